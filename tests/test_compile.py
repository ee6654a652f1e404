"""The ops inside torch.compile, torch.export and AOTInductor: equal to eager, no graph break, no copy, no recompile."""

import functools
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

import paged_ops
from paged_ops import layouts, testing
from paged_ops.inspection import CompileReport
from paged_ops.registry import OPS
from tests.helpers.cache_forms import (
    B,
    D,
    H,
    K,
    N,
    T,
    arena_inside,
    arena_slices_as_list,
    cache,
    decode_batch,
    hnd_view,
    list_of_caches,
    next_layer,
    one_argument,
    out_overload,
    separate_storages,
    sliced_inside,
    split_inside,
    step,
    unbound_inside,
)

COMPILED = [(name, testing.case_named(name, case)) for name, cases in testing.COMPILED.items() for case in cases]
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    # Graphs are small: a pool of compilers in each of the test processes would cost more than it saves.
    with torch.no_grad(), inductor_config.patch(compile_threads=1):
        yield


def compile_(function, dynamic=None):
    return torch.compile(function, fullgraph=True, dynamic=dynamic)


def tensor_arguments(inputs):
    """A call as a function of its tensors (and lists of them), as a model would make it."""
    tensors = {n: v for n, v in enumerate(inputs.args) if isinstance(v, (torch.Tensor, list))}
    named = {name: v for name, v in inputs.kwargs.items() if isinstance(v, torch.Tensor)}
    fixed = {name: v for name, v in inputs.kwargs.items() if name not in named}

    def call(op, tensors, named):
        args = [tensors.get(n, value) for n, value in enumerate(inputs.args)]
        return op(*args, **named, **fixed)

    return call, tensors, named


@pytest.mark.parametrize(
    ("name", "case", "dynamic"),
    [
        *(pytest.param(*each, True, id=f"{each[0]}-{each[1].name}-dynamic") for each in COMPILED),
        # of each op, one case with the sizes as constants
        *(pytest.param(*each, False, id=f"{each[0]}-{each[1].name}-static") for each in dict(COMPILED).items()),
    ],
)
def test_compiled_equals_eager(name, case, dynamic, device):
    inputs = case.inputs(device)
    before = testing.clone_inputs(inputs)
    call, tensors, named = tensor_arguments(inputs)
    with CompileReport() as report:
        results = compile_(functools.partial(call, OPS[name]), dynamic)(tensors, named)
    testing.assert_result(name, inputs, before, results)
    assert report.graph_breaks == report.cache_copies == 0, report.copies
    eager = testing.clone_inputs(before)
    for got, want in zip(flat(results), flat(OPS[name](*eager.args, **eager.kwargs)), strict=True):
        testing.assert_same_bytes(name, got, want)


def flat(results):
    return [] if results is None else [results] if isinstance(results, torch.Tensor) else list(results)


# How a cache can reach a graph ---------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Holds its cache; ``how`` says in which way."""

    def __init__(self, how, device):
        super().__init__()
        if how == "buffer":
            self.register_buffer("kv", cache(device=device))
        elif how == "attribute":
            self.kv = cache(device=device)
        else:
            self.kv = [cache(device=device)]

    def forward(self, *batch):
        qkv, *rest = batch
        return step(qkv, self.kv[0] if isinstance(self.kv, list) else self.kv, *rest)


def joined_inside(device):
    """Values of another head size: one tensor, split inside."""
    Dv = D // 2

    def function(kv, qkv, tables, lens, starts, slots):
        query, key, value = qkv.split([H, K, K], dim=1)
        key_cache, value_cache = paged_ops.layouts.split_joined_cache(kv, D)
        paged_ops.reshape_and_cache(key, value[..., :Dv], key_cache, slots, value_cache=value_cache)
        return paged_ops.paged_attention(query, key_cache, tables, lens, starts, D**-0.5, value_cache=value_cache)

    shape = layouts.kv_cache_shape("NHD", N, B, K, D, value_head_size=Dv)
    return function, (torch.randn(shape, device=device),)


def joined_hnd_inside(device):
    function, _ = joined_inside(device)
    return function, (layouts.allocate_kv_cache("HND", N, B, K, D, torch.float32, device, value_head_size=D // 2),)


def joined_layers_inside(device):
    layer, caches = joined_inside(device)

    def function(layers, qkv, *rest):
        for kv in layers:
            out = layer(kv, qkv, *rest)
            qkv = next_layer(qkv, torch.cat([out, out], dim=-1))
        return qkv

    return function, ([each.clone() for each in caches * 3],)


def module_buffer(device):
    return Layer("buffer", device), ()


def module_attribute(device):
    return Layer("attribute", device), ()


def module_list(device):
    return Layer("list", device), ()


def uint8_with_dtype_name(device):
    def function(kv, qkv, tables, lens, starts, slots):
        query, key, value = qkv.split([H, K, K], dim=1)
        paged_ops.reshape_and_cache(key, value, kv, slots, kv_cache_dtype="fp8")
        return paged_ops.paged_attention(query, kv, tables, lens, starts, D**-0.5, kv_cache_dtype="fp8")

    return function, (torch.zeros(N, 2, B, K, D, dtype=torch.uint8, device=device),)


def latents(device):
    def function(kv, qkv, tables, lens, starts, slots):
        paged_ops.latent_cache_write(qkv[:, H, :24], qkv[:, H, 24:], kv, slots)
        out = paged_ops.paged_attention(qkv[:, :H], kv, tables, lens, starts, D**-0.5, value_head_size=24)
        paged_ops.latent_cache_write(out[:, 0], qkv[:, H, 24:], kv, slots)  # as a second layer would
        return paged_ops.paged_attention(qkv[:, :H], kv, tables, lens, starts, D**-0.5, value_head_size=24)

    return function, (torch.randn(N, B, D, device=device),)


def attend_to_rows(qkv, kv, tables, lens, starts, slots):
    """Write and attend to latent rows that hold their scales."""
    rows, latent = {"kv_cache_dtype": "fp8_ds_mla"}, qkv[:, H]
    paged_ops.latent_cache_write(latent.repeat(1, 512 // D), latent.repeat(1, 64 // D), kv, slots, **rows)
    query = qkv[:, :H].repeat(1, 1, 576 // D)
    return paged_ops.paged_attention(query, kv, tables, lens, starts, 0.04, value_head_size=512, **rows)


def latent_rows(device):
    def function(kv, *batch):
        attend_to_rows(batch[0], kv, *batch[1:])
        return attend_to_rows(batch[0] * 2, kv, *batch[1:])

    return function, (torch.zeros(N, B, 656, dtype=torch.uint8, device=device),)


def select_and_attend(qkv, kv, index, tables, lens, starts, slots):
    """A layer with an indexer, which has the blocks of the latents and a scale per token."""
    row, format_ = qkv[:, H], {"kv_cache_dtype": "fp8_ds_index"}
    key = row.repeat(1, 128 // D)
    paged_ops.latent_cache_write(row[:, :24], row[:, 24:], kv, slots)
    paged_ops.latent_cache_write(key, key[:, :0], index, slots, **format_)
    index_query = qkv[:, :H].repeat(1, 1, 128 // D)
    selected = paged_ops.select_keys(index_query, index, tables, lens, starts, 3, relu=True, **format_)
    return paged_ops.paged_attention(
        qkv[:, :H], kv, tables, lens, starts, 0.2, value_head_size=24, selected_keys=selected
    )


def indexed_latents(device):
    def function(kv, index, qkv, *batch):
        out = select_and_attend(qkv, kv, index, *batch)
        return out + select_and_attend(qkv * 2, kv, index, *batch)  # as a second layer would

    return function, (torch.randn(N, B, D, device=device), torch.zeros(N, B, 132, dtype=torch.uint8, device=device))


def copy_of_all_layers(device):
    def function(layers, mapping, qkv, *rest):
        paged_ops.copy_blocks(layers, mapping)
        return step(qkv, layers[0], *rest)

    mapping = torch.tensor([[0, 40], [1, 41]], device=device)
    return function, ([cache(device=device) for _ in range(3)], mapping)


# Results that are first used when their cache was written again: inductor would move the reads behind these writes.


def write_before_use(device):
    def function(kv, qkv, tables, lens, starts, slots):
        query, key, value = qkv.split([H, K, K], dim=1)
        out = paged_ops.paged_attention(query, kv, tables, lens, starts, D**-0.5)
        paged_ops.reshape_and_cache(key, value, kv, slots)
        return out + 1

    return function, (cache(device=device),)


def copy_and_swap_before_use(device):
    def function(layers, mapping, on_cpu, qkv, tables, lens, starts, slots):
        outs = [paged_ops.paged_attention(qkv[:, :H], kv, tables, lens, starts, D**-0.5) for kv in layers]
        paged_ops.copy_blocks(layers, mapping)
        paged_ops.swap_blocks(layers[:1], layers[1:], on_cpu)
        return outs[0] + outs[1]

    mapping = torch.tensor([[0, 40], [1, 41]])
    return function, ([cache(device=device) for _ in range(2)], mapping.to(device), mapping)


def cascade_before_write(device):
    def function(kv, qkv, tables, lens, starts, slots):
        query, key, value = qkv.split([H, K, K], dim=1)
        prefix = tables[:1, :1], torch.full_like(lens[:1], B)
        out = paged_ops.cascade_attention(query, kv, *prefix, tables, lens, starts, D**-0.5)
        paged_ops.reshape_and_cache(key, value, kv, slots)
        return out + 1

    return function, (cache(device=device),)


def sum_of_two_steps(device):
    return (lambda kv, qkv, *rest: step(qkv, kv, *rest) + step(qkv * 2, kv, *rest)), (cache(device=device),)


def sum_over_an_arena(device):
    def function(arena, qkv, *rest):
        return step(qkv, arena[0], *rest) + step(qkv * 2, arena[1], *rest)

    return function, (cache(2, device=device),)


def sum_over_unbound_planes(device):
    layer, caches = unbound_inside(device)
    return (lambda kv, qkv, *rest: layer(kv, qkv, *rest) + layer(kv, qkv * 2, *rest)), caches


WITHOUT_COPY = [
    one_argument,
    hnd_view,
    sliced_inside,
    unbound_inside,
    split_inside,
    joined_inside,
    joined_hnd_inside,
    joined_layers_inside,
    arena_inside,
    arena_slices_as_list,
    list_of_caches,
    separate_storages,
    module_buffer,
    module_attribute,
    module_list,
    uint8_with_dtype_name,
    latents,
    latent_rows,
    indexed_latents,
    out_overload,
    copy_of_all_layers,
    write_before_use,
    copy_and_swap_before_use,
    cascade_before_write,
    sum_of_two_steps,
    pytest.param(sum_over_an_arena, marks=pytest.mark.slow),
    sum_over_unbound_planes,
]


def tensors_of(caches):
    return [t for each in caches for t in (each if isinstance(each, list) else [each])]


def clone_all(caches):
    return [[t.clone() for t in each] if isinstance(each, list) else each.clone() for each in caches]


@pytest.mark.parametrize("way", WITHOUT_COPY, ids=lambda way: way.__name__)
def test_no_cache_copy(way, device):
    function, caches = way(device)
    batch = decode_batch(device=device)
    sized = [t for t in tensors_of(caches) if t.numel() > T * H * D] or [cache(device=device)]
    eager_caches = clone_all(caches)
    with CompileReport(caches=sized) as report:
        compiled = compile_(function)(*caches, *batch)
    assert report.graphs == 1
    assert report.graph_breaks == report.recompiles == report.cache_copies == 0, report.copies
    # Modules hold their cache: the same tokens written once more change nothing.
    eager = function(*eager_caches, *batch)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)
    for got, want in zip(tensors_of(caches), tensors_of(eager_caches), strict=True):
        testing.assert_same_bytes("cache", got, want)


def two_slices_as_inputs(device):
    planes = torch.randn(2, N, B, K, D, device=device)

    def function(key_cache, value_cache, qkv, *rest):
        return step(qkv, key_cache, *rest, value_cache=value_cache)

    return function, (planes[0], planes[1])


@pytest.mark.slow
def test_the_lint_catches_copies(device):
    function, caches = two_slices_as_inputs(device)
    with CompileReport(caches=caches) as report:
        compile_(function)(*caches, *decode_batch(device=device))
    assert report.cache_copies > 0


@pytest.mark.slow
def test_the_lint_catches_the_pass_of_a_dtype_view(device):
    """A view of another dtype that is made and written inside costs a pass over the cache; made outside it is free."""
    batch, storage = decode_batch(device=device), torch.zeros(N, 2, B, K, D, dtype=torch.uint8, device=device)

    def copies(view_inside):
        def function(kv, qkv, *rest):
            return step(qkv, kv.view(torch.float8_e4m3fn) if view_inside else kv, *rest)

        torch._dynamo.reset()
        kv = storage.clone()
        given = kv if view_inside else kv.view(torch.float8_e4m3fn)
        with CompileReport(caches=[given]) as report:
            compile_(function)(given, *batch)
        assert kv.any()
        return report.cache_copies

    assert copies(view_inside=False) == 0
    if TORCH >= (2, 10):
        assert copies(view_inside=True) > 0
    else:  # the dtype is lost
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="got a uint8 tensor"):
            copies(view_inside=True)


# Branches and loops --------------------------------------------------------------------------------------------------


def in_a_branch(kv, query, key, tables, lens, starts, slots):
    def write(query, kv, key, tables, lens, starts, slots):
        paged_ops.reshape_and_cache(key, key, kv, slots)
        return paged_ops.paged_attention(query, kv, tables, lens, starts, D**-0.5) * 1.0

    def rest(query, kv, key, tables, lens, starts, slots):
        return query * 2.0

    return torch.cond(lens[0] > 3, write, rest, (query, kv, key, tables, lens, starts, slots))


def in_a_loop(kv, query, key, tables, lens, starts, slots):
    def body(i, out):
        paged_ops.reshape_and_cache(key, key, kv, slots)
        return i + 1, out + paged_ops.paged_attention(query, kv, tables, lens, starts, D**-0.5)

    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda i, out: i < 2, body, (torch.zeros((), dtype=torch.int64), torch.zeros_like(query)))[1]


NOT_SINCE_2_14 = pytest.mark.skipif(TORCH >= (2, 14), reason="torch 2.14 takes some of these loops, and may not end")


@pytest.mark.parametrize("function", [in_a_branch, pytest.param(in_a_loop, marks=NOT_SINCE_2_14)])
def test_a_write_in_a_branch_or_a_loop_is_never_lost(function):
    qkv, *batch = decode_batch()
    query, key, _ = (each.contiguous() for each in qkv.split([H, K, K], dim=1))
    kv = cache()
    before, eager = kv.clone(), kv.clone()
    if TORCH >= (2, 13):  # torch.cond of torch 2.11 refuses writes in eager mode, too
        want = function(eager, query, key, *batch)
        assert not torch.equal(before, eager)
    if TORCH >= (2, 14):
        torch.testing.assert_close(compile_(function)(kv, query, key, *batch), want)
        assert torch.equal(kv, eager)
    else:
        with pytest.raises(Exception, match=r"mutation|modifying the input|alias annotations"):
            compile_(function)(kv, query, key, *batch)
        assert torch.equal(kv, before)


# Recompiles ----------------------------------------------------------------------------------------------------------


def test_one_graph_for_all_batch_sizes(device):
    """mark_unbacked: batches of 0, 1, 2, 7, 19 tokens, any context, any width of the block tables: one graph."""
    kv = cache(device=device)
    compiled = compile_(step)
    with CompileReport(caches=[kv]) as report:
        for tokens, length in ((7, 20), (0, 1), (1, 1), (2, 31), (19, 17), (7, 32)):
            qkv, tables, lens, starts, slots = decode_batch(tokens, length, device)
            if tokens == 1:
                tables = torch.cat([tables, torch.full_like(tables, 99)], 1)
            for tensor in (qkv, lens, starts, slots):
                torch._dynamo.decorators.mark_unbacked(tensor, 0)
            for dim in (0, 1):
                torch._dynamo.decorators.mark_unbacked(tables, dim)
            expected = step(qkv, kv.clone(), tables, lens, starts, slots)
            torch.testing.assert_close(compiled(qkv, kv, tables, lens, starts, slots), expected, rtol=0, atol=0)
    assert report.graphs == 1, report.recompile_reasons
    assert report.recompiles == report.graph_breaks == report.cache_copies == 0, report.copies


def test_mark_dynamic_recompiles_for_no_size(device):
    kv = cache(device=device)
    compiled = compile_(step)
    with CompileReport(caches=[kv]) as report:
        for tokens, length in ((7, 20), (2, 31), (19, 17), (3, 5)):
            qkv, *rest = decode_batch(tokens, length, device)
            for tensor in (qkv, *rest):
                torch._dynamo.mark_dynamic(tensor, 0)
            compiled(qkv, kv, *rest)
    assert report.graphs == 1, report.recompile_reasons
    assert report.recompiles == 0


def test_no_recompile_from_layer_to_layer(device):
    """One graph serves layers that differ in their cache only."""
    compiled = compile_(step)
    batch = decode_batch(device=device)
    with CompileReport() as report:
        for _ in range(4):
            compiled(batch[0], cache(device=device), *batch[1:])
    assert report.graphs == 1, report.recompile_reasons


@pytest.mark.slow
def test_scale_is_a_constant_of_the_graph(device):
    """Each new scale compiles again; a factor of the query, as a tensor, does not."""
    qkv, *batch = decode_batch(device=device)
    kv = cache(device=device)

    def function(scale, factor, qkv, tables, lens, starts, slots):
        return paged_ops.paged_attention(qkv[:, :H] * factor, kv, tables, lens, starts, scale)

    compiled = compile_(function)
    results = []
    for scales, factors in (((0.1, 0.2), (1.0, 1.0)), ((0.1, 0.1), (1.0, 2.0))):
        with CompileReport() as report:
            for scale, factor in zip(scales, factors, strict=True):
                results.append(compiled(scale, torch.tensor(factor, device=device), qkv, *batch))
        assert report.recompiles == (1 if scales[0] != scales[1] else 0), report.recompile_reasons
    torch.testing.assert_close(results[3], results[1])


def test_symbolic_integers(device):
    """A window, a chunk and a capacity that vary from call to call become symbols, not new graphs."""
    case = testing.case_named("paged_attention", "decode-fp32")
    inputs = case.inputs(device)

    def function(window, chunk, capacity, query, kv, tables, lens, starts):
        out = paged_ops.paged_attention(
            query, kv, tables, lens, starts, 0.125, sliding_window=window, attention_chunk=chunk
        )
        return out, paged_ops.gather_kv(kv, tables, lens, capacity)[0]

    compiled = compile_(function, dynamic=True)
    with CompileReport() as report:
        for window, chunk, capacity in ((5, 64, 300), (9, 32, 70), (33, 100, 11)):
            got = compiled(window, chunk, capacity, *inputs.args[:5])
            want = function(window, chunk, capacity, *inputs.args[:5])
            torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert report.graphs == 1, report.recompile_reasons


def test_block_sparse_made_inside(device):
    inputs = testing.case_named("paged_attention", "decode-fp32").inputs(device)

    def function(local_blocks, *args):
        return paged_ops.paged_attention(*args, 0.125, block_sparse=paged_ops.BlockSparse(16, local_blocks, 3, True))

    compiled = compile_(function, dynamic=True)
    for local_blocks in (1, 2):
        args = (local_blocks, *inputs.args[:5])
        torch.testing.assert_close(compiled(*args), function(*args), rtol=0, atol=0)


# Export and ahead-of-time --------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """Two layers over their own caches: embeds, writes, attends, projects."""

    def __init__(self, layout="NHD", **features):
        super().__init__()
        self.qkv = nn.Linear(H * D, (H + 2 * K) * D)
        self.features = features
        self.layout = layout
        for layer in range(2):
            shape = layouts.kv_cache_shape(layout, N, B, K, D)
            self.register_buffer(f"kv{layer}", torch.zeros(shape))

    def forward(self, hidden, tables, lens, starts, slots):
        for storage in (self.kv0, self.kv1):
            query, key, value = self.qkv(hidden).view(-1, H + 2 * K, D).split([H, K, K], dim=1)
            if self.layout == "X_PACKED":
                kv, value_cache = paged_ops.layouts.split_kv_cache(storage, K, D)
            else:
                kv, value_cache = layouts.kv_cache_view(self.layout, storage), None
            paged_ops.reshape_and_cache(key, value, kv, slots, value_cache=value_cache)
            scale = D**-0.5
            out = paged_ops.paged_attention(
                query, kv, tables, lens, starts, scale, value_cache=value_cache, **self.features
            )
            hidden = hidden + out.flatten(1)
        return hidden


def decoder_and_batch(layout="NHD", **features):
    torch.manual_seed(0)
    _, *batch = decode_batch()
    return Decoder(layout, **features).eval(), (torch.randn(T, H * D), *batch)


# What a process that imports only torch and paged_ops does with a saved program.
RUN_ELSEWHERE = """
import sys, torch, paged_ops
assert not {"transformers", "triton", "jax"} & set(sys.modules), "only torch and paged_ops"
kind, program, data = sys.argv[1:]
batch, expected = torch.load(data)
if kind == "export":
    run = torch.export.load(program).module()
else:
    import torch._inductor.codecache  # torch 2.10 uses it to load a package, and does not import it
    run = torch._inductor.aoti_load_package(program)
for _ in range(2):  # the second time the tokens are in the cache already
    torch.testing.assert_close(run(*batch), expected, rtol=1e-5, atol=1e-5)
bigger = [torch.cat([t, t[-1:]]) for t in batch[:3]]
starts, slots = torch.arange(len(bigger[0]) + 1, dtype=torch.int32), torch.cat([batch[4], batch[4].new_full((1,), -1)])
out = run(*bigger, starts, slots)
torch.testing.assert_close(out[:-1], expected, rtol=1e-5, atol=1e-5)
print("ran", kind)
"""


def run_elsewhere(kind, program, tmp_path, batch, expected):
    data = tmp_path / "data.pt"
    torch.save((batch, expected), data)
    command = [sys.executable, "-X", "faulthandler", "-c", RUN_ELSEWHERE, kind, str(program), str(data)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"ran {kind}"


def exported(model, batch):
    tokens = torch.export.Dim("tokens", min=2, max=512)
    shapes = ({0: tokens}, {0: tokens}, {0: tokens}, {0: tokens + 1}, {0: tokens})
    return torch.export.export(model, batch, dynamic_shapes=shapes, strict=False)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_export_keeps_the_ops(strict):
    model, batch = decoder_and_batch()
    program = torch.export.export(model, batch, strict=strict)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("paged_ops.reshape_and_cache.default") == 2
    assert targets.count("paged_ops.paged_attention.default") == 2


def test_export_of_latents():
    class Latents(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kv", torch.zeros(N, B, D))

        def forward(self, qkv, tables, lens, starts, slots):
            paged_ops.latent_cache_write(qkv[:, H, :24], qkv[:, H, 24:], self.kv, slots)
            return paged_ops.paged_attention(qkv[:, :H], self.kv, tables, lens, starts, 0.2, value_head_size=24)

    model, batch = Latents(), decode_batch()
    program = exported(model, batch)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("paged_ops.latent_cache_write.default") == 1
    torch.testing.assert_close(program.module()(*batch), model(*batch), rtol=0, atol=0)
    bigger = decode_batch(tokens=9)
    torch.testing.assert_close(program.module()(*bigger), model(*bigger), rtol=0, atol=0)


def test_export_of_latent_rows():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kv", torch.zeros(N, B, 656, dtype=torch.uint8))

        def forward(self, qkv, tables, lens, starts, slots):
            return attend_to_rows(qkv, self.kv, tables, lens, starts, slots)

    model = Rows()
    program = exported(model, decode_batch())
    for batch in (decode_batch(), decode_batch(tokens=9)):
        torch.testing.assert_close(program.module()(*batch), model(*batch), rtol=0, atol=0)


@pytest.mark.slow
def test_export_of_an_indexer():
    class Indexed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kv", torch.zeros(N, B, D))
            self.register_buffer("index", torch.zeros(N, B, 132, dtype=torch.uint8))

        def forward(self, qkv, tables, lens, starts, slots):
            return select_and_attend(qkv, self.kv, self.index, tables, lens, starts, slots)

    model = Indexed()
    program = exported(model, decode_batch())
    for batch in (decode_batch(), decode_batch(tokens=9)):
        torch.testing.assert_close(program.module()(*batch), model(*batch), rtol=0, atol=0)


def test_export_saved_and_loaded_elsewhere(tmp_path):
    model, batch = decoder_and_batch()
    program = exported(model, batch)
    expected = model(*batch)
    torch.export.save(program, tmp_path / "decoder.pt2")
    run_elsewhere("export", tmp_path / "decoder.pt2", tmp_path, batch, expected)


@pytest.mark.slow
def test_aot_inductor_package_elsewhere(tmp_path):
    sparse = paged_ops.BlockSparse(16, 1, 2)
    model, batch = decoder_and_batch("X_PACKED", block_sparse=sparse)
    expected = Decoder.forward(model, *batch)
    for kv in model.buffers():
        kv.zero_()
    package = tmp_path / "decoder.pt2"
    torch._inductor.aoti_compile_and_package(exported(model, batch), package_path=str(package))
    run_elsewhere("aoti", package, tmp_path, batch, expected)


def _copy(arena):
    paged_ops.copy_blocks([arena[1]], torch.tensor([[0, 1]]))


def _swap(arena):
    paged_ops.swap_blocks([arena[0]], [arena[1]], torch.tensor([[0, 1]]))


def _gather(arena):
    kv_cache = arena[0].view(arena.shape[1], 2, 4, 1, 8)
    tables, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    rows = arena.shape[1] * 8
    key, value = arena[1].view(rows, 1, 8), arena[2].view(rows, 1, 8)
    torch.ops.paged_ops.gather_kv.out(kv_cache, tables, lens, rows, key=key, value=value)


@pytest.mark.parametrize(
    ("write", "argument"), [(_copy, r"kv_caches\[0\]"), (_swap, r"dst_caches\[0\]"), (_gather, "key")]
)
def test_every_op_refuses_to_write_a_slice_at_an_open_place(write, argument):
    arena = torch.zeros(3, 5, 64)
    torch._dynamo.mark_dynamic(arena, 1)
    with pytest.raises(RuntimeError, match=rf"{argument}: expected .* got a slice at element \d*\*?s"):
        torch.compile(write, fullgraph=True)(arena)


def test_a_written_slice_at_an_open_place_is_refused():
    """Inductor would write it to the start of what it is cut from: values of an x-packed cache among its keys."""

    def write(rows, flat, slots):
        key_cache, value_cache = paged_ops.layouts.split_kv_cache(flat, 1, 8)
        paged_ops.reshape_and_cache(rows, rows, key_cache, slots, value_cache=value_cache)

    rows, slots = torch.ones(2, 1, 8), torch.tensor([0, 1])
    compiled = torch.compile(write, fullgraph=True)
    flat = torch.zeros(2, 5, 32)
    compiled(rows, flat, slots)
    assert flat.sum((1, 2)).tolist() == [16, 16]
    with pytest.raises(RuntimeError, match=r"value_cache: expected .* got a slice at element 32\*s"):
        compiled(rows, torch.zeros(2, 7, 32), slots)  # another number of blocks opens that size

    part = torch.zeros(3, 5, 2, 4, 1, 8)
    plain = torch.compile(paged_ops.reshape_and_cache, fullgraph=True, dynamic=True)
    plain(rows, rows, part[1], slots)  # an input may begin anywhere
    assert part.sum((1, 2, 3, 4, 5)).tolist() == [0, 32, 0]
