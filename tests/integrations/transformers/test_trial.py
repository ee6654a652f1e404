"""What is tried when a model is wrapped: logits that are masked, scaled or rounded hide no mistake, and are none."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is the extra 'hf'")

from paged_ops.integrations.transformers import PagedCausalLM  # noqa: E402

V, C = 128, 64
LOWEST = torch.finfo(torch.float32).min
HALF = slice(0, V // 2)


def tiny(mixes: bool = False, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model; one that ``mixes`` adds to the input of an MLP that of the token before."""
    sizes: dict[str, Any] = dict(
        vocab_size=V,
        hidden_size=C,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )
    config = transformers.LlamaConfig(**{**sizes, **changes})
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation="eager").eval()
    mlp = model.model.layers[0].mlp
    if mixes:
        mlp.forward = lambda x: type(mlp).forward(mlp, x + x.roll(1, dims=1))
    return model


def change_logits(model: Any, change: Callable[[Tensor], Tensor | None]) -> Any:
    """The model, with logits ``[1, T, V]`` that ``change`` writes, or returns."""

    def changed(_: Any, __: Any, logits: Tensor) -> Tensor:
        logits = logits.clone()
        result = change(logits)
        return logits if result is None else result

    model.lm_head.register_forward_hook(changed)
    return model


def fill(where: Any, value: float) -> Callable[[Tensor], None]:
    def change(logits: Tensor) -> None:
        logits[..., where] = value

    return change


def add(where: Any, value: float) -> Callable[[Tensor], None]:
    def change(logits: Tensor) -> None:
        logits[..., where] += value

    return change


def scale(logits: Tensor) -> None:
    logits[..., :4] *= 1e5


def by_position(logits: Tensor) -> None:
    logits[0, ::3, :40] = LOWEST


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda logits: None,
    "-inf": fill([3, 5], -torch.inf),
    "half of them -inf": fill(HALF, -torch.inf),
    "lowest": fill([3, 5], LOWEST),
    "-1e4": fill([3, 5], -1e4),
    "lower by 1e4": add(HALF, -1e4),
    "higher by 1e8": add([3, 5], 1e8),
    "scaled": scale,
    "padded vocabulary": lambda logits: nn.functional.pad(logits, (0, 64), value=0.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_logits_that_are_masked_or_scaled_hide_nothing(name: str) -> None:
    PagedCausalLM(change_logits(tiny(), CHANGES[name]))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM, where they differ by .*: it mixes tokens outside"):
        PagedCausalLM(change_logits(tiny(mixes=True), CHANGES[name]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masked_logits_in_half_precision(dtype: torch.dtype) -> None:
    change = fill([3, 5], torch.finfo(dtype).min)
    PagedCausalLM(change_logits(tiny(dtype=dtype), change))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM, where they differ by .*: it mixes tokens outside"):
        PagedCausalLM(change_logits(tiny(mixes=True, dtype=dtype), change))


def test_masks_are_the_same_in_both_runs() -> None:
    model = tiny()

    def change(logits: Tensor) -> None:
        if "paged" in model.config._attn_implementation:
            logits[..., 7] = -torch.inf

    with pytest.raises(ValueError, match="LlamaForCausalLM, where they differ by inf"):
        PagedCausalLM(change_logits(model, change))


@pytest.mark.parametrize("paged", [False, True])
def test_a_row_of_nan_is_an_error(paged: bool) -> None:
    model = tiny()

    def change(logits: Tensor) -> None:
        if paged == ("paged" in model.config._attn_implementation):
            logits[:, 2] = torch.nan

    where = "on a paged cache" if paged else "by itself"
    with pytest.raises(ValueError, match=rf"without NaN, got NaN for tokens \[2.*\] of a trial run from .* {where}"):
        PagedCausalLM(change_logits(model, change))


def test_logits_that_say_nothing_are_an_error() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM, where they differ by nan"):
        PagedCausalLM(change_logits(tiny(), fill(slice(None), 1.0)))


class Int8Linear(nn.Module):
    """As weights and activations in int8 are computed: activations are rounded by the largest of their token, or of
    all tokens."""

    def __init__(self, linear: nn.Linear, by_token: bool) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.by_token, self.factor = by_token, weight.abs().amax(1) / 127
        self.weight = nn.Parameter((weight / self.factor[:, None]).round())

    def forward(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True) if self.by_token else x.abs().max()
        step = largest.clamp_min(1e-12) / 127
        return (x / step).round() @ self.weight.T * step * self.factor


@pytest.mark.parametrize("by_token", [True, False])
def test_activations_that_are_rounded_to_int8(by_token: bool) -> None:
    def rounded(mixes: bool) -> Any:
        model = tiny(mixes, num_hidden_layers=4)
        for module in list(model.modules()):
            for name, child in module.named_children():
                if type(child) is nn.Linear and name != "lm_head":
                    setattr(module, name, Int8Linear(child, by_token))
        return model

    PagedCausalLM(rounded(mixes=False))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM, where they differ by .*: it mixes tokens outside"):
        PagedCausalLM(rounded(mixes=True))


def test_half_precision_may_differ_as_far_as_rounding_changes_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_ops.integrations.transformers import trial

    for tolerance in (trial.TOLERANCE_OF_HALF, 1e-4):
        monkeypatch.setattr(trial, "TOLERANCE_OF_HALF", tolerance)
        PagedCausalLM(tiny(dtype=torch.bfloat16))
        with pytest.raises(ValueError, match=r"they differ by .*: it mixes tokens outside"):
            PagedCausalLM(tiny(mixes=True, dtype=torch.bfloat16))


def test_why_logits_differ() -> None:
    roberta = transformers.RobertaConfig(
        vocab_size=V, hidden_size=C, num_hidden_layers=1, num_attention_heads=2, is_decoder=True
    )
    with pytest.raises(ValueError, match="the position of its first token is not 0"):
        PagedCausalLM(transformers.RobertaForCausalLM(roberta).eval())
    model = tiny()
    rotary = model.model.rotary_emb

    def forward(x: Tensor, position_ids: Tensor) -> Any:
        return types.MethodType(type(rotary).forward, rotary)(x, torch.arange(x.shape[1])[None])

    rotary.forward = forward
    with pytest.raises(ValueError, match="it ignores position_ids"):
        PagedCausalLM(model)
