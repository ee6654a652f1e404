"""Tests of vLLM's backend: `make test-vllm` runs them in an environment of their own.

Where vLLM is not installed they are not collected.
"""

import importlib.util

if importlib.util.find_spec("vllm") is None:
    collect_ignore = ["test_backend.py", "test_engine.py", "test_latent.py", "test_warm_up.py"]
