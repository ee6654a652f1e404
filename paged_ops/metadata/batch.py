"""A step as the host describes it, and helpers that reorder such batches, rewrite them and say what pays.

Letters: T tokens of the batch (padded), S sequences (padded), H query heads, K key/value heads, D head size, N blocks
in the cache, B tokens per block, M columns of a block table. Lengths and positions are counted in tokens.

All of this runs on the host, once per step, on whole tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from paged_ops.checks import at_least, expect, present
from paged_ops.layouts import paged_kv
from paged_ops.metadata.bidirectional import Ranges, ranges_of_requests

Ints = Sequence[int] | Tensor  # numpy arrays too


# Up to this number of integers, Python reads them faster than a torch op.
FEW = 512


class Batch:
    """A step as the host describes it: for each request what is scheduled, what is cached, and where.

    CPU tensors (and numpy arrays) are used as they are, not copied: :meth:`swap` moves rows of the caller's tensors.

    Args:
        query_lens: ``[num_reqs]`` tokens scheduled in this step; 0 is allowed.
        num_computed_tokens: ``[num_reqs]`` tokens that are in the cache already.
        block_ids: the blocks of each request in order: lists of ints, or an int32 or int64 tensor ``[num_reqs, W]``
            whose entries past a request's need may hold anything. The tensor is faster: keep one, append to its rows.
        other_block_ids: the same for each further pool of the cache.
        state_slots: ``[num_reqs]`` the row of each request's state, as ``StateCache.rows`` gives it; None without.
        bidirectional_ranges: for each request, any number of pairs (start, end) of positions: tokens of one range
            see each other (an image's, a prefix's). Lists, or an integer tensor ``[num_reqs, W, 2]``, in which pairs
            with ``start < 0`` or ``end <= start`` are padding; None without.

    Raises:
        ValueError: an argument is not on the CPU or not integer, or they disagree about the number of requests.
    """

    def __init__(
        self,
        query_lens: Ints,
        num_computed_tokens: Ints,
        block_ids: Sequence[Sequence[int]] | Tensor,
        *,
        other_block_ids: Sequence[Sequence[Sequence[int]] | Tensor] = (),
        state_slots: Ints | None = None,
        bidirectional_ranges: Ranges | None = None,
    ):
        self.query_lens = integers("query_lens", query_lens, rank=1)
        self.num_computed_tokens = integers("num_computed_tokens", num_computed_tokens, rank=1)
        self.block_ids = _block_ids(block_ids)
        self.other_block_ids = [_block_ids(each) for each in other_block_ids]
        self.state_slots = None if state_slots is None else integers("state_slots", state_slots, rank=1)
        given = bidirectional_ranges
        self.bidirectional_ranges = None if given is None else ranges_of_requests(given)
        n = self.num_reqs
        for argument, rows in (
            ("num_computed_tokens", self.num_computed_tokens),
            ("block_ids", self.block_ids),
            *(("other_block_ids", each) for each in self.other_block_ids),
            ("state_slots", self.state_slots),
            ("bidirectional_ranges", self.bidirectional_ranges),
        ):
            if rows is not None:
                expect(len(rows) == n, argument, f"one for each of the {n} requests", len(rows))

    @property
    def num_reqs(self) -> int:
        return self.query_lens.shape[0]  # len() of a tensor is a Python function

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens.tolist()) if self.num_reqs <= FEW else int(self.query_lens.sum())

    def is_uniform(self, query_len: int) -> bool:
        """Whether each request has ``query_len`` tokens."""
        if self.num_reqs <= FEW:
            lens = self.query_lens.tolist()
            return lens.count(query_len) == len(lens)
        return bool((self.query_lens == query_len).all())

    def swap(self, i: int, j: int) -> None:
        """Exchange requests i and j."""
        for rows in (
            self.query_lens,
            self.num_computed_tokens,
            self.block_ids,
            *self.other_block_ids,
            *(each for each in (self.state_slots, self.bidirectional_ranges) if each is not None),
        ):
            rows[[i, j]] = rows[[j, i]]


class Reorderable(Protocol):
    """What :func:`reorder_batch_to_split_decodes_and_prefills` asks of a batch; :class:`Batch` is one."""

    @property
    def query_lens(self) -> Ints:
        """``[num_reqs]`` tokens scheduled for each request, on the host."""

    def swap(self, i: int, j: int) -> None:
        """Exchange requests i and j."""


def swaps_to_split_decodes_and_prefills(query_lens: Ints, decode_threshold: int = 1) -> list[tuple[int, int]]:
    """The fewest swaps ``(i, j)``, ``i < j``, that move requests of at most ``decode_threshold`` tokens to the front.

    With d decodes, the prefills among the first d places must leave, and equally many later decodes enter. A swap
    can do no more than one of each, so pairing them is minimal. No request is in two swaps, so their order does not
    matter.

    Args:
        query_lens: ``[num_reqs]`` tokens scheduled for each request, on the host.
        decode_threshold: most query tokens of a decode.
    """
    at_least(0, decode_threshold=decode_threshold)
    is_decode = integers("query_lens", query_lens, rank=1) <= decode_threshold
    num_decodes = int(is_decode.sum())
    leaving = (~is_decode[:num_decodes]).nonzero().flatten()
    coming = is_decode[num_decodes:].nonzero().flatten() + num_decodes
    return list(zip(leaving.tolist(), coming.tolist(), strict=True))


def reorder_batch_to_split_decodes_and_prefills(batch: Reorderable, decode_threshold: int = 1) -> bool:
    """Move a batch's decodes to the front, in place, by the fewest swaps.

    Takes a :class:`Batch`, or any object with ``query_lens`` and ``swap(i, j)``, so that an engine's own state of its
    requests can move along. For the bare list of swaps see :func:`swaps_to_split_decodes_and_prefills`.

    Args:
        batch: what to reorder.
        decode_threshold: most query tokens of a decode.

    Returns:
        Whether anything moved.
    """
    swaps = swaps_to_split_decodes_and_prefills(batch.query_lens, decode_threshold)
    for i, j in swaps:
        batch.swap(i, j)
    return bool(swaps)


class VirtualBatches(NamedTuple):
    """A batch of V sequences that replaces another one."""

    query_lens: Tensor  # int32 [V], host
    seq_lens: Tensor  # int32 [V], host
    block_tables: Tensor  # [V, chunk / B], dtype and device of the block tables that it was cut from


def make_local_attention_virtual_batches(
    chunk: int, query_lens: Ints, seq_lens: Ints, block_tables: Tensor, block_size: int
) -> VirtualBatches:
    """Rewrite a batch for chunked-local attention as more, shorter sequences.

    With ``attention_chunk = chunk`` a token at position i sees the keys ``j <= i`` with ``i // chunk == j // chunk``.
    So each chunk of a sequence that has query tokens becomes a sequence of its own: its keys from the start of
    the chunk to the last query token in it. Plain causal attention over these gives the same numbers, and the query
    rows keep their order. The blocks of a chunk are ``chunk / B`` adjacent columns of the sequence's block table.

    Example: chunk 4, query_lens [4, 10, 5], seq_lens [6, 17, 9] and block_size 2 give query_lens
    [2, 2, 1, 4, 4, 1, 4, 1] and seq_lens [4, 2, 4, 4, 4, 1, 4, 1]: sequence 0 from keys 0 and 4, sequence 1 from keys
    4, 8, 12 and 16, sequence 2 from keys 4 and 8.

    Args:
        chunk: tokens of a chunk, a multiple of block_size.
        query_lens: ``[num_reqs]``, host; a request without query tokens vanishes.
        seq_lens: ``[>= num_reqs]``, host; rows past num_reqs are padding.
        block_tables: ``[>= num_reqs, M]``, any device; on another than the CPU the indices are copied to it.
        block_size: B.

    Raises:
        ValueError: chunk is not a multiple of block_size; a sequence is shorter than its query or longer than its row.

    Source: the local attention of Llama-4, served by virtual batches in vLLM.
    """
    expect(block_size >= 1, "block_size", "1 or more", block_size)
    expect(chunk >= 1 and chunk % block_size == 0, "chunk", f"a positive multiple of block_size = {block_size}", chunk)
    q = integers("query_lens", query_lens, rank=1).to(torch.int64)
    n = len(q)
    kv = integers("seq_lens", seq_lens, rank=1)[:n].to(torch.int64)
    expect(len(kv) == n, "seq_lens", f"one for each of the {n} requests of query_lens", len(kv))
    not_negative("query_lens", q)
    too_short = (kv < q).nonzero()
    if len(too_short):
        s = int(too_short[0])
        expect(False, "seq_lens", f"at least the {int(q[s])} query tokens of request {s}", int(kv[s]))
    present("block_tables", block_tables)
    expect(block_tables.dim() == 2 and len(block_tables) >= n, "block_tables", f"[S >= {n}, M]", block_tables)
    width, columns = blocks_for(largest(kv), block_size), block_tables.shape[1]
    expect(columns >= width, "block_tables", f"{width} columns for sequences of up to {largest(kv)} tokens", columns)

    first_query = kv - q
    first_chunk = first_query // chunk
    num_chunks = torch.where(q > 0, (kv - 1) // chunk - first_chunk + 1, 0)
    request = torch.repeat_interleave(num_chunks)
    ordinal = torch.arange(len(request), device="cpu") - (num_chunks.cumsum(0) - num_chunks)[request]
    start = (first_chunk[request] + ordinal) * chunk
    stop = torch.minimum(start + chunk, kv[request])
    # The last chunk may reach past the table, where nothing is needed, so any column serves.
    column = start[:, None] // block_size + torch.arange(chunk // block_size, device="cpu")
    column = column.clamp(max=max(columns - 1, 0))
    device = block_tables.device
    return VirtualBatches(
        query_lens=(stop - torch.maximum(start, first_query[request])).to(torch.int32),
        seq_lens=(stop - start).to(torch.int32),
        block_tables=block_tables[request[:, None].to(device), column.to(device)],
    )


def block_ids_from_addresses(
    block_tables: Tensor, seq_lens: Ints, kv_cache: Tensor, *, value_cache: Tensor | None = None
) -> Tensor:
    """The block ids of block tables that hold the physical addresses of blocks.

    ``id = (address - kv_cache.data_ptr()) / (kv_cache.stride(0) * itemsize)``. Of each row only the
    ``ceil(seq_len / B)`` entries that the sequence needs are looked at.

    Args:
        block_tables: int64 ``[S, M]``, host: addresses in bytes.
        seq_lens: ``[num_reqs]``, host, ``num_reqs <= S``: further rows are padding.
        kv_cache: the cache whose blocks these are, on any device; its content is not touched.
        value_cache: as the ops take it. It marks the separate and x-packed forms; its content is not read.

    Returns:
        int32 ``[S, M]``, host; 0 where no block is needed.

    Raises:
        ValueError: a needed entry is not where a block of this cache starts.
    """
    addresses = integers("block_tables", block_tables, rank=2).to(torch.int64)
    lens = integers("seq_lens", seq_lens, rank=1).to(torch.int64)
    not_negative("seq_lens", lens)
    expect(len(lens) <= len(addresses), "seq_lens", f"at most one for each of the {len(addresses)} rows", len(lens))
    cache = paged_kv(kv_cache, value_cache)
    N, B, base = cache.num_blocks, cache.block_size, kv_cache.data_ptr()
    width, M = blocks_for(largest(lens), B), addresses.shape[1]
    expect(width <= M, "block_tables", f"{width} columns for sequences of up to {largest(lens)} tokens", M)
    stride = kv_cache.stride(0) * kv_cache.element_size()

    needed = torch.zeros(addresses.shape, dtype=torch.bool, device="cpu")
    needed[: len(lens)] = torch.arange(0, M * B, max(B, 1), device="cpu") < lens[:, None]
    offsets = torch.where(needed, addresses - base, 0)
    ids = offsets // max(stride, 1)
    wrong = needed & ((ids * stride != offsets) | (ids < 0) | (ids >= N))
    if bool(wrong.any()):
        s, column = wrong.nonzero()[0].tolist()
        starts = f"the start of one of the cache's {N} blocks (every {stride} bytes from {base:#x} on)"
        expect(False, "block_tables", starts, f"{int(addresses[s, column]):#x} at [{s}, {column}]")
    return ids.to(torch.int32)


def use_cascade_attention(
    common_prefix_len: int, query_lens: Ints, H: int, K: int, uses_alibi: bool, uses_window: bool, num_sms: int
) -> bool:
    """Whether reading a shared prefix once for the whole batch should beat reading it for each sequence.

    The unit of time is what one SM needs for one key and value of one head: 512 bytes in bf16 with D 128, some 14 ns of
    an H200's bandwidth, and about as long in matrix instructions for a full tile of R = 128 rows. Rows of a
    tile are query tokens times the G = H / K heads that share a key. With P = common_prefix_len, q the query_lens and T
    their sum::

        plain   = K * sum_s ceil(q[s] * G / R) * P / num_sms     each sequence reads the prefix, split over all SMs
        cascade = ceil(K * ceil(T * G / R) / num_sms) * P        waves of tiles, each tile walks the prefix once
                  + 1.5 * T * H / num_sms                        the merge: two outputs read, one written
                  + 700                                          two more launches, some 10 us

    True if ``cascade < plain``; suffixes cost the same either way. Prefixes under 256 tokens and fewer than 8 sequences
    are refused outright: there the result would depend on the constants of this model.

    Args:
        common_prefix_len: tokens that all sequences share.
        query_lens: ``[num_reqs]``, host.
        H, K: query heads, key/value heads.
        uses_alibi: the result is False with ALiBi, which depends on distances between prefix and suffix.
        uses_window: the result is False with a sliding window or chunks, for the same reason.
        num_sms: multiprocessors of the device.

    Raises:
        ValueError: H is not a multiple of K, or a number is negative.

    Source of the idea: Hydragen (arXiv:2402.05099) and the cascade inference of FlashInfer; the cost model is our own.
    """
    q = integers("query_lens", query_lens, rank=1).to(torch.int64)
    not_negative("query_lens", q)
    expect(common_prefix_len >= 0, "common_prefix_len", "0 or more", common_prefix_len)
    expect(K >= 1 and H >= K and H % K == 0, "H", f"a positive multiple of K = {K}", H)
    expect(num_sms >= 1, "num_sms", "1 or more", num_sms)
    if uses_alibi or uses_window or common_prefix_len < 256 or int((q > 0).sum()) < 8:
        return False
    T, G, R = int(q.sum()), H // K, 128
    plain = K * int(((q * G + R - 1) // R).sum()) * common_prefix_len / num_sms
    waves = blocks_for(K * blocks_for(T * G, R), num_sms)
    return waves * common_prefix_len + 1.5 * T * H / num_sms + 700 < plain


def integers(argument: str, values: Ints, rank: int) -> Tensor:
    """Numbers of the host as an int32 or int64 CPU tensor; if they are one, it is not copied."""
    try:
        tensor = values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError):  # strings, None, rows of different lengths
        raise ValueError(f"{argument}: expected integers, got {repr(values)[:80]}") from None
    if tensor.numel() == 0 and not isinstance(values, Tensor):
        tensor = tensor.to(torch.int64)
    if tensor.device.type != "cpu" or tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != rank:
        expect(tensor.device.type == "cpu", argument, "a tensor on the CPU", tensor)
        expect(tensor.dtype in (torch.int32, torch.int64), argument, "int32 or int64", tensor)
        expect(False, argument, f"{rank} dimension{'s' * (rank > 1)}", tensor)
    return tensor


def _block_ids(rows: Sequence[Sequence[int]] | Tensor) -> Tensor:
    """Lists of blocks as a tensor ``[num_reqs, W]``, padded with -1, which is no block."""
    if not isinstance(rows, (list, tuple)):
        return integers("block_ids", cast(Tensor, rows), rank=2)
    of_requests = all(isinstance(row, Iterable) for row in rows)
    expect(of_requests, "block_ids", "a list of blocks for each request", repr(rows)[:80])
    flat = integers("block_ids", list(itertools.chain.from_iterable(rows)), rank=1)
    lens = torch.tensor([len(row) for row in rows], dtype=torch.int64, device="cpu")
    table = torch.full((len(rows), largest(lens)), -1, dtype=flat.dtype, device="cpu")
    table[torch.arange(table.shape[1], device="cpu") < lens[:, None]] = flat
    return table


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // max(block_size, 1))


def largest(values: Tensor) -> int:
    return int(values.max()) if len(values) else 0


def not_negative(argument: str, values: Tensor) -> None:
    if len(values) and int(values.min()) < 0:
        expect(False, argument, "0 or more for each request", f"{int(values.min())} for request {int(values.argmin())}")
