"""The reference against numbers worked out by hand: it is what everything else is compared with.

Most examples use one trick: with all logits 0 the output is the plain mean of the values that a row sees, and lse the
logarithm of how many there are; and a logit of ln 3 beside one of 0 gives the weights 3/4 and 1/4, and lse = ln 4.
"""

import itertools
import math

import pytest
import torch

from paged_ops import BlockSparse, masks, reference
from paged_ops.reference import paged_attention_with_lse

LN3, LN4, NAN, INF = math.log(3), math.log(4), math.nan, math.inf
E4M3 = torch.float8_e4m3fn


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def floats(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)


def cache_of(keys, values, block_size=2):
    """One sequence of 2-vectors for one head, in blocks that run backwards; what is not its own is NaN."""
    used = -(-len(keys) // block_size)
    kv_cache = torch.full((used + 1, 2, block_size, 1, 2), NAN)
    table = ints(*range(used, 0, -1), 10**6)[None]
    for j, (key, value) in enumerate(zip(keys, values, strict=True)):
        block = used - j // block_size
        kv_cache[block, 0, j % block_size, 0] = floats(*key)
        kv_cache[block, 1, j % block_size, 0] = floats(*value)
    return kv_cache, table


def attend(query, keys, values, scale=1.0, block_size=2, **features):
    """Output and lse of one sequence whose last tokens have the queries ``[q, H, 2]``."""
    kv_cache, table = cache_of(keys, values, block_size)
    query = torch.tensor(query, dtype=torch.float32)
    lens, starts = ints(len(keys)), ints(0, len(query))
    return paged_attention_with_lse(query, kv_cache, table, lens, starts, scale, **features)


def means(count, rows, num_heads=1, block_size=2, **features):
    """Output of the last ``rows`` of ``count`` tokens with value j at position j and all logits 0, and exp(lse)."""
    values = [(float(j), 0.0) for j in range(count)]
    query = [[(0.0, 0.0)] * num_heads] * rows
    out, lse = attend(query, [(0.0, 0.0)] * count, values, block_size=block_size, **features)
    return [round(mean, 5) for mean in out[:, :, 0].flatten().tolist()], lse.exp().round().flatten().tolist()


def assert_near(got, want):
    torch.testing.assert_close(got, torch.tensor(want, dtype=got.dtype), rtol=0, atol=1e-6)


def test_two_keys():
    out, lse = attend([[(1, 0)]], [(0, 7), (LN3, -7)], [(4, 0), (0, 8)])
    assert_near(out, [[[1, 6]]])  # 1/4 of the one, 3/4 of the other
    assert_near(lse, [[LN4]])


def test_scale():
    out, _ = attend([[(1, 0)]], [(0, 0), (2 * LN3, 0)], [(4, 0), (0, 8)], scale=0.5)
    assert_near(out, [[[1, 6]]])


def test_causal_rows_see_themselves_and_what_came_before():
    out, lse = attend([[(1, 0)], [(1, 0)]], [(LN3, 0), (0, 0)], [(4, 0), (0, 8)])
    assert_near(out, [[[4, 0]], [[3, 2]]])
    assert_near(lse, [[LN3], [LN4]])


def test_not_causal():
    assert means(4, 2, causal=False) == ([1.5, 1.5], [4, 4])


def test_query_heads_share_a_key_value_head():
    out, lse = attend([[(1, 0), (-1, 0)]], [(0, 0), (LN3, 0)], [(4, 0), (0, 8)])
    assert_near(out, [[[1, 6], [3, 2]]])  # the second head has logits 0 and -ln 3
    assert_near(lse, [[LN4, LN4 - LN3]])


def test_sliding_window_counts_the_token_itself():
    assert means(6, 3, sliding_window=1) == ([3, 4, 5], [1, 1, 1])
    assert means(6, 3, sliding_window=3) == ([2, 3, 4], [3, 3, 3])
    assert means(6, 1, sliding_window=6) == means(6, 1)


def test_attention_chunk():
    assert means(6, 6, attention_chunk=4) == ([0, 0.5, 1, 1.5, 4, 4.5], [1, 2, 3, 4, 1, 2])


def test_window_and_chunk_mean_both():
    assert means(6, 4, attention_chunk=4, sliding_window=2) == ([1.5, 2.5, 4, 4.5], [2, 2, 1, 2])


def test_soft_cap():
    huge = 1e6  # its tanh is 1: the logit is the cap itself
    out, lse = attend([[(1, 0)]], [(0, 0), (huge, 0)], [(4, 0), (0, 8)], soft_cap=LN3)
    assert_near(out, [[[1, 6]]])
    assert_near(lse, [[LN4]])


def test_soft_cap_is_of_the_scaled_logit():
    logit = LN3 * math.atanh(0.5)  # capped at ln 3 it is half of that
    out, _ = attend([[(1, 0)]], [(0, 0), (2 * logit, 0)], [(4, 0), (0, 8)], scale=0.5, soft_cap=LN3)
    weight = math.sqrt(3) / (1 + math.sqrt(3))
    assert_near(out, [[[4 * (1 - weight), 8 * weight]]])


def test_alibi_falls_with_distance():
    out, lse = attend([[(0, 0)]], [(0, 0), (0, 0)], [(4, 0), (0, 8)], alibi_slopes=floats(LN3))
    assert_near(out, [[[1, 6]]])
    assert_near(lse, [[LN4 - LN3]])  # 1/3 + 1


def test_sinks_take_part_and_have_no_value():
    out, lse = attend([[(1, 0)]], [(0, 0)], [(4, 8)], sinks=floats(LN3), scale=17.0, soft_cap=0.1)
    assert_near(out, [[[1, 2]]])
    assert_near(lse, [[LN4]])  # neither scaled nor capped


def test_rows_before_the_sequence_see_nothing():
    query, key, value = [[(1, 0)], [(1, 0)]], [(0, 0)], [(4, 8)]
    out, lse = attend(query, key, value)
    assert_near(out, [[[0, 0]], [[4, 8]]])
    assert lse.tolist() == [[-INF], [0]]
    out, lse = attend(query, key, value, sinks=floats(LN3))
    assert_near(out, [[[0, 0]], [[1, 2]]])
    assert_near(lse, [[LN3], [LN4]])


def test_ranges_are_seen_in_both_directions():
    ranges = ints(2, 5)[None, None]  # rows 2, 3 and 4 see each other
    assert means(6, 6, bidirectional_ranges=ranges) == ([0, 0.5, 2, 2, 2, 2.5], [1, 2, 5, 5, 5, 6])


def test_a_range_is_seen_beyond_window_and_chunk():
    # Window 2: row 3 sees 2 and 3, and from its range 1 to 4; row 5 is outside. Chunk 2: row 3 alone, and its range.
    ranges = ints(1, 5)[None, None]
    assert means(6, 3, bidirectional_ranges=ranges, sliding_window=2) == ([2.5, 2.5, 4.5], [4, 4, 2])
    assert means(6, 3, bidirectional_ranges=ranges, attention_chunk=2) == ([2.5, 2.5, 4.5], [4, 4, 2])


def test_a_range_in_the_window_adds_only_later_keys():
    # Window 2, range 1 to 4: row 3 sees 2 and 3, and 4 of its range; row 4 sees 3 and 4. Chunk 2: row 3 sees 2, 3, 4.
    ranges = {"bidirectional_ranges": ints(1, 5)[None, None], "ranges_in_window": True}
    assert means(6, 3, **ranges, sliding_window=2) == ([3, 3.5, 4.5], [3, 2, 2])
    assert means(6, 3, **ranges, attention_chunk=2) == ([3, 4, 4.5], [3, 1, 2])
    assert means(6, 6, **ranges) == means(6, 6, bidirectional_ranges=ranges["bidirectional_ranges"])
    assert means(6, 3, ranges_in_window=True, sliding_window=2) == means(6, 3, sliding_window=2)


def test_ranges_that_are_padding_that_overlap_and_that_end_past_the_keys():
    padding = [(-1, 4), (4, 4), (3, 0), (0, -1)]
    assert means(4, 2, bidirectional_ranges=ints(*sum(padding, ())).view(1, 4, 2)) == ([1, 1.5], [3, 4])
    # Row 1 is in both of (0, 2) and (1, 3), row 0 in the first alone: seeing is not handed on.
    assert means(4, 4, bidirectional_ranges=ints(0, 2, 1, 3).view(1, 2, 2)) == ([0.5, 1, 1, 1.5], [2, 3, 3, 4])
    assert means(4, 2, bidirectional_ranges=ints(2, 9).view(1, 1, 2)) == ([1.5, 1.5], [4, 4])
    assert means(4, 1, bidirectional_ranges=ints().view(1, 0, 2)) == ([1.5], [4])


def test_alibi_grows_towards_later_keys_of_a_range():
    ranges = ints(0, 2)[None, None]
    out, _ = attend(
        [[(0, 0)], [(0, 0)]], [(0, 0)] * 2, [(4, 0), (0, 8)], alibi_slopes=floats(LN3), bidirectional_ranges=ranges
    )
    assert_near(out, [[[1, 6]], [[1, 6]]])


def test_rows_before_the_sequence_are_in_no_range():
    out, lse = attend([[(1, 0)], [(1, 0)]], [(0, 0)], [(4, 8)], bidirectional_ranges=ints(-1, 1, 0, 1).view(1, 2, 2))
    assert_near(out, [[[0, 0]], [[4, 8]]])
    assert lse.tolist() == [[-INF], [0]]


def test_block_sparse_alike_for_all_heads():
    # Blocks of 2 tokens; row 7 stands in block 3: itself (local), and blocks 1 and 3 ((kb + 1) % 2 == 0).
    sparse = BlockSparse(2, local_blocks=1, vert_stride=2, homo_head=True)
    assert means(8, 1, num_heads=2, block_sparse=sparse) == ([(2 + 3 + 6 + 7) / 4] * 2, [4, 4])


def test_block_sparse_slides_over_query_heads():
    # The second head's offset is 2: blocks 0 and 2 in its stripe, and block 3 because it is local.
    sparse = BlockSparse(2, local_blocks=1, vert_stride=2)
    out, count = means(8, 1, num_heads=2, block_sparse=sparse)
    assert out == pytest.approx([18 / 4, (0 + 1 + 4 + 5 + 6 + 7) / 6])
    assert count == [4, 6]


def test_block_sparse_slides_over_key_value_heads_and_ranks():
    # One key/value head: both query heads have one offset, on rank 1 of 2 it is 1 * step + 1 with step = int(4 / 2).
    # (kb + 3) % 4 == 0 is block 1; block 3 is local.
    sparse = BlockSparse(2, local_blocks=1, vert_stride=4, homo_head_group=True, rank=1, world_size=2)
    assert means(8, 1, num_heads=2, block_sparse=sparse) == ([(2 + 3 + 6 + 7) / 4] * 2, [4, 4])


def test_block_sparse_is_causal_within_the_block():
    sparse = BlockSparse(2, local_blocks=2, vert_stride=8, homo_head=True)
    assert means(7, 3, block_sparse=sparse) == ([(2 + 3 + 4) / 3, (2 + 3 + 4 + 5) / 4, (4 + 5 + 6) / 3], [3, 4, 3])


def test_ragged_batch_and_padding():
    kv_cache = torch.full((4, 2, 2, 1, 2), NAN)
    kv_cache[2, :, 0, 0], kv_cache[3, :, 0, 0], kv_cache[3, :, 1, 0] = floats(1, 0), floats(0, 2), floats(0, 4)
    tables = ints(2, 99, 3, 99, 99, 99).view(3, 2)
    query = torch.zeros(5, 1, 2)
    query[3:] = NAN
    # One token, then two; a padding sequence; rows 3 and 4 are padding.
    out, lse = paged_attention_with_lse(query, kv_cache, tables, ints(1, 2, 0), ints(0, 1, 3, 3), 1.0, sinks=floats(0))
    assert_near(out, [[[0.5, 0]], [[0, 1]], [[0, 2]], [[0, 0]], [[0, 0]]])
    assert lse.exp().round().flatten().tolist() == [2, 2, 3, 0, 0]


def test_fp8_cache_is_read_with_its_scales():
    kv_cache = torch.tensor([[[[[2.0, 0]], [[0, 0]]], [[[4.0, 0]], [[0, 8]]]]]).to(E4M3)
    scales = {"k_scale": floats(LN3 / 2), "v_scale": floats(10)}
    out, lse = paged_attention_with_lse(
        floats(1, 0)[None, None], kv_cache, ints(0)[None], ints(2), ints(0, 1), 1, **scales
    )
    assert_near(out, [[[30, 20]]])
    assert_near(lse, [[LN4]])


def test_fp8_output():
    out, lse = attend([[(1, 0)]], [(0, 0), (LN3, 0)], [(4, 0), (0, 8000)], output_scale=floats(2))
    assert out.dtype == E4M3
    assert out.flatten().tolist() == [0.5, 448]  # 1/2, and 6000/2 saturated
    assert_near(lse, [[LN4]])


@pytest.mark.parametrize(
    ("dtype", "real", "codes"),
    [
        # Neighbours of 17 are 16 and 18, of 19 they are 18 and 20: ties go to the even mantissa. 448 is the largest.
        (E4M3, (17, 19, 448, 1e6, -INF, NAN), (0x58, 0x5A, 0x7E, 0x7E, 0xFE, 0x7F)),
        # Two bits of mantissa: 9 lies between 8 and 10, 11 between 10 and 12. 57344 is the largest.
        (torch.float8_e5m2, (9, 11, 57344, 1e6, -INF), (0x48, 0x4A, 0x7B, 0x7B, 0xFB)),
    ],
)
def test_fp8_codes(dtype, real, codes):
    stored = reference.quantise(2 * floats(*real)[None, :, None], floats(2).expand(len(real)), dtype)
    assert stored.view(torch.uint8).flatten().tolist() == list(codes)


def test_reshape_and_cache():
    key, value = floats(1, 2, 3)[:, None, None], floats(-1, -2, -3)[:, None, None]
    kv_cache = torch.full((3, 2, 2, 1, 1), NAN)
    reference.reshape_and_cache(
        key, value, kv_cache, torch.tensor([5, -1])
    )  # slot 5: block 2, offset 1; row 2 is padding
    assert kv_cache[2, :, 1].flatten().tolist() == [1, -1]
    assert int(kv_cache.isnan().sum()) == 10


def test_fp8_e5m2_keeps_nan():
    code = reference.quantise(floats(NAN)[:, None, None], None, torch.float8_e5m2).view(torch.uint8)
    assert int(code) & 0x7F > 0x7C  # the exponent is full and the mantissa is not 0


def test_reshape_and_cache_separate():
    key, value = floats(1, 2, 3).view(1, 1, 3), floats(4, 5).view(1, 1, 2)  # Dv is not D
    key_cache, value_cache = torch.zeros(2, 2, 1, 3), torch.zeros(2, 2, 1, 2)
    reference.reshape_and_cache(key, value, key_cache, ints(2), value_cache=value_cache)  # block 1, offset 0
    assert key_cache[1, 0, 0].tolist() == [1, 2, 3]
    assert value_cache[1, 0, 0].tolist() == [4, 5]
    assert int(key_cache.count_nonzero()) + int(value_cache.count_nonzero()) == 5


def test_reshape_and_cache_x_packed():
    key = torch.arange(8.0).view(1, 1, 8)  # x = 4 of float32: two packs
    key_cache, value_cache = torch.zeros(2, 1, 2, 3, 4), torch.zeros(2, 1, 8, 3)
    reference.reshape_and_cache(key, 10 + key, key_cache, torch.tensor([4]), value_cache=value_cache)
    assert key_cache[1, 0, :, 1].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert value_cache[1, 0, :, 1].tolist() == [10, 11, 12, 13, 14, 15, 16, 17]
    assert int(key_cache.count_nonzero()) == 7
    assert int(value_cache.count_nonzero()) == 8


def test_reshape_and_cache_interleaved():
    key, value = floats(1, 2).view(1, 2, 1), floats(3, 4).view(1, 2, 1)  # two heads
    kv_cache = torch.zeros(1, 2, 4, 1)
    reference.reshape_and_cache(key, value, kv_cache, torch.tensor([1]))
    assert kv_cache[0].squeeze(-1).tolist() == [[0, 0, 0, 0], [1, 3, 2, 4]]


def test_latent_cache_write():
    kv_cache = torch.full((3, 2, 3), NAN)
    latent, rotated = torch.arange(6.0).view(3, 2), floats(10, 20, 30)[:, None]
    reference.latent_cache_write(latent, rotated, kv_cache, torch.tensor([5, -1]))  # row 2 is past the mapping
    assert kv_cache[2, 1].tolist() == [0, 1, 10]
    assert int(kv_cache.isnan().sum()) == 15


def test_latent_rows_are_keys_and_their_first_columns_are_values():
    kv_cache = torch.full((2, 2, 3), NAN)
    kv_cache[1] = torch.tensor([(4, 0, 0), (0, 8, LN3)])
    query = torch.tensor([[(0, 0, 1)]], dtype=torch.float32)  # the rotated part alone decides
    arguments = query, kv_cache, ints(1)[None], ints(2), ints(0, 1), 1.0
    out, lse = paged_attention_with_lse(*arguments, value_head_size=2)
    assert_near(out, [[[1, 6]]])
    assert_near(lse, [[LN4]])
    query = torch.tensor([[(LN3 / 4, 0, 0)]])  # and now the part that is values, too: logits ln 3 and 0
    out, _ = paged_attention_with_lse(query, *arguments[1:], value_head_size=2)
    assert_near(out, [[[3, 2]]])


def test_latent_values_have_the_scale_of_the_keys():
    kv_cache = torch.tensor([[(4.0, 0.0), (0.0, 8.0)]]).to(E4M3)  # [1, 2, 2], values of size 1
    out, _ = paged_attention_with_lse(
        torch.zeros(1, 1, 2), kv_cache, ints(0)[None], ints(2), ints(0, 1), 1.0, value_head_size=1, k_scale=floats(0.5)
    )
    assert_near(out, [[[1]]])


def test_latent_rows_that_hold_their_scales():
    latent, rotated = torch.zeros(2, 512), torch.zeros(2, 64)
    latent[0, :3] = floats(896, -4, 1)  # scale 2; the last is the smallest normal number times 32
    latent[0, 128:131] = floats(INF, 3, NAN)  # infinity saturates, and what is beside it vanishes
    latent[0, 256] = 2.0**-149  # too small for a scale
    rotated[0, :2] = floats(1, 1 + 2**-8)  # a tie, to even
    kv_cache = torch.full((2, 3, 656), 0xFF, dtype=torch.uint8)
    reference.latent_cache_write(latent, rotated, kv_cache, torch.tensor([4, -1]), kv_cache_dtype="fp8_ds_mla")
    assert bool((kv_cache.view(6, 656)[[0, 1, 2, 3, 5]] == 0xFF).all())
    row = kv_cache[1, 1]
    assert row[:4].tolist() == [0x7E, 0xC0, 0x30, 0] and row[128:131].tolist() == [0x7E, 0, 0x7F]
    assert not row[256:512].any()
    largest = torch.finfo(torch.float32).max
    assert row[512:528].view(torch.float32).tolist() == [2, torch.tensor(largest).div(448).item(), 2.0**-126, 2.0**-126]
    assert row[528:].view(torch.bfloat16)[:3].tolist() == [1, 1, 0]
    arguments = ints(1, 1)[None], ints(5), 6
    key, value = reference.gather_kv(kv_cache, *arguments, kv_cache_dtype="fp8_ds_mla", dtype=torch.float32)
    assert key[4, 0, :4].tolist() == [896, -4, 1, 0] and key[4, 0, 512:515].tolist() == [1, 1, 0]
    assert key[4, 0, 128] > 0.99 * largest and key[4, 0, 129] == 0 and bool(key[4, 0, 130].isnan())
    assert key.shape == (6, 1, 576) and value.shape == (6, 1, 0) and not key[5].any()


def test_gathered_latents_are_whole_rows():
    kv_cache = torch.arange(12.0).view(2, 2, 3)
    key, value = reference.gather_kv(kv_cache, ints(1)[None], ints(2), 3)
    assert key.tolist() == [[[6, 7, 8]], [[9, 10, 11]], [[0, 0, 0]]]
    assert value.shape == (3, 1, 0)


def test_merge():
    out_a, out_b = floats(4, NAN, 4, NAN).view(4, 1, 1), floats(8, 8, NAN, NAN).view(4, 1, 1)
    lse_a, lse_b = floats(0, -INF, 1, INF)[:, None], floats(LN3, 2, INF, -INF)[:, None]
    out, lse = reference.merge_attention_states(out_a, lse_a, out_b, lse_b)
    assert_near(out.flatten(), [7, 8, 4, 0])
    assert_near(lse.flatten(), [LN4, 2, 1, -INF])


def test_cascade_is_attention_over_both_parts():
    kv_cache = torch.full((4, 2, 2, 1, 2), NAN)
    kv_cache[3, 0], kv_cache[3, 1] = 0, 2  # the prefix: two keys, value 2
    kv_cache[1, :, 0, 0], kv_cache[1, :, 1, 0] = floats(0, 0), floats(0, 5)  # the suffix: values 0 and 5
    query = torch.zeros(2, 1, 2)
    out = reference.cascade_attention(
        query, kv_cache, ints(3)[None], ints(2), ints(1)[None], ints(2), ints(0, 2), 1.0, sinks=floats(0)
    )
    # Both rows see the prefix; the first sees one suffix token, the second two; and the sink, once.
    assert_near(out.squeeze(1), [[4 / 4, 4 / 4], [4 / 5, 9 / 5]])


def test_cascade_behind_whole_blocks_is_ordinary_attention():
    generator = torch.Generator().manual_seed(0)
    kv_cache = torch.randn(9, 2, 4, 2, 8, generator=generator)
    query = torch.randn(8, 4, 8, generator=generator)
    prefix, suffixes = ints(7, 2)[None], ints(0, 99, 5, 1).view(2, 2)  # 8 tokens; blocks 0, and 5 and 1
    starts, scale = ints(0, 2, 8), 0.3
    features = {"soft_cap": 2.0, "sinks": torch.randn(4, generator=generator)}
    got = reference.cascade_attention(query, kv_cache, prefix, ints(8), suffixes, ints(3, 7), starts, scale, **features)
    tables = torch.cat([prefix.expand(2, 2), suffixes], 1)
    want = reference.paged_attention(query, kv_cache, tables, ints(11, 15), starts, scale, **features)
    torch.testing.assert_close(got, want)


def test_blocks():
    cache = torch.arange(4.0)[:, None]
    reference.copy_blocks([cache], torch.tensor([[0, 2], [0, 3]]))
    assert cache.flatten().tolist() == [0, 1, 0, 0]
    host = torch.full((2, 1), NAN)
    reference.swap_blocks([cache], [host], torch.tensor([[1, 0]]))
    assert host[0] == 1
    assert host[1].isnan()


def test_gather_kv():
    kv_cache = torch.arange(12.0).view(3, 2, 2, 1, 1)  # block n: keys 4n, 4n + 1, values 4n + 2, 4n + 3
    tables, lens = ints(2, 0, 1, 9).view(2, 2), ints(3, 1)
    key, value = reference.gather_kv(kv_cache, tables, lens, 6)
    assert key.flatten().tolist() == [8, 9, 0, 4, 0, 0]  # two rows past the end
    assert value.flatten().tolist() == [10, 11, 2, 6, 0, 0]
    key, _ = reference.gather_kv(kv_cache, tables, lens, 2)
    assert key.flatten().tolist() == [8, 9]


def test_the_oldest_key_is_the_first_that_the_masks_keep():
    for i, window, chunk in itertools.product((0, 1, 7, 8, 20), (0, 1, 5, 30), (0, 1, 4, 30)):
        numbers = {"sliding_window": window, "attention_chunk": chunk}
        kept = masks.keep(ints(i), torch.arange(32), 1, 1, is_causal=True, **numbers)[0, 0]
        assert masks.oldest_key(i, window, chunk) == int(kept.nonzero()[0]), (i, window, chunk)


def test_first_tokens_stay_visible_past_the_window():
    """Six tokens, a window of two, one first token: the last row sees keys 0, 4 and 5. Values are their positions."""
    values = torch.arange(6.0).view(6, 1, 1)
    cache = torch.stack([torch.zeros_like(values), values])[None]  # [1, 2, 6, 1, 1]
    call = (torch.ones(6, 1, 1), cache, ints([0]), ints(6), ints(0, 6), 1.0)
    out, lse = reference.paged_attention_with_lse(*call, sliding_window=2, num_first_tokens=1)
    seen = [[0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 4, 5]]
    torch.testing.assert_close(out.flatten(), torch.tensor([sum(keys) / len(keys) for keys in seen]))
    torch.testing.assert_close(lse.flatten(), torch.tensor([float(len(keys)) for keys in seen]).log())
    chunked, _ = reference.paged_attention_with_lse(*call, sliding_window=2, num_first_tokens=1, attention_chunk=3)
    torch.testing.assert_close(chunked.flatten(), torch.tensor([0.0, 0.5, 1.0, 3.0, 3.5, 4.5]))
    plain = reference.paged_attention_with_lse(*call)
    assert all(map(torch.equal, plain, reference.paged_attention_with_lse(*call, num_first_tokens=3)))


def test_selected_keys_are_the_only_ones_seen():
    """Six tokens with their positions as values: two rows name blocks of two keys, between padding."""
    values = torch.arange(6.0).view(6, 1, 1)
    cache = torch.stack([torch.zeros_like(values), values])[None]  # [1, 2, 6, 1, 1]
    call = (torch.ones(2, 1, 1), cache, ints([0]), ints(6), ints(0, 2), 1.0)
    selected = torch.tensor([[[2, -1, 0]], [[-5, 9, 1]]], dtype=torch.int32)  # the first row is at position 4
    out, lse = reference.paged_attention_with_lse(*call, selected_keys=selected, selected_block_size=2)
    torch.testing.assert_close(out.flatten(), torch.tensor([(0 + 1 + 4) / 3, (2 + 3) / 2]))
    torch.testing.assert_close(lse.flatten(), torch.tensor([3.0, 2.0]).log())
    windowed, _ = reference.paged_attention_with_lse(*call, selected_keys=selected[:, :, :1], sliding_window=2)
    torch.testing.assert_close(windowed.flatten(), torch.tensor([0.0, 0.0]))
    every = torch.arange(6, dtype=torch.int32).flip(0).expand(2, 1, 6)
    plain = reference.paged_attention_with_lse(*call)
    assert all(map(torch.equal, plain, reference.paged_attention_with_lse(*call, selected_keys=every)))


def test_index_keys_that_hold_their_scales():
    keys = torch.zeros(3, 128)
    keys[0, :3] = floats(896, -6, 1)  # the scale is 2
    keys[1, :3] = floats(900, INF, NAN)  # and here, of the largest number, 2**120
    kv_cache = torch.full((2, 4, 132), 0xFF, dtype=torch.uint8)
    slots = torch.tensor([5, -1, 6])
    reference.latent_cache_write(keys[[0, 2, 1]], torch.empty(3, 0), kv_cache, slots, kv_cache_dtype="fp8_ds_index")
    assert bool((kv_cache[0] == 0xFF).all())
    block = kv_cache[1].flatten()  # 4 * 128 numbers, then 4 scales
    assert block[128:131].tolist() == [0x7E, 0xC4, 0x30]  # 448, -3, 1/2
    assert block[256:259].tolist() == [0, 0x7E, 0x7F]
    assert block[512:].view(torch.float32)[1:3].tolist() == [2, 2.0**120]
    assert bool((block[:128] == 0xFF).all())
    query = torch.zeros(2, 1, 128)
    query[:, 0, 1] = -1
    batch = ints(1)[None], ints(4), ints(0, 2)
    kv_cache[1] = 0
    kv_cache[1].flatten()[129] = 0xC4  # -3 of token 1, whose scale is the smaller one
    kv_cache[1].flatten()[257] = 0xC0  # -2 of token 2
    kv_cache[1].flatten()[512:].view(torch.float32).copy_(floats(1, 1, 2, 1))
    got = reference.select_keys(query, kv_cache, *batch, 1, kv_cache_dtype="fp8_ds_index")
    assert got.tolist() == [[[2]], [[2]]]


def select(query, keys, k, **options):
    """The lists of one sequence whose last tokens have the indexer's queries ``[q, Hi, 1]``."""
    used = -(-len(keys) // 2)
    index_cache = torch.full((used + 1, 2, 1), NAN)
    table = ints(*range(used, 0, -1), 10**6)[None]  # blocks run backwards
    for j, key in enumerate(keys):
        index_cache[used - j // 2, j % 2, 0] = key
    query = torch.tensor(query, dtype=torch.float32)[..., None]
    return reference.select_keys(query, index_cache, table, ints(len(keys)), ints(0, len(query)), k, **options).tolist()


def test_select_keys():
    keys = [3, 9, -5, 9, 4]
    assert select([[1]], keys, 2) == [[[1, 3]]]  # ascending, not by score
    assert select([[1]], keys, 1) == [[[1]]]  # of two equal scores the lower position
    assert select([[-1]], keys, 2) == [[[0, 2]]]
    assert select([[1]], keys, 7) == [[[0, 1, 2, 3, 4, -1, -1]]]
    assert select([[1], [1]], keys, 2) == [[[1, 3]], [[1, 3]]]
    assert select([[0]] * 5, keys, 2) == [[[0, -1]], [[0, 1]], [[0, 1]], [[0, 1]], [[0, 1]]]  # a row sees itself
    assert select([[-1]] * 2, [1, 0, -2], 1, causal=False) == [[[2]], [[2]]]
    assert select([[-1]] * 3, [5, 4], 1) == [[[-1]], [[0]], [[1]]]  # the first row is before position 0
    assert select([[1]], [NAN, -INF, -INF], 2) == [[[0, 1]]]  # NaN is not above a number, and counts as -inf
    assert select([[1]], [NAN, 1, -INF], 2) == [[[0, 1]]]


def test_select_keys_sums_heads_by_weight():
    keys = [3, -2, 1]
    weights = torch.tensor([[1.0, 2.0]])
    assert select([[1, -1]], keys, 1, weights=weights, relu=True) == [[[1]]]  # 3, 2 * 2, 1
    assert select([[1, -1]], keys, 1, weights=weights) == [[[1]]]  # -3, 2, -1
    assert select([[1, -1]], keys, 1, weights=torch.tensor([[1.0, 0.0]])) == [[[0]]]
    assert select([[1, -1]], keys, 1, relu=True) == [[[0]]]  # 3, 2, 1
    assert select([[1, -1]], keys, 1, relu=True, scale=-1.0) == [[[0]]]  # scaled before the activation
    assert select([[1, -1]], keys, 1, per_head=True) == [[[0], [1]]]


def test_select_keys_pools_blocks():
    keys = [5, 0, 3, 3, 1, 1, 4]
    assert select([[1]], keys, 2, pool="max", block_size=2) == [[[0, 3]]]  # of 5, 3, 1, 4
    assert select([[1]], keys, 2, pool="mean", block_size=2) == [[[1, 3]]]  # of 2.5, 3, 1, and the one key of the last
    assert select([[1], [1]], keys, 1, pool="max", block_size=3) == [[[0]], [[0]]]
    assert select([[1], [1]], keys, 1, pool="max", block_size=3, local_blocks=1) == [[[1]], [[2]]]
    assert select([[1]], keys, 2, pool="max", block_size=2, local_blocks=2) == [[[2, 3]]]
    assert select([[1]], keys, 3, pool="max", block_size=2, local_blocks=2) == [[[0, 2, 3]]]
    assert select([[-1]], [-INF, 0, 0, 0], 1, local_blocks=1) == [[[3]]]  # wins over infinity
