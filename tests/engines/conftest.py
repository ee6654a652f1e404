"""Tests of vLLM's backend: `make test-vllm` runs them in an environment of their own.

Where vLLM is not installed they are not collected.
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    sys.path.insert(0, str(Path(__file__).parent))
