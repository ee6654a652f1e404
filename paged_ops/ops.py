"""Every op, declared once: signature, mutated arguments, and meaning. :mod:`paged_ops.registry` finds the rest.

Longer than 500 lines, as every op is here, with all that its user needs to know.

Letters, one legend for the whole project: T tokens of the batch (padded), S sequences (padded), H query heads,
K key/value heads, D head size, Dv value head size (= D unless stated), N blocks in the cache, B tokens per block,
M columns of a block table, P pairs of blocks; of a latent cache R compressed and P rotated columns.

What all ops share:

* **Cache.** ``kv_cache`` and ``value_cache`` take the forms of :mod:`paged_ops.layouts`, in the model's dtype or in fp8
  (``float8_*``, or ``uint8`` named by ``kv_cache_dtype="fp8"|"fp8_e4m3"|"fp8_e5m2"``). ``k_scale`` and ``v_scale`` are
  float32 ``[1]`` or ``[K]``, ``stored = real / scale``; absent means 1; given on a cache that is not fp8 is an error.
  Latent caches may also be uint8 ``[N, B, 656]`` with ``kv_cache_dtype="fp8_ds_mla"``, whose rows hold their scales:
  512 e4m3 numbers, 4 float32 scales, 64 bfloat16 columns (:func:`latent_cache_write`).
* **Padding.** Slots of padding are negative. Padding sequences have ``seq_lens`` 0 and an empty query range (the tail
  of ``query_start_loc`` repeats its last value). Rows of ``query`` past ``query_start_loc[S]`` give output 0 and lse
  -inf. Block-table entries that no length needs, blocks that no sequence owns and the tail of a last block are not
  read: they may hold anything, NaN too.
* **Empty tensors.** With no blocks, tokens or sequences, writes do nothing and attention returns zeros.
* **Errors.** A wrong rank, shape, dtype, device or combination raises ValueError with the argument, what was expected
  and what came, before anything is written, in eager and at compile time alike. Values (block ids, slots, lengths) are
  checked on the CPU, on other devices under :func:`paged_ops.set_debug_checks`.
* **Memory.** Any strides. What an op writes (caches, and the preallocated results of an ``.out`` overload) shares no
  byte with itself (no expanded cache) or with another argument; else it raises before anything is written. On XLA only
  a tensor that is passed twice is detected. Keys and values may be interleaved views of one tensor. Results of
  :func:`merge_attention_states` may be arguments.
* **Ambient state.** Results depend on the arguments alone: not on autocast, default device or dtype, grad or inference
  mode, deterministic mode, the precision of float32 matmuls, or function modes.
* **Autograd.** No op has derivatives; an argument that requires grad raises in grad mode, one with a tangent
  (``torch.func.jvp``, dual numbers) always. ``torch.vmap`` takes the ops that write nothing, row by row.
"""

# No "from __future__ import annotations": the schemas are inferred from the annotations.
from collections.abc import Sequence

import torch
from torch import Tensor

from paged_ops.registry import op

# Ops of whole models. Ops over ranks look up their process group's state by a name, as a schema has no process groups.
PARALLEL = torch.library.Library("paged_ops_parallel", "DEF")
MODELS = torch.library.Library("paged_ops_models", "DEF")


@op(mutates=("kv_cache", "value_cache"))
def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    value_cache: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> None:
    """Write the keys and values of new tokens into the cache, in place.

    Row t of ``key`` and ``value`` goes to slot ``s = slot_mapping[t]``: block ``s // B``, offset ``s % B``. An fp8
    cache stores ``real / scale`` in float32, rounded to nearest even, saturated at the largest finite value; NaN stays.

    Args:
        key: ``[T', K, D]``, any strides (a slice of a fused qkv is fine), the cache's dtype or, if that is fp8, any
            model dtype.
        value: ``[T', K, Dv]``, as key.
        kv_cache: the cache, mutated; see :mod:`paged_ops.layouts` for its forms.
        slot_mapping: int32 or int64 ``[T]``, ``T <= T'``: rows past it are padding. A negative slot is skipped. If
            two rows have one slot, either may be kept. A slot at or past ``N*B`` is an error.
        value_cache: the values' cache in the separate and x-packed forms, mutated.
        k_scale, v_scale: float32 ``[1]`` or ``[K]`` of an fp8 cache.
        kv_cache_dtype: what uint8 storage holds.

    Source: the slot-mapped write of PagedAttention (Kwon et al. 2023, arXiv:2309.06180).
    """


@op(mutates=("kv_cache",))
def latent_cache_write(
    latent: Tensor,
    rotated: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> None:
    """Write new tokens into a latent cache, in place: ``[latent[t], rotated[t]]`` becomes one row of R + P columns.

    Latent attention (MLA) keeps for each token a vector that is keys and values of all heads at once, compressed, and a
    key that carries the rotary positions. All else is as in :func:`reshape_and_cache`: row t goes to slot
    ``slot_mapping[t]``, and an fp8 cache stores ``real / scale``.

    With ``kv_cache_dtype="fp8_ds_mla"`` a row is 656 bytes, which hold their scales: for each group of 128 latent
    columns, ``scale = max(amax / 448, 2**-126)`` in float32, then ``real / scale`` in e4m3, rounded and saturated as
    above. amax is the largest magnitude of the group; infinities count as the largest float32, and NaN does not count.
    Rotated columns are rounded to bfloat16. The order is 512 numbers, 4 scales, 64 columns.

    It also writes the keys of :func:`select_keys`: R columns, P = 0. With ``kv_cache_dtype="fp8_ds_index"``, R = 128,
    a block holds 128 e4m3 numbers per token, then a float32 scale per token: the power of two at or above ``max(amax,
    1e-4) / 448``, with amax as above.

    Args:
        latent: ``[T', R]``, the compressed part (512 columns in DeepSeek-V3), any strides, the cache's dtype or, if
            that is fp8, any model dtype.
        rotated: ``[T', P]``, the rotated part (64), as latent; P may be 0.
        kv_cache: ``[N, B, R + P]``, mutated; uint8 ``[N, B, 656]`` of rows with scales, where R is 512 and P 64, the
            bytes of a row lie side by side, and strides and offset are multiples of 16 bytes; uint8 ``[N, B, 132]`` of
            index keys with scales, where the bytes of a block lie side by side and begin at a multiple of 4.
        slot_mapping: int32 or int64 ``[T]``, ``T <= T'``, as in :func:`reshape_and_cache`.
        k_scale: float32 ``[1]`` of an fp8 cache, for all R + P columns; None for rows with scales.
        kv_cache_dtype: what uint8 storage holds.

    Sources: multi-head latent attention of DeepSeek-V2 (arXiv:2405.04434); rows with scales as of FlashMLA and vLLM.
    """


@op(out=("out",))
def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    *,
    value_cache: Tensor | None = None,
    causal: bool = True,
    sliding_window: int = 0,
    attention_chunk: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    block_sparse: Sequence[int] | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    output_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    bidirectional_ranges: Tensor | None = None,
    value_head_size: int | None = None,
    num_first_tokens: int = 0,
    batch_invariant: bool = False,
    selected_keys: Tensor | None = None,
    selected_block_size: int = 1,
    ranges_in_window: bool = False,
) -> Tensor:
    """Attention of a ragged batch over the paged cache: decode, speculative verification, (chunked) prefill, any mix.

    Sequence s owns rows ``query_start_loc[s] : query_start_loc[s+1]`` of ``query``: the last ``q_len`` of its
    ``seq_lens[s]`` tokens, which are all in the cache. Row r is at position ``i = seq_len - q_len + r``. For head h,
    with key/value head ``h // (H/K)``, over the keys j that the row sees::

        cap(x)   = soft_cap * tanh(x / soft_cap)
        logit[j] = cap(scale * q . (k_scale * k[j])) + alibi_slopes[h] * (j - i)
        lse      = log(exp(sinks[h]) + sum_j exp(logit[j]))
        out      = sum_j exp(logit[j] - lse) * v_scale * v[j]

    Softmax and accumulation are float32. A row that sees no key gives 0 and lse = its sink (-inf without sinks).

    Args:
        query: ``[T, H, D]``, float32, float16 or bfloat16; H a multiple of K; any strides.
        kv_cache: the cache (:mod:`paged_ops.layouts`), in the query's dtype or fp8.
        block_tables: int32 ``[S, M]``: row s lists the blocks of sequence s. The entry of a block whose keys no row
            sees (behind a window, or between it and the first tokens) may be any id in the cache, but not -1.
        seq_lens: int32 ``[S]``: tokens of each sequence in the cache, this step's among them; 0 for padding.
        query_start_loc: int32 ``[S + 1]``, starting at 0.
        scale: factor of the logits, usually ``D ** -0.5``.
        value_cache: the values' cache in the separate form (where Dv may differ from D) and the x-packed form.
        causal: see keys ``j <= i``; False: every ``j < seq_len`` (cross and encoder attention, a cascade's prefix).
        sliding_window: see keys with ``i - j < sliding_window`` (the token itself counts); 0 is off.
        attention_chunk: see keys with ``i // attention_chunk == j // attention_chunk``; 0 is off.
        soft_cap: bound of the logits, before masks and biases; 0 is off, infinity refused.
        alibi_slopes: float32 ``[H]`` (Press et al. 2021, arXiv:2108.12409).
        sinks: float32 ``[H]``: an extra logit per head that takes part in the sum and has no value; never scaled,
            capped or biased (gpt-oss; Xiao et al. 2023, arXiv:2309.17453).
        block_sparse: :class:`paged_ops.BlockSparse`: local blocks plus a vertical stride.
        k_scale, v_scale: float32 ``[1]`` or ``[K]`` of an fp8 cache.
        output_scale: float32 ``[1]``: return ``clamp(out / output_scale)`` as float8_e4m3fn.
        kv_cache_dtype: what uint8 storage holds.
        bidirectional_ranges: int32 ``[S, R, 2]``: R half-open ranges (start, end) of positions for each sequence. A
            query and a key in one range see each other, whatever their order, window and chunk (image tokens, the
            prefix of a prefix-LM); outside of it the other masks hold. A pair with ``start < 0`` or ``end <= start`` is
            padding; ranges may overlap, and pass ``seq_len``, past which no key is seen. GPU kernels compile for R.
        value_head_size: Dv. Required for a latent cache ``[N, B, D]``, whose values are the first Dv columns of its
            keys, and whose ``k_scale`` applies to both; other forms have their own Dv, which it must equal if given.
        num_first_tokens: with a window, keys ``j < num_first_tokens`` are seen past the window (StreamingLLM; Xiao et
            al. 2023, arXiv:2309.17453). Positions stay absolute, and the other masks hold. Without a window it changes
            nothing. Blocks between the first tokens and the window are not read. ``KVCache`` and ``HybridCache`` free
            them, and keep the others, if they get the same number. GPU kernels compile for the number.
        batch_invariant: the bits of a row's results depend only on its query, the keys and values that it sees at their
            positions, masks, scale, head counts, dtype, cache format and the device: not on the other sequences, their
            order, padding, blocks, the block size, strides, or how many new tokens the call has. So a token decoded
            step by step has the same bits as in one prefill. See docs/numerics.md for what that costs.
        selected_keys: int32 ``[T, G, k]``, G = 1 or K: row t of key/value head h sees key j only if
            ``j // selected_block_size`` is in ``selected_keys[t, h if G == K else 0]``, and only if the other masks let
            it. Entries are positions in the sequence divided by the block size, in any order; negative entries are
            padding, and entries past the sequence select nothing. A repeated entry is an error. The time grows with k,
            not with the sequence (DeepSeek-V3.2's sparse attention, MiniMax-M3's block selection).
        selected_block_size: keys per entry of ``selected_keys``, at least 1; 1 without them.
        ranges_in_window: ``bidirectional_ranges`` add only keys after the query; earlier ones are seen by window and
            chunk alone (the image tokens of Gemma-4). Without ranges it changes nothing.

    Returns:
        ``[T, H, Dv]`` in the query's dtype (float8_e4m3fn with output_scale); rows of padding are 0.

    Block-sparse refuses ALiBi, window, chunk, soft cap and causal=False; causal=False refuses window and chunk;
    bidirectional_ranges and num_first_tokens refuse block-sparse and causal=False.
    Window and chunk together mean both. Sources: PagedAttention (arXiv:2309.06180), FlashAttention-2
    (arXiv:2307.08691), soft cap of Gemma-2 (arXiv:2408.00118), chunks of Llama-4, latent attention of DeepSeek-V2
    (arXiv:2405.04434).
    """


@op(out=("out", "lse"))
def paged_attention_with_lse(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    *,
    value_cache: Tensor | None = None,
    causal: bool = True,
    sliding_window: int = 0,
    attention_chunk: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    block_sparse: Sequence[int] | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    output_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    bidirectional_ranges: Tensor | None = None,
    value_head_size: int | None = None,
    num_first_tokens: int = 0,
    batch_invariant: bool = False,
    selected_keys: Tensor | None = None,
    selected_block_size: int = 1,
    ranges_in_window: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`paged_attention`, and the log of the softmax's sum: float32 ``[T, H]``, natural log, sinks included.

    Rows of padding have lse -inf, sinks or not. Two calls over disjoint keys combine exactly by
    :func:`merge_attention_states`.
    """


@op(out=("out",))
def select_keys(
    index_query: Tensor,
    index_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    k: int,
    *,
    weights: Tensor | None = None,
    scale: float = 1.0,
    relu: bool = False,
    per_head: bool = False,
    pool: str = "none",
    block_size: int = 1,
    local_blocks: int = 0,
    causal: bool = True,
    k_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> Tensor:
    """The indexer of sparse attention: for each row, the k keys, or blocks of keys, with the largest scores.

    The result is the ``selected_keys`` of :func:`paged_attention`. Letters, besides those above: Hi heads of the
    indexer, Di their size, G lists per row. For row t at position i, over the keys j that it sees (``j <= i``)::

        score[t, h, j] = act(scale * index_query[t, h] . (k_scale * index_cache[j]))        act: relu or identity
        score[t, j]    = sum_h weights[t, h] * score[t, h, j]                               G = 1; without weights, 1
        score[t, h, j]                                                                      per_head: G = Hi
        score[.., e]   = the largest score, or the mean, of the keys of block e that the row sees          pool

    Scores and sums are float32, and the selection is exact for them: of equal scores the lower position wins. NaN
    counts as -inf. A row that sees at most k entries gets all of them. On a GPU no value is read on the host, so calls
    can be captured in graphs. The workspace is at most 256 MiB, whatever the batch.

    Args:
        index_query: ``[T, Hi, Di]``, float32, float16 or bfloat16, any strides.
        index_cache: ``[N, B, Di]``, one key per token for all heads, in the query's dtype or fp8, any strides; or uint8
            ``[N, B, 132]`` with ``kv_cache_dtype="fp8_ds_index"``, where Di = 128 and each token has its own scale. It
            has the blocks of the sequence's other caches; :func:`latent_cache_write` with P = 0 writes it.
        block_tables, seq_lens, query_start_loc: as in :func:`paged_attention`.
        k: the number of entries per list, at least 1.
        weights: ``[T, Hi]``, float32 or the query's dtype; not with ``per_head``.
        scale: factor of the scores before the activation.
        relu: replace negative scores by 0 before the sum over heads.
        per_head: one list per head instead of one for all heads.
        pool: "none", or "max" or "mean" over blocks of ``block_size`` keys. Then entries are positions divided by
            ``block_size``.
        block_size: keys per entry, ``selected_block_size`` of attention; 1 without a pool. Independent of B.
        local_blocks: the blocks that always win: the row's own and those before it, ``local_blocks`` in total, at most
            k. 0: none, not even the row's own.
        causal: see keys ``j <= i``; False: every ``j < seq_len``.
        k_scale: float32 ``[1]`` of an fp8 cache.
        kv_cache_dtype: what uint8 storage holds.

    Returns:
        int32 ``[T, G, k]``: ascending, distinct entries, then -1. Rows of padding are -1.

    Sources: the lightning indexer of DeepSeek-V3.2 (``relu``, ``weights``), the block selection of MiniMax-M3
    (``per_head``, ``pool="max"``, ``local_blocks``).
    """


@op(out=("out", "lse"), in_place=True)
def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine two partial attentions over disjoint keys, exactly.

    ``lse = log(exp(lse_a) + exp(lse_b))``, ``out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b``. An lse of
    +inf is read as -inf: an empty side, whose output is not read. Both sides empty: output 0, lse -inf. At most one
    side may have counted sinks.

    Args:
        out_a, out_b: ``[T, H, Dv]`` of one dtype, float32, float16 or bfloat16.
        lse_a, lse_b: float32 ``[T, H]``, natural log.

    Returns:
        out ``[T, H, Dv]`` in the dtype of out_a, lse float32 ``[T, H]``. Source: section 2.2 of FlashInfer
        (Ye et al. 2025, arXiv:2501.01005).
    """


@op(out=("out",))
def cascade_attention(
    query: Tensor,
    kv_cache: Tensor,
    prefix_block_table: Tensor,
    prefix_len: Tensor,
    suffix_block_tables: Tensor,
    suffix_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    *,
    value_cache: Tensor | None = None,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    output_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    value_head_size: int | None = None,
) -> Tensor:
    """Attention of a batch whose sequences all begin with one shared prefix, which is read once.

    Equal to :func:`paged_attention` over prefix and suffix together: all rows of the batch attend to the prefix as one
    long query with causal off, each sequence attends to its own suffix, and the two merge. All lengths are device
    tensors, so that one captured graph serves any prefix. :func:`paged_ops.use_cascade_attention` says when it pays.
    Window, chunk, ALiBi, block-sparse and bidirectional ranges depend on positions across the seam and have no argument
    here.

    Args:
        query, kv_cache, query_start_loc, scale: as in :func:`paged_attention`.
        value_cache, soft_cap, k_scale, v_scale, output_scale, kv_cache_dtype, value_head_size: likewise.
        prefix_block_table: int32 ``[1, Mp]``, the blocks of the prefix.
        prefix_len: int32 ``[1]``, its tokens; they may end inside its last block.
        suffix_block_tables: int32 ``[S, M]``, each sequence's blocks after the prefix.
        suffix_lens: int32 ``[S]``, tokens after the prefix, this step's among them.
        sinks: counted with the suffix.

    Returns:
        ``[T, H, Dv]``. Sources: Hydragen (arXiv:2402.05099), cascade inference of FlashInfer.
    """


@op(mutates=("kv_caches",))
def copy_blocks(kv_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    """Copy whole blocks inside each of a list of caches (layers; keys and values), in one launch.

    Args:
        kv_caches: tensors with the block first (``[N, ...]``), of one device, mutated; an empty list is a no-op.
        block_mapping: int64 ``[P, 2]`` of (source, destination), on the caches' device or on the CPU. One source may
            go to many destinations. A destination named twice, or a block that is both source and destination, is an
            error: checked for a mapping on the CPU, elsewhere under :func:`paged_ops.set_debug_checks`.
    """


@op(mutates=("dst_caches",), in_place=True)
def swap_blocks(src_caches: Sequence[Tensor], dst_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    """Copy whole blocks from one list of caches to another: between devices, or between a device and the host.

    Asynchronous on the current stream where the host side is pinned: later work on that stream is ordered after it, a
    host reader waits (:meth:`paged_ops.KVCache.synchronize`). A host cache that is not pinned works, synchronously.

    Args:
        src_caches, dst_caches: lists of the same length; each pair has one block shape and dtype; dst is mutated.
        block_mapping: int64 ``[P, 2]`` of (source, destination) on the CPU. A destination named twice is an error, and
            so is a block in both roles when a cache is swapped with itself (as the same entry of both lists). Else no
            cache in dst_caches shares memory with another.
    """


@op(out=("key", "value"))
def gather_kv(
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    *,
    value_cache: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The cached keys and values of a batch as ragged tensors: the bridge to any dense attention.

    Token j of sequence s lands in row ``sum(seq_lens[:s]) + j``. Rows past ``sum(seq_lens)`` are 0; tokens past the
    capacity are dropped.

    Args:
        kv_cache, value_cache, block_tables, seq_lens, k_scale, v_scale, kv_cache_dtype: as in :func:`paged_attention`.
        num_tokens: rows of the results, so that no sync is needed.
        dtype: float32, float16 or bfloat16 of the results; by default the cache's; required for an fp8 cache, which is
            dequantised (``stored * scale``, in float32, then rounded).

    Returns:
        key ``[num_tokens, K, D]``, value ``[num_tokens, K, Dv]``. Of a latent cache the key holds the whole rows,
        ``[num_tokens, 1, R + P]``, and the value, which is a part of them, is empty: ``[num_tokens, 1, 0]``.
    """


@op(library=PARALLEL)
def all_reduce(x: Tensor, reducer: str) -> Tensor:
    """The sum over ranks of ``x [..., C]``, in x's dtype.

    Args:
        x: this rank's rows, in the dtype, with the columns and on the device of the reducer.
        reducer: ``AllReduce.name``: see :mod:`paged_ops.parallel.all_reduce`.
    """


@op(library=PARALLEL)
def all_gather_columns(x: Tensor, reducer: str) -> Tensor:
    """The ranks' ``x [..., N·C]`` concatenated in the last dimension, ``[..., W·N·C]`` for W ranks."""


@op(library=PARALLEL)
def all_reduce_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    reducer: str,
    weight_offset: float = 0.0,
    rounds_first: bool = False,
    inner_weight: Tensor | None = None,
    inner_eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """All-reduce, residual add and RMSNorm::

        s = Σ_r x_r                    rounded to x's dtype
        s = norm(s, inner_weight, inner_eps)               if there is an inner_weight, as in Gemma-2
        summed = residual + s          rounded to x's dtype
        normed = norm(summed, weight, eps)
        norm(y, w, e) = y / sqrt(mean(y²) + e) * (weight_offset + w)          in float32, rounded to x's dtype

    Args:
        x: ``[..., C]``, this rank's rows, as in :func:`all_reduce`.
        residual: of the same shape and dtype, equal on all ranks.
        weight, inner_weight: ``[C]``, in x's dtype if ``rounds_first``, else in any of the reducer's dtypes.
        rounds_first: whether the quotient is rounded to x's dtype before it is multiplied by the weight, as in Llama.

    Returns:
        summed and normed, contiguous, of x's shape.
    """


@op(library=PARALLEL)
def merge_over_ranks(part: Tensor, lse: Tensor, context: str) -> tuple[Tensor, Tensor]:
    """The ranks' partial attention over disjoint keys, merged: see :mod:`paged_ops.parallel.exchange`.

    Args:
        part: ``[T, H, Dv]``, attention over this rank's keys.
        lse: float32 ``[T, H]``, log of the sum of exponentials.
        context: ``Context.handle.name``: see :mod:`paged_ops.parallel.context`.
    """


@op(library=MODELS)
def few_row_linear(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    constant: bool = False,
) -> Tensor:
    """``x [..., C]`` times the transpose of ``weight [O, C]``: ``[..., O]`` in x's dtype, summed in float32.

    On Hopper GPUs kernels for few rows overlap with the previous kernel: ``lowerings/gpu/linear.py``.

    Args:
        norm: ``[C]``, the weight of an RMSNorm of x, with ``eps``, before the matmul.
        gated: the first half of the matmul's columns are gates: ``silu(gate) * up``, ``[..., O / 2]``.
        residual: of the result's shape, added to it.
        constant: the kernel just before on this stream does not write the weight, so it may be read before that one
            has ended.
    """


@op(library=MODELS)
def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [..., C]`` times the transpose of ``weight [O, C]``, plus ``bias [O]``: ``[..., O]`` in x's dtype.

    Summed in float32, in an order that C and the dtype alone decide: the bits of a row depend on no other row, nor on
    the number of rows or threads. All tensors have one dtype: float32, float16 or bfloat16.
    """


@op(library=MODELS)
def invariant_expert_linear(x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`invariant_linear` of each row of ``x [T, C]`` by the weight of its own expert: ``[T, O]``.

    Args:
        weight: ``[E, O, C]``, of any strides.
        experts: int64 ``[T]``, each from 0 to E - 1.
        bias: ``[E, O]``.
    """


@op(library=MODELS)
def invariant_rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, rounds_first: bool = False
) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * (weight_offset + weight)`` of each row of ``x [..., C]``, in x's dtype.

    Computed in float32, in an order that C alone decides.

    Args:
        weight: ``[C]``, or None.
        rounds_first: whether the quotient is rounded to x's dtype before it is multiplied by the weight, as in Llama.
    """
