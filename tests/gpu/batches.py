"""Batches for the Hopper kernels, and their results compared with float64."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.gpu import GPU, captured_into

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
import triton

import paged_ops
from paged_ops import layouts
from paged_ops.features import Features, kept_keys
from paged_ops.lowerings.gpu import spec
from paged_ops.lowerings.gpu.attention.hopper import work, work_shares
from paged_ops.lowerings.gpu.attention.shared import work_split
from paged_ops.lowerings.gpu.target import Target
from tests.gpu.pointers import Pointer, as_torch


def parts_by_the_code(plan, q_lens, lens, monkeypatch):
    """By the code of a kernel whose programs take shares: of each unit (sequence, key/value head, first token) the
    parts, each its first tile, its tiles, and its program; and the tiles of each sequence. What the merge takes for a
    divided unit are its parts."""
    as_torch(monkeypatch)
    work.gl.sum = lambda values, axis=0: values.sum().item()  # *= would change a tensor's other names, too
    for module in (work_split, work_shares):
        for name, given in list(vars(module).items()):
            if isinstance(given, triton.JITFunction):
                monkeypatch.setattr(module, name, given.fn)
        monkeypatch.setattr(module, "tl" if module is work_split else "gl", work.gl)
    first, merge = (launch._launcher._constants for launch in (plan.launches[0], plan.launches[-1]))
    SPEC, DIVISION, TILE, (P, _, _) = first["SPEC"], first["DIVISION"], merge["TILE"], plan.launches[0].grid(None)
    starts = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0).int()
    tensors = SimpleNamespace(query_start_loc=Pointer(starts), seq_lens=Pointer(torch.tensor(lens, dtype=torch.int32)))
    S, TOKENS = len(lens), TILE.M // SPEC.G
    given = SimpleNamespace(tensors=tensors, numbers=SimpleNamespace(S=S, window=100, chunk=0))
    parts: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}

    def note(part, counts, *_):
        assert 1 <= part.seen <= part.count
        unit = int(part.s), int(part.kh), int(part.first_token)
        parts.setdefault(unit, []).append((int(part.tile), int(part.count), part.program))
        return counts

    for p in range(P):
        monkeypatch.setattr(work_shares, "share_index", lambda *_, p=p: p)
        share = work_shares.share_of(torch.tensor(p), P, given, SPEC, DIVISION, TILE)
        work_shares.walk(note, None, given, share, None, SPEC, DIVISION, TILE)
    _, _, _, first_tiles, end_tiles = work_split.sequence(torch.arange(S), given, SPEC, DIVISION, TILE.N)
    merged: dict[tuple[int, int, int], list[int]] = {}
    given.lanes = torch.arange(merge["DIVISION"].at_once)
    for p in range(P):
        start, end, share, longer = work_split.shares(p, P, given, merge["SPEC"], merge["DIVISION"], TILE)
        s, unit, tile = work_split.locate(end - 1, given, merge["SPEC"], merge["DIVISION"], TILE)
        left = end_tiles[s] - first_tiles[s] - 1 - tile
        key = int(s), int(unit) % SPEC.K, int(unit) // SPEC.K * TOKENS
        if start < end and left > 0 and key in parts:
            merged.setdefault(key, []).append(p)
            of_unit = (
                work_split.program_of(end - 1 - tile, share, longer),
                work_split.program_of(end - 1 + left, share, longer),
            )
            assert [each[2] for each in parts[key]] == list(range(of_unit[0], of_unit[1] + 1))
    assert merged == {key: [each[2] for each in own[:-1]] for key, own in parts.items() if len(own) > 1}
    return parts, list(zip(first_tiles.tolist(), end_tiles.tolist(), strict=True))


def check_parts(parts, tiles, wanted):
    """The tiles of each unit follow each other, and there is no other unit."""
    assert parts.keys() == wanted
    for (s, _, _), own in parts.items():
        (first, end), begins = tiles[s], [tile for tile, _, _ in own]
        assert begins == [first, *(tile + count for tile, count, _ in own[:-1])]
        assert own[-1][0] + own[-1][1] == end


SMALL = Target(torch.device("cuda", 0), "NVIDIA H200", "cuda", 90, 16, 227 << 10)
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.get_device_capability(GPU) != (9, 0),
    reason="needs an sm_90",
)


def planned(H, K, T, S, D=512, dtype=torch.half, columns=2, **features):
    """The specification and the shapes of a call."""
    kv_cache = layouts.kv_cache_view("NHD", torch.zeros(layouts.kv_cache_shape("NHD", 5, 16, K, D), dtype=dtype))
    paged, f = layouts.paged_kv(kv_cache), Features(**features)
    query, tables = torch.zeros(T, H, D, dtype=dtype), torch.zeros(S, columns, dtype=torch.int32)
    of_call = spec.spec_of(query, paged.key, paged.value, 0, tables, None, f, query.dtype, True)
    return of_call, spec.Shapes(T, S, 5, columns, True, spec.numbers_of(f, 0.1, columns, S, T))


def batch(
    heads, tokens, lens, D=128, Dv=None, B=16, layout="NHD", dtype=torch.bfloat16, padding=0, sinks=False, columns=0,
    blocks=0, stored=None, scales=(None, None), slope=0.0, **features,
):  # fmt: skip
    """The arguments of a call, and its result in float64: everything that must not be read is NaN. ``stored``: the type
    of an fp8 cache. ``slope``: by how much logits, to base 2, grow from each key to the one before it."""
    generator = torch.Generator(device=GPU).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, device=GPU, generator=generator)

    (H, K), S, T, scale = heads, len(lens), sum(tokens) + padding, D**-0.5
    needed = [-(-n // B) for n in lens]
    N = max(sum(needed) + 3, blocks)
    query = normal(T, H, D).to(dtype)
    kv_cache = layouts.kv_cache_view(layout, normal(*layouts.kv_cache_shape(layout, N, B, K, D)).to(dtype))
    paged = layouts.paged_kv(kv_cache)
    key, value = paged.key.flatten(3), paged.value
    if Dv is not None:
        kv_cache, value = key.contiguous(), value[..., :Dv].contiguous()
        key, features["value_cache"] = kv_cache, value
    ids = torch.randperm(N - 1)[: sum(needed)].split(needed)
    tables = torch.full((S, max(*needed, columns) + 1 if S > 1 else needed[0] + 1), N - 1, dtype=torch.int32)
    read = torch.zeros(N, B, dtype=torch.bool)
    seen = Features(**features | {"value_cache": None})
    for s, own in enumerate(ids):
        tables[s, : needed[s]] = own
        i, j = torch.arange(lens[s] - tokens[s], lens[s]), torch.arange(needed[s] * B)
        kept = kept_keys(seen, s, i, j, 1, 1, B)[0].any(0) & (j < lens[s])
        read[own] = kept.view(-1, B)
        key[own, :, :, 0] += (slope / scale / math.log2(math.e) * (lens[s] - j).view(-1, B, 1)).to(key)
    unread = ~read.to(GPU)
    key[unread] = torch.nan
    value[unread] = torch.nan
    if stored is not None:
        kv_cache, key, value = (each.to(stored) for each in (kv_cache, key, value))
        if Dv is not None:
            features["value_cache"] = value
        key, value = (each.double() * (factor or 1.0) for each, factor in zip((key, value), scales, strict=True))
        given = zip(("k_scale", "v_scale"), scales, strict=True)
        features |= {name: torch.tensor([factor], device=GPU) for name, factor in given if factor is not None}
    starts = torch.tensor([0, *tokens]).cumsum(0)
    if sinks:
        features["sinks"] = normal(H)
    vectors = (torch.tensor(lens, dtype=torch.int32, device=GPU), starts.to(GPU, torch.int32))
    call = (query, kv_cache, tables.to(GPU), *vectors, scale)
    out = torch.zeros(T, H, value.shape[3], dtype=torch.double, device=GPU)
    lse = torch.full((T, H), -math.inf, dtype=torch.double, device=GPU)
    for s, n in enumerate(lens):
        rows = slice(int(starts[s]), int(starts[s + 1]))
        if tokens[s]:
            own = ids[s].to(GPU)
            keys, values = (each[own].flatten(0, 1)[:n].double().nan_to_num() for each in (key, value))
            out[rows], lse[rows] = in_float64(query[rows].double(), keys, values, scale, features)
    return call, features, (out, lse)


def in_float64(query, keys, values, scale, features):
    """Of ``[t, H, D]``, ``[n, K, D]`` and ``[n, K, Dv]``."""
    (t, H, D), (n, K, _) = query.shape, keys.shape
    logits = torch.einsum("tkgd,jkd->kgtj", query.view(t, K, H // K, D), keys) * scale
    cap = features.get("soft_cap", 0)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    i, j = torch.arange(n - t, n, device=GPU), torch.arange(n, device=GPU)
    kept = kept_keys(Features(**features), 0, i, j, 1, 1, 1)[0]
    logits = logits.masked_fill(~kept, -math.inf)
    if "sinks" in features:
        sinks = features["sinks"].double().view(K, H // K, 1, 1).expand(K, H // K, t, 1)
        logits = torch.cat([logits, sinks], -1)
    weights = logits.softmax(-1).nan_to_num(0.0)[..., :n]
    out = torch.einsum("kgtj,jkd->tkgd", weights, values)
    return out.reshape(t, H, -1), logits.logsumexp(-1).permute(2, 0, 1).reshape(t, H)


def compare(out, lse, wanted, wanted_lse):
    assert len(out) == len(wanted)
    # rtol: scores of hundreds are sums of float32s, which tensor cores truncate
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-4, rtol=4e-6)
    largest = wanted.abs().max().item()
    torch.testing.assert_close(out.double(), wanted, atol=0.012 * largest, rtol=0)


def check_twice(call, features, wanted):
    """A call against float64; two calls give the same bits."""
    out, lse = paged_ops.paged_attention_with_lse(*call, **features)
    again = paged_ops.paged_attention_with_lse(*call, **features)
    assert torch.equal(out.view(torch.int16), again[0].view(torch.int16)) and torch.equal(lse, again[1])
    compare(out, lse, *wanted)


def check_replays(made, length):
    """Batches of equal shapes by one graph, which is captured with the first batch and all lengths ``length``."""
    captured = [each.clone() if isinstance(each, torch.Tensor) else each for each in made[0][0]]
    captured[3].fill_(length)
    paged_ops.paged_attention_with_lse(*captured)
    torch.cuda.synchronize(GPU)
    graph = torch.cuda.CUDAGraph()
    with captured_into(graph):
        out, lse = paged_ops.paged_attention_with_lse(*captured)
    for call, _, wanted in made:
        for place, given in zip(captured[:5], call[:5], strict=True):
            if place.itemsize == 1:
                place, given = place.view(torch.uint8), given.view(torch.uint8)
            place.copy_(given)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize(GPU)
        compare(out, lse, *wanted)
