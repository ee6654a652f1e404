"""Index keys of windows of tokens (Qwen4), next to layers that keep state and the ids of the last tokens."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.gpu import GPU

transformers = pytest.importorskip("transformers", reason="transformers is the extra 'hf'")

from paged_ops import AttentionMetadataBuilder, Batch  # noqa: E402
from paged_ops.generation import GenerationLoop  # noqa: E402
from paged_ops.integrations.transformers import PagedCausalLM, index_windows  # noqa: E402
from paged_ops.integrations.transformers.probe import Index  # noqa: E402
from tests.integrations.transformers.indexed_models import GREEDY, generate_by_transformers, prompts  # noqa: E402
from tests.integrations.transformers.model_families import make_model  # noqa: E402

FAMILY = "qwen4_exp_text"
EOS = 17  # of prompts, too: the n-grams of a token do not reach over it


def model_of(num_layers: int = 4, **changes: Any) -> Any:
    """Layers with states, ids of tokens and an indexer, with prompts 8 times longer than what is selected."""
    kinds = ["linear_attention", "indexed_attention"] * (num_layers // 2)
    places: dict[str, Any] = dict(ple_layer_ids=[1, 3][: num_layers // 2], eos_token_id=EOS)
    model: Any = make_model(FAMILY, num_hidden_layers=num_layers, layer_types=kinds, **{**places, **changes})
    model.generation_config.eos_token_id = None
    for module in model.modules():
        if type(module).__name__ == "Qwen4ExpTextPLELayer":  # random models have zeros
            torch.nn.init.normal_(module.conv1d.weight, std=0.3)
    return model


@functools.cache
def expected() -> list[list[int]]:
    return generate_by_transformers(model_of())


def loop_of(paged: PagedCausalLM, **options: Any) -> GenerationLoop:
    kv_cache = paged.allocate_kv_cache(28, 4, num_host_blocks=64, num_state_slots=8)
    return GenerationLoop(paged, kv_cache, max_num_seqs=8, max_num_tokens=24, **options)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_tokens_equal_generate() -> None:
    assert any(EOS in prompt for prompt in prompts())
    paged = PagedCausalLM(model_of())
    assert paged.states is not None
    assert [(layer.name.split(".", 3)[3], layer.continues) for layer in paged.states.layers] == [
        ("ple", True),
        ("linear_attn", True),
    ] * 2
    assert [spec.dtype for spec in paged.states.layers[0].specs] == [torch.float32, torch.int64]
    loop = loop_of(paged)
    assert loop.generate(prompts(), GREEDY) == expected()
    assert loop.stats.swapped_out > 0


def test_tokens_differ_when_ids_are_forgotten() -> None:
    paged = PagedCausalLM(model_of())
    assert paged.states is not None
    call = type(paged.states.layers[0])._call

    def forgetting(self: Any, args: Any, kwargs: Any, step: Any, rows: Any, tensors: Any) -> Any:
        for tensor in tensors:
            if not tensor.is_floating_point():
                tensor.fill_(3)
        return call(self, args, kwargs, step, rows, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(paged.states.layers[0]), "_call", forgetting)
        assert loop_of(paged).generate(prompts(), GREEDY) != expected()


@pytest.mark.slow
def test_compiled_layers() -> None:
    paged = PagedCausalLM(model := model_of(2)).compile_layers(backend="eager")
    loop = loop_of(paged)
    loop.warm_up()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    texts = loop.generate(prompts(), GREEDY)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before, "no recompiles after the warm-up"
    paged.unwrap()
    assert texts == generate_by_transformers(model)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["eager", "layers"])
def test_tokens_equal_generate_in_cuda_graphs(how: str) -> None:
    torch.set_float32_matmul_precision("highest")
    model = model_of().to(GPU)
    model.set_experts_implementation("batched_mm")
    paged = PagedCausalLM(model)
    if how == "layers":
        paged.compile_layers()
    loop = loop_of(paged, graph_mode="FULL_DECODE_ONLY")
    assert loop.generate(prompts(), GREEDY) == expected()
    assert loop.graph_stats.replayed > 0


def test_blocks_without_whole_windows_are_refused() -> None:
    paged = PagedCausalLM(model_of(2))
    loop = GenerationLoop(paged, paged.allocate_kv_cache(22, 6), max_num_seqs=8, max_num_tokens=24)
    with pytest.raises(ValueError, match="block_size: expected a multiple of 4, as an indexer scores windows of 4"):
        loop.generate(prompts()[:1], GREEDY)


def test_blocks_of_the_default_size_have_whole_windows() -> None:
    paged = PagedCausalLM(model_of(2, indexer_budget=12, indexer_compress_ratio=3))
    layers = zip(paged.allocate_kv_cache(4).layers, paged.layers, strict=False)  # after them come states
    assert {layer.shape[1] for layer, spec in layers if not spec.value_head_size} == {48}


@pytest.mark.parametrize("r", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_windows_are_selected_as_over_one_sequence(r: int, device: str) -> None:
    """Sequences of several lengths, in chunks, with padding, against scores of all windows."""
    generator = torch.Generator().manual_seed(r)
    k, heads, Di, P, B = 3, 4, 16, 8, 12
    norm = torch.nn.LayerNorm(Di, elementwise_affine=False)

    def rotate(x: Any, *, cos: Any, sin: Any, unsqueeze_dim: int) -> Any:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        turned, rest = x.split([P, Di - P], -1)
        a, b = turned.chunk(2, -1)
        return torch.cat([turned * cos + torch.cat([-b, a], -1) * sin, rest], -1)

    indexer: Any = SimpleNamespace(compress_ratio=r, block_topk=k, k_layernorm=norm, paged_form=(rotate, False))
    lengths, chunks = (1, 40, 23, 12), ((1, 7, 5, 12), (0, 1, 18, 0), (0, 32, 0, 0))
    angles = torch.arange(40)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01]).repeat(2)
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    queries = [torch.randn(n, heads, Di, generator=generator).to(device) for n in lengths]
    keys = [torch.randn(n, Di, generator=generator).to(device) for n in lengths]
    tables = torch.randperm(20, generator=generator)[:16].view(4, 4).tolist()
    builder = AttentionMetadataBuilder(B, 5, 40, 4, device, num_blocks=20)
    cache, done, T = torch.full((20, B, Di), float("nan"), device=device), [0] * 4, 40
    for lens in chunks:
        metadata = builder.build(0, Batch(list(lens), list(done), tables), num_reqs=5, num_tokens=T)
        rows = [slice(at, at + n) for at, n in zip(done, lens, strict=True)]

        def of_step(whole: Any, rows: Any = rows) -> Any:
            there = torch.cat([each[row] for each, row in zip(whole, rows, strict=True)])
            return torch.cat([there, there.new_zeros(T - len(there), *there.shape[1:])])

        starts = (metadata.positions - (r - 1)).clamp(min=0)
        index = Index(of_step(queries), of_step(keys), None, (cos[starts], sin[starts]))
        selected = index_windows.select(indexer, index, cache, metadata.pool(0), metadata).tolist()
        row = 0
        for s, n in enumerate(lens):
            n_windows = lengths[s] // r
            means = keys[s][: n_windows * r].unflatten(0, (n_windows, r)).mean(1)
            firsts = torch.arange(n_windows, device=device) * r
            of_windows = dict(cos=cos[firsts][None], sin=sin[firsts][None], unsqueeze_dim=2)
            rotated = rotate(norm(means)[None, :, None], **of_windows)[0, :, 0]
            scored = torch.relu(queries[s] @ rotated.T).sum(1)
            for i in range(done[s], done[s] + n):
                complete = (i + 1) // r
                best = scored[i, :complete].topk(min(k, complete)).indices.sort().values.tolist()
                want = best + ([complete] if (i + 1) % r else [])
                assert selected[row] == [want + [-1] * (k + 1 - len(want))], (s, i)
                row += 1
            done[s] += n
