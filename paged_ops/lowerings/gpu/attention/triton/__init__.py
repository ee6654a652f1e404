"""Attention kernels in Triton: they run on every GPU, and in the interpreter."""
