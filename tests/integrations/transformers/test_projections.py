"""Fused projections give what the model gave, by fewer matrix products."""

import copy
import itertools
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from paged_ops.inspection import CompileReport
from paged_ops.integrations.transformers.projections import (
    FusedPart,
    fuse_projections,
    split_projections,
    use_overlapping_products,
)
from paged_ops.lowerings.gpu import linear as products
from tests.helpers.gpu import GPU


class Block(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, n, bias=bias) for n in (24, 8, 8))
        self.gate_proj, self.up_proj = (nn.Linear(16, 32, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(32, 16, bias=False)

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        x = x + q[..., :16] * k.sum(-1, keepdim=True) + v.mean(-1, keepdim=True)
        return x + self.down_proj(torch.sigmoid(self.gate_proj(x)) * self.up_proj(x))


@pytest.fixture(autouse=True)
def no_grad():
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_equal_and_fewer_products(bias, compiled):
    model = nn.Sequential(Block(bias), Block(bias))
    fused = copy.deepcopy(model)
    assert fuse_projections(fused) == 2 * 3
    run = torch.compile(fused, fullgraph=True) if compiled else fused
    with CompileReport() as report:
        for _ in range(3):  # what a pass leaves behind must not reach the next
            x = torch.randn(5, 16)
            torch.testing.assert_close(run(x), model(x))
    assert all(m.input is m.output is None for m in fused.modules() if hasattr(m, "sizes"))
    assert report.graphs == compiled and report.recompiles == 0, report.recompile_reasons
    products = sum(len(re.findall(r"extern_kernels\.(?:add)?mm\(", code)) for code in report.code)
    assert products == 2 * 3 * compiled


def test_parts_in_any_order_of_any_input():
    block = Block(True)
    q, k, v = block.q_proj, block.k_proj, block.v_proj
    fuse_projections(block)
    a, b = torch.randn(3, 16), torch.randn(4, 16)
    for part, whole, x in ((block.v_proj, v, a), (block.k_proj, k, b), (block.q_proj, q, a), (block.q_proj, q, a)):
        torch.testing.assert_close(part(x), whole(x))
        torch.testing.assert_close(part.weight, whole.weight)
        torch.testing.assert_close(part.bias, whole.bias)


def test_what_stays():
    mixed = Block(False)
    mixed.k_proj = nn.Linear(16, 8, bias=True)
    mixed.up_proj = nn.Sequential(nn.Linear(16, 32))
    assert fuse_projections(mixed) == 0
    assert not any(isinstance(module, FusedPart) for module in mixed.modules())


@pytest.mark.parametrize("bias", [False, True])
def test_names_and_weights_are_the_originals(bias):
    model = nn.Sequential(Block(bias), Block(bias))
    want = {name: weight.clone() for name, weight in model.state_dict().items()}
    fuse_projections(model)
    got = model.state_dict()
    assert list(got) == list(want)
    assert all(torch.equal(got[name], want[name]) for name in want)
    other = {name: 0.1 * torch.randn_like(weight) for name, weight in want.items()}
    model.load_state_dict(other)
    x = torch.randn(5, 16)
    plain = nn.Sequential(Block(bias), Block(bias))
    plain.load_state_dict(other)
    torch.testing.assert_close(model(x), plain(x))
    changed = dict(other)
    changed["0.q_proj.weight"] = torch.zeros(3, 16)
    del changed["1.k_proj.weight"]
    with pytest.raises(
        RuntimeError, match=r"(?s)Missing key.*1.k_proj.weight.*0.q_proj.weight: expected shape \[24, 16\]"
    ):
        model.load_state_dict(changed)
    assert split_projections(model) == 2 * 5
    assert not any(isinstance(module, FusedPart) for module in model.modules())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in model.parameters())
    torch.testing.assert_close(model(x), plain(x))
    assert split_projections(model) == 0


def test_a_saved_model_is_the_original(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is the extra 'hf'")
    sizes = dict(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16
    )
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, num_key_value_heads=2)).eval()
    want = {name: weight.clone() for name, weight in model.state_dict().items()}
    fuse_projections(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    got = loaded.state_dict()
    assert list(got) == list(want)
    assert all(torch.equal(got[name], want[name]) for name in want)


def half_block():
    block = Block(False).to(torch.bfloat16)
    block.q_proj, block.k_proj, block.v_proj = (
        nn.Linear(512, n, bias=False, dtype=torch.bfloat16) for n in (256, 64, 64)
    )
    block.down_proj = nn.Linear(512, 4096, bias=False, dtype=torch.bfloat16)
    return block


@pytest.mark.parametrize("compiled", [False, True])
def test_overlapping_products_are_the_layers_own(compiled):
    block = half_block()
    x = torch.randn(5, 512, dtype=torch.bfloat16)

    def run(block, x):
        return block.q_proj(x), block.k_proj(x), block.v_proj(x), block.down_proj(x)

    want = run(block, x)
    assert fuse_projections(block) == 3
    assert use_overlapping_products(block) == 2, "the fused one and down_proj: gate and up are of another size"
    got = (torch.compile(run, fullgraph=True) if compiled else run)(block, x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("change", ["bias", "float32", "odd outputs", "odd inputs"])
def test_products_that_stay(change):
    inputs, outputs = 512 + 8 * (change == "odd inputs"), 128 + 8 * (change == "odd outputs")
    dtype = torch.float32 if change == "float32" else torch.bfloat16
    layer = nn.Sequential(nn.Linear(inputs, outputs, bias=change == "bias", dtype=dtype))
    assert use_overlapping_products(layer) == 0
    assert type(layer[0]) is nn.Linear


def test_tiles_divide_their_weights():
    for T, O in itertools.product(range(70), range(64, 140_000, 64)):
        tile = products.tile_of(T, O, 132)
        assert tile is None or O % tile["BN"] == 0
        assert tile is None or T <= tile["ROWS"]
    assert products.tile_of(16, 6144, 132) and products.tile_of(64, 28672, 132)
    assert products.tile_of(17, 6144, 132) is products.tile_of(65, 28672, 132) is products.tile_of(0, 64, 132) is None


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 64, 65])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (4096, 4096), (14336, 4096), (256, 64), (4096, 28672)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_overlapping_products_on_a_gpu(rows, inputs, outputs, dtype):
    weight = torch.randn(outputs, inputs, device=GPU, dtype=dtype) * inputs**-0.5
    layer = nn.Sequential(nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=GPU))
    layer[0].weight.copy_(weight)
    assert use_overlapping_products(layer) == 1
    for _ in range(3):
        x = torch.randn(2, rows, 2 * inputs, device=GPU, dtype=dtype)[0, :, :inputs]
        want = (x.double() @ weight.double().T).to(dtype)
        torch.testing.assert_close(layer(x), want, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
def test_transformers_models(name):
    transformers = pytest.importorskip("transformers", reason="transformers is the extra 'hf'")
    sizes = dict(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16
    )
    config = getattr(transformers, f"{name}Config")(**sizes, num_key_value_heads=2)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    ids = torch.randint(64, (2, 9))
    want = model(ids).logits
    assert fuse_projections(model) == 2 * 3
    torch.testing.assert_close(model(ids).logits, want)


@pytest.mark.slow
def test_paged_and_compiled():
    transformers = pytest.importorskip("transformers", reason="transformers is the extra 'hf'")
    from paged_ops.generation import GenerationLoop, SamplingParams
    from paged_ops.integrations.transformers import PagedCausalLM

    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_key_value_heads=2, head_dim=16, initializer_range=0.2, eos_token_id=None)
    ).eval()
    prompts = [[1, 2, 3, 4, 5], [7, 8], [9] * 11]

    def tokens(compile):
        paged = PagedCausalLM(model)
        loop = GenerationLoop(paged, paged.allocate_kv_cache(32), compile=compile)
        return loop.generate(prompts, SamplingParams(max_new_tokens=10))

    want = tokens(compile=False)
    fuse_projections(model)
    assert tokens(compile=False) == want
    with CompileReport() as report:
        assert tokens(compile=True) == want
    assert report.graphs == 1 and report.recompiles == 0, report.recompile_reasons
    assert len(re.findall(r"extern_kernels\.(?:add)?mm\(", report.code[0])) == 2 * 4 + 1


def test_projections_need_no_transformers():
    code = """
import sys
sys.modules["transformers"] = None
from paged_ops.integrations.transformers.projections import fuse_projections
from paged_ops.integrations.transformers import projections, all_reduce_fusion
try:
    from paged_ops.integrations.transformers import PagedCausalLM
except ModuleNotFoundError as error:
    assert error.name == "transformers"
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("change", [fuse_projections, split_projections, use_overlapping_products])
def test_a_wrapped_model_is_no_module(change):
    class PagedCausalLM:
        """As the one that wraps a model: it has no modules."""

    with pytest.raises(ValueError, match=r"^model: expected a model of .*; of a PagedCausalLM its \.model, got Paged"):
        change(PagedCausalLM())


def test_the_overlapping_kernel_says_that_it_needs_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "paged_ops.lowerings.gpu.linear", None)
    with pytest.raises(
        ImportError, match=r"^use_overlapping_products: expected Triton, .* \(the extra gpu\), got none"
    ):
        use_overlapping_products(nn.Linear(4, 4))
