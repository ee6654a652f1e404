"""vLLM with these ops: ``plugin`` makes the backend known, ``backend`` is it, ``metadata`` builds its steps.

The backend is imported at its first use: vLLM loads the plugin in every process, before much of vLLM can be imported.
"""

from typing import Any

_BACKEND = ("PagedOpsBackend", "PagedOpsImpl")


def __getattr__(name: str) -> Any:
    if name not in _BACKEND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from paged_ops.integrations.vllm import backend

    return getattr(backend, name)
