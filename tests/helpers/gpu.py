"""The GPU that tests of a GPU put their tensors on: ``pytest --device cuda:1`` names another than the current one."""

import contextlib

import torch

GPU = torch.device("cuda", 0)  # tests/conftest.py sets it, before tests are imported


@contextlib.contextmanager
def captured_into(graph):
    """Capture the block into a CUDA graph on that GPU."""
    with torch.cuda.device(GPU), torch.cuda.graph(graph, stream=torch.cuda.Stream(GPU)):
        yield
