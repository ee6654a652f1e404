"""Derivatives and the transforms of torch.func: refused by every op, rather than silently zero."""

import pytest
import torch
from torch.autograd import forward_ad

from paged_ops import testing
from paged_ops.registry import OPS


def differentiable(op):
    """An op on a case as a function of its first floating-point tensor, and that tensor."""
    inputs = testing.CASES[op][0].inputs()

    def leaves(value):
        return value if isinstance(value, list) else [value]

    flat = [each for value in inputs.args for each in leaves(value)]
    x = next((each for each in flat if isinstance(each, torch.Tensor) and each.is_floating_point()), None)

    def call(x_):
        def swap(value):
            return [swap(each) for each in value] if isinstance(value, list) else x_ if value is x else value

        args = map(swap, inputs.args)
        result = OPS[op](*args, **inputs.kwargs)
        return x_ * 1 if result is None else result

    return call, x


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("op", sorted(OPS))
def test_forward_mode_is_refused(op, grad):
    call, x = differentiable(op)
    assert x is not None
    with torch.set_grad_enabled(grad):
        with pytest.raises(RuntimeError, match=f"paged_ops.{op} has no derivatives.* detach it"):
            torch.func.jvp(call, (x,), (torch.ones_like(x),))
        with pytest.raises(RuntimeError, match=f"paged_ops.{op} has no derivatives.* detach it"):
            torch.func.jacfwd(lambda y: call(x + y.sum()))(torch.ones(2))  # y is small: a Jacobian has a row for each
        with forward_ad.dual_level():
            with pytest.raises(RuntimeError, match=f"paged_ops.{op} has no derivatives"):
                call(forward_ad.make_dual(x, torch.ones_like(x)))
            call(x)  # what has no tangent is not differentiated


@pytest.mark.parametrize("op", sorted(OPS))
def test_reverse_mode_of_torch_func_is_refused(op):
    call, x = differentiable(op)

    def scalar(y):
        result = call(x + y.sum())
        return sum(each.sum() for each in (result if isinstance(result, tuple) else (result,)))

    for transform in (torch.func.grad(scalar), torch.func.jacrev(scalar), torch.func.hessian(scalar)):
        with pytest.raises(RuntimeError, match=f"paged_ops.{op} has no (backward|derivatives)"):
            transform(torch.ones(2))


@pytest.mark.parametrize("mode", [torch.func.grad, torch.func.jacfwd])
def test_compiled_transforms_are_refused(mode):
    call, x = differentiable("paged_attention")
    compiled = torch.compile(mode(lambda y: call(y).sum()), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="has no derivatives"):
        compiled(x)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap():
    """Functional ops run row by row; what an op writes cannot be split."""
    call, x = differentiable("paged_attention")
    both = torch.vmap(call)(torch.stack([x, x.neg()]))
    assert torch.equal(both[0], call(x))
    assert torch.equal(both[1], call(x.neg()))
    with pytest.raises(RuntimeError, match="no derivatives"):
        torch.func.jvp(torch.vmap(call), (torch.stack([x, x]),), (torch.ones(2, *x.shape),))
    for op in ("reshape_and_cache", "copy_blocks", "swap_blocks"):
        call, x = differentiable(op)
        with pytest.raises(RuntimeError, match=rf"paged_ops.{op} writes .*, which torch.vmap cannot split"):
            torch.vmap(call)(torch.stack([x, x]))


def test_no_gradient_of_what_only_passes_by():
    """Inside a transform, ops on tensors that are not differentiated work."""
    call, x = differentiable("paged_attention")
    want = call(x)
    gradient = torch.func.grad(lambda y: (call(x) * y).sum())(torch.ones_like(want))
    assert torch.equal(gradient, want)
    _, tangent = torch.func.jvp(lambda y: call(x) * y, (torch.ones_like(want),), (torch.ones_like(want),))
    assert torch.equal(tangent, want)
    detached = torch.func.jvp(lambda y: call(y.detach()) + y.sum(), (x,), (torch.zeros_like(x),))
    assert torch.equal(detached[1], torch.zeros_like(want))
