"""The plugin that registers :mod:`paged_ops.integrations.vllm`, and the differences of vLLM 0.26 to 0.33.

Importing this module imports only vLLM's table of backends, because every process of the engine does so.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.attention.backends import registry

NAME = "PAGED_OPS"
_CLASS_PATH = "paged_ops.integrations.vllm.Backend"
logger = init_logger("vllm.paged_ops")  # vLLM shows the messages of loggers below its own


def register() -> None:
    """Register the backend with vLLM by its name, and as ``CUSTOM``: an entry point of ``vllm.general_plugins``.

    If another package has registered ``CUSTOM``, it stays. Processes of the engine load plugins more than once; the
    second call changes nothing.
    """
    custom = registry.AttentionBackendEnum.CUSTOM
    if hasattr(registry.AttentionBackendEnum, "register"):  # vLLM 0.26 allows no new names
        member()
    elif custom.is_overridden() and custom.get_path() != _CLASS_PATH:
        logger.warning(
            "paged_ops is not registered: this version of vLLM allows no new names, and CUSTOM is %s. Choose one of the"
            " two packages by VLLM_PLUGINS.",
            custom.get_path(),
        )
    if not custom.is_overridden():
        registry.register_backend(custom, _CLASS_PATH)


def member() -> Any:
    """``AttentionBackendEnum.PAGED_OPS``, created if this process does not have it yet.

    Enum members are pickled by value, which works only where the member exists already. A spawned engine unpickles its
    configuration before it loads plugins, so this member is pickled as a call of this function.
    """
    members = registry.AttentionBackendEnum
    if NAME not in members.__members__:
        registry.register_backend(NAME, _CLASS_PATH)
        members[NAME].__reduce_ex__ = lambda protocol: (member, ())
    return members[NAME]


def replace_cpu_backend() -> None:
    """Use this backend on vLLM's CPU platform, which offers no choice. Call it in each process of the engine.

    It serves the layers of decoders, with latents (MLA) or without. Encoders and cross attention keep vLLM's own
    backends, as does an engine with ``CPU_ATTN`` or ``CPU_MLA``.
    """
    from vllm.platforms.cpu import CpuPlatform

    register()
    of_platform = CpuPlatform.get_attn_backend_cls.__func__
    if of_platform.__module__ == __name__:
        return

    def get_attn_backend_cls(cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kw: Any) -> str:
        asked_for = selected_backend and selected_backend.is_overridden() and selected_backend.get_path() == _CLASS_PATH
        selected = None if asked_for else selected_backend
        layer = attn_selector_config
        if selected is not None or layer.attn_type != "decoder" or layer.use_sparse:
            return of_platform(cls, selected, attn_selector_config, *args, **kw)
        path = f"paged_ops.integrations.vllm.PagedOps{'MLA' if layer.use_mla else ''}Backend"
        backend = registry.resolve_obj_by_qualname(path)
        reasons = backend.validate_configuration(device_capability=None, **layer._asdict())
        if reasons:
            raise ValueError(f"{name()} is not valid for this configuration. Reasons: {reasons}")
        return path

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def name() -> str:
    """The name of the backend in vLLM's table: ``PAGED_OPS``, or ``CUSTOM`` in versions without new names."""
    members = registry.AttentionBackendEnum
    return NAME if NAME in members.__members__ else members.CUSTOM.name


def serves_latents() -> bool:
    """Whether the model of the engine being created has latent attention (MLA)."""
    from vllm.config import vllm as config

    current = config.get_current_vllm_config_or_none()
    return current is not None and current.model_config is not None and bool(current.model_config.use_mla)


def largest_batch() -> tuple[int, int] | None:
    """The most tokens and sequences per step of the engine being created; None outside of one.

    Also None if precompilation is off: ``--additional-config '{"paged_ops_warm_up": false}'``.
    """
    from vllm.config import vllm as config

    current = config.get_current_vllm_config_or_none()
    if current is None or current.scheduler_config is None or not _option(current, "paged_ops_warm_up", True):
        return None
    return current.scheduler_config.max_num_batched_tokens, current.scheduler_config.max_num_seqs


def wants_cascade(vllm_config: Any) -> bool:
    """Whether steps search for a shared prefix: ``--additional-config '{"paged_ops_cascade": true}'``; off by
    default."""
    return _option(vllm_config, "paged_ops_cascade", False)


def is_batch_invariant() -> bool:
    """Whether the engine runs with ``VLLM_BATCH_INVARIANT=1``."""
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def _option(vllm_config: Any, name: str, default: bool) -> bool:
    additional = vllm_config.additional_config
    return bool(additional.get(name, default)) if isinstance(additional, dict) else default


def context_group() -> Any:
    """The ranks that shard the cache's tokens (``--decode-context-parallel-size``); None without them."""
    from vllm.distributed import parallel_state

    try:
        group = parallel_state.get_dcp_group()
    except AssertionError:  # there is no group outside of an engine
        return None
    return group if group.world_size > 1 else None


_exchanges: dict[Any, Any] = {}


def context_exchange(group: Any, vllm_config: Any, head_size: int, device: Any) -> Any:
    """The exchange in which the ranks of :func:`context_group` merge partial attention. They make it together, once.

    ``--additional-config '{"paged_ops_symmetric_memory": false}'``: by collectives, also where GPUs address each
    other's memory.
    """
    from paged_ops.parallel.all_reduce import MOST_ROWS
    from paged_ops.parallel.exchange import prepare

    model, parallel, ranks = vllm_config.model_config, vllm_config.parallel_config, group.device_group
    heads = model.get_num_attention_heads(parallel)
    key = ranks.group_name, heads, head_size, model.dtype, device
    found = _exchanges.get(key)
    if found is None or found.group.group is not ranks:
        sequences = min(vllm_config.scheduler_config.max_num_seqs, MOST_ROWS)
        found = _exchanges[key] = prepare(
            ranks,
            device,
            rows=sequences * heads,
            head_size=head_size,
            dtype=model.dtype,
            gathered_heads=heads,
            # the halves of a split batch run on streams of their own
            collectives=bool(getattr(parallel, "use_ubatching", False))
            or not _option(vllm_config, "paged_ops_symmetric_memory", True),
        )
        logger.info("Context parallelism of paged_ops: parts are merged by %s.", found.how)
    return found


def heads_first() -> bool:
    """Whether vLLM orders a block in memory by heads, then tokens. Only used before 0.29."""
    from vllm.v1.attention.backends import utils

    return utils.get_kv_cache_layout() == "HND"
