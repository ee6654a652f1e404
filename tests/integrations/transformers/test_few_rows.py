"""Layers of transformers' models with norms, gates and residual adds in matmuls of few rows."""

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from paged_ops.generation import GenerationLoop, SamplingParams
from paged_ops.inspection import CompileReport
from paged_ops.integrations.transformers import PagedCausalLM, few_rows
from paged_ops.integrations.transformers.projections import fuse_projections, use_overlapping_products

SIZES = dict(vocab_size=64, hidden_size=1024, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=16)
SIZES |= dict(num_key_value_heads=2, head_dim=64, initializer_range=0.05, eos_token_id=None)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(few_rows, "serves", lambda device: True)


def make(name="Llama", fuse=True, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().to(torch.bfloat16)
    if fuse:
        fuse_projections(model)
    return model


class Calls(TorchDispatchMode):
    """Rows of each matmul, by what is in it."""

    def __init__(self):
        super().__init__()
        self.found = {"norm": [], "gate": [], "add": [], "plain": []}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.paged_ops_models.few_row_linear.default:
            defaults = None, None, 0.0, False, False  # which the dispatcher leaves out
            norm, residual, _, gated, constant = (*args, *defaults[len(args) - 2 :])[2:]
            assert constant and not kwargs
            kind = "gate" if gated else "norm" if norm is not None else "add" if residual is not None else "plain"
            self.found[kind].append(args[0].numel() // args[0].shape[-1])
        return function(*args, **(kwargs or {}))


def generate(model, sequences=1, prompt=PROMPT, backend="eager"):
    paged = PagedCausalLM(model).compile_layers(dynamic=False, backend=backend)
    loop = GenerationLoop(paged, paged.allocate_kv_cache(32))
    return loop.generate([prompt] * sequences, SamplingParams(max_new_tokens=8))


def calls_of(model, sequences=1):
    with torch.compiler.set_stance("force_eager"), Calls() as calls:
        generate(model, sequences)
    return calls.found


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_tokens_are_the_same(name):
    want = generate(make(name))
    model = make(name)
    use_overlapping_products(model)
    assert generate(model) == want
    found = calls_of(model)
    assert len(found["norm"]) == len(found["gate"]) == 2 * 7, "each layer of each decode"
    assert found["add"] == found["norm"] + found["gate"]
    assert max(found["norm"]) <= 2 and max(found["plain"]) >= len(PROMPT), "prompts run as before"
    with Calls() as eager:
        paged = PagedCausalLM(model)
        GenerationLoop(paged, paged.allocate_kv_cache(32)).generate([PROMPT], SamplingParams(max_new_tokens=8))
    assert eager.found["norm"], "uncompiled, too"
    model.paged_wrapping.undo()
    assert not any(hasattr(layer, "paged_few_rows") for layer in model.model.layers)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_interrupted_step_adds_nothing_to_the_next(error, monkeypatch):
    model = make()
    use_overlapping_products(model)
    paged = PagedCausalLM(model)
    loop = GenerationLoop(paged, paged.allocate_kv_cache(32))
    sampling = SamplingParams(max_new_tokens=4)
    want = loop.generate([PROMPT], sampling)
    attention = model.model.layers[1].self_attn
    own, steps = attention.forward, []

    def interrupted(*args, **kwargs):
        steps.append(attention.o_proj.residual is not None)
        if steps[-1]:
            raise error("in a step of few rows")
        return own(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(attention, "forward", interrupted)
        with pytest.raises(error):
            loop.generate([PROMPT], sampling)
    assert steps[-1]
    assert attention.o_proj.residual is None
    loop.reset()
    assert loop.generate([PROMPT], sampling) == want


def test_more_rows_run_the_layers_own():
    model = make()
    use_overlapping_products(model)
    most = few_rows.MOST_ROWS
    assert calls_of(model, most)["norm"]
    assert not calls_of(model, most + 1)["norm"]


def test_dynamic_sizes_compile_once():
    def recompiles(model):
        torch._dynamo.reset()
        paged = PagedCausalLM(model).compile_layers(dynamic=True, backend="eager")
        loop = GenerationLoop(paged, paged.allocate_kv_cache(32))
        with CompileReport() as report:
            for sequences in (2, 3, few_rows.MOST_ROWS + 1, 2):
                loop.generate([PROMPT] * sequences, SamplingParams(max_new_tokens=4))
        return report.recompiles

    model = make()
    want = recompiles(model)
    use_overlapping_products(model)
    assert recompiles(model) <= want


@pytest.mark.parametrize(
    "change", ["separate", "bias", "gelu", "hook", "adapter", "scaled", "invariant", "not overlapping", "other device"]
)
def test_layers_that_stay(change, monkeypatch):
    options = {"mlp_bias": True} if change == "bias" else {"hidden_act": "gelu"} if change == "gelu" else {}
    model = make(fuse=change != "separate", **options)
    if change != "not overlapping":
        use_overlapping_products(model)
    layer = model.model.layers[1]
    if change == "hook":
        layer.mlp.register_forward_hook(lambda module, args, output: output * 1.0)
    elif change == "adapter":
        layer.self_attn.o_proj = nn.Sequential(layer.self_attn.o_proj)
    elif change == "scaled":
        layer.post_attention_layernorm.forward = lambda x: (
            2 * type(layer.post_attention_layernorm).forward(layer.post_attention_layernorm, x)
        )
    elif change == "other device":
        monkeypatch.setattr(few_rows, "serves", lambda device: False)
    PagedCausalLM(model, batch_invariant=change == "invariant")
    assert not hasattr(layer, "paged_few_rows")
    assert hasattr(model.model.layers[0], "paged_few_rows") == (change in ("hook", "adapter", "scaled"))
