"""Linear layers, experts and norms in a fixed order: right, and with the same bits for a row in any company."""

import pytest
import torch

from paged_ops import ops, reference
from paged_ops.lowerings.cpu import linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((96, 64), (33, 50), (1, 1), (257, 16), (40, 300))  # outputs and features


@pytest.fixture(params=["cpp", "torch"])
def path(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(linear, "compiled", lambda: None)
    elif linear.compiled() is None:
        pytest.skip("no compiler")
    return request.param


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def bits(x):
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def expect_close(found, x, expected):
    """To float32's rounding of sums, and the dtype's own."""
    within = 1e-5 if x.dtype == torch.float32 else 2 * torch.finfo(x.dtype).eps
    torch.testing.assert_close(found, expected, rtol=within, atol=within * expected.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(path, shape, dtype):
    O, C = shape
    x, weight, bias = random(2, 9, C, dtype=dtype), random(O, C, dtype=dtype), random(O, dtype=dtype)
    for given in (None, bias):
        expect_close(ops.invariant_linear(x, weight, given), x, reference.invariant_linear(x, weight, given))


def differing(linear_of, x, threads, lengths):
    """The numbers of rows with which a row has other bits than among all rows."""
    threads(1)
    whole, found = bits(linear_of(x)), []
    for T in lengths:
        start = 37 * T % (len(x) - T + 1)
        threads(1 + T % 3)
        found += [] if torch.equal(bits(linear_of(x[start : start + T])), whole[start : start + T]) else [T]
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_rows_and_threads(path, dtype, threads):
    x = random(300, 50, dtype=dtype)
    weight, bias = random(130, 50, dtype=dtype), random(130, dtype=dtype)
    lengths = range(301) if path == "cpp" else (0, 1, 2, 3, 17, 300)
    assert not differing(lambda rows: ops.invariant_linear(rows, weight, bias), x, threads, lengths)


def test_other_orders_are_found(threads):
    """With each pair of rows added in an order of its own."""
    x, weight = random(64, 512), random(40, 512)

    def planted(rows):
        back = torch.stack([row.flip(0) if i % 2 else row for i, row in enumerate(rows)])
        turned = torch.stack(
            [ops.invariant_linear(row, weight.flip(1) if i % 2 else weight) for i, row in enumerate(back)]
        )
        return turned

    assert differing(planted, x, threads, range(1, 64))


def test_strides_and_alignment(path):
    x, weight = random(12, 100), random(30, 101)
    expected = ops.invariant_linear(x[:, :50].contiguous(), weight[:, 1:51].contiguous())
    assert torch.equal(ops.invariant_linear(x[:, :50], weight[:, 1:51]), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts(path, dtype, threads):
    E, O, C, T = 5, 24, 40, 33
    x, weight = random(T, C, dtype=dtype), random(E, C, O, dtype=dtype).transpose(1, 2)
    bias, experts = random(E, O, dtype=dtype), torch.arange(T) * 7 % 4  # one expert has no rows
    found = ops.invariant_expert_linear(x, weight, experts, bias)
    expect_close(found, x, reference.invariant_expert_linear(x, weight, experts, bias))
    for t in range(0, T, 5):
        alone = ops.invariant_expert_linear(x[t : t + 1], weight, experts[t : t + 1], bias)
        assert torch.equal(bits(alone), bits(found[t : t + 1]))
    assert torch.equal(found[:1], ops.invariant_linear(x[:1], weight[0], bias[0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [(0.0, True), (1.0, False), (0.0, False)], ids=str)
def test_norms(options, dtype, threads):
    x, weight = random(200, 72, dtype=dtype), random(72, dtype=dtype)
    for given in (None, weight):
        found = ops.invariant_rms_norm(x, given, 1e-6, *options)
        expect_close(found, x, reference.invariant_rms_norm(x, given, 1e-6, *options))
    assert not differing(
        lambda rows: ops.invariant_rms_norm(rows, weight, 1e-6, *options), x, threads, range(1, 200, 7)
    )


@pytest.mark.parametrize("change", ["columns", "dtype", "bias", "experts"])
def test_errors_name_the_argument(change):
    x, weight, bias, experts = random(3, 8), random(2, 4, 8), random(2, 4), torch.zeros(3, dtype=torch.int64)
    if change == "columns":
        x = random(3, 7)
    elif change == "dtype":
        x = x.double()
    elif change == "bias":
        bias = random(2, 5)
    else:
        experts = experts.int()
    with pytest.raises(ValueError, match="^x: expected" if change in ("columns", "dtype") else f"^{change}: expected"):
        ops.invariant_expert_linear(x, weight, experts, bias)
    if change != "experts":
        with pytest.raises(ValueError, match="^bias: expected" if change == "bias" else "^x: expected"):
            ops.invariant_linear(x, weight[0], bias[0])


@pytest.mark.slow
def test_compiles():
    x, weight = random(5, 16), random(8, 16)

    @torch.compile(fullgraph=True, dynamic=True)
    def run(x):
        return ops.invariant_rms_norm(ops.invariant_linear(x, weight), None, 1e-6)

    with torch.no_grad():
        assert torch.equal(run(x), ops.invariant_rms_norm(ops.invariant_linear(x, weight), None, 1e-6))
