"""The TPU branch of the lowering, its kernels in Pallas' interpret mode: against the reference, NaN wherever an op must
not read, within the same error budget as every lowering."""

import pytest
import torch
import torch_xla

import paged_ops
from paged_ops import testing
from paged_ops.lowerings.tpu import ragged, write
from paged_ops.testing import BATCHES, AttentionCase, CacheSpec
from tests.xla import tpu_interpreter
from tests.xla.cases import ATTENTION, BF16, WRITES, writes

pytestmark = pytest.mark.xla


@pytest.fixture(autouse=True)
def on_a_tpu():
    with torch.no_grad(), tpu_interpreter.pretending_a_tpu():
        yield


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_ragged_kernel(case):
    assert paged_ops.supports("paged_attention", "xla", **dict(case.features)) == []
    testing.check("paged_attention", case, "xla")


@pytest.mark.parametrize("case", WRITES, ids=lambda case: case.name)
def test_write_kernel(case):
    kv_cache, slots = case.inputs("xla").args[2:]
    assert write.can_write_runs(kv_cache, len(slots))
    testing.check("reshape_and_cache", case, "xla")


@pytest.mark.parametrize("T", [1, 5, 128, 300])
def test_write_kernel_moves_runs(T):
    """Runs over block borders, across tiles, of every length, with gaps, and what lies past the end is dropped."""
    generator = torch.Generator().manual_seed(T)
    N, B, K2, D = 48, 8, 4, 128
    cache = torch.randn(N, B, K2, D, generator=generator)
    rows = torch.randn(T, K2, D, generator=generator)
    slots = torch.arange(T) + 7
    for _ in range(T // 20):
        cut, gap = torch.randint(0, T, (2,), generator=generator).tolist()
        slots[cut : cut + gap % 5] = -1
        slots = torch.where(torch.arange(T) >= cut, slots + gap % 3, slots)
    slots = torch.where(slots < N * B, slots, -1)
    expected = cache.flatten(0, 1).clone()
    expected[slots[slots >= 0]] = rows[slots >= 0]
    written = write.write_runs(*(t.to("xla") for t in (cache, rows, slots)), interpret=True)
    assert torch.equal(written.cpu().flatten(0, 1), expected)


def test_slots_past_the_end_are_dropped():
    inputs = writes("past", num_blocks=2, tokens=4, skip=0).inputs("xla")
    key, value, kv_cache, _ = inputs.args
    kv_cache.zero_()
    slots = torch.tensor([0, 10**6, 2 * 16, 31], device="xla")
    paged_ops.reshape_and_cache(key, value, kv_cache, slots)
    filled = kv_cache.cpu().flatten(0, 1).abs().sum((1, 2)) > 0
    assert filled.nonzero().flatten().tolist() == [0, 31]


LACKING = {
    "causal off": ({"causal": False}, "always causal"),
    "chunk": ({"attention_chunk": 16}, "no attention_chunk"),
    "alibi": ({"alibi_slopes": True}, "no alibi_slopes"),
    "sinks": ({"sinks": True}, "no sinks"),
    "block-sparse": ({"block_sparse": paged_ops.BlockSparse(16, 2, 3)}, "no block_sparse"),
    "ranges": ({"bidirectional_ranges": True}, "no bidirectional_ranges"),
    "float16": ({"dtype": torch.float16}, "run the model in bfloat16"),
    "head size": ({"head_size": 64}, "head size 128 only: pad"),
    "layout": ({"layout": "NHD"}, "INTERLEAVED layout only"),
    "heads": ({"num_kv_heads": 3, "num_heads": 6, "dtype": BF16}, "repeat key/value heads"),
    "uint8": ({"kv_cache_dtype": "fp8"}, "float8 cache, not from uint8"),
}


@pytest.mark.parametrize("asked", LACKING)
def test_what_the_kernel_lacks_is_known_beforehand_and_raises(asked):
    features, reason = LACKING[asked]
    answers = paged_ops.supports("paged_attention", "xla", **features)
    assert len(answers) == 1
    assert reason in answers[0]
    properties = {"dtype", "head_size", "num_kv_heads", "num_heads", "layout"}
    spec = {k: v for k, v in features.items() if k in ("dtype", "head_size", "num_kv_heads", "kv_cache_dtype")}
    if "kv_cache_dtype" in features:
        spec["cache_dtype"] = torch.uint8
    form = {"form": "nhd" if "layout" in features else "interleaved"}
    inputs = AttentionCase(
        "lacking",
        BATCHES["decode"],
        CacheSpec(**{"head_size": 128, **spec, **form}),
        num_heads=features.get("num_heads", 8),
        features=tuple((k, v) for k, v in features.items() if k not in {*properties, "kv_cache_dtype"}),
    ).inputs("xla")
    with pytest.raises(ValueError, match=r"paged_ops\.paged_attention on a TPU: .*" + reason):
        paged_ops.paged_attention(*inputs.args, **inputs.kwargs)


@pytest.mark.parametrize("op", ["paged_attention_with_lse", "cascade_attention"])
def test_no_lse(op):
    assert paged_ops.supports(op, "xla") == [ragged.NO_LSE]
    name = {"cascade_attention": "decode-prefix16"}.get(op, "decode-fp32")
    inputs = testing.case_named(op, name).inputs("xla")
    with pytest.raises(ValueError, match="returns no lse"):
        getattr(paged_ops, op)(*inputs.args, **inputs.kwargs)


def test_head_size_64_by_padding():
    """What the error advises: padded to 128 the result is that of head size 64, padded."""
    wide, T = ragged.KERNEL_HEAD_SIZE, 5
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(T, heads, 64, generator=generator) for heads in (8, 2, 2))
    batch = [
        torch.tensor([[2, 0]], dtype=torch.int32),
        torch.tensor([T], dtype=torch.int32),
        torch.tensor([0, T], dtype=torch.int32),
    ]
    slots = 2 * 16 + torch.arange(T)

    def attend(device, pad):
        kv_cache = paged_ops.allocate_kv_cache("INTERLEAVED", 4, 16, 2, wide if pad else 64, torch.float32, device)
        q, k, v = ((ragged.pad_head_size(t) if pad else t).to(device) for t in (query, key, value))
        paged_ops.reshape_and_cache(k, v, kv_cache, slots.to(device))
        return paged_ops.paged_attention(q, kv_cache, *(t.to(device) for t in batch), 64**-0.5).cpu()

    padded = attend("xla", pad=True)
    torch_xla.sync()
    torch.testing.assert_close(padded[..., :64], attend("cpu", pad=False))
    assert not padded[..., 64:].any()
