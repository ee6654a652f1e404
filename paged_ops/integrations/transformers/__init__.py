"""Models of transformers over a paged cache: :class:`PagedCausalLM`, and the attention function it uses.

``model`` wraps a model, ``attention_function`` is what its layers call, ``probe`` and ``trial`` find out what a model
needs by running it, ``refusals`` names what cannot be served.
"""

from paged_ops.integrations.transformers.attention_function import attention, no_mask
from paged_ops.integrations.transformers.model import PagedCausalLM, sharded

__all__ = ["PagedCausalLM", "attention", "no_mask", "sharded"]
