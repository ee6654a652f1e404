"""Models of transformers over a paged cache: :class:`PagedCausalLM`, and the attention function it uses.

- ``model``: wraps a model; ``wrapping``: undoes it; ``attention_function``: called by its layers
- ``probe``, ``trial``: run a few tokens to detect the caches and masks that a model needs; ``refusals``: the errors
- ``latent``, ``indexers``, ``own_attention``, ``recurrent`` and ``state_steps``, ``rotary``, ``prompt_ranges``: kinds
  of layers
- ``all_reduce_fusion`` finds all-reduces to fuse in a sharded model, ``fused_layers`` has the forwards with them
- ``invariant``: layers for ``batch_invariant``; ``scoring``: log-probabilities of given tokens
- ``projections``: fused and overlapping linear layers; ``weights``: detects changed weights and adapters
- ``generation_config``: sampling settings; ``continuous_batching``: transformers' own ``generate_batch``
"""

from typing import Any

__all__ = ["PagedCausalLM", "attention", "no_mask", "sharded"]

try:
    from paged_ops.integrations.transformers.attention_function import attention, no_mask
    from paged_ops.integrations.transformers.model import PagedCausalLM
    from paged_ops.integrations.transformers.weights import sharded
except ModuleNotFoundError as error:  # ``projections`` also serves models without transformers
    if error.name != "transformers":
        raise
    _missing = error

    def __getattr__(name: str) -> Any:
        if name in __all__:
            raise _missing
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
