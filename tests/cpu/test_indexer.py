"""The indexer on the CPU: chunks of keys and rows."""

import pytest

from paged_ops import testing
from paged_ops.lowerings.cpu import indexer


@pytest.mark.parametrize("case", ["dsa-long-exact", "msa-long-exact", "mean-exact", "k100-msa-b48", "noncausal-exact"])
def test_many_chunks(case, monkeypatch):
    """Rows keep their best entries from chunk to chunk: many equal scores, few keys per chunk, blocks cut by none."""
    monkeypatch.setattr(indexer, "TILE_ELEMENTS", 1 << 10)
    monkeypatch.setattr(indexer, "CHUNK", 16)
    testing.check("select_keys", testing.case_named("select_keys", case))
