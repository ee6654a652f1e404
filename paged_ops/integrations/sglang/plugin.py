"""The plugin that registers :mod:`paged_ops.integrations.sglang.backend` with SGLang 0.5.23."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

NAME = "paged_ops"


def register() -> None:
    """Register the backend by its name: an entry point of ``sglang.srt.plugins``.

    Its name is also accepted by ``--enable-deterministic-inference``, with the prefix cache, because
    ``batch_invariant`` does not depend on which tokens of a prompt were cached. A second call changes nothing.
    """
    if NAME in ATTENTION_BACKENDS:
        return
    register_attention_backend(NAME)(_create)
    choices.add_attention_backend_choices([NAME])
    choices.add_deterministic_attention_backend_choices([NAME])
    choices.add_radix_supported_deterministic_attention_backend_choices([NAME])


def _create(runner: Any) -> Any:
    from paged_ops.integrations.sglang.backend import PagedOpsAttentionBackend

    return PagedOpsAttentionBackend(runner)
