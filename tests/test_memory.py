"""Where arguments lie: writes on top of other arguments, tables past 2^31 tokens, views that are not yet computed."""

import itertools
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import paged_ops
from paged_ops import checks, testing
from paged_ops.registry import OPS

ATTENTION = torch.ops.paged_ops.paged_attention_with_lse
MERGE = torch.ops.paged_ops.merge_attention_states


def attention_in(buffer):
    """A decode case whose query is the beginning of a buffer, and its result."""
    inputs = testing.case_named("paged_attention_with_lse", "decode-fp32").inputs()
    query = buffer[: inputs.args[0].numel()].view(inputs.args[0].shape).copy_(inputs.args[0])
    return (query, *inputs.args[1:]), ATTENTION.default(*inputs.args)


@pytest.mark.parametrize("shift", [0, 1, 64, 4095])
def test_results_on_top_of_an_argument_are_refused(shift):
    buffer = torch.empty(9000)
    args, (out, lse) = attention_in(buffer)
    before = buffer.clone()
    with pytest.raises(ValueError, match="out: expected memory of its own, got memory that query shares"):
        ATTENTION.out(*args, out=buffer[shift:][: out.numel()].view(out.shape), lse=lse)
    with pytest.raises(ValueError, match="lse: expected memory of its own, got memory that kv_cache shares"):
        ATTENTION.out(*args, out=out, lse=args[1].view(-1)[shift:][: lse.numel()].view(lse.shape))
    with pytest.raises(ValueError, match="lse: expected memory of its own, got memory that out shares"):
        ATTENTION.out(*args, out=out, lse=out.view(-1)[shift // 2 :][: lse.numel()].view(lse.shape))
    testing.assert_same_bytes("query", buffer, before)


def test_results_beside_an_argument():
    buffer = torch.empty(9000)
    args, (want, lse) = attention_in(buffer)
    out = buffer[want.numel() :][: want.numel()].view(want.shape)
    ATTENTION.out(*args, out=out, lse=lse)
    testing.assert_same_bytes("out", out, want)


@pytest.mark.parametrize("side", [0, 2])
def test_states_merge_in_place(side):
    args = list(testing.case_named("merge_attention_states", "fp32-d80-h4").inputs().args)
    want = MERGE.default(*args)
    apart = args[side].flatten().clone()
    MERGE.out(*args, out=args[side], lse=args[side + 1])
    for got, expected in zip(args[side : side + 2], want, strict=True):
        testing.assert_same_bytes("a result", got, expected)
    shifted = torch.cat([apart, apart[:4]])
    args[side] = shifted[: apart.numel()].view(args[side].shape)
    with pytest.raises(ValueError, match=r"out: expected memory of its own, got memory that out_[ab] shares"):
        MERGE.out(*args, out=shifted[4:].view(args[side].shape), lse=torch.empty_like(args[1]))


def arguments(op, name):
    inputs = testing.case_named(op, name).inputs()
    names = [each.name for each in getattr(torch.ops.paged_ops, op).default._schema.arguments]
    return dict(zip(names, inputs.args, strict=False)) | inputs.kwargs


def called(op, given):
    schema = getattr(torch.ops.paged_ops, op).default._schema
    args = [given[each.name] for each in schema.arguments if not each.kwarg_only]
    return OPS[op](
        *args, **{each.name: given[each.name] for each in schema.arguments if each.kwarg_only and each.name in given}
    )


def flat(given):
    values = [each for value in given.values() for each in (value if isinstance(value, list) else [value])]
    return [each for each in values if isinstance(each, torch.Tensor)]


WRITE, SEPARATE = ("reshape_and_cache", "nhd-fp32"), ("reshape_and_cache", "separate-fp32")
PACKED, ROWS = ("reshape_and_cache", "x_packed-fp16"), ("latent_cache_write", "latent-fp32")
COPY, SWAP = ("copy_blocks", "nhd-fp32"), ("swap_blocks", "nhd-fp32")
K, V, C, S, D = "kv_cache", "value_cache", "kv_caches", "src_caches", "dst_caches"
# the op and its case, what is changed, given the right arguments, and which two tensors share memory
SHARED = [
    (WRITE, lambda a: {"key": a[K].view(-1, 2, 32)[:24]}, "kv_cache", "key"),
    (WRITE, lambda a: {"value": a[K].view(-1, 2, 32)[-24:]}, "kv_cache", "value"),
    (WRITE, lambda a: {"slot_mapping": a[K].view(-1).view(torch.int64)[5:26]}, "kv_cache", "slot_mapping"),
    (SEPARATE, lambda a: {V: a[K]}, "value_cache", "kv_cache"),
    (SEPARATE, lambda a: {V: a[K].view(4, 2, 16, 32).transpose(1, 2)}, "value_cache", "kv_cache"),
    (SEPARATE, lambda a: {V: a[K][1:], K: a[K][:-1]}, "value_cache", "kv_cache"),
    (SEPARATE, lambda a: {V: a[K][2:], K: a[K][:2], "slot_mapping": torch.arange(21)}, None, None),
    (SEPARATE, lambda a: halves(a, 32), None, None),
    (SEPARATE, lambda a: halves(a, 31), "value_cache", "kv_cache"),
    (PACKED, lambda a: {V: a[K].view(4, 2, 32, 16)}, "value_cache", "kv_cache"),
    (ROWS, lambda a: {"latent": a[K].view(-1, 40)[:24, :32]}, "kv_cache", "latent"),
    (ROWS, lambda a: {"rotated": a[K].view(-1, 40)[:24, 32:]}, "kv_cache", "rotated"),
    (ROWS, lambda a: beside(a), None, None),
    (COPY, lambda a: {C: [a[C][0], a[C][1], a[C][0]]}, "kv_caches[2]", "kv_caches[0]"),
    (COPY, lambda a: {C: [a[C][0], a[C][0][:, 1:]]}, "kv_caches[1]", "kv_caches[0]"),
    (COPY, lambda a: {C: [*a[C][0].split(1, 1)]}, None, None),
    (SWAP, lambda a: {S: [a[D][0][:8]], D: [a[D][0][1:]]}, "dst_caches[0]", "src_caches[0]"),
    (SWAP, lambda a: {S: [*a[S][:2]], D: [a[S][1], a[D][0]]}, "dst_caches[0]", "src_caches[1]"),
    (SWAP, lambda a: {S: [*a[S][:2]], D: [a[D][0], a[S][0]]}, "dst_caches[1]", "src_caches[0]"),
    (SWAP, lambda a: {D: [a[D][0]] * 3}, "dst_caches[1]", "dst_caches[0]"),
    (SWAP, lambda a: {S: [a[S][0]] * 3}, None, None),
    (SWAP, lambda a: {S: a[D], "block_mapping": torch.tensor([[0, 5], [1, 6]])}, None, None),
]  # fmt: skip


def halves(given, start):
    """Keys and values side by side in one tensor, as of vLLM: values begin at an element of the keys' row."""
    joined = torch.zeros(4, 2, 16, 64)
    return {
        "kv_cache": joined[..., :32].transpose(1, 2),
        "value_cache": joined[..., start : start + 32].transpose(1, 2),
    }


def beside(given):
    """New rows and the cache in one tensor, none of whose elements are those of the other."""
    both = torch.randn(4, 16, 80)
    return {"kv_cache": both[..., :40], "latent": both.view(-1, 80)[:24, 40:72], "rotated": both.view(-1, 80)[:24, 72:]}


@pytest.mark.parametrize(
    ("where", "change", "written", "other"), SHARED, ids=[f"{n}-{row[0][0]}-{row[2]}" for n, row in enumerate(SHARED)]
)
def test_what_is_written_shares_memory_with_nothing(where, change, written, other):
    op, name = where
    given = arguments(op, name)
    given |= change(given)
    mode = FakeTensorMode()

    def faked(value):
        if isinstance(value, list):
            return [faked(each) for each in value]
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    fakes = {name: faked(value) for name, value in given.items()}
    if written is None:
        called(op, given)
        with mode:
            called(op, fakes)
        return
    message = f"^{written}: expected memory of its own, got memory that {other} shares$".replace("[", r"\[")
    before = [each.clone() for each in flat(given)]
    with pytest.raises(ValueError, match=message):
        called(op, given)
    for each, old in zip(flat(given), before, strict=True):
        testing.assert_same_bytes("an argument", each, old)
    with mode, pytest.raises((ValueError, RuntimeError), match=message.strip("^$")):
        called(op, fakes)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_refuses_one_cache_for_keys_and_values(dynamic):
    given = arguments(*SEPARATE)
    write = torch.compile(paged_ops.reshape_and_cache, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    before = given["kv_cache"].clone()
    args = [given[name] for name in ("key", "value", "kv_cache", "slot_mapping")]
    with pytest.raises(Exception, match="value_cache: expected memory of its own, got memory that kv_cache shares"):
        write(*args, value_cache=given["kv_cache"])
    testing.assert_same_bytes("kv_cache", given["kv_cache"], before)


def test_memory_of_two_storages():
    """Tensors that others made of one buffer: their storages differ, their addresses tell."""
    buffer = bytearray(4 * 16 * 2 * 32 * 4 + 4096)
    kv_cache, value_cache = (
        torch.frombuffer(buffer, dtype=torch.float32, offset=start, count=4096).view(4, 16, 2, 32)
        for start in (0, 4096)
    )
    given = arguments(*SEPARATE) | {"kv_cache": kv_cache, "value_cache": value_cache}
    with pytest.raises(ValueError, match="value_cache: expected memory of its own, got memory that kv_cache shares"):
        called("reshape_and_cache", given)


@pytest.mark.parametrize(
    "sizes", [[(4, 2, 16, 2, 32), (1024, 512, 64, 32, 1)], [(4, 2, 16, 2, 32), (2048, 1024, 64, 31, 1)]]
)
def test_elements_of_a_cache_lie_apart(sizes):
    given = arguments(*WRITE)
    given["kv_cache"] = torch.zeros(8192).as_strided(*sizes)
    for op, call in (
        ("kv_cache", lambda: called("reshape_and_cache", given)),
        (r"kv_caches\[0\]", lambda: paged_ops.copy_blocks([given["kv_cache"]], torch.tensor([[0, 1]]))),
        (
            r"dst_caches\[0\]",
            lambda: paged_ops.swap_blocks([torch.zeros(*sizes[0])], [given["kv_cache"]], torch.tensor([[0, 1]])),
        ),
    ):
        with pytest.raises(
            ValueError, match=rf"^{op}: expected a tensor whose elements do not overlap .*, got strides \(\d"
        ):
            call()
    latents = torch.zeros(4000).as_strided((4, 16, 40), (640, 39, 1))
    with pytest.raises(ValueError, match="kv_cache: expected a tensor whose elements do not overlap"):
        called("latent_cache_write", arguments(*ROWS) | {"kv_cache": latents})
    assert not given["kv_cache"].any()


def test_overlaps_against_all_addresses():
    """Random sizes and strides, every address of which is listed."""
    rng = random.Random(0)

    def place(n):
        sizes = [(rng.randint(1, 4), rng.choice((0, *range(1, 14)))) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.05:
            sizes[0] = 0, 1
        shape, strides = zip(*sizes, strict=True)
        return checks._Place(rng.randint(0, 40), shape, strides, rng.choice((1, 2, 4)), True, n)

    def elements(place):
        indices = itertools.product(*map(range, place.shape))
        return [sum(i * s for i, s in zip(index, place.strides, strict=True)) for index in indices]

    found = [0, 0]
    for _ in range(2000):
        a, b = place(0), place(1)
        both = [{p.address + e * p.itemsize + n for e in elements(p) for n in range(p.itemsize)} for p in (a, b)]
        shares, repeats = bool(both[0] & both[1]), len(set(elements(a))) < len(elements(a))
        assert checks._share(a, b) == shares, (a, b)
        assert checks._overlaps_itself(a.shape, a.strides) == repeats, a
        found = [found[0] + shares, found[1] + repeats]
    assert 200 < found[0] < 1800
    assert 200 < found[1] < 1800


def test_lazily_negated_and_conjugated_views():
    key, value, cache, slots = testing.case_named("reshape_and_cache", "nhd-fp32").inputs().args
    cache.zero_()
    want = cache.clone()
    paged_ops.reshape_and_cache(key, value, want, slots)
    paged_ops.reshape_and_cache(torch._neg_view(key.neg()), value, cache, slots)
    assert torch.equal(cache, want)
    lazy = torch._neg_view(cache)
    for write in (
        lambda: paged_ops.reshape_and_cache(key, value, lazy, slots),
        lambda: paged_ops.copy_blocks([cache, lazy], torch.tensor([[0, 1]])),
        lambda: paged_ops.swap_blocks([cache], [lazy], torch.tensor([[0, 1]])),
    ):
        with pytest.raises(ValueError, match="expected a tensor that can be written, got a negated or conjugated view"):
            write()
    assert torch.equal(cache, want)
    with pytest.raises(ValueError, match="key: expected float32 or float16 or bfloat16, got a complex64 tensor"):
        paged_ops.reshape_and_cache(key.to(torch.complex64).conj(), value, cache, slots)
    inputs = testing.case_named("paged_attention_with_lse", "decode-fp32").inputs()
    query, cache, *rest = inputs.args
    for args in ((torch._neg_view(query.neg()), cache), (query, torch._neg_view(cache.neg()))):
        for got, expected in zip(ATTENTION.default(*args, *rest), ATTENTION.default(*inputs.args), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("M", [2**27 + 1, 2**31])
def test_tables_of_more_tokens_than_int32(M):
    """M * B is past 2^31; the lengths are not."""
    cache, query = torch.randn(3, 2, 16, 1, 16), torch.randn(1, 2, 16)
    near, starts = torch.tensor([[2]], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    far, lens = near.expand(1, M), torch.tensor([16], dtype=torch.int32)
    want = paged_ops.paged_attention(query, cache, near, lens, starts, 1.0)
    assert torch.equal(paged_ops.paged_attention(query, cache, far, lens, starts, 1.0), want)
    for got, expected in zip(
        paged_ops.gather_kv(cache, far, lens, 16), paged_ops.gather_kv(cache, near, lens, 16), strict=True
    ):
        assert torch.equal(got, expected)
    with pytest.raises(ValueError, match=r"seq_lens: expected lengths .*, got -1 at \[0\]"):
        paged_ops.paged_attention(query, cache, far, lens - 17, starts, 1.0)
    with pytest.raises(ValueError, match=r"block_tables: expected ids of the 3 blocks of the cache .*, got 3"):
        paged_ops.paged_attention(query, cache, (near + 1).expand(1, M), lens, starts, 1.0)
