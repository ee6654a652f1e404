"""Layers of transformers that keep state instead of keys, in ragged steps: tokens against its own generate()."""

import contextlib
import copy
import functools
import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch import nn  # noqa: E402

from paged_ops import AttentionMetadataBuilder, Batch, KVCache, graphs  # noqa: E402
from paged_ops.cache import HybridCache  # noqa: E402
from paged_ops.cache.states import StateCache, StateSpec  # noqa: E402
from paged_ops.generation import GenerationLoop, SamplingParams  # noqa: E402
from paged_ops.inspection import CompileReport  # noqa: E402
from paged_ops.integrations.transformers import PagedCausalLM  # noqa: E402
from paged_ops.integrations.transformers.recurrent import StateLayers, cache_argument  # noqa: E402

B, V, NEW_TOKENS = 4, 256, 10
LENGTHS = (1, 2, 3, 5, 9, 17, 24, 33)

GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS)
COMMON: dict[str, Any] = dict(
    vocab_size=V,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.15,  # large, so that logits differ by much more than float32 rounds
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
)
NO_ATTENTION: dict[str, Any] = {
    name: COMMON[name] for name in ("vocab_size", "hidden_size", "eos_token_id", "bos_token_id", "pad_token_id")
}
DELTA: dict[str, Any] = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    num_hidden_layers=3,
)
MAMBA2: dict[str, Any] = dict(
    mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=16, mamba_chunk_size=8, num_hidden_layers=3
)
EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
CONFIGS: dict[str, Any] = {
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **COMMON, **DELTA, **EXPERTS, head_dim=16, shared_expert_intermediate_size=32
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**COMMON, **DELTA, head_dim=16),
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(**{**COMMON, **DELTA, "linear_num_key_heads": 4}),
    "lfm2": lambda: transformers.Lfm2Config(
        **COMMON, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]
    ),
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        **COMMON, **EXPERTS, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1
    ),
    "jamba": lambda: transformers.JambaConfig(
        **COMMON,
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **COMMON,
        head_dim=16,
        layers_block_type=["mamba", "attention", "moe", "mamba"],
        ssm_state_size=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    "bamba": lambda: transformers.BambaConfig(**COMMON, **MAMBA2, attn_layer_indices=[1]),
    "falcon_h1": lambda: transformers.FalconH1Config(**COMMON, **{**MAMBA2, "num_hidden_layers": 2}, mamba_d_ssm=128),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        **COMMON,
        **MAMBA2,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
    ),
    "zamba2": lambda: transformers.Zamba2Config(
        **COMMON,
        num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        mamba_d_state=16,
        n_mamba_heads=8,
        mamba_ngroups=2,
        chunk_size=8,
        adapter_rank=4,
    ),
    "kimi_linear": lambda: transformers.KimiLinearConfig(
        **{**COMMON, **EXPERTS, "num_key_value_heads": 4},
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_head_dim=16,
        linear_num_heads=4,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_group=1,
        topk_group=1,
    ),
    "zaya": lambda: transformers.ZayaConfig(
        **{name: value for name, value in COMMON.items() if name != "intermediate_size"},
        head_dim=16,
        num_hidden_layers=4,
        moe_intermediate_size=32,
        num_experts=4,
    ),
    "mamba": lambda: transformers.MambaConfig(
        **NO_ATTENTION, state_size=8, num_hidden_layers=2, tie_word_embeddings=False
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        **NO_ATTENTION, state_size=16, num_heads=8, head_dim=16, n_groups=2, chunk_size=8, num_hidden_layers=2
    ),
}
# Seeds at which the likeliest token leads the second by at least 5e-4 of the largest logit, all along.
SEEDS = {
    "qwen3_next": 1,
    "qwen3_5": 2,
    "olmo_hybrid": 2,
    "lfm2": 2,
    "bamba": 4,
    "falcon_h1": 1,
    "granitemoehybrid": 2,
    "zamba2": 4,
    "zaya": 1,
    "mamba": 1,
}
# Layers of these take up a state before one token alone.
BY_TOKEN = {"jamba", "mamba"}


@functools.cache
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, V, (length,), generator=generator).tolist() for length in LENGTHS]


def make_model(name: str) -> Any:
    torch.manual_seed(SEEDS.get(name, 0))
    options: dict[str, Any] = dict(dtype=torch.float32, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), **options).eval()
    # as they come, the states hardly show: they are forgotten within a token, or small beside what goes past them
    shown = {"A_log": -2.0, "dt_bias": 0.5, "dt_proj.bias": 0.5, "D": 0.1, "temp": 4.0}
    for parameter_name, parameter in model.named_parameters():
        for end, value in shown.items():
            if parameter_name.endswith(f".{end}"):
                nn.init.constant_(parameter, value)
    return model


def generate(model: Any) -> tuple[list[list[int]], float]:
    """Greedy continuations, one prompt at a time, and the least lead of a token over the second."""
    tokens, lead = [], 1.0
    for prompt in prompts():
        options: dict[str, Any] = dict(do_sample=False, output_logits=True, return_dict_in_generate=True)
        output = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, **options)
        tokens.append(output.sequences[0, len(prompt) :].tolist())
        logits = torch.cat(output.logits)
        top = logits.topk(2).values
        lead = min(lead, float((top[:, 0] - top[:, 1]).min() / logits.abs().max()))
    return tokens, lead


@functools.cache
def expected(name: str) -> list[list[int]]:
    tokens, lead = generate(make_model(name))
    assert lead > 1e-3, "some token is a matter of rounding: choose another seed"
    assert len({token for output in tokens for token in output}) > 20
    return tokens


class Steps:
    """A model's steps over sequences, in whatever chunks a test asks for."""

    def __init__(self, model: Any, num_slots: int = 10) -> None:
        self.paged = PagedCausalLM(model)
        assert self.paged.states is not None
        self.layers = self.paged.states.layers
        sizes = (self.paged.num_layers, 200, B, self.paged.num_kv_heads, self.paged.head_size)
        values = {"value_head_size": self.paged.value_head_size, "layout": self.paged.layout}
        self.kv_cache = KVCache(*sizes, **values) if self.paged.num_layers else KVCache(1, 200, B, 1, 1)
        self.states = StateCache(self.paged.states.specs, num_slots)
        for tensor in self.states.tensors:
            tensor.fill_(float("nan"))
        self.tensors = self.kv_cache.layers[: self.paged.num_layers] + self.states.tensors
        self.builder = AttentionMetadataBuilder(B, 16, 256, 50, num_blocks=200, num_state_rows=2 * (num_slots + 1))
        self.tokens: dict[int, list[int]] = {}

    def admit(self, seq_id: int, prompt: list[int]) -> None:
        self.tokens[seq_id] = list(prompt)
        self.kv_cache.admit(seq_id, prompt, extra_key=object())
        self.states.admit(seq_id)

    def left(self, seq_id: int) -> int:
        return len(self.tokens[seq_id]) - self.kv_cache.num_computed_tokens(seq_id)

    @torch.no_grad()
    def run(self, plan: list[tuple[int, int]], padding: int = 0, commit: bool = True) -> torch.Tensor:
        """One step of (sequence, tokens) pairs; those that are through get their next token."""
        kv_cache, n = self.kv_cache, len(plan)
        for seq_id, _ in plan:
            kv_cache.append(seq_id, self.tokens[seq_id][kv_cache.num_tokens(seq_id) :])
        kv_cache.flush_copies()
        computed = [kv_cache.num_computed_tokens(seq_id) for seq_id, _ in plan]
        blocks = [kv_cache.block_ids(seq_id) for seq_id, _ in plan]
        slots = self.states.rows([seq_id for seq_id, _ in plan])
        batch = Batch([count for _, count in plan], computed, blocks, state_slots=slots)
        T = batch.num_tokens + padding
        metadata = self.builder.build(0, batch, num_reqs=n + padding, num_tokens=T)
        ids = [id for (s, count), c in zip(plan, computed, strict=True) for id in self.tokens[s][c : c + count]]
        rows = metadata.query_start_loc[1:].to(torch.int64) - 1
        last = self.paged(torch.tensor(ids + [0] * (T - len(ids))), metadata, rows, self.tensors)[:n]
        if commit:
            for (seq_id, count), token in zip(plan, last.argmax(-1).tolist(), strict=True):
                kv_cache.commit(seq_id, count)
                self.states.commit(seq_id)
                if not self.left(seq_id):
                    self.tokens[seq_id].append(token)
        return last

    def finish(self, rng: random.Random, budget: int, longest: int) -> list[list[int]]:
        """Random chunks until each prompt has its continuation; some steps fail after the model ran."""
        prompt_lens = {seq_id: len(tokens) for seq_id, tokens in self.tokens.items()}
        while live := [s for s, tokens in self.tokens.items() if len(tokens) < prompt_lens[s] + NEW_TOKENS]:
            plan, room = [], budget
            for seq_id in rng.sample(live, len(live)):
                count = min(self.left(seq_id), room, rng.randint(1, longest))
                if count:
                    plan.append((seq_id, count))
                    room -= count
            if rng.random() < 0.2:
                self.run(plan, commit=False)
            self.run(plan, padding=rng.randint(0, 3))
        return [tokens[prompt_lens[seq_id] :] for seq_id, tokens in sorted(self.tokens.items())]


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_equal_generate_in_chunks_and_after_steps_that_failed(name: str) -> None:
    steps = Steps(make_model(name))
    assert {layer.continues for layer in steps.layers} == {name not in BY_TOKEN}
    for seq_id, prompt in enumerate(prompts()):
        steps.admit(seq_id, prompt)
    assert steps.finish(random.Random(0), budget=24, longest=12) == expected(name)


def make_loop(name: str, num_blocks: int = 100, num_host_blocks: int = 0, **options: Any) -> GenerationLoop:
    paged = PagedCausalLM(make_model(name))
    kv_cache = paged.allocate_kv_cache(num_blocks, B, num_host_blocks=num_host_blocks, num_state_slots=8)
    assert isinstance(kv_cache, HybridCache) and kv_cache.states is not None
    for tensor in kv_cache.states.tensors:
        tensor.fill_(float("nan"))
    return GenerationLoop(paged, kv_cache, **options)


def is_empty(loop: GenerationLoop) -> bool:
    cache: Any = loop.kv_cache
    return not cache.stats().used_blocks and cache.states.num_free_slots == 8 and not cache.states.seq_ids


@pytest.mark.parametrize("name", ["qwen3_next", "jamba", "lfm2", "nemotron_h", "falcon_h1", "mamba2"])
def test_a_loop_gives_the_tokens_of_generate_through_preemptions(name: str) -> None:
    for num_host_blocks in (0, 40):
        loop = make_loop(name, 18, num_host_blocks, max_num_tokens=16, max_num_seqs=8)
        assert [list(output) for output in loop.generate(prompts(), GREEDY)] == expected(name)
        preempted = loop.stats.swapped_out if num_host_blocks else loop.stats.recomputed
        assert preempted > 0 or name == "mamba2"  # which has no blocks to run out of
        assert loop.stats.cached_tokens == 0 and is_empty(loop)


def test_equal_prompts_share_nothing() -> None:
    loop = make_loop("qwen3_next")
    for _ in range(2):  # the second time the blocks of the first are idle
        outputs = loop.generate([prompts()[-1]] * 3, GREEDY)
        assert [list(output) for output in outputs] == [expected("qwen3_next")[-1]] * 3
    assert loop.stats.cached_tokens == 0


@pytest.mark.parametrize("num_slots", [8, 2])
def test_samples_of_one_prompt_have_the_states_of_one(num_slots: int) -> None:
    """By fork if there is a slot, else by computing the prompt again: the same tokens."""
    outputs = []
    for slots in (8, num_slots):
        paged = PagedCausalLM(make_model("qwen3_next"))
        loop = GenerationLoop(paged, paged.allocate_kv_cache(100, B, num_state_slots=slots), max_num_seqs=8, seed=0)
        params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=1.0, n=3, seed=5)
        outputs.append([[list(s) for s in loop.generate([prompt], params)] for prompt in prompts()[4:]])
        assert not loop.has_work
    assert outputs[0] == outputs[1]
    assert len({tuple(output) for samples in outputs[0] for output in samples}) == 3 * len(outputs[0])


def test_an_abort_gives_the_slot_back() -> None:
    loop = make_loop("lfm2", max_num_tokens=16, max_num_seqs=8)
    ids = [loop.submit(prompt, GREEDY) for prompt in prompts()]
    for _ in range(4):
        loop.step()
    loop.abort(ids[0])
    loop.abort(ids[7])
    loop.run()
    assert [list(loop.output(i)) for i in ids[1:7]] == expected("lfm2")[1:7]
    assert is_empty(loop)


def test_a_step_that_fails_in_the_middle_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some layers have written the states of that step."""
    loop = make_loop("qwen3_next", max_num_tokens=16, max_num_seqs=8)
    last_layer: Any = loop._model._eager_step.model.model.layers[-1]  # type: ignore[attr-defined]
    own_forward, count = last_layer.forward, 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        out = own_forward(*args, **kwargs)
        if count % 3 == 0:
            raise KeyboardInterrupt
        return out

    monkeypatch.setattr(last_layer, "forward", forward)
    ids = [loop.submit(prompt, GREEDY) for prompt in prompts()]
    outputs: dict[int, list[int]] = {request_id: [] for request_id in ids}
    interrupts = 0
    while loop.has_work:
        with contextlib.suppress(KeyboardInterrupt):
            interrupts += 1
            for new in loop.step():
                assert new.token is not None
                outputs[new.request_id].append(new.token)
            interrupts -= 1
    assert [outputs[request_id] for request_id in ids] == expected("qwen3_next")
    assert interrupts > 5


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_without_the_state_differ(name: str) -> None:
    for kind in ("conv", "recurrent"):
        steps = Steps(make_model(name))
        numbered = enumerate(key for layer in steps.layers for key in layer.keys)
        chosen = [index for index, key in numbered if key.kind == kind]
        if not chosen:
            continue
        steps.admit(0, prompts()[-1])
        steps.run([(0, 33)])
        for _ in range(NEW_TOKENS - 1):
            for index in chosen:
                steps.states.tensors[index].zero_()
            steps.run([(0, 1)])
        assert steps.tokens[0][33:] != expected(name)[-1], kind


def test_the_module_is_its_own_for_other_caches() -> None:
    model = make_model("qwen3_next")
    layers = StateLayers.find(model)
    assert layers is not None
    layers.install()
    assert generate(model)[0] == expected("qwen3_next")
    layers.remove()
    module = layers.layers[0].module
    assert "forward" not in module.__dict__ and not type(module).__name__.startswith("Paged")


@pytest.mark.parametrize("name", ["cache", "cache_params", "past_key_values"])
def test_the_argument_for_the_cache_has_each_release_s_name(name: str) -> None:
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**NO_ATTENTION, num_hidden_layers=1)).eval()
    forward = model.forward
    given = cache_argument(forward)
    scope = {"forward": lambda cache, **rest: forward(**{given: cache}, **rest)}
    exec(
        f"def renamed(input_ids=None, {name}=None, **rest): return forward({name}, input_ids=input_ids, **rest)", scope
    )
    model.forward = scope["renamed"]
    layers = StateLayers.find(model)
    assert layers is not None and layers.argument == name


def a_llama() -> Any:
    config = transformers.LlamaConfig(**COMMON, num_hidden_layers=1)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda paged: pickle.loads(pickle.dumps(paged))])
def test_a_copy_has_its_own_modules(copied: Any) -> None:
    paged = PagedCausalLM(make_model("lfm2"))
    other = copied(paged)
    with torch.no_grad():
        for parameter in paged.model.parameters():
            parameter.zero_()
    paged.unwrap()
    loop = GenerationLoop(other, other.allocate_kv_cache(100, B, num_state_slots=8), max_num_seqs=8)
    assert [list(output) for output in loop.generate(prompts(), GREEDY)] == expected("lfm2")
    assert generate(other.unwrap())[0] == expected("lfm2")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (None, {"num_host_state_slots": 4}, "num_host_state_slots: expected None, as no layer .* keeps state, got 4"),
        ("lfm2", {"num_host_state_slots": -1}, "num_host_state_slots: expected at least 0, got -1"),
        ("lfm2", {"num_state_slots": "4"}, "num_state_slots: expected an integer of at least 0, got '4'"),
    ],
)
def test_slots_that_are_refused(name: str | None, options: dict[str, Any], message: str) -> None:
    model = make_model(name) if name else a_llama()
    with pytest.raises(ValueError, match=f"^{message}"):
        PagedCausalLM(model).allocate_kv_cache(8, **options)


def test_models_without_states() -> None:
    assert StateLayers.find(a_llama()) is None


def test_state_outside_the_cache_is_refused() -> None:
    model = make_model("lfm2")
    conv = model.model.layers[2].conv
    own_forward = conv.forward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kept = getattr(conv, "kept", 0.0)
        conv.kept = hidden_states[:, -1:].mean()
        return own_forward(hidden_states, *args, **kwargs) + kept

    conv.forward = forward
    with pytest.raises(
        ValueError, match=r"whose state is all in transformers' cache, got model\.layers\.2\.conv, a Lfm2Sh"
    ):
        StateLayers.find(model)


def test_a_module_with_the_states_of_two_layers_is_refused() -> None:
    model = make_model("lfm2")
    shared = model.model.layers[0].conv

    class AsLayer(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            shared.layer_idx = 2
            try:
                return shared(*args, **kwargs)
            finally:
                shared.layer_idx = 0

    model.model.layers[2].conv = AsLayer()
    with pytest.raises(
        ValueError, match="model: expected a module to keep the states of one layer, got a module with several"
    ):
        StateLayers.find(model)
    shared.layer_idx = 0
    model.model.layers[2].conv = shared
    with pytest.raises(ValueError, match=r"expected each state to be written once per step, but .* is written twice"):
        StateLayers.find(model)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Kinds of decoder layers, and the rotary embedding.
GRAPHS = {"lfm2": 2 + 1}


@pytest.mark.slow  # 15 s each
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(("name", "whole"), [("lfm2", False), ("mamba2", True)])
def test_decodes_are_compiled(name: str, whole: bool) -> None:
    """One graph for all layers of a kind, or for all; no state is copied; parts of prompts run as they are."""
    paged = PagedCausalLM(make_model(name))
    if not whole:
        paged.compile_layers()
    kv_cache = paged.allocate_kv_cache(18, B, num_host_blocks=40, num_state_slots=8)
    with CompileReport(kv_cache.layers) as report:
        loop = GenerationLoop(paged, kv_cache, max_num_seqs=8, max_num_tokens=16, compile=whole)
        loop.warm_up()
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert [list(output) for output in loop.generate(prompts(), GREEDY)] == expected(name)
    assert (report.graphs, report.graph_breaks) == (1 if whole else GRAPHS[name], 0), report.recompile_reasons
    assert report.cache_copies == 0, report.copies
    paged.unwrap()
    assert generate(paged.model)[0] == expected(name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "mamba2"])
def test_decodes_are_captured(name: str) -> None:
    torch.set_float32_matmul_precision("highest")
    model = make_model(name).to("cuda")
    want, _ = generate(model)
    paged = PagedCausalLM(model)
    kv_cache = paged.allocate_kv_cache(18, B, num_host_blocks=40, num_state_slots=8)
    loop = GenerationLoop(paged, kv_cache, max_num_seqs=8, max_num_tokens=16, graph_mode="FULL_DECODE_ONLY")
    assert [list(output) for output in loop.generate(prompts(), GREEDY)] == want
    assert loop.graph_stats.replayed > 0


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_modes_that_capture_parts_of_prompts_are_refused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs.Graph, "runs_on", staticmethod(lambda device: True))
    states = StateCache([StateSpec((2,), torch.float32)], 2)
    with pytest.raises(ValueError, match=r"mode: expected (one that graph_support|NONE or FULL_DECODE_ONLY)"):
        graphs.DecodeGraphs(lambda *step: step[0], HybridCache([], [], states), max_num_seqs=2, mode=mode)


def test_a_graph_serves_no_first_tokens() -> None:
    states = StateCache([StateSpec((2,), torch.float32)], 2)
    runner = graphs.DecodeGraphs(lambda *step: step[0], HybridCache([], [], states), max_num_seqs=2, mode="NONE")
    key = graphs.GraphKey(2, 2)
    runner._seq_sizes, runner.captured = [2], {key: None}  # type: ignore[dict-item]
    for computed, found in (([5, 1], key), ([5, 0], None)):
        assert runner.find(Batch([1, 1], computed, [[0], [1]], state_slots=[2, 4])) == found
