"""The forms in which a cache can reach a compiled graph."""

import torch

import paged_ops
from paged_ops import layouts

T, H, K, D, B, N = 4, 8, 2, 32, 16, 64


def step(qkv, kv_cache, tables, lens, starts, slots, value_cache=None):
    """What a layer does: write, then attend."""
    query, key, value = qkv.split([H, K, K], dim=1)
    paged_ops.reshape_and_cache(key, value, kv_cache, slots, value_cache=value_cache)
    return paged_ops.paged_attention(query, kv_cache, tables, lens, starts, D**-0.5, value_cache=value_cache)


def next_layer(qkv, out):
    return torch.cat([qkv[:, :H] + out, qkv[:, H:]], dim=1)


def decode_batch(tokens=T, length=20, device="cpu"):
    tables = torch.arange(tokens * 2, dtype=torch.int32, device=device).view(tokens, 2)
    lens = torch.full((tokens,), length, dtype=torch.int32, device=device)
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    slots = tables[:, (length - 1) // B].long() * B + (length - 1) % B
    return torch.randn(tokens, H + 2 * K, D, device=device), tables, lens, starts, slots


def cache(*lead, device="cpu"):
    return torch.randn(*lead, N, 2, B, K, D, device=device)


def one_argument(device):
    return (lambda kv, qkv, *rest: step(qkv, kv, *rest)), (cache(device=device),)


def hnd_view(device):
    kv = layouts.allocate_kv_cache("HND", N, B, K, D, torch.float32, device)
    return (lambda kv, qkv, *rest: step(qkv, kv, *rest)), (kv,)


def sliced_inside(device):
    def function(planes, qkv, *rest):
        return step(qkv, planes[0], *rest, value_cache=planes[1])

    return function, (torch.randn(2, N, B, K, D, device=device),)


def unbound_inside(device):
    def function(kv, qkv, *rest):
        key_cache, value_cache = kv.unbind(1)
        return step(qkv, key_cache, *rest, value_cache=value_cache)

    return function, (cache(device=device),)


def split_inside(device):
    def function(kv, qkv, *rest):
        key_cache, value_cache = paged_ops.layouts.split_kv_cache(kv, K, D)
        return step(qkv, key_cache, *rest, value_cache=value_cache)

    shape = layouts.kv_cache_shape("X_PACKED", N, B, K, D)
    return function, (torch.randn(shape, device=device),)


def arena_inside(device):
    def function(arena, qkv, *rest):
        for layer in range(3):
            qkv = next_layer(qkv, step(qkv, arena[layer], *rest))
        return qkv

    return function, (cache(3, device=device),)


def arena_slices_as_list(device):
    def function(layers, qkv, *rest):
        for kv in layers:
            qkv = next_layer(qkv, step(qkv, kv, *rest))
        return qkv

    return function, (list(cache(3, device=device).unbind(0)),)


def list_of_caches(device):
    function, _ = arena_slices_as_list(device)
    return function, ([cache(device=device) for _ in range(3)],)


def separate_storages(device):
    def function(key_cache, value_cache, qkv, *rest):
        return step(qkv, key_cache, *rest, value_cache=value_cache)

    return function, tuple(torch.randn(N, B, K, D, device=device) for _ in range(2))


def out_overload(device):
    def function(kv, out, qkv, tables, lens, starts, slots):
        query, key, value = qkv.split([H, K, K], dim=1)
        paged_ops.reshape_and_cache(key, value, kv, slots)
        torch.ops.paged_ops.paged_attention.out(query, kv, tables, lens, starts, D**-0.5, out=out)
        return out + 1

    return function, (cache(device=device), torch.empty(T, H, D, device=device))
