"""A plugin of vLLM, loaded in all processes of the engines under test: our backend on the CPU platform.

That platform has no slots for a cache whose tokens are sharded over ranks; what a GPU's kernel computes stands in.
For its own latent attention it turns chunks, prefixes and block sizes off, unless the CPU has AMX; ours has them all.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from paged_ops.integrations.vllm import plugin as vllm_plugin


def register() -> None:
    """Called by vLLM, in some processes more than once."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.triton_utils import dispatcher
    from vllm.utils import cpu_triton_utils

    vllm_plugin.replace_cpu_backend()
    of_one_rank = cpu_triton_utils._compute_slot_mapping_kernel_impl
    signature = inspect.signature(of_one_rank)

    def slots(*arguments: Any, **options: Any) -> None:
        given = signature.bind(*arguments, **options)
        given.apply_defaults()
        values = given.arguments
        if values["TOTAL_CP_WORLD_SIZE"] == 1:
            of_one_rank(*arguments, **options)
            return
        query_start_loc, positions, block_table, slot_mapping = (
            values[name] for name in ("query_start_loc", "positions", "block_table", "slot_mapping")
        )
        W, rank, B = (values[name] for name in ("TOTAL_CP_WORLD_SIZE", "TOTAL_CP_RANK", "KV_CACHE_BLOCK_SIZE"))
        interleave = values["CP_KV_CACHE_INTERLEAVE_SIZE"]
        lens = query_start_loc.diff().long()
        rows = torch.repeat_interleave(torch.arange(len(lens)), lens)
        places = positions[: len(rows)].long()
        offsets = places % (B * W)
        blocks = block_table[rows, places // (B * W)].long()
        mine = offsets // interleave % W == rank
        within = offsets // (W * interleave) * interleave + offsets % interleave
        slot_mapping.fill_(-1)
        slot_mapping[: len(rows)] = torch.where(mine, blocks * B + within, -1)

    check = CpuPlatform.check_and_update_config.__func__
    if check.__module__ != __name__:

        def check_and_update_config(cls: Any, vllm_config: Any) -> None:
            own = str(vllm_config.attention_config.backend).endswith("CPU_MLA")
            model = vllm_config.model_config
            with pretended_amx(model is not None and model.use_mla and not own):
                check(cls, vllm_config)

        CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    cpu_triton_utils._compute_slot_mapping_kernel_impl = slots
    dispatcher.register_kernels({"vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": slots})


@contextlib.contextmanager
def pretended_amx(pretend: bool) -> Iterator[None]:
    """Whether the platform believes that the CPU has AMX."""
    before = torch.cpu._is_amx_tile_supported
    if pretend:
        torch.cpu._is_amx_tile_supported = lambda: True
    try:
        yield
    finally:
        torch.cpu._is_amx_tile_supported = before
