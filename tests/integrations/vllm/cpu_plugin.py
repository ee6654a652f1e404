"""A plugin of vLLM, loaded in all processes of the engines under test: our backend on the CPU platform.

That platform has no slots for a cache whose tokens are sharded over ranks; what a GPU's kernel computes stands in.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from paged_ops.integrations.vllm import plugin as vllm_plugin


def register() -> None:
    """Called by vLLM, in some processes more than once."""
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

    cpu_triton_utils._compute_slot_mapping_kernel_impl = slots
    dispatcher.register_kernels({"vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": slots})
