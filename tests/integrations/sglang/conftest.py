"""Tests of SGLang's backend: `make test-sglang` runs them in an environment of their own.

Where SGLang is not installed they are not collected.
"""

import importlib.util

if importlib.util.find_spec("sglang") is None:
    collect_ignore = ["test_backend.py", "test_engine.py"]
