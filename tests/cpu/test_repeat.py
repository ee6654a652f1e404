"""Calls like an earlier one skip the checks in Python: nothing of the earlier call stays, and every error is raised."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import paged_ops
from paged_ops import fake, testing
from paged_ops.lowerings.cpu import fused, prepared, write

ATTEND = torch.ops.paged_ops.paged_attention
ATTEND_WITH_LSE = torch.ops.paged_ops.paged_attention_with_lse
WRITE = torch.ops.paged_ops.reshape_and_cache.default


@pytest.fixture(autouse=True)
def compiler():
    assert fused.compiled() is not None, "no C++ compiler"
    assert write.compiled() is not None, "no C++ compiler"


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """The ops whose arguments were checked in Python, since records are empty."""
    ops = []

    def noted(name):
        check = getattr(fake, name)
        monkeypatch.setattr(fake, name, lambda *args, **kwargs: (ops.append(name), check(*args, **kwargs))[1])

    for name in ("paged_attention", "reshape_and_cache", "latent_cache_write"):
        noted(name)
    monkeypatch.setattr(prepared, "_prepared", {})
    monkeypatch.setattr(write, "_prepared", {})
    return ops


def call(seed=0, dtype=torch.float32, features=(), form="nhd", seqs=((1, 20), (3, 33))):
    torch.manual_seed(seed)
    spec = testing.CacheSpec(dtype=dtype, head_size=32, form=form)
    named = tuple(testing.FEATURES[name] for name in features)
    return testing.AttentionCase(f"repeated {seed}", seqs, spec, features=named).inputs()


def rows_of(dtype=torch.float32, seed=0):
    """Keys, values, a cache of four blocks of eight tokens, and slots."""
    torch.manual_seed(seed)
    key, value = torch.randn(3, 2, 2, 16, dtype=dtype).unbind(1)
    return key, value, torch.full((4, 2, 8, 2, 16), torch.nan, dtype=dtype), torch.tensor([3, -1, 30])


@pytest.mark.parametrize("features", [(), ("sinks", "alibi"), ("window",), ("ranges",)], ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_later_calls_are_not_checked_and_use_the_new_tensors(checked, dtype, features):
    for seed in range(3):
        given = call(seed, dtype, features)
        expected = paged_ops.reference.paged_attention_with_lse(*given.args, **given.kwargs)
        results = [torch.full_like(each, torch.nan) for each in expected]
        alone = ATTEND.default(*given.args, **given.kwargs)
        ATTEND_WITH_LSE.out(*given.args, **given.kwargs, out=results[0], lse=results[1])
        testing.assert_same_bytes("out", alone, results[0])
        testing.assert_same_bytes("out", ATTEND.list(*given.args, **given.kwargs)[0], alone)
        for got, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(got, wanted.to(got.dtype), rtol=2e-2, atol=2e-2)
    assert checked == ["paged_attention"]


def test_later_writes_are_not_checked_and_use_the_new_tensors(checked):
    for seed in range(3):
        key, value, cache, slots = rows_of(seed=seed)
        WRITE(key, value, cache, slots)
        assert cache[0, 0, 3].equal(key[0])
        assert cache[3, 1, 6].equal(value[2])
        assert cache.isfinite().sum() == 4 * 32
    assert checked == ["reshape_and_cache"]


def strided(query):
    return torch.cat((query, query), 2)[..., : query.shape[2]]


@pytest.mark.parametrize(
    "other",
    [
        lambda args: [strided(args[0]), *args[1:]],
        lambda args: [args[0].bfloat16(), args[1].bfloat16(), *args[2:]],
        lambda args: [args[0], torch.cat((args[1], args[1]), 1)[:, : args[1].shape[1]], *args[2:]],
        lambda args: [*args[:2], torch.cat((args[2], args[2]), 1)[:, : args[2].shape[1]], *args[3:]],
        lambda args: [*args[:5], 0.5],
    ],
    ids=["query strides", "dtypes", "cache strides", "table strides", "scale"],
)
def test_another_signature_is_checked_anew(checked, other):
    given = call()
    ATTEND.default(*given.args, **given.kwargs)
    args = other(given.args)
    got = ATTEND.default(*args, **given.kwargs)
    assert checked == ["paged_attention"] * 2
    expected = paged_ops.reference.paged_attention(*args, **given.kwargs)
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=2e-2, atol=2e-2)


def changed(args, n, value):
    args = list(args)
    args[n] = args[n].clone()
    args[n].view(-1)[-1] = value
    return args


@pytest.mark.parametrize(
    ("n", "value", "name"), [(2, 2**30, "block_tables"), (3, 2**30, "seq_lens"), (4, 2**30, "query_start_loc")]
)
def test_wrong_values_are_refused_and_nothing_is_written(n, value, name):
    given = call()
    out = torch.full_like(given.args[0], torch.nan)
    ATTEND.out(*given.args, **given.kwargs, out=torch.empty_like(out))
    args = changed(given.args, n, value)
    if n == 2:
        args[2].fill_(value)
    with pytest.raises(ValueError, match=name):
        ATTEND.out(*args, **given.kwargs, out=out)
    assert out.isnan().all()


@pytest.mark.parametrize("features", [(), ("sinks",)], ids="-".join)
def test_results_that_share_memory_are_refused(features):
    given = call(features=features)
    query, *rest = given.args
    ATTEND.out(*given.args, **given.kwargs, out=torch.empty_like(query))
    with pytest.raises(ValueError, match="memory"):
        ATTEND.out(query, *rest, **given.kwargs, out=query)
    cache = given.args[1]
    with pytest.raises(ValueError, match="memory"):
        ATTEND.out(*given.args, **given.kwargs, out=cache.view(-1)[: query.numel()].view_as(query))
    memory = torch.empty(2 * query.numel())
    lse = memory[query.numel() - 1 :][: query.shape[0] * query.shape[1]].view(query.shape[:2])
    ATTEND_WITH_LSE.out(*given.args, **given.kwargs, out=torch.empty_like(query), lse=torch.empty_like(lse))
    with pytest.raises(ValueError, match="memory"):
        ATTEND_WITH_LSE.out(*given.args, **given.kwargs, out=memory[: query.numel()].view_as(query), lse=lse)


def test_a_result_in_the_memory_of_sinks_is_refused():
    given = call(features=("sinks",))
    query = given.args[0]
    ATTEND.out(*given.args, **given.kwargs, out=torch.empty_like(query))
    memory = torch.empty(query.numel() + query.shape[1])
    sinks = memory[query.numel() - 1 :][: query.shape[1]].copy_(given.kwargs["sinks"])
    with pytest.raises(ValueError, match="memory"):
        ATTEND.out(*given.args, **{**given.kwargs, "sinks": sinks}, out=memory[: query.numel()].view_as(query))


def test_a_result_between_the_rows_of_the_query_is_allowed():
    given = call()
    query, *rest = given.args
    expected = ATTEND.default(*given.args, **given.kwargs)
    both = torch.full((*query.shape[:1], 2, *query.shape[1:]), torch.nan)
    slices, out = both[:, 0].copy_(query), torch.empty_like(query)
    ATTEND.out(slices, *rest, **given.kwargs, out=out)
    testing.assert_same_bytes("out", out, expected)
    one = torch.full((2, *query.shape), torch.nan)  # in one storage, side by side
    ATTEND.out(one[0].copy_(query), *rest, **given.kwargs, out=one[1])
    testing.assert_same_bytes("out", one[1], expected)


@pytest.mark.parametrize("wrong", [(torch.bfloat16, 0), (torch.float32, 1)], ids=["dtype", "shape"])
def test_a_wrong_result_is_refused(wrong):
    given = call()
    query = given.args[0]
    ATTEND.out(*given.args, **given.kwargs, out=torch.empty_like(query))
    out = torch.empty(len(query) + wrong[1], *query.shape[1:], dtype=wrong[0])
    with pytest.raises(ValueError, match="out"):
        ATTEND.out(*given.args, **given.kwargs, out=out)


def test_wrong_slots_and_shared_memory_are_refused_and_nothing_is_written(checked):
    key, value, cache, slots = rows_of()
    WRITE(key, value, cache.clone(), slots)
    with pytest.raises(ValueError, match="slot_mapping"):
        WRITE(key, value, cache, slots + 2)
    for n in (0, 1):
        rows = [key, value]
        rows[n] = cache.view(-1)[5:][: key.numel()].view_as(key)
        with pytest.raises(ValueError, match="memory"):
            WRITE(
                *(rows[n].as_strided(key.shape, key.stride()) if i == n else each for i, each in enumerate(rows)),
                cache,
                slots,
            )
    inside = cache.view(torch.int64).view(-1)[:3].copy_(slots)
    before = cache.clone()
    with pytest.raises(ValueError, match="memory"):
        WRITE(key, value, cache, inside)
    testing.assert_same_bytes("cache", cache, before)


def test_caches_that_move_onto_each_other_are_refused():
    key, value, _, slots = rows_of()
    memory = torch.zeros(2 * 4 * 8 * 2 * 16)
    keys, values = memory.view(2, 4, 8, 2, 16)
    WRITE(key, value, keys, slots, value_cache=values)
    assert values[3, 6].equal(value[2])
    shifted = memory[16:][: values.numel()].view_as(values)
    with pytest.raises(ValueError, match="memory"):
        WRITE(key, value, keys, slots, value_cache=shifted)


def test_settings_of_torch_change_nothing(checked):
    given, (key, value, cache, slots) = call(), rows_of()
    expected = ATTEND.default(*given.args, **given.kwargs)
    WRITE(key, value, cache, slots)
    threads = torch.get_num_threads()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(3)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            got = ATTEND.default(*given.args, **given.kwargs)
            WRITE(value, key, cache, slots)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
    assert checked == ["paged_attention", "reshape_and_cache"]
    testing.assert_same_bytes("out", got, expected)
    assert cache[0, 0, 3].equal(value[0])


def test_without_the_library_it_is_left_to_torch(checked, monkeypatch):
    given = call()
    expected = ATTEND.default(*given.args, **given.kwargs)
    monkeypatch.setattr(fused, "compiled", lambda: None)
    torch.testing.assert_close(ATTEND.default(*given.args, **given.kwargs), expected)
    assert len(checked) == 2


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops.append(op)
        return op(*args, **(kwargs or {}))


def test_modes_see_a_repeated_call():
    given, writes = call(), rows_of()
    for _ in range(2):
        paged_ops.paged_attention(*given.args, **given.kwargs)
        paged_ops.reshape_and_cache(*writes)
    with Seen() as seen:
        paged_ops.paged_attention(*given.args, **given.kwargs)
        paged_ops.reshape_and_cache(*writes)
    assert [op for op in seen.ops if op.namespace == "paged_ops"] == [ATTEND.default, WRITE]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        paged_ops.paged_attention(*given.args, **given.kwargs)
    assert "paged_ops::paged_attention" in {event.key for event in profile.key_averages()}


def test_fake_tensors_after_real_ones():
    given, writes = call(), rows_of()
    paged_ops.paged_attention(*given.args, **given.kwargs)
    paged_ops.reshape_and_cache(*writes)
    with FakeTensorMode() as mode:
        args = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in given.args]
        result = paged_ops.paged_attention(*args, **given.kwargs)
        paged_ops.reshape_and_cache(*map(mode.from_tensor, writes))
    assert type(result).__name__ == "FakeTensor"


def test_gradients_and_transforms_are_still_refused():
    given = call()
    query, *rest = given.args
    paged_ops.paged_attention(*given.args, **given.kwargs)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="no backward"):
        paged_ops.paged_attention(query.clone().requires_grad_(), *rest, **given.kwargs)
    with pytest.raises(RuntimeError, match=r"no backward|no derivatives"):
        torch.func.grad(lambda q: paged_ops.paged_attention(q, *rest, **given.kwargs).sum())(query)


def test_compiled_and_eager_calls_in_turn():
    given = call()
    compiled = torch.compile(lambda *args: paged_ops.paged_attention(*args, **given.kwargs) * 2, backend="aot_eager")
    for seed in range(3):
        args = call(seed).args
        expected = paged_ops.paged_attention(*args, **given.kwargs)
        testing.assert_same_bytes("out", compiled(*args), expected * 2)
