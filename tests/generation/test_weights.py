"""Weights and adapters that change beside a loop: never tokens of a mixture, never prefixes of the old ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.graphs.imitated import ImitatedSession

transformers = pytest.importorskip("transformers", reason="transformers is the extra 'hf'")

from paged_ops.generation import GenerationLoop, SamplingParams  # noqa: E402
from paged_ops.integrations.transformers import PagedCausalLM  # noqa: E402
from paged_ops.integrations.transformers.weights import Weights  # noqa: E402

GREEDY = SamplingParams(max_new_tokens=8)
PROMPT = [(7 * i) % 60 + 1 for i in range(24)]
CHANGED = "model: expected weights and active adapters that stay while requests are unfinished .* got changed ones"


class Adapted(nn.Module):
    """A linear layer with adapters, as peft makes them."""

    def __init__(self, base_layer: nn.Linear, names: tuple[str, ...]) -> None:
        super().__init__()
        self.base_layer, self.lora = base_layer, nn.ModuleDict()
        self._active_adapter, self._disable_adapters, self.merged_adapters = [names[0]], False, list[str]()
        for name in names:
            self.load(name)

    def load(self, name: str) -> None:
        generator = torch.Generator().manual_seed(ord(name[0]))
        linear = nn.Linear(self.base_layer.in_features, self.base_layer.out_features, bias=False).eval()
        with torch.no_grad():
            linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator) * 0.3)
        self.lora[name] = linear

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        for name in [] if self._disable_adapters else self._active_adapter:
            y = y + self.lora[name](x)
        return y


def tiny(*adapters: str) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    if adapters:
        for layer in model.model.layers:
            layer.mlp.up_proj = Adapted(layer.mlp.up_proj, adapters)
    return model


def use(model: Any, *names: str) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj._active_adapter = list(names)


def expected(model: Any) -> list[int]:
    """The tokens of a copy of the model."""
    model = copy.deepcopy(model)
    paged = getattr(model, "paged_wrapping", None)
    if paged is not None:
        paged.undo()
    model.set_attn_implementation("eager")
    options: dict[str, Any] = dict(max_new_tokens=8, do_sample=False)
    return model.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()


def served(model: Any, **options: Any) -> GenerationLoop:
    paged = PagedCausalLM(model)
    return GenerationLoop(paged, paged.allocate_kv_cache(64, 4), **options)


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.neg_()


def replaced(model: Any) -> None:
    proj = model.model.layers[0].mlp.up_proj
    proj.weight = nn.Parameter(-proj.weight.detach())


def loaded(model: Any) -> None:
    model.load_state_dict({name: -each for name, each in model.state_dict().items()}, assign=True)


def module(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.up_proj = nn.Linear(32, 48, bias=False).eval()


def layer(model: Any) -> None:
    del model.model.layers[1]
    model.config.num_hidden_layers = 1


CHANGES: list[Callable[[Any], None]] = [in_place, replaced, loaded, module, layer]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_prefixes_of_other_weights_are_forgotten(change: Callable[[Any], None]) -> None:
    model = tiny()
    loop = served(model)
    before = expected(model)
    assert loop.generate([PROMPT], GREEDY) == [before]
    assert loop.generate([PROMPT], GREEDY) == [before]
    cached = loop.stats.cached_tokens
    assert cached > 0
    change(model)
    after = expected(model)
    assert after != before
    assert loop.generate([PROMPT], GREEDY) == [after]
    assert loop.stats.cached_tokens == cached
    assert loop.generate([PROMPT], GREEDY) == [after]
    assert loop.stats.cached_tokens == 2 * cached


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_weights_stay_while_requests_are_unfinished(change: Callable[[Any], None]) -> None:
    model = tiny()
    loop = served(model)
    first = loop.submit(PROMPT, GREEDY)
    loop.step()
    steps = loop.stats.steps
    change(model)
    for call in (loop.step, lambda: loop.submit(PROMPT, GREEDY), lambda: loop.generate([PROMPT], GREEDY)):
        with pytest.raises(ValueError, match=CHANGED):
            call()
    assert loop.stats.steps == steps and len(loop.output(first)) == 1
    assert loop.abort(first)
    assert loop.generate([PROMPT], GREEDY) == [expected(model)]


def test_a_request_that_waits_has_the_weights_of_its_submission() -> None:
    model = tiny()
    loop = served(model)
    loop.submit(PROMPT, GREEDY)
    in_place(model)
    with pytest.raises(ValueError, match=CHANGED):
        loop.step()


def test_reset_is_for_what_shows_nowhere() -> None:
    model = tiny()
    loop = served(model)
    loop.generate([PROMPT], GREEDY)
    model.model.layers[0].mlp.up_proj.weight.data.neg_()
    loop.reset()
    assert loop.generate([PROMPT], GREEDY) == [expected(model)]


def test_adapters_change_only_between_requests() -> None:
    model = tiny("a", "b")
    loop = served(model)
    a = expected(model)
    assert loop.generate([PROMPT], GREEDY) == [a]
    request = loop.submit(PROMPT, GREEDY)
    loop.step()
    use(model, "b")
    with pytest.raises(ValueError, match=CHANGED):
        loop.step()
    use(model, "a")
    assert loop.run()[request] == a[1:] and loop.output(request) == a
    for names in (["b"], ["a", "b"], [], ["a"]):
        use(model, *names)
        want = expected(model)
        assert (want == a) == (names == ["a"])
        assert loop.generate([PROMPT], GREEDY) == [want]
    for attribute, value in (("_disable_adapters", True), ("merged_adapters", ["a"])):
        loop.submit(PROMPT, GREEDY)
        setattr(model.model.layers[1].mlp.up_proj, attribute, value)
        with pytest.raises(ValueError, match=CHANGED):
            loop.step()
        setattr(model.model.layers[1].mlp.up_proj, attribute, type(value)())
        loop.run()


def test_adapters_may_be_loaded_while_requests_run() -> None:
    model = tiny("a")
    loop = served(model)
    want = expected(model)
    request = loop.submit(PROMPT, GREEDY)
    loop.step()
    for each in model.model.layers:
        each.mlp.up_proj.load("b")
    loop.step()
    for each in model.model.layers:
        each.mlp.up_proj.lora["b"].weight.data = torch.zeros(1)
        del each.mlp.up_proj.lora["b"]
    loop.run()
    assert loop.output(request) == want
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.lora["a"].weight.neg_()
    assert loop.generate([PROMPT], GREEDY) == [expected(model)] != [want]


def test_two_loops_on_one_cache_serve_two_adapters() -> None:
    model = tiny("a", "b")
    paged = PagedCausalLM(model)
    cache = paged.allocate_kv_cache(64, 4)
    loops = {name: GenerationLoop(paged, cache) for name in ("a", "b")}
    want = {}
    for name in loops:
        use(model, name)
        want[name] = expected(model)
    assert want["a"] != want["b"]
    for round_ in range(2):
        requests = {}
        for name, loop in loops.items():
            use(model, name)
            requests[name] = loop.submit(PROMPT, GREEDY)
        while any(loop.has_work for loop in loops.values()):
            for name, loop in loops.items():
                use(model, name)
                loop.step()
        assert {name: loop.output(requests[name]) for name, loop in loops.items()} == want
        assert all((loop.stats.cached_tokens > 0) == (round_ > 0) for loop in loops.values()), "each has its own"
    request = loops["b"].submit(PROMPT, GREEDY)
    use(model, "a")
    with pytest.raises(ValueError, match=CHANGED):
        loops["b"].step()
    use(model, "b")
    loops["b"].run()
    assert loops["b"].output(request) == want["b"]


def test_training_mode_is_refused_at_the_step() -> None:
    model = tiny()
    mlp = model.model.layers[0].mlp
    mlp.up_proj, mlp.act_fn = nn.Linear(32, 48, bias=False), nn.Sequential(mlp.act_fn, nn.Dropout(0.5))
    assert mlp.up_proj.training
    refusal = (
        r"model: expected evaluation mode, got LlamaForCausalLM, or a part of it, in training; call model.eval\(\)"
    )
    with pytest.raises(ValueError, match=refusal):
        PagedCausalLM(model)
    mlp.act_fn.eval()
    loop = served(model)
    want = expected(model)
    request = loop.submit(PROMPT, GREEDY)
    loop.step()
    for part in (model, mlp.act_fn[1]):
        part.train()
        for call in (loop.step, lambda: loop.submit(PROMPT)):
            with pytest.raises(ValueError, match=refusal):
                call()
        model.eval()
    loop.run()
    assert loop.output(request) == want


def test_training_mode_is_refused_by_the_step_itself() -> None:
    model = tiny()
    paged = PagedCausalLM(model)
    model.train()
    with pytest.raises(ValueError, match="expected evaluation mode"):
        paged(torch.tensor([1]), None, torch.tensor([0]), [])  # type: ignore[arg-type]


def test_training_mode_is_refused_of_a_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    paged = PagedCausalLM(model)
    monkeypatch.setattr(
        "paged_ops.generation.model_step.compile_step", lambda step, _: step._step
    )  # no code of ours runs in it
    loop = GenerationLoop(paged, paged.allocate_kv_cache(64, 4), compile=True)
    loop.generate([PROMPT], GREEDY)
    model.train()
    with pytest.raises(ValueError, match="expected evaluation mode"):
        loop.generate([PROMPT], GREEDY)


def test_versions_of_equal_sums_differ() -> None:
    """The weights of two layers change places, and one weight takes the memory of another."""
    model = tiny()
    weights = Weights(model)
    seen = {weights.version()}
    assert weights.version() in seen
    first, second = (each.mlp.up_proj for each in model.model.layers)
    first.weight, second.weight = second.weight, first.weight
    seen.add(weights.version())
    assert len(seen) == 2
    for count in range(3, 10):
        shape = first.weight.shape
        del first.weight
        first.weight = nn.Parameter(torch.ones(shape))
        seen.add(weights.version())
        assert len(seen) == count
    assert weights.version() in seen


@torch.inference_mode()
def test_weights_of_inference_mode_have_no_version() -> None:
    model = tiny()
    assert Weights(model).version() is not None


def test_any_step_may_have_a_version() -> None:
    class Step:
        version, vocab_size = 0, 64

        def weights_version(self) -> int:
            return self.version

        def __call__(self, input_ids: Tensor, metadata: Any, last_rows: Tensor, kv_caches: Any) -> Tensor:
            return torch.zeros(len(last_rows), 64)

    from paged_ops.cache import KVCache

    step = Step()
    loop = GenerationLoop(step, KVCache(1, 16, 4, 1, 8))
    loop.submit(PROMPT, GREEDY)
    loop.step()
    step.version = 1
    with pytest.raises(ValueError, match=CHANGED):
        loop.step()


def test_a_new_loop_on_a_cache_uses_no_prefixes_of_other_weights() -> None:
    model = tiny()
    paged = PagedCausalLM(model)
    kv_cache = paged.allocate_kv_cache(64, 4)
    with GenerationLoop(paged, kv_cache) as loop:
        loop.generate([PROMPT], GREEDY)
        (again,) = loop.generate([PROMPT], GREEDY)
        assert again.num_cached_tokens > 0
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-3)
    with GenerationLoop(paged, kv_cache) as loop:
        (output,) = loop.generate([PROMPT], GREEDY)
    assert output.num_cached_tokens == 0
    assert output == expected(model)


class Recorded:
    """As a CUDA graph: the operations on the tensors that there were at capture."""

    def __init__(self, session: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        return True

    def capture(self, function: Any) -> Any:
        calls = self.calls

        class Tape(TorchDispatchMode):
            def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = call(*args, **(kwargs or {}))
                calls.append((call, args, kwargs or {}, out))
                return out

        with Tape():
            self.out = function()
        return self.out

    def replay(self) -> Any:
        for call, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(call(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        return self.out


def test_graphs_are_captured_again_for_other_adapters_and_replaced_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_ops.graphs.runner.Graph", Recorded)
    monkeypatch.setattr("paged_ops.graphs.runner.CaptureSession", ImitatedSession)
    model = tiny("a", "b")
    paged = PagedCausalLM(model)
    loop = GenerationLoop(paged, paged.allocate_kv_cache(64, 4), graph_mode="FULL_DECODE_ONLY")
    captures: list[int] = []
    capture = loop._model.graphs.capture
    monkeypatch.setattr(loop._model.graphs, "capture", lambda *given: captures.append(1) or capture(*given))
    for name in "abb":
        use(model, name)
        (output,) = loop.generate([PROMPT], GREEDY)
        assert output == expected(model)
    assert len(captures) == 2 and loop.graph_stats.replayed > 0
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)  # where it is: the graphs read it there
    assert loop.generate([PROMPT], GREEDY) == [expected(model)]
    assert len(captures) == 2
    model.lm_head.weight = nn.Parameter(-2 * model.lm_head.weight.detach())
    assert loop.generate([PROMPT], GREEDY) == [expected(model)]
    assert len(captures) == 3

    def interrupted(*_: Any) -> None:
        loop._model.graphs.captured.clear()
        raise KeyboardInterrupt

    model.lm_head.weight = nn.Parameter(-3 * model.lm_head.weight.detach())
    with monkeypatch.context() as patch:
        patch.setattr(loop._model.graphs, "capture", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.generate([PROMPT], GREEDY)
    assert loop.generate([PROMPT], GREEDY) == [expected(model)]
    assert len(captures) == 4 and loop._model.graphs.captured, "the next step captures what the interrupt left"
