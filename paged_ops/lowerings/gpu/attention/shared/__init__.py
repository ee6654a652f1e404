"""Helpers that every attention kernel uses: masks and softmax of a tile, the split of work, the merge of splits."""
