"""Old module paths and public names, which work for one release with a DeprecationWarning that gives the new one.

A finder at the end of ``sys.meta_path`` imports them, so existing modules are never shadowed.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_HF = "paged_ops.integrations.transformers"
MOVED = {
    "paged_ops.allocator": "paged_ops.cache.allocator",
    "paged_ops.batch": "paged_ops.metadata.batch",
    "paged_ops.block_pool": "paged_ops.cache.block_pool",
    "paged_ops.hybrid": "paged_ops.cache.hybrid",
    "paged_ops.hyperparameters": "paged_ops.metadata.hyperparameters",
    "paged_ops.states": "paged_ops.cache.states",
    "paged_ops.model_step": "paged_ops.generation.model_step",
    "paged_ops.request": "paged_ops.generation.request",
    "paged_ops.sampling": "paged_ops.generation.params",
    "paged_ops.warming": "paged_ops.lowerings.warm_up",
    "paged_ops.integrations.attention_function": f"{_HF}.attention_function",
    "paged_ops.integrations.continuous_batching": f"{_HF}.continuous_batching",
    "paged_ops.integrations.projections": f"{_HF}.projections",
    "paged_ops.integrations.recurrent": f"{_HF}.recurrent",
    "paged_ops.integrations.sums": f"{_HF}.all_reduce_fusion",
    "paged_ops.integrations.vllm_plugin": "paged_ops.integrations.vllm.plugin",
    "paged_ops.lowerings.gpu.products": f"{_HF}.projections",
    "paged_ops.parallel.ranks": "paged_ops.parallel.rendezvous",
    "paged_ops.parallel.reduce": "paged_ops.parallel.all_reduce",
    "paged_ops.parallel.spread": "paged_ops.cache.shard",
}
# Names that moved out of paged_ops, and their modules.
NAMES = {
    "block_ids_from_addresses": "paged_ops.metadata",
    "collect_layer_hyperparameters": "paged_ops.metadata",
    "common_layer_hyperparameters": "paged_ops.metadata",
    "make_local_attention_virtual_batches": "paged_ops.metadata",
    "min_tpu_block_size": "paged_ops.layouts",
    "preferred_tpu_block_size": "paged_ops.layouts",
    "reorder_batch_to_split_decodes_and_prefills": "paged_ops.metadata",
    "split_joined_cache": "paged_ops.layouts",
    "split_kv_cache": "paged_ops.layouts",
}
# Names that were renamed when their module moved.
RENAMED = {
    "paged_ops.integrations.sums": {"Sums": "AllReduceReport"},
    "paged_ops.parallel.reduce": {"RowSums": "AllReduce", "row_sums": "prepare_all_reduce"},
    "paged_ops.parallel.spread": {"Spread": "TokenShard", "WHOLE": "UNSHARDED"},
}


class _Moved(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Forward all attributes to the module at the new path."""
        old, path = module.__name__, MOVED[module.__name__]
        _warn(f"{old} is {path} now; the old path ends with the next release")
        new, renamed = importlib.import_module(path), RENAMED.get(old, {})
        public = getattr(new, "__all__", [name for name in vars(new) if not name.startswith("_")])

        def attribute(name: str) -> Any:
            return getattr(new, renamed.get(name, name))

        module.__doc__ = new.__doc__
        module.__dict__.update(
            __getattr__=attribute, __dir__=lambda: [*dir(new), *renamed], __all__=[*public, *renamed]
        )


def install() -> None:
    """Make the old paths importable."""
    if not any(type(finder) is _Moved for finder in sys.meta_path):
        sys.meta_path.append(_Moved())


def public_name(name: str) -> Any:
    """The module ``__getattr__`` of paged_ops, for names and modules that moved."""
    if f"paged_ops.{name}" in MOVED:
        return importlib.import_module(f"paged_ops.{name}")
    if name not in NAMES:
        raise AttributeError(f"module 'paged_ops' has no attribute {name!r}")
    _warn(f"paged_ops.{name} is {NAMES[name]}.{name} now; the old name ends with the next release")
    return getattr(importlib.import_module(NAMES[name]), name)


def _warn(message: str) -> None:
    """Warn at the line that uses the old name, outside this file and importlib."""
    frame, level = sys._getframe(), 1
    while (file := frame.f_code.co_filename) in (__file__, importlib.__file__) or "_bootstrap" in file:
        if frame.f_back is None:
            break
        frame = frame.f_back
        level += "_bootstrap" not in frame.f_code.co_filename  # warnings does not count these
    warnings.warn(message, DeprecationWarning, stacklevel=level)
