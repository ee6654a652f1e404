"""The checks of a batch against the capacities of a builder, on whole tensors of the host, once per step.

Letters: S sequences, B tokens per block, M columns of a block table, R bidirectional ranges per sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_ops.checks import describe_setting, expect, is_integer
from paged_ops.metadata.batch import blocks_for


def check_input_ids(input_ids: Any, has_inputs: bool) -> None:
    """All but their number: they are read by their address."""
    expect(has_inputs, "input_ids", "None, as the builder has no inputs", input_ids)
    is_read = isinstance(input_ids, Tensor) and input_ids.dtype == torch.int64 and input_ids.dim() == 1
    is_read = is_read and input_ids.device.type == "cpu" and input_ids.is_contiguous()
    expect(is_read, "input_ids", "a contiguous int64 tensor [num_tokens] on the CPU", input_ids)


def check_numbers(num_reqs: Any, num_tokens: Any, lookahead: Any) -> None:
    """That the numbers of a step are integers, before C++ reads them."""
    optional = (int, type(None))
    if type(num_reqs) in optional and type(num_tokens) in optional and type(lookahead) is int:
        return
    for name, number in (("num_reqs", num_reqs), ("num_tokens", num_tokens), ("lookahead", lookahead)):
        known = is_integer(number) or (number is None and name != "lookahead")
        expect(known, name, "an integer", describe_setting(number))


def padded_size(argument: str, asked: int | None, actual: int, limit_name: str, limit: int) -> int:
    """The padded size of a step: the one that was asked for, by default the batch's."""
    size = actual if asked is None else asked
    expect(actual <= size <= limit, argument, f"{actual} (of the batch) to {limit_name} = {limit}", size)
    return size


def is_needed(seq_lens: Tensor, width: int, block_size: int) -> Tensor:
    """bool ``[len(seq_lens), width]``: whether an entry of a block table lies within its sequence."""
    return torch.arange(0, width * block_size, block_size, device="cpu") < seq_lens[:, None]


def needed_blocks(
    name: str, block_ids: Tensor, num_blocks: int, seq_lens: Tensor, max_seq_len: int, B: int, M: int
) -> Tensor:
    """The columns of ``block_ids`` that some request needs, after a check of every entry that is needed."""
    argument = "num_computed_tokens + query_lens"
    expect(max_seq_len <= M * B, argument, f"at most {M * B} tokens ({M} blocks of {B}) a request", max_seq_len)
    width = blocks_for(max_seq_len, B)
    wide_enough = f"{width} blocks for the {max_seq_len} tokens of the longest request (block size {B})"
    expect(block_ids.shape[1] >= width, name, wide_enough, block_ids.shape[1])
    blocks = block_ids[:, :width]
    if blocks.numel():
        low, high = torch.aminmax(blocks)
        if int(low) < 0 or int(high) >= num_blocks:  # only now look which entries are needed
            wrong = ((blocks < 0) | (blocks >= num_blocks)) & is_needed(seq_lens, width, B)
            if bool(wrong.any()):
                s, column = wrong.nonzero()[0].tolist()
                need = blocks_for(int(seq_lens[s]), B)
                ids = f"ids in [0, {num_blocks}) for all {need} blocks that request {s} needs"
                expect(False, name, ids, f"{int(blocks[s, column])} at [{s}, {column}]")
    return blocks


def check_state_slots(rows: Tensor | None, num_reqs: int, num_state_rows: int) -> None:
    """The rows of the requests' states; None without a ``StateCache``, and for a batch without requests."""
    R = num_state_rows
    if not R:
        expect(rows is None, "state_slots", "None, as the builder has no states (num_state_rows)", rows)
    elif rows is None:
        expect(not num_reqs, "state_slots", "one for each request, as the builder has states", None)
    if rows is None:
        return
    valid = not len(rows) or (bool((rows >= 2).all()) and bool((rows < R).all()))
    expect(valid, "state_slots", f"rows in [2, {R}), as StateCache.rows gives", rows.tolist())
    slots = rows // 2
    expect(len(slots.unique()) == len(slots), "state_slots", "a slot for each request alone", rows.tolist())


def check_common_prefix(common_prefix_len: int, computed: Tensor, blocks: Tensor, block_size: int) -> None:
    """The common prefix: whole blocks, computed in all requests, and the same blocks."""
    most = int(computed.min()) if len(computed) else 0
    valid = 0 <= common_prefix_len <= most and common_prefix_len % block_size == 0
    multiple = f"a multiple of block_size = {block_size}, 0 to the least num_computed_tokens = {most}"
    expect(valid, "common_prefix_len", multiple, common_prefix_len)
    prefix = blocks[:, : common_prefix_len // block_size]
    differs = (prefix != prefix[:1]).any(1)
    if bool(differs.any()):
        same = f"a prefix of {prefix.shape[1]} blocks that all requests share"
        expect(False, "common_prefix_len", same, f"other blocks for request {int(differs.nonzero()[0])} than for 0")
