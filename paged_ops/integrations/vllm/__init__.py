"""vLLM with these ops: ``plugin`` makes the backend known, ``backend`` is it, ``metadata`` builds its steps.

``latent`` is the same for layers with latents (MLA). The backend is imported at its first use: vLLM loads the plugin in
every process, before much of vLLM can be imported.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "Backend":  # what the engine's model needs: vLLM knows one name for both
        from paged_ops.integrations.vllm import plugin

        name = "PagedOpsMLABackend" if plugin.serves_latents() else "PagedOpsBackend"
    if name in ("PagedOpsBackend", "PagedOpsImpl"):
        from paged_ops.integrations.vllm import backend

        return getattr(backend, name)
    if name == "PagedOpsMLABackend":
        from paged_ops.integrations.vllm import latent

        return latent.PagedOpsMLABackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
