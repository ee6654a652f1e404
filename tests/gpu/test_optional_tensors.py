"""A kernel is compiled for the tensors of its first call, and later launches pass addresses alone. So calls with and
without a tensor share no kernel that gets it."""

import itertools

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from paged_ops import layouts
from paged_ops.features import Features
from paged_ops.lowerings.gpu import spec
from paged_ops.lowerings.gpu.attention import choose
from tests.gpu.step import H200

E4M3 = torch.float8_e4m3fn
NAMES = "k_scale", "v_scale", "sinks", "alibi_slopes", "output_scale"
BATCHES = (1, 1), (4, 4), (300, 2), (4096, 4)  # T, S


def launches(H, D, latent, T, S, stored, out, **features):
    """The launches of all kernels that take a call, not only of the first one."""
    if latent:
        key = torch.zeros(5, 16, 1, D + 64, dtype=stored)
        paged, query = layouts.paged_kv(key, key[..., :D]), torch.zeros(T, H, D + 64, dtype=torch.bfloat16)
    else:
        paged = layouts.paged_kv(torch.zeros(5, 2, 16, 8, D, dtype=stored))
        query = torch.zeros(T, H, D, dtype=torch.bfloat16)
    f, tables = Features(**features), torch.zeros(S, 400, dtype=torch.int32)
    of_call = spec.spec_of(query, paged.key, paged.value, 0, tables, None, f, out, True, latent)
    shapes = spec.Shapes(T, S, 5, 400, True, spec.numbers_of(f, 0.1, 400, S, T))
    for kernel in choose.kernels_of(H200):
        choice = "refused" if kernel.serves(of_call, H200) else kernel.plan(of_call, H200, shapes)
        if not isinstance(choice, str):
            built = kernel.build(choice, of_call, H200, shapes)
            yield from (*built.launches, *built.without_counters)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("latent", "heads", "sizes"), [(False, (32,), (64, 128, 256)), (True, (16, 64, 128), (512,))])
def test_calls_with_and_without_a_tensor_share_no_kernel_that_gets_it(latent, heads, sizes, batch_invariant):
    looked_at = 0
    for H, D, (T, S), name in itertools.product(heads, sizes, BATCHES, NAMES):
        stored = E4M3 if name in ("k_scale", "v_scale") else torch.bfloat16
        out = E4M3 if name == "output_scale" else torch.bfloat16
        call = H, D, latent, T, S, stored
        given = {name: torch.ones(H if name in ("sinks", "alibi_slopes") else 1), "batch_invariant": batch_invariant}
        gets = {each._launcher for each in launches(*call, out, **given) if name not in each._without}
        others = {each._launcher for each in launches(*call, torch.bfloat16, batch_invariant=batch_invariant)}
        assert not gets & others, (name, *call)
        looked_at += len(gets)
    assert looked_at > 50
