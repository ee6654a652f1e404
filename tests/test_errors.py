"""Bad calls: each raises an error that names the argument, what was expected and what came, and changes no byte."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import paged_ops
from paged_ops import features, masks, metadata, testing
from paged_ops.generation import GenerationLoop
from paged_ops.graphs import DecodeGraphs
from paged_ops.registry import OPS

WRITE = ("reshape_and_cache", "nhd-fp32")
ATTEND = ("paged_attention", "mixed-fp32")
LSE = ("paged_attention_with_lse", "mixed-fp32")
SEPARATE = ("paged_attention", "separate-fp16")
PACKED = ("paged_attention", "x_packed-fp16")
FP8 = ("paged_attention", "nhd-e4m3-auto-fp16")
FP8_WRITE = ("reshape_and_cache", "nhd-e4m3-head-bf16")
UINT8 = ("reshape_and_cache", "uint8-fp8")
MERGE = ("merge_attention_states", "fp32-d32-h1")
CASCADE = ("cascade_attention", "mixed-prefix75")
COPY = ("copy_blocks", "nhd-fp32")
SWAP = ("swap_blocks", "nhd-fp32")
GATHER = ("gather_kv", "nhd-fp32")
LATENT = ("paged_attention", "latent-mixed-fp32")
LATENT_FP8 = ("paged_attention", "latent-e4m3-fp16")
INDEX = ("select_keys", "dsa-decode-fp32")
INDEX_BLOCKS = ("select_keys", "index-fp32-b16-decode")
INDEX_WRITE = ("latent_cache_write", "index-fp32-b16")
INDEX_FP8 = ("select_keys", "e4m3-auto-fp16")
LATENT_WRITE = ("latent_cache_write", "latent-fp32")
LATENT_FP8_WRITE = ("latent_cache_write", "latent-e4m3-tensor-bf16")
ROWS = ("paged_attention", "latent-rows-decode-bf16")
ROWS_WRITE = ("latent_cache_write", "latent-rows-fp32-b16")
ROWS_GATHER = ("gather_kv", "latent-rows-fp32-b16")
GATHER_FP8 = ("gather_kv", "nhd-e4m3-tensor-fp16")

f32, f16, i32, i64 = torch.float32, torch.float16, torch.int32, torch.int64


def ones(*shape, dtype=f32, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device)


def meta(tensor):
    return tensor.to("meta")


# op and case, argument, what replaces it (a function of the right one, or a value), and what the message says
STATIC = [
    # reshape_and_cache
    (WRITE, "key", lambda t: t[0], r"key: expected 3 dimensions \[T', K, D\], got a float32 tensor of shape \[2, 32\]"),
    (WRITE, "key", lambda t: t[..., :16], r"key: expected 32 in dimension 2 of \[T', K, D\], got .*\[24, 2, 16\]"),
    (WRITE, "key", lambda t: t.double(), r"key: expected float32 or float16 or bfloat16, got a float64 tensor"),
    (WRITE, "value", lambda t: t[:, :1], r"value: expected 2 in dimension 1 of \[T', K, Dv\], got .*\[24, 1, 32\]"),
    (WRITE, "value", lambda t: t[:5], r"value: expected 24 in dimension 0 of \[T', K, Dv\], got .*\[5, 2, 32\]"),
    (WRITE, "value", lambda t: t.half(), r"value: expected float32, got a float16 tensor"),
    (WRITE, "kv_cache", lambda t: t.half(), r"kv_cache: expected the model's torch.float32, or fp8, got a float16"),
    (WRITE, "kv_cache", lambda t: t[:, :1], r"kv_cache: expected 2 planes .* in dimension 1 .*, got .*\[4, 1, 16, 2, 32\]"),
    (WRITE, "kv_cache", lambda t: t[0, 0], r"kv_cache: expected 4 or 5 dimensions .*, got .*\[16, 2, 32\]"),
    (WRITE, "kv_cache", lambda t: t[:, 0, :, :1], r"kv_cache: expected an even dimension 2 of \[N, B, 2K, D\], got"),
    (WRITE, "kv_cache", lambda t: t.to(torch.uint8), r"kv_cache: expected float32, .* \(uint8 needs kv_cache_dtype"),
    (WRITE, "kv_cache", meta, r"kv_cache: expected a tensor on cpu, the key's device, got .* on meta"),
    (WRITE, "slot_mapping", lambda t: t[:, None], r"slot_mapping: expected 1 dimensions \[T\], got .*\[21, 1\]"),
    (WRITE, "slot_mapping", lambda t: t.to(torch.int16), r"slot_mapping: expected int64 or int32, got a int16 tensor"),
    (WRITE, "slot_mapping", lambda t: torch.cat([t, t]), r"slot_mapping: expected at most the 24 rows of key, got .*\[42\]"),
    (WRITE, "slot_mapping", meta, r"slot_mapping: expected a tensor on cpu, got .* on meta"),
    (WRITE, "k_scale", ones(1), r"k_scale: expected None, as a torch.float32 cache has no scales, got .*\[1\]"),
    (WRITE, "v_scale", ones(2), r"v_scale: expected None, as a torch.float32 cache has no scales, got .*\[2\]"),
    (WRITE, "kv_cache_dtype", "fp4", r"kv_cache_dtype: expected one of \('auto', 'fp8', .*\), got 'fp4'"),
    (WRITE, "kv_cache_dtype", "fp8", r"kv_cache: expected uint8 or torch.float8_e4m3fn .*, got a float32 tensor"),
    (WRITE, "value_cache", ones(4, 16, 2, 32), r"kv_cache: expected x = 16 / itemsize last .*, got"),
    (UINT8, "kv_cache_dtype", "auto", r"kv_cache: expected float32, .*\(uint8 needs .*, got a uint8 tensor"),
    (FP8_WRITE, "kv_cache_dtype", "fp8_e5m2", r"kv_cache: expected uint8 or torch.float8_e5m2 .*, got a float8_e4m3fn"),
    (FP8_WRITE, "k_scale", ones(2), r"k_scale: expected shape \[1\] or \[3\], got .*\[2\]"),
    (FP8_WRITE, "v_scale", ones(3, dtype=f16), r"v_scale: expected float32, got a float16 tensor"),
    (FP8_WRITE, "v_scale", ones(1, 1), r"v_scale: expected 1 dimensions \[1\] or \[K\], got .*\[1, 1\]"),
    # latent_cache_write
    (LATENT_WRITE, "latent", lambda t: t[None], r"latent: expected 2 dimensions \[T', R\], got .*\[1, 24, 32\]"),
    (LATENT_WRITE, "latent", lambda t: t.double(), r"latent: expected float32 or float16 or bfloat16, got a float64"),
    (LATENT_WRITE, "latent", lambda t: t[:, :16], r"kv_cache: expected R \+ P = 16 \+ 8 columns in \[N, B, R \+ P\], got .*40\]"),
    (LATENT_WRITE, "rotated", lambda t: t[:5], r"rotated: expected 24 in dimension 0 of \[T', P\], got .*\[5, 8\]"),
    (LATENT_WRITE, "rotated", lambda t: t.half(), r"rotated: expected float32, got a float16 tensor"),
    (LATENT_WRITE, "kv_cache", lambda t: t[0], r"kv_cache: expected 3 dimensions \[N, B, R \+ P\], got .*\[16, 40\]"),
    (LATENT_WRITE, "kv_cache", lambda t: t.half(), r"kv_cache: expected the model's torch.float32, or fp8, got a float16"),
    (LATENT_WRITE, "kv_cache", meta, r"kv_cache: expected a tensor on cpu, the latent's device, got .* on meta"),
    (LATENT_WRITE, "slot_mapping", lambda t: t.float(), r"slot_mapping: expected int64 or int32, got a float32"),
    (LATENT_WRITE, "slot_mapping", lambda t: torch.cat([t, t]), r"slot_mapping: expected at most the 24 rows of latent, got .*\[42\]"),
    (LATENT_WRITE, "k_scale", ones(1), r"k_scale: expected None, as a torch.float32 cache has no scales, got .*\[1\]"),
    (LATENT_FP8_WRITE, "k_scale", ones(2), r"k_scale: expected shape \[1\] or \[1\], got .*\[2\]"),
    (WRITE, "kv_cache", ones(4, 16, 40), r"kv_cache: expected 4 or 5 dimensions \(a latent cache is written by latent_"),
    # paged_attention over latents
    (LATENT, "value_head_size", None, r"value_head_size: expected the R of the latent kv_cache \[N, B, R \+ P\], got None"),
    (LATENT, "value_head_size", 0, r"value_head_size: expected 1 to 40, columns of the latent kv_cache .*, got 0"),
    (LATENT, "value_head_size", 41, r"value_head_size: expected 1 to 40, columns of the latent kv_cache .*, got 41"),
    (LATENT, "query", lambda t: t[..., :32], r"query: expected head size 40, the cache's, in \[T, H, D\], got .*32\]"),
    (LATENT, "value_cache", ones(4, 16, 1, 32), r"value_cache: expected None with a latent kv_cache \[N, B, R \+ P\], got"),
    (LATENT_FP8, "v_scale", ones(1), r"v_scale: expected None, as a latent cache has one scale, k_scale, got"),
    (ATTEND, "value_head_size", 32, r"value_head_size: expected None, or the 64 of the cache, got 32"),
    # latent rows that hold their scales
    (ROWS_WRITE, "kv_cache", lambda t: t[..., :640], r"kv_cache: expected uint8 \[N, B, 656\] \(kv_cache_dtype='fp8_ds_mla'\), got .*640\]"),
    (ROWS_WRITE, "kv_cache", lambda t: t[0], r"kv_cache: expected 3 dimensions \[N, B, R \+ P\], got .*\[16, 656\]"),
    (ROWS_WRITE, "kv_cache", lambda t: t.view(torch.float8_e4m3fn), r"kv_cache: expected uint8 \[N, B, 656\] .*, got a float8_e4m3fn"),
    (ROWS_WRITE, "kv_cache", ones(4, 16, 656), r"kv_cache: expected uint8 \[N, B, 656\] .*, got a float32 tensor"),
    (ROWS_WRITE, "kv_cache", ones(4, 16, 664, dtype=torch.uint8)[..., :656], r"kv_cache: expected strides and an offset that are multiples of 16 bytes, got"),
    (ROWS_WRITE, "kv_cache", ones(4, 16, 672, dtype=torch.uint8)[..., 8:664], r"kv_cache: expected strides and an offset that are .*, got .* offset 8"),
    (ROWS_WRITE, "kv_cache", ones(4, 16, 1312, dtype=torch.uint8)[..., ::2], r"kv_cache: expected contiguous rows of bytes, got strides"),
    (ROWS_WRITE, "kv_cache", ones(43000, dtype=torch.uint8).as_strided((4, 16, 656), (10504, 656, 1)), r"kv_cache: expected strides and an offset that are .*, got .*\(10504, 656, 1\)"),
    (ROWS, "kv_cache", lambda t: t[0], r"kv_cache: expected uint8 \[N, B, 656\] \(kv_cache_dtype='fp8_ds_mla'\), got .*\[16, 656\]"),
    (ROWS_WRITE, "kv_cache_dtype", "auto", r"kv_cache: expected float32, .*\(uint8 needs .*, got a uint8 tensor"),
    (ROWS_WRITE, "kv_cache_dtype", "fp8", r"kv_cache: expected R \+ P = 512 \+ 64 columns in \[N, B, R \+ P\], got .*656\]"),
    (ROWS_WRITE, "latent", lambda t: t[:, :256], r"latent: expected 512 columns with kv_cache_dtype='fp8_ds_mla', got .*256\]"),
    (ROWS_WRITE, "rotated", lambda t: t[:, :32], r"rotated: expected 64 columns with kv_cache_dtype='fp8_ds_mla', got .*32\]"),
    (ROWS_WRITE, "k_scale", ones(1), r"k_scale: expected None, as rows of fp8_ds_mla hold their scales, got"),
    (ROWS, "k_scale", ones(1), r"k_scale: expected None, as rows of fp8_ds_mla hold their scales, got"),
    (ROWS, "v_scale", ones(1), r"v_scale: expected None, as rows of fp8_ds_mla hold their scales, got"),
    (ROWS, "value_cache", ones(4, 16, 1, 32), r"value_cache: expected None with a kv_cache \[N, B, 656\], got"),
    (ROWS, "value_head_size", 256, r"value_head_size: expected 512 with kv_cache_dtype='fp8_ds_mla', got 256"),
    (ROWS, "value_head_size", None, r"value_head_size: expected the R of the latent kv_cache"),
    (ROWS, "query", lambda t: t[..., :512], r"query: expected head size 576, the cache's, in \[T, H, D\], got .*512\]"),
    (ROWS_GATHER, "dtype", None, r"dtype: expected float32, float16 or bfloat16 \(required for an fp8 cache\), got None"),
    (WRITE, "kv_cache_dtype", "fp8_ds_mla", r"kv_cache: expected uint8 \[N, B, 656\] .*, got a float32 tensor"),
    # paged_attention
    (ATTEND, "query", lambda t: t[0], r"query: expected 3 dimensions \[T, H, D\], got .*\[8, 64\]"),
    (ATTEND, "query", lambda t: t[:, :7], r"query: expected a multiple of the cache's 2 key/value heads as H .*\[61, 7, 64\]"),
    (ATTEND, "query", lambda t: t[..., :32], r"query: expected head size 64, the cache's, in \[T, H, D\], got .*32\]"),
    (ATTEND, "query", lambda t: t.to(testing.F8_E4M3), r"query: expected float32 or float16 or bfloat16, got a float8"),
    (ATTEND, "query", lambda t: t.half(), r"kv_cache: expected the model's torch.float16, or fp8, got a float32"),
    (ATTEND, "kv_cache", meta, r"kv_cache: expected a tensor on cpu, the query's device, got .* on meta"),
    (ATTEND, "block_tables", lambda t: t[0], r"block_tables: expected 2 dimensions \[S, M\], got"),
    (ATTEND, "block_tables", lambda t: t.long(), r"block_tables: expected int32, got a int64 tensor"),
    (ATTEND, "block_tables", lambda t: t[:3], r"block_tables: expected 7 in dimension 0 of \[S, M\], got .*\[3, "),
    (ATTEND, "seq_lens", lambda t: t.long(), r"seq_lens: expected int32, got a int64 tensor"),
    (ATTEND, "seq_lens", lambda t: t[None], r"seq_lens: expected 1 dimensions \[S\], got .*\[1, 7\]"),
    (ATTEND, "query_start_loc", lambda t: t[:-1], r"query_start_loc: expected 8 in dimension 0 of \[S \+ 1\], got .*\[7\]"),
    (ATTEND, "query_start_loc", lambda t: t.long(), r"query_start_loc: expected int32, got a int64 tensor"),
    (ATTEND, "query_start_loc", meta, r"query_start_loc: expected a tensor on cpu, got .* on meta"),
    (ATTEND, "sinks", ones(7), r"sinks: expected 8 in dimension 0 of \[H\], got .*\[7\]"),
    (ATTEND, "sinks", ones(8, dtype=f16), r"sinks: expected float32, got a float16 tensor"),
    (ATTEND, "alibi_slopes", ones(8, 1), r"alibi_slopes: expected 1 dimensions \[H\], got .*\[8, 1\]"),
    (ATTEND, "output_scale", ones(8), r"output_scale: expected 1 in dimension 0 of \[1\], got .*\[8\]"),
    (ATTEND, "sliding_window", -1, r"sliding_window: expected 0 \(off\) or a number of tokens, got -1"),
    (ATTEND, "attention_chunk", -8, r"attention_chunk: expected 0 \(off\) or a number of tokens, got -8"),
    (ATTEND, "soft_cap", -1.0, r"soft_cap: expected 0 \(off\) or a positive bound, got -1.0"),
    (ATTEND, "soft_cap", math.nan, r"soft_cap: expected 0 \(off\) or a positive bound, got nan"),
    (ATTEND, "soft_cap", math.inf, r"soft_cap: expected 0 \(off\) or a bound in the range of float32, got inf"),
    (ATTEND, "soft_cap", 1e39, r"soft_cap: expected 0 \(off\) or a bound in the range of float32, got 1e\+39"),
    (ATTEND, "soft_cap", 1e-46, r"soft_cap: expected 0 \(off\) or a bound in the range of float32, got 1e-46"),
    (ATTEND, "scale", math.nan, r"scale: expected a finite float32, got nan"),
    (ATTEND, "scale", -math.inf, r"scale: expected a finite float32, got -inf"),
    (ATTEND, "scale", 1e39, r"scale: expected a finite float32, got 1e\+39"),
    (CASCADE, "soft_cap", math.inf, r"soft_cap: expected 0 \(off\) or a bound in the range of float32, got inf"),
    (CASCADE, "scale", math.inf, r"scale: expected a finite float32, got inf"),
    (ATTEND, "bidirectional_ranges", ones(7, 2, dtype=i32), r"bidirectional_ranges: expected 3 dimensions \[S, R, 2\], got .*\[7, 2\]"),
    (ATTEND, "bidirectional_ranges", ones(6, 1, 2, dtype=i32), r"bidirectional_ranges: expected 7 in dimension 0 of \[S, R, 2\], got .*\[6, 1, 2\]"),
    (ATTEND, "bidirectional_ranges", ones(7, 1, 3, dtype=i32), r"bidirectional_ranges: expected 2 in dimension 2 of \[S, R, 2\], got .*\[7, 1, 3\]"),
    (ATTEND, "bidirectional_ranges", ones(7, 1, 2, dtype=torch.int64), r"bidirectional_ranges: expected int32, got a int64 tensor"),
    (ATTEND, "selected_keys", ones(3, 1, 2, dtype=i32), r"selected_keys: expected 61 in dimension 0 of \[T, G, k\], got .*\[3, 1, 2\]"),
    (ATTEND, "selected_keys", ones(61, 3, 2, dtype=i32), r"selected_keys: expected 1 or the cache's 2 key/value heads as G in \[T, G, k\], got 3"),
    (ATTEND, "selected_keys", ones(61, 1, 2, dtype=torch.int64), r"selected_keys: expected int32, got a int64 tensor"),
    (ATTEND, "selected_block_size", 0, r"selected_block_size: expected a number of keys, at least 1, got 0"),
    (ATTEND, "selected_block_size", 64, r"selected_block_size: expected 1 without selected_keys, got 64"),
    # select_keys
    (INDEX, "index_query", lambda t: t[0], r"index_query: expected 3 dimensions \[T, Hi, Di\], got .*\[4, 32\]"),
    (INDEX, "index_query", lambda t: t.double(), r"index_query: expected float32 or float16 or bfloat16, got a float64"),
    (INDEX, "index_query", lambda t: t[:, :0], r"index_query: expected at least one head in \[T, Hi, Di\], got .*0, 32\]"),
    (INDEX, "index_query", lambda t: t[..., :16], r"index_cache: expected 16 in dimension 2 of \[N, B, Di\], got .*32\]"),
    (INDEX, "index_cache", lambda t: t[0], r"index_cache: expected 3 dimensions \[N, B, Di\], got .*\[16, 32\]"),
    (INDEX, "index_cache", lambda t: t.half(), r"index_cache: expected the query's torch.float32, or fp8, got a float16"),
    (INDEX, "index_cache", lambda t: t.to(torch.uint8), r"index_cache: expected float32, .*\(uint8 needs kv_cache_dtype"),
    (INDEX, "index_cache", meta, r"index_cache: expected a tensor on cpu, got .* on meta"),
    (INDEX, "seq_lens", lambda t: t.long(), r"seq_lens: expected int32, got a int64 tensor"),
    (INDEX, "k", 0, r"k: expected at least 1, got 0"),
    (INDEX, "pool", "sum", r"pool: expected one of \('none', 'max', 'mean'\), got 'sum'"),
    (INDEX, "block_size", 8, r"block_size: expected 1 with pool='none', got 8"),
    (INDEX, "block_size", 0, r"block_size: expected at least 1, got 0"),
    (INDEX, "local_blocks", -1, r"local_blocks: expected at least 0, got -1"),
    (INDEX, "local_blocks", 13, r"local_blocks: expected at most k = 12, as these blocks always win, got 13"),
    (INDEX, "scale", 1e39, r"scale: expected a finite float32, got 1e\+39"),
    (INDEX, "weights", ones(8), r"weights: expected 2 dimensions \[T, Hi\], got .*\[8\]"),
    (INDEX, "weights", ones(8, 3), r"weights: expected 4 in dimension 1 of \[T, Hi\], got .*\[8, 3\]"),
    (INDEX, "weights", ones(8, 4, dtype=f16), r"weights: expected float32, got a float16 tensor"),
    (INDEX, "per_head", True, r"weights: expected None with per_head, which sums no heads, got a float32"),
    (INDEX, "k_scale", ones(1), r"k_scale: expected None, as a torch.float32 cache has no scales, got"),
    (INDEX, "kv_cache_dtype", "fp8", r"index_cache: expected uint8 or torch.float8_e4m3fn .*, got a float32"),
    (INDEX, "kv_cache_dtype", "fp8_ds_mla", r"kv_cache_dtype: expected another format than 'fp8_ds_mla', .* got 'fp8_ds_mla'"),
    # index keys with a scale per token
    (INDEX_BLOCKS, "index_query", lambda t: t[..., :64], r"index_query: expected Di = 128 with kv_cache_dtype='fp8_ds_index', got 64"),
    (INDEX_BLOCKS, "index_cache", lambda t: t[..., :128], r"index_cache: expected uint8 \[N, B, 132\] \(kv_cache_dtype='fp8_ds_index'\), got"),
    (INDEX_BLOCKS, "index_cache", lambda t: t.view(testing.F8_E4M3), r"index_cache: expected uint8 \[N, B, 132\] .*, got a float8_e4m3fn"),
    (INDEX_BLOCKS, "index_cache", ones(4, 16, 140, dtype=torch.uint8)[..., :132], r"index_cache: expected blocks of contiguous bytes, got strides"),
    (INDEX_BLOCKS, "index_cache", ones(8500, dtype=torch.uint8)[1:8449].view(4, 16, 132), r"index_cache: expected blocks that begin at multiples of 4 bytes, got .* offset 1"),
    (INDEX_BLOCKS, "k_scale", ones(1), r"k_scale: expected None, as blocks of fp8_ds_index hold their scales, got"),
    (INDEX_WRITE, "k_scale", ones(1), r"k_scale: expected None, as blocks of fp8_ds_index hold their scales, got"),
    (INDEX_WRITE, "latent", lambda t: t[:, :64], r"latent: expected 128 columns with kv_cache_dtype='fp8_ds_index', got .*64\]"),
    (INDEX_WRITE, "rotated", ones(24, 8), r"rotated: expected 0 columns with kv_cache_dtype='fp8_ds_index', got .*8\]"),
    (LATENT, "kv_cache_dtype", "fp8_ds_index", r"kv_cache_dtype: expected another format: latent_cache_write and select_keys alone take"),
    (GATHER, "kv_cache_dtype", "fp8_ds_index", r"kv_cache_dtype: expected another format: latent_cache_write and select_keys alone take"),
    (WRITE, "kv_cache_dtype", "fp8_ds_index", r"kv_cache_dtype: expected another format: latent_cache_write and select_keys alone take"),
    (INDEX_FP8, "k_scale", ones(2), r"k_scale: expected 1 in dimension 0 of \[1\], got .*\[2\]"),
    (ATTEND, "k_scale", ones(1), r"k_scale: expected None, as a torch.float32 cache has no scales, got"),
    (ATTEND, "block_sparse", [16, 1], r"block_sparse: expected 7 numbers .*, got 2"),
    (ATTEND, "block_sparse", paged_ops.BlockSparse(24, 1, 1), r"block_sparse.block_size: expected a positive multiple .* 16, got 24"),
    (ATTEND, "block_sparse", paged_ops.BlockSparse(0, 1, 1), r"block_sparse.block_size: expected a positive multiple .* 16, got 0"),
    (ATTEND, "block_sparse", paged_ops.BlockSparse(-16, 1, 1), r"block_sparse.block_size: expected a positive multiple .* 16, got -16"),
    (ATTEND, "block_sparse", paged_ops.BlockSparse(16, -1, 1), r"block_sparse.local_blocks: expected 0 or more, got -1"),
    (ATTEND, "block_sparse", paged_ops.BlockSparse(16, 1, 0), r"block_sparse.vert_stride: expected 1 or more, got 0"),
    (ATTEND, "block_sparse", paged_ops.BlockSparse(16, 1, 1, True, True), r"block_sparse: expected one of homo_head, .* got both"),
    (ATTEND, "block_sparse", paged_ops.BlockSparse(16, 1, 1, rank=2), r"block_sparse.rank: expected 0 <= rank < .* 1, got 2"),
    (ATTEND, "block_sparse", paged_ops.BlockSparse(16, 1, 1, rank=-1), r"block_sparse.rank: expected 0 <= rank < .* 1, got -1"),
    (LSE, "query", lambda t: t[:, :, None], r"query: expected 3 dimensions \[T, H, D\], got .*\[61, 8, 1, 64\]"),
    (SEPARATE, "value_cache", lambda t: t[:, :8], r"value_cache: expected the B, K of kv_cache, \[16, 2\]"),
    (SEPARATE, "value_cache", lambda t: t[:2], r"value_cache: expected the \d+ blocks of kv_cache, got .*\[2, 16, 2, 64\]"),
    (SEPARATE, "value_cache", lambda t: t.float(), r"value_cache: expected the dtype of kv_cache, torch.float16, got a float32"),
    (SEPARATE, "value_cache", meta, r"value_cache: expected a tensor on cpu, got .* on meta"),
    (SEPARATE, "value_cache", ones(1), r"value_cache: expected 4 dimensions \[N, B, K, Dv\] or \[N, K, D, B\], got"),
    (PACKED, "value_cache", lambda t: t[:, :, :32], r"value_cache: expected \[N, K, D, B\] = \[N, 2, 64, 16\] with an x-packed"),
    (PACKED, "kv_cache", lambda t: t[..., :4], r"kv_cache: expected x = 16 / itemsize last in \[N, K, D/x, B, x\], got .*4\]"),
    (FP8, "k_scale", ones(5), r"k_scale: expected shape \[1\] or \[2\], got .*\[5\]"),
    # torch lets None pass for a tensor
    (WRITE, "key", lambda t: None, r"key: expected a tensor, got None"),
    (ATTEND, "kv_cache", lambda t: None, r"kv_cache: expected a tensor, got None"),
    (ATTEND, "block_tables", lambda t: None, r"block_tables: expected a tensor, got None"),
    (GATHER, "seq_lens", lambda t: None, r"seq_lens: expected a tensor, got None"),
    (MERGE, "lse_b", lambda t: None, r"lse_b: expected a tensor, got None"),
    (COPY, "block_mapping", lambda t: None, r"block_mapping: expected a tensor, got None"),
    # the other ops
    (MERGE, "out_b", lambda t: t[:, :, :16], r"out_b: expected 32 in dimension 2 of \[T, H, Dv\], got .*\[13, 1, 16\]"),
    (MERGE, "out_b", lambda t: t.half(), r"out_b: expected float32, got a float16 tensor"),
    (MERGE, "lse_a", lambda t: t.T, r"lse_a: expected 13 in dimension 0 of \[T, H\], got .*\[1, 13\]"),
    (MERGE, "lse_b", lambda t: t.double(), r"lse_b: expected float32, got a float64 tensor"),
    (CASCADE, "prefix_len", lambda t: t[None], r"prefix_len: expected 1 dimensions \[1\], got .*\[1, 1\]"),
    (CASCADE, "prefix_block_table", lambda t: t.expand(2, -1), r"prefix_block_table: expected 1 in dimension 0 of \[1, Mp\], got"),
    (CASCADE, "suffix_lens", lambda t: t.long(), r"suffix_lens: expected int32, got a int64 tensor"),
    (CASCADE, "suffix_block_tables", lambda t: t[:1], r"suffix_block_tables: expected 3 in dimension 0 of \[S, M\], got"),
    (COPY, "block_mapping", lambda t: t.int(), r"block_mapping: expected int64, got a int32 tensor"),
    (COPY, "block_mapping", lambda t: t[:, :1], r"block_mapping: expected 2 in dimension 1 of \[P, 2\], got .*\[4, 1\]"),
    (WRITE, "kv_cache", lambda t: t[:1].expand(4, -1, -1, -1, -1), r"kv_cache: expected a tensor whose elements do not overlap .*, got strides \(0,"),
    (COPY, "kv_caches", lambda ts: [ts[0], ts[1][:1].expand_as(ts[0])], r"kv_caches\[1\]: expected a tensor whose elements do not overlap"),
    (SWAP, "dst_caches", lambda ts: [ts[0][:1].expand_as(ts[1]), *ts[1:]], r"dst_caches\[0\]: expected a tensor whose elements do not overlap"),
    (COPY, "kv_caches", lambda ts: [ts[0], ones(dtype=torch.uint8)], r"kv_caches\[1\]: expected blocks in dimension 0, got a uint8 tensor of shape \[\]"),
    (COPY, "kv_caches", lambda ts: [ts[0], meta(ts[1])], r"kv_caches\[1\]: expected a tensor on cpu, got .* on meta"),
    (SWAP, "dst_caches", lambda ts: ts[:2], r"dst_caches: expected 3 caches, as src_caches, got 2"),
    (SWAP, "dst_caches", lambda ts: [ts[0], ts[1][:, :1], ts[2]], r"dst_caches\[1\]: expected blocks of shape \[2, 16, 2, 32\]"),
    (SWAP, "dst_caches", lambda ts: [ts[0].half(), *ts[1:]], r"dst_caches\[0\]: expected torch.float32, as the source, got a float16"),
    (SWAP, "block_mapping", meta, r"block_mapping: expected a tensor on the CPU, got .* on meta"),
    (GATHER, "num_tokens", -1, r"num_tokens: expected 0 or more rows, got -1"),
    (GATHER, "dtype", torch.float64, r"dtype: expected float32, float16 or bfloat16, got torch.float64"),
    (GATHER, "block_tables", lambda t: t.long(), r"block_tables: expected int32, got a int64 tensor"),
    (GATHER_FP8, "dtype", None, r"dtype: expected float32, float16 or bfloat16 \(required for an fp8 cache\), got None"),
]  # fmt: skip


def replaced(call, op, argument, change):
    names = [a.name for a in getattr(torch.ops.paged_ops, op).default._schema.arguments]
    named = dict(zip(names, call.args, strict=False)) | call.kwargs
    named[argument] = change(named[argument]) if callable(change) else change
    positional = [a.name for a in getattr(torch.ops.paged_ops, op).default._schema.arguments if not a.kwarg_only]
    args = tuple(named.pop(name) for name in positional)
    return replace(call, args=args, kwargs=named)


def tensors_in(call):
    values = [*call.args, *call.kwargs.values()]
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return [each for each in flat if isinstance(each, torch.Tensor) and each.device.type != "meta"]


def raises(op, call, message):
    with pytest.raises((ValueError, RuntimeError), match=message) as error:
        OPS[op](*call.args, **call.kwargs)
    return str(error.value)


def unchanged(op, call, message):
    """The error of a call, which wrote nothing."""
    before = [t.clone() for t in tensors_in(call)]
    text = raises(op, call, message)
    for tensor, old in zip(tensors_in(call), before, strict=True):
        testing.assert_same_bytes(f"an argument of {op}", tensor, old)
    return text


@pytest.mark.parametrize(
    ("where", "argument", "change", "message"),
    STATIC,
    ids=[f"{n}-{row[0][0]}-{row[1]}" for n, row in enumerate(STATIC)],
)
def test_static_error_is_the_same_in_eager_and_fake(where, argument, change, message):
    op, case = where
    call = replaced(testing.case_named(op, case).inputs(), op, argument, change)
    eager = unchanged(op, call, message)
    assert re.search(r"expected .*, got ", eager), eager
    mode = FakeTensorMode()

    def to_fake(value):
        if isinstance(value, list):
            return [to_fake(each) for each in value]
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    fake = replace(
        call, args=tuple(map(to_fake, call.args)), kwargs={name: to_fake(v) for name, v in call.kwargs.items()}
    )
    with mode:
        assert raises(op, fake, message) == eager


FLAGS = [(ATTEND, "causal"), (LSE, "causal"), (ATTEND, "batch_invariant"), (INDEX, "relu"), (INDEX, "causal")]


@pytest.mark.parametrize(("where", "flag"), FLAGS)
def test_none_is_no_flag(where, flag):
    """The dispatcher takes None for False: attention would see later tokens."""
    op, case = where
    inputs = testing.case_named(op, case).inputs()
    with pytest.raises(ValueError, match=f"^{flag}: expected True or False, got None$"):
        OPS[op](*inputs.args, **inputs.kwargs | {flag: None})


def exclusive():
    """The arguments of a call with each pair that excludes each other, and the message."""
    arguments = {
        "causal=False" if argument == "causal" else argument: (argument, value)
        for argument, value in testing.FEATURES.values()
    }
    for a, b in features.EXCLUSIVE:
        named = testing.case_named(*ATTEND)
        inputs = replace(named, features=(arguments[a], arguments[b])).inputs()
        yield (
            {name: inputs.kwargs[name] for name in (arguments[a][0], arguments[b][0])},
            f"{a} cannot be combined with {b}",
        )


EXCLUSIVE = list(exclusive())


@pytest.mark.parametrize(("chosen", "message"), EXCLUSIVE, ids=[message for _, message in EXCLUSIVE])
def test_exclusive_features_are_named(chosen, message):
    call = testing.case_named(*ATTEND).inputs()
    call = replace(call, kwargs={**call.kwargs, **chosen})
    for op in ("paged_attention", "paged_attention_with_lse"):
        unchanged(op, call, message)
        assert message in paged_ops.supports(op, "cpu", **chosen)
    meta_call = replace(call, args=tuple(meta(v) if isinstance(v, torch.Tensor) else v for v in call.args))
    meta_features = {name: meta(v) if isinstance(v, torch.Tensor) else v for name, v in chosen.items()}
    with pytest.raises(ValueError, match=message):
        paged_ops.paged_attention(*meta_call.args, **meta_features)


# What only values show: checked on the CPU always.
VALUES = [
    (WRITE, "slot_mapping", lambda t: t.clone().fill_(64), r"slot_mapping: expected slots .* in \[-1, 64\), got 64 at \[0\]"),
    (WRITE, "slot_mapping", lambda t: torch.where(t == t[7], 10**9, t), r"slot_mapping: .* got 1000000000 at \[7\]"),
    (ATTEND, "seq_lens", lambda t: t * 100, r"seq_lens: expected lengths that \d+ blocks of 16 tokens can hold, in .* got 4000"),
    (ATTEND, "seq_lens", lambda t: -t, r"seq_lens: expected lengths .*, got -40 at \[0\]"),
    (ATTEND, "query_start_loc", lambda t: t + 1, r"query_start_loc: expected the first entry to be 0, got 1"),
    (ATTEND, "query_start_loc", lambda t: t * 2, r"query_start_loc: expected rows of query in \[0, 62\), got"),
    (ATTEND, "query_start_loc", lambda t: t.flip(0), r"query_start_loc: expected non-decreasing offsets, got"),
    (ATTEND, "block_tables", lambda t: t + 1000, r"block_tables: expected ids of the \d+ blocks of the cache in .*, got 10"),
    (ATTEND, "block_tables", lambda t: -t - 1, r"block_tables: expected ids .*, got -"),
    (INDEX, "seq_lens", lambda t: t * 100, r"seq_lens: expected lengths that \d+ blocks of 16 tokens can hold, in"),
    (INDEX, "query_start_loc", lambda t: t * 2, r"query_start_loc: expected rows of query in \[0, 9\), got"),
    (INDEX, "block_tables", lambda t: -t - 1, r"block_tables: expected ids .*, got -"),
    (GATHER, "block_tables", lambda t: t + 1000, r"block_tables: expected ids of the \d+ blocks"),
    (GATHER, "seq_lens", lambda t: t + 999, r"seq_lens: expected lengths"),
    (CASCADE, "prefix_block_table", lambda t: t + 1000, r"^prefix_block_table: expected ids of the \d+ blocks of the cache in"),
    (CASCADE, "prefix_len", lambda t: t * 100, r"^prefix_len: expected lengths that \d+ blocks of 16 tokens can hold"),
    (CASCADE, "prefix_len", lambda t: -t, r"^prefix_len: expected lengths .*, got -75 at \[0\]"),
    (CASCADE, "suffix_lens", lambda t: t * 100, r"^suffix_lens: expected lengths that \d+ blocks of 16 tokens can hold"),
    (CASCADE, "suffix_block_tables", lambda t: -t - 1, r"^suffix_block_tables: expected ids .*, got -"),
    (CASCADE, "query_start_loc", lambda t: t * 2, r"^query_start_loc: expected rows of query in"),
    (COPY, "block_mapping", torch.tensor([[0, 9]]), r"block_mapping\[:, 1\]: expected destination blocks in \[0, 9\), got 9 at \[0\]"),
    (COPY, "block_mapping", torch.tensor([[-1, 0]]), r"block_mapping\[:, 0\]: expected source blocks in \[0, 9\), got -1"),
    (COPY, "block_mapping", torch.tensor([[9, 0]]), r"block_mapping\[:, 0\]: expected source blocks in \[0, 9\), got 9 at \[0\]"),
    (COPY, "block_mapping", torch.tensor([[0, -1]]), r"block_mapping\[:, 1\]: expected destination blocks in \[0, 9\), got -1 at \[0\]"),
    (COPY, "block_mapping", torch.tensor([[0, 4], [1, 4]]), r"block_mapping: expected each destination once, got \[4\] twice"),
    (COPY, "block_mapping", torch.tensor([[0, 4], [4, 5]]), r"block_mapping: expected no block as both .*, got \[4\] in both"),
    (COPY, "block_mapping", torch.tensor([[3, 3]]), r"block_mapping: expected no block as both source and destination, got \[3\]"),
    (SWAP, "block_mapping", torch.tensor([[0, 1], [5, 1]]), r"block_mapping: expected each destination once, got \[1\] twice"),
    (SWAP, "block_mapping", torch.tensor([[9, 0]]), r"block_mapping\[:, 0\]: expected source blocks in \[0, 9\), got 9"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("where", "argument", "change", "message"),
    VALUES,
    ids=[f"{n}-{row[0][0]}-{row[1]}" for n, row in enumerate(VALUES)],
)
def test_values_are_checked_before_anything_is_written(where, argument, change, message):
    op, case = where
    unchanged(op, replaced(testing.case_named(op, case).inputs(), op, argument, change), message)


FUNCTIONAL = [row for row in VALUES if "out" in getattr(torch.ops.paged_ops, row[0][0]).overloads()]


@pytest.mark.parametrize(
    ("where", "argument", "change", "message"),
    FUNCTIONAL,
    ids=[f"{n}-{row[0][0]}-{row[1]}" for n, row in enumerate(FUNCTIONAL)],
)
def test_values_are_checked_before_a_given_result_is_written(where, argument, change, message):
    op, case = where
    packet = getattr(torch.ops.paged_ops, op)
    right = testing.case_named(op, case).inputs()
    results = OPS[op](*right.args, **right.kwargs)
    results = results if isinstance(results, tuple) else (results,)
    names = [each.name for each in packet.out._schema.arguments if each.is_out]
    call = replaced(right, op, argument, change)
    with pytest.raises(ValueError, match=message):
        packet.out(*call.args, **call.kwargs, **dict(zip(names, [each.fill_(7) for each in results], strict=True)))
    assert all((each == 7).all() for each in results)


# One wrong number each, in a batch that is right in all else: every entry of its tables is a block.
ONE_WRONG = [
    ("query_start_loc", [0, 3, 2, 5], r"query_start_loc: expected non-decreasing offsets, got \[0, 3, 2, 5\]"),
    ("query_start_loc", [1, 2, 3, 5], r"query_start_loc: expected the first entry to be 0, got 1"),
    ("query_start_loc", [0, 2, 3, 6], r"query_start_loc: expected rows of query in \[0, 6\), got 6 at \[3\]"),
    ("query_start_loc", [0, -1, 3, 5], r"query_start_loc: expected rows of query in \[0, 6\), got -1 at \[1\]"),
    ("seq_lens", [4, -3, 6], r"seq_lens: expected lengths that 2 blocks of 4 tokens can hold, in \[0, 9\), got -3 at \[1\]"),
    ("seq_lens", [4, 9, 6], r"seq_lens: expected lengths that 2 blocks of 4 tokens can hold, in \[0, 9\), got 9 at \[1\]"),
    ("block_tables", [[0, 1], [2, 3], [4, 8]], r"block_tables: expected ids of the 8 blocks of the cache in \[0, 8\), got 8 at \[2, 1\]"),
    ("block_tables", [[0, 1], [-1, 3], [4, 5]], r"block_tables: expected ids of the 8 blocks of the cache in \[0, 8\), got -1 at \[1, 0\]"),
    ("block_tables", [[0, 99], [2, -7], [4, 5]], None),  # entries that no length needs
]  # fmt: skip


@pytest.mark.parametrize(("argument", "values", "message"), ONE_WRONG)
def test_one_wrong_number(argument, values, message):
    named = {"block_tables": [[0, 1], [2, 3], [4, 5]], "seq_lens": [4, 3, 6], "query_start_loc": [0, 2, 3, 5]}

    def call(chosen):
        query, kv_cache = (torch.linspace(-1, 1, n) for n in (5 * 2 * 8, 8 * 2 * 4 * 1 * 8))
        integers = [torch.tensor(each, dtype=i32) for each in chosen.values()]
        return testing.Inputs((query.view(5, 2, 8), kv_cache.view(8, 2, 4, 1, 8), *integers, 1.0), {}, None)

    right, changed = call(named), call(named | {argument: values})
    if message is None:
        assert torch.equal(paged_ops.paged_attention(*changed.args), paged_ops.paged_attention(*right.args))
    else:
        unchanged("paged_attention", changed, message)


LATENTS = {"layout": "LATENT", "head_size": 576, "value_head_size": 512, "num_kv_heads": 1}
SUPPORT = [
    ("paged_attention", "cpu", {}, []),
    ("paged_attention_with_lse", "cuda", {"dtype": torch.bfloat16, "sinks": True}, []),
    ("paged_attention", "rocm", {"cache_dtype": torch.float8_e4m3fnuz, "k_scale": True}, []),
    ("gather_kv", "cuda", {}, []),
    ("latent_cache_write", "cuda", {}, []),
    ("select_keys", "cpu", {"pool": "max", "k_scale": True, "cache_dtype": torch.float8_e4m3fn}, []),
    ("select_keys", "cuda", {"kv_cache_dtype": "fp8_ds_index", "cache_dtype": torch.uint8, "head_size": 128, "value_head_size": None}, []),
    ("select_keys", "cuda", {"block_size": 512, "head_size": 128, "value_head_size": None}, ["block_size: a GPU takes at most 256 keys, got 512"]),
    ("latent_cache_write", "xla", {"kv_cache_dtype": "fp8_ds_index"}, ["kv_cache_dtype: 'fp8_ds_index' is not served through XLA"]),
    ("paged_attention", "cpu", {"kv_cache_dtype": "fp8_ds_index"}, ["kv_cache_dtype: latent_cache_write and select_keys alone"]),
    ("select_keys", "xla", {}, ["paged_ops.select_keys: no lowering for XLA yet"]),
    ("paged_attention", "cpu", {"num_kv_heads": 2}, ["num_kv_heads: expected 1 in the LATENT layout, got 2"]),
    ("paged_attention", "cpu", {"value_head_size": 600}, ["value_head_size: expected at most head_size = R + P = 576 in"]),
    ("paged_attention", "cpu", {"value_cache": True}, ["value_cache: expected None, as the cache of the LATENT layout"]),
    ("paged_attention", "cpu", {"v_scale": True}, ["v_scale: expected None, as the cache of the LATENT layout has one"]),
    ("paged_attention", "cuda", {"head_size": 1088, "value_head_size": 1024}, ["value_head_size: at most 512 of a latent"]),
    ("paged_attention", "cuda", {"head_size": 768}, ["head_size - value_head_size: at most 128 of a latent cache, got 256"]),
    ("paged_attention", "cuda", {"layout": "NHD", "value_head_size": None}, ["head_size: at most 512, got 576"]),
    ("paged_attention", "cuda", {"layout": "NHD", "head_size": 512, "batch_invariant": True}, []),
    ("paged_attention", "cuda", {"batch_invariant": True, "selected_keys": True}, []),
    ("paged_attention", "xla", {}, ["the ragged kernel has no latent attention"]),
    ("paged_attention", "cuda", {"kv_cache_dtype": "fp8_ds_mla", "cache_dtype": torch.uint8, "dtype": torch.float16}, []),
    ("latent_cache_write", "rocm", {"kv_cache_dtype": "fp8_ds_mla"}, []),
    ("latent_cache_write", "xla", {"kv_cache_dtype": "fp8_ds_mla"}, ["kv_cache_dtype: 'fp8_ds_mla' is not served through XLA"]),
    ("gather_kv", "cpu", {"kv_cache_dtype": "fp8_ds_mla", "k_scale": True}, ["k_scale: expected None, as rows of fp8_ds_mla"]),
    ("paged_attention", "cpu", {"kv_cache_dtype": "fp8_ds_mla", "head_size": 320, "value_head_size": 256},
     ["head_size: expected 576 with kv_cache_dtype='fp8_ds_mla', got 320", "value_head_size: expected 512 with"]),
    ("paged_attention", "cuda", {"kv_cache_dtype": "fp8_ds_mla", "cache_dtype": torch.float8_e4m3fn},
     ["cache_dtype: expected torch.uint8 with kv_cache_dtype='fp8_ds_mla', got"]),
    ("reshape_and_cache", "cpu", {}, ["layout: a cache of the LATENT layout is written by latent_cache_write"]),
    ("latent_cache_write", "cpu", {"layout": "NHD", "value_head_size": None}, ["layout: latent_cache_write writes the"]),
]  # fmt: skip


REFUSED_VALUES = [
    ("paged_attention", {"dtype": "float16"}, "dtype: expected float32, float16 or bfloat16, got 'float16'"),
    ("paged_attention", {"cache_dtype": "fp8", "kv_cache_dtype": "fp8"}, "cache_dtype: expected uint8 or"
     " torch.float8_e4m3fn (kv_cache_dtype='fp8'), got 'fp8'"),
    ("paged_attention", {"kv_cache_dtype": "int8"}, "kv_cache_dtype: expected one of"),
    ("reshape_and_cache", {"cache_dtype": torch.int8}, "cache_dtype: expected float32, float16, bfloat16 or float8"),
    ("gather_kv", {"cache_dtype": torch.uint8}, "cache_dtype: expected float32, float16, bfloat16 or float8 (uint8 needs"),
    ("paged_attention", {"cache_dtype": torch.float8_e5m2, "kv_cache_dtype": "fp8"}, "cache_dtype: expected uint8 or"),
    ("paged_attention", {"causal": None}, "causal: expected True or False, got None"),
    ("select_keys", {"relu": "no"}, "relu: expected True or False, got 'no'"),
    ("select_keys", {"pool": "median"}, "pool: expected one of"),
    ("cascade_attention", {"soft_cap": float("inf")}, "soft_cap: expected 0 (off) or a bound in the range of float32"),
    ("paged_attention", {"soft_cap": "30"}, "soft_cap: expected a number, got '30'"),
    ("paged_attention", {"block_sparse": [8, 1, 0, 0, 0, 0, 1]}, "block_sparse.vert_stride: expected 1 or more, got 0"),
    ("paged_attention", {"block_sparse": [24, 1, 2, 0, 0, 0, 1], "block_size": 16}, "block_sparse.block_size: expected a"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "asked", "reason"), REFUSED_VALUES)
def test_supports_refuses_the_values_that_a_call_refuses(op, asked, reason):
    (got,) = paged_ops.supports(op, "cpu", **asked)
    assert got.startswith(reason), got


@pytest.mark.parametrize(("op", "device", "asked", "reasons"), SUPPORT)
def test_reasons_about_latents(op, device, asked, reasons):
    got = paged_ops.supports(op, device, **(LATENTS | asked))
    assert len(got) == len(reasons), got
    assert all(mine.startswith(wanted) for mine, wanted in zip(got, reasons, strict=True)), got


def test_swapping_a_cache_with_itself_checks_both_roles():
    cache = torch.arange(8.0).view(4, 2)
    before = cache.clone()
    with pytest.raises(ValueError, match="block_mapping: expected no block as both source and destination"):
        paged_ops.swap_blocks([cache], [cache], torch.tensor([[0, 1], [1, 2]]))
    assert torch.equal(cache, before)


def builder(**changes):
    sizes = {"block_size": 4, "max_num_seqs": 4, "max_num_tokens": 16, "max_blocks_per_seq": 3, "num_blocks": 8}
    return metadata.AttentionMetadataBuilder(**(sizes | changes))


def batch(query_lens=(1, 2), computed=(3, 4), blocks=((0,), (1, 2))):
    return metadata.Batch(list(query_lens), list(computed), [list(ids) for ids in blocks])


def cache(num_blocks=4, **changes):
    sizes = {"num_layers": 1, "block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": f32} | changes
    return paged_ops.KVCache(num_blocks=num_blocks, **sizes)


def admitted(**changes):
    made = cache(**changes)
    made.admit("a", list(range(5)))
    return made


HOST = {
    "too many sequences": (lambda: builder().build(0, batch([1] * 5, [0] * 5, [[0]] * 5)), "max_num_seqs"),
    "too many tokens": (lambda: builder().build(0, batch([12, 12], [0, 0], [[0, 1, 2], [3, 4, 5]])), "max_num_tokens"),
    "too many blocks": (lambda: builder().build(0, batch([1], [15], [[0, 1, 2, 3]])), r"expected at most 12 tokens \(3 blocks of 4\)"),
    "a foreign block id": (lambda: builder().build(0, batch([1], [3], [[8]])), "block_ids"),
    "too few blocks": (lambda: builder().build(0, batch([3], [3], [[0]])), "block_ids"),
    "negative lengths": (lambda: builder().build(0, batch([-1], [3], [[0]])), "query_lens"),
    "lists that disagree": (lambda: batch([1, 2], [3], [[0], [1]]), "num_computed_tokens"),
    "unordered batch": (
        lambda: metadata.split_decodes_and_prefills(builder().build(0, batch([5, 1], [0, 3], [[0, 1], [2]]))),
        "batch|metadata",
    ),
    "chunk and block size": (
        lambda: metadata.make_local_attention_virtual_batches(
            6, torch.tensor([4]), torch.tensor([6]), torch.zeros(1, 3, dtype=i32), 4
        ),
        "chunk",
    ),
    "an address that is no block's": (
        lambda: metadata.block_ids_from_addresses(
            torch.tensor([[3]], dtype=i64), torch.tensor([1], dtype=i32), torch.zeros(4, 2, 4, 1, 8)
        ),
        "block_tables",
    ),
    "exhaustion": (lambda: cache().admit("a", list(range(17))), "block"),
    "exhaustion while appending": (lambda: admitted().append("a", list(range(30))), "block"),
    "admitted twice": (lambda: admitted().admit("a", [1]), "a"),
    "an unknown sequence": (lambda: cache().free("nobody"), "nobody"),
    "freed twice": (lambda: (made := admitted(), made.free("a"), made.free("a")), "a"),
    "no host cache": (lambda: (made := admitted(), made.commit("a", 5), made.swap_out("a")), "host"),
    "a sequence that is not swapped out": (lambda: admitted(num_host_blocks=4).swap_in("a"), "a"),
    "forked onto itself": (lambda: admitted().fork("a", "a"), "a"),
    "committed more than admitted": (lambda: admitted().commit("a", 6), "6"),
    "committed with the ids of fewer tokens": (lambda: admitted().commit("a", 2, [5]), "token_ids: expected num_written"),
    "an unknown layout": (lambda: paged_ops.kv_cache_shape("NDH", 1, 1, 1, 1), "layout: expected one of .*, got 'NDH'"),
    "a head size that x does not divide": (
        lambda: paged_ops.layouts.split_kv_cache(torch.zeros(2, 4, 160, dtype=f16), 1, 10),
        "head_size: expected a multiple of x = 8 for torch.float16, got 10",
    ),
    "a flat cache of another shape": (
        lambda: paged_ops.layouts.split_kv_cache(torch.zeros(2, 4, 100), 2, 8),
        r"kv_cache: expected a multiple of K\*D = 16",
    ),
    "a flat cache of another rank": (
        lambda: paged_ops.layouts.split_kv_cache(torch.zeros(2, 4, 8, 16), 2, 8),
        r"kv_cache: expected the flat cache \[2, N, B\*K\*D\], got .*\[2, 4, 8, 16\]",
    ),
    "a flat cache of another number of planes": (
        lambda: paged_ops.layouts.split_kv_cache(torch.zeros(3, 4, 128), 2, 8),
        r"kv_cache: expected the flat cache \[2, N, B\*K\*D\], got .*\[3, 4, 128\]",
    ),
    "no longest sequence": (
        lambda: GenerationLoop(lambda *step: None, cache(), max_model_len=0),
        "max_model_len: expected at least 1, got 0",
    ),
    "no longest sequence of graphs": (
        lambda: DecodeGraphs(lambda *step: None, cache(), max_num_seqs=1, max_model_len=0),
        "max_model_len: expected at least 1, got 0",
    ),
    "an unknown op": (lambda: paged_ops.supports("attend", "cpu"), "op: expected one of .*, got 'attend'"),
    "an unknown device": (lambda: paged_ops.supports("copy_blocks", "abacus"), "device: expected one of .*, got 'abacus'"),
    "an unknown feature": (lambda: paged_ops.supports("copy_blocks", "cpu", sinks=True), "features: expected .*, got 'sinks'"),
    "sparse parameters": (lambda: masks.check_block_sparse([1, 2, 3], 1), "block_sparse: expected 7 numbers .*, got 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOST)
def test_host_side_misuse(name):
    call, message = HOST[name]
    with pytest.raises((ValueError, RuntimeError, KeyError), match=message):
        call()
