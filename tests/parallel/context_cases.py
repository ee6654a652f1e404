"""What each rank runs in the tests of context parallelism: tokens of every sequence spread over the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import paged_ops
from paged_ops import reference
from paged_ops.cache import KVCache
from paged_ops.generation import GenerationLoop
from paged_ops.integrations.transformers import PagedCausalLM
from paged_ops.integrations.transformers.projections import fuse_projections
from paged_ops.layouts import split_joined_cache
from paged_ops.metadata import AttentionMetadataBuilder, Batch
from paged_ops.parallel.context import Context, attend, attend_with_gathered_heads
from paged_ops.parallel.exchange import prepare
from paged_ops.testing.compare import assert_close
from tests.generation.toy import EMBED, GREEDY, POSITION, PROMPTS, TO_KEY, TO_LOGITS, TO_VALUE, B, D, H, K
from tests.parallel.loop_cases import LIMIT, stats_of
from tests.parallel.model_cases import load, make, texts_of

# Tokens of the step, and of the history, for each sequence. Blocks have 8 tokens, 4 or 2 on each rank.
BATCHES = {
    "decode": ([1, 1, 1, 1, 1], [0, 1, 8, 37, 100]),
    "speculative": ([3, 4, 2, 4], [0, 5, 30, 64]),
    "chunked prefill": ([9, 17, 5], [8, 3, 40]),
    "prefill": ([1, 8, 30], [0, 0, 0]),
    "mixed": ([1, 1, 0, 4, 20, 13], [50, 3, 6, 12, 0, 25]),
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "soft cap": {"soft_cap": 5.0},
    "sinks": {"sinks": True},
    "one head": {"heads": (4, 1)},
    "uneven heads": {"heads": (6, 3)},
    "HND": {"layout": "HND"},
    "other values": {"value_head_size": 24},
    "fp8": {"stored": torch.float8_e4m3fn},
    "fp8 output": {"output_scale": True},
    "latents": {"heads": (4, 1), "value_head_size": 8, "layout": "LATENT"},
    "fp8 latents": {"heads": (4, 1), "value_head_size": 8, "layout": "LATENT", "stored": torch.float8_e4m3fn},
    "latent rows": {
        "heads": (4, 1),
        "head_size": 576,
        "value_head_size": 512,
        "layout": "LATENT",
        "stored": torch.uint8,
        "kv_cache_dtype": "fp8_ds_mla",
    },
}
SIZE, BLOCK = 16, 8


def attends(rank: int, size: int, batch: str, form: str) -> bool:
    """One step, with NaN wherever a rank holds nothing, within the error budget of attention over the whole cache."""
    options = dict(FORMS[form])
    dtype, (heads, kv_heads) = options.pop("dtype", torch.float32), options.pop("heads", (4, 2))
    D = options.pop("head_size", SIZE)
    width = options.pop("value_head_size", D)
    query_lens, computed = BATCHES[batch]
    lens = [a + b for a, b in zip(query_lens, computed, strict=True)]
    torch.manual_seed(0)  # the same on all ranks
    keys, values = (torch.randn(sum(lens), kv_heads, n).to(dtype) for n in (D, width))
    stored = {"layout": options.pop("layout", None), "dtype": options.pop("stored", dtype), "value_head_size": width}
    scales: dict[str, Any] = {}
    is_latent = stored["layout"] == "LATENT"
    if name := options.pop("kv_cache_dtype", None):
        stored["kv_cache_dtype"] = scales["kv_cache_dtype"] = name
    elif is_latent and stored["dtype"].itemsize == 1:
        scales = {"k_scale": torch.tensor([0.02])}
    elif stored["dtype"].itemsize == 1:
        scales = {"k_scale": torch.tensor([0.02, 0.03]), "v_scale": torch.tensor([0.01])}
    context = Context(dist.group.WORLD, "cpu", head_size=width, dtype=dtype)
    whole = KVCache(1, 64, BLOCK, kv_heads, D, **stored)
    mine = KVCache(1, 64, BLOCK, kv_heads, D, **stored, shard=context.shard)
    most, ids = max(sum(lens), sum(query_lens) + 2), torch.randperm(64).tolist()
    blocks = [[ids.pop() for _ in range(-(-n // BLOCK))] for n in lens]
    steps, caches = [], []
    for cache in (whole, mine):
        view = cache.layers[0], None
        if width != D and not is_latent:
            view = split_joined_cache(cache.layers[0], D)
        if stored["dtype"].itemsize > 1:
            cache.layers[0].fill_(torch.nan)
        builder = AttentionMetadataBuilder(
            BLOCK, len(lens) + 1, most, 16, num_blocks=64, shards=[cache.shard], unused_block_id=63
        )
        slots = builder.build(0, Batch(lens, [0] * len(lens), blocks)).slot_mapping
        if is_latent:
            paged_ops.latent_cache_write(keys[:, 0, :width], keys[:, 0, width:], view[0], slots, **scales)
        else:
            paged_ops.reshape_and_cache(keys, values, view[0], slots, value_cache=view[1], **scales)
        sizes = dict(num_reqs=len(lens) + 1, num_tokens=sum(query_lens) + 2)  # with padding
        steps.append(builder.build(0, Batch(query_lens, computed, blocks), **sizes))
        caches.append({"value_head_size": width} if is_latent else {"value_cache": view[1]})
        caches[-1] |= scales
        caches[-1]["kv_cache"] = view[0]
    step, T = steps[0], sum(query_lens)
    query = torch.randn(T + 2, heads, D).to(dtype)
    values = keys[..., :width] if is_latent else values
    rows = [i for s, n in enumerate(lens) for i in range(sum(lens[:s]) + n - query_lens[s], sum(lens[:s]) + n)]
    own = [torch.cat([each[rows], torch.full((2, *each.shape[1:]), torch.nan, dtype=dtype)]) for each in (keys, values)]
    if is_latent:
        own = [own[0][:, 0], None]
    features: dict[str, Any] = {"soft_cap": options.get("soft_cap", 0.0)}
    if options.get("sinks"):
        features["sinks"] = torch.randn(heads)
    arguments = step.block_tables, step.seq_lens, step.query_start_loc, D**-0.5
    reads = caches[0].pop("kv_cache")
    given = {**features, **caches[0]}
    plain = reference.paged_attention(query, reads, *arguments, **given)
    truth = reference.paged_attention(query.double(), reads, *arguments, **given)
    if options.get("output_scale"):
        features["output_scale"] = torch.tensor([0.01])
    reads, tables, starts = caches[1].pop("kv_cache"), steps[1].block_tables, steps[1].query_start_loc
    got, general = (
        attend(query, *own, reads, tables, starts, D**-0.5, each, context.handle, **features, **caches[1])
        # the second is what a graph of mixed batches holds
        for each in (steps[1].context, builder.context_of(len(lens) + 1, T + 2, is_decode=False))
    )
    assert (steps[1].context.history_lens is None) == (batch == "decode")
    near = 0.13 if options.get("output_scale") else 0.02 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(general.float(), got.float(), atol=near, rtol=near)
    if options.get("output_scale"):
        assert got.dtype == torch.float8_e4m3fn
        limit = torch.tensor(448.0)
        expected = (truth / 0.01).clamp(-limit, limit).to(torch.float8_e4m3fn).float()
        torch.testing.assert_close(got.float(), expected, rtol=0.13, atol=0.5)
    else:
        assert_close("out", got, plain, truth, float(values.float().abs().max()))
        assert not got[T:].any()
    if rank == 0 and form == "plain":  # the tokens are indeed spread
        kept = mine.layers[0].isfinite().flatten(1).all(1).sum()
        assert kept < 64
    every = [torch.empty_like(got.view(torch.uint8)) for _ in range(size)]
    dist.all_gather(every, got.view(torch.uint8))
    return all(torch.equal(each, every[0]) for each in every)


class SpreadToy:
    """The toy model of tests/generation/test_loop.py, whole on each rank, over a cache that is spread."""

    def __init__(self) -> None:
        self.context = Context(dist.group.WORLD, "cpu", head_size=D, dtype=torch.float32)
        self.process_group = dist.group.WORLD
        self.fault: Any = None

    def __call__(self, input_ids, metadata, last_rows, kv_caches):
        hidden = EMBED[input_ids] + POSITION[metadata.positions]
        key, value = ((hidden @ each).view(-1, K, D) for each in (TO_KEY, TO_VALUE))
        paged_ops.reshape_and_cache(key, value, kv_caches[0], metadata.slot_mapping)
        batch = metadata.block_tables, metadata.query_start_loc, D**-0.5, metadata.context, self.context.handle
        out = attend(hidden.view(-1, H, D), key, value, kv_caches[0], *batch)
        return out.flatten(1)[last_rows] @ TO_LOGITS


def generates(rank: int, size: int, num_blocks: int = 128, num_host_blocks: int = 0, **options: Any) -> Any:
    toy = SpreadToy()
    cache = KVCache(1, num_blocks, B, K, D, num_host_blocks=num_host_blocks, shard=toy.context.shard)
    assert cache.layers[0].shape[2] == B // size
    with GenerationLoop(toy, cache, rank_time_limit=LIMIT, **options) as loop:
        outputs = loop.generate(PROMPTS, GREEDY)
        return [list(each) for each in outputs], stats_of(loop)


def advances(rank: int, size: int) -> Any:
    """Steps that follow without the host give what built ones give."""
    from paged_ops.metadata import advance_decodes

    context = Context(dist.group.WORLD, "cpu", head_size=D, dtype=torch.float32)
    builder = AttentionMetadataBuilder(8, 5, 5, 16, num_blocks=64, shards=[context.shard])
    blocks = [[5, 9, 7], [1, 2, 3], [30, 31, 32]]
    metadata = builder.build(0, Batch([1] * 3, [0, 6, 15], blocks), num_reqs=4, num_tokens=4, lookahead=5)
    for n in range(1, 6):
        advance_decodes(metadata, 8)
        got = [each.clone() for each in (metadata.slot_mapping, metadata.context.lens, metadata.seq_lens)]
        other = AttentionMetadataBuilder(8, 5, 5, 16, num_blocks=64, shards=[context.shard])
        want = other.build(0, Batch([1] * 3, [n, 6 + n, 15 + n], blocks), num_reqs=4, num_tokens=4)
        for a, b in zip(got, (want.slot_mapping, want.context.lens, want.seq_lens), strict=True):
            assert torch.equal(a, b), (n, a, b)
    return context.exchange.how


def many_rows(rank: int, size: int) -> bool:
    """Parts that are merged by rows, and heads that each rank has for itself."""
    from paged_ops.parallel import exchange

    exchange._MANY = 1
    merge = exchange.Exchange(exchange.ProcessGroup(dist.group.WORLD))
    torch.manual_seed(0)
    parts, lses = torch.randn(size, 7, 2 * size, 5), torch.randn(size, 7, 2 * size) * 3
    lses[0, 0], lses[:, 1], lses[1, 2] = -torch.inf, -torch.inf, torch.inf
    parts[0, 0], parts[1, 2] = torch.nan, torch.nan  # of no keys
    lse = torch.where(lses == torch.inf, -torch.inf, lses).double()
    weights = torch.exp(lse - lse.amax(0).clamp(min=-1e9))
    total = (weights[..., None] * torch.where(weights[..., None] == 0, 0, parts.double())).sum(0)
    truth = torch.where(weights.sum(0)[..., None] == 0, 0, total / weights.sum(0)[..., None])
    out, got = merge.everywhere(parts[rank], lses[rank])
    torch.testing.assert_close(out.double(), truth, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got.double(), torch.logsumexp(lse, 0), atol=1e-6, rtol=1e-6)
    own = slice(rank * 2, rank * 2 + 2)
    out, got = merge.of_own_heads(parts[rank], lses[rank])
    torch.testing.assert_close(out.double(), truth[:, own], atol=1e-6, rtol=1e-6)
    return True


def serves(rank: int, size: int, name: str, folder: str, how: str = "eager", tensor_parallel: int = 1) -> Any:
    """Texts of one process (rank 0 alone has them), and of all together."""
    path = make(name, folder, rank)
    device = torch.device("cuda", rank) if "captured" in how else torch.device("cpu")
    expected = texts_of(PagedCausalLM(load(path).to(device))) if rank == 0 else None
    dist.barrier()
    context: Any = dist.group.WORLD
    if tensor_parallel > 1:
        context = dist.init_device_mesh(
            device.type, (size // tensor_parallel, tensor_parallel), mesh_dim_names=("cp", "tp")
        )
        model = shard(load(path), context["tp"])
    else:
        model = load(path).to(device)
    if "layers" in how:
        context = Context(context, device, head_size=16, dtype=torch.float32, collectives=True)
    paged = PagedCausalLM(model, context=context)
    assert (paged.context is context) == ("layers" in how)
    if "fused" in how:
        fuse_projections(model)
    if "layers" in how:
        paged.compile_layers(backend="aot_eager")
    cache = paged.allocate_kv_cache(64, 8)
    options = dict(max_num_seqs=4, max_num_tokens=24, rank_time_limit=60.0)
    if "captured" in how:
        assert paged.context.exchange.how == "symmetric memory"
        options["graph_mode"] = "FULL_DECODE_ONLY"
    from tests.parallel.model_cases import GREEDY as EIGHT
    from tests.parallel.model_cases import TEXTS

    with GenerationLoop(paged, cache, **options) as loop:
        texts = [list(each) for each in loop.generate(TEXTS, EIGHT)]
    return expected, texts, [pool.shard.size for pool in cache.pools], paged.num_kv_heads


def replays(rank: int, size: int) -> int:
    """Graphs of odd and even numbers of exchanges, replayed in turn with other parts, on GPUs: how many were wrong."""
    context = Context(dist.group.WORLD, torch.device("cuda", rank), head_size=64, dtype=torch.float32)
    assert context.exchange.how == "symmetric memory"
    graphs, wrong = [], 0
    for T, calls in ((1, 65), (150, 4)):
        part, lse = torch.zeros(T, 8, 64, device=f"cuda:{rank}"), torch.zeros(T, 8, device=f"cuda:{rank}")
        context.exchange.everywhere(part, lse)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = [context.exchange.everywhere(part + n, lse)[0] for n in range(calls)]
        graphs.append((part, lse, graph, results))
    for n in range(100):
        part, lse, graph, results = graphs[n % 3 % 2]
        generator = torch.Generator().manual_seed(n)
        parts, lses = (
            torch.randn(size, *part.shape, generator=generator),
            torch.randn(size, *lse.shape, generator=generator),
        )
        part.copy_(parts[rank])
        lse.copy_(lses[rank])
        graph.replay()
        truth = (parts.double() * torch.softmax(lses.double(), 0)[..., None]).sum(0)
        for at in (0, len(results) - 1):
            wrong += not torch.allclose(results[at].cpu().double(), truth + at, atol=1e-4)
    return wrong


def decodes_with_gathered_heads(rank: int, size: int, device_type: str) -> int:
    """Decodes of several layers, each rank with query heads of its own, captured on GPUs and replayed with other
    lengths: how many results differ from attention over the whole cache in float64."""
    device = torch.device(device_type, rank if device_type == "cuda" else None)
    heads, head_size, block, M, layers = 3, 64, 8, 9, 3
    wide = {"head_size": head_size, "dtype": torch.float32, "gathered_heads": heads}
    exchange = prepare(dist.group.WORLD, device, rows=12 * heads, **wide)
    if device_type == "cuda":
        assert exchange.how == "symmetric memory"
        assert exchange._reducer.kind == "symmetric"
    own = slice(rank * heads, (rank + 1) * heads)
    generator, wrong, steps = torch.Generator().manual_seed(0), 0, []
    for S in (1, 5, 20):  # of 20 sequences there is no room in symmetric memory
        queries = torch.randn(layers, S, size * heads, head_size, generator=generator)
        both = torch.randn(2, S, size * block * M, 1, head_size, generator=generator)
        key_cache, value_cache = both[:, :, rank::size].reshape(2, S * M, block, 1, head_size).to(device)
        query, nothing = queries[:, :, own].to(device), both.new_full((S, 1, head_size), torch.nan).to(device)
        tables = torch.arange(S * M, dtype=torch.int32).view(S, M).to(device)
        starts = torch.arange(S + 1, dtype=torch.int32).to(device)
        lens, out = torch.zeros(S, dtype=torch.int32, device=device), query.new_full(query.shape, torch.nan)
        batch = nothing, nothing, key_cache, tables, lens, starts, 1, head_size**-0.5, exchange

        def step(query=query, batch=batch, value_cache=value_cache, out=out) -> None:
            for rows, results in zip(query, out, strict=True):
                attend_with_gathered_heads(rows, *batch, value_cache=value_cache, out=results)

        if device_type == "cuda":
            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
            step = graph.replay
        read = query, value_cache, batch  # graphs hold addresses only
        steps.append((step, S, queries, both.double(), lens, out, read))
    for n in range(12):
        step, S, queries, (keys, values), lens, out, _ = steps[n % 3]
        whole = [(n * 31 + s * 17) % (size * block * M) + 1 for s in range(S)]
        lens.copy_(torch.tensor([len(range(rank, each, size)) for each in whole]))
        step()
        for s, each in enumerate(whole):
            scores = queries[:, s].double() @ keys[s, :each, 0].T * head_size**-0.5
            truth = torch.softmax(scores, -1) @ values[s, :each, 0]
            wrong += not torch.allclose(out[:, s].cpu().double(), truth[:, own], atol=1e-4)
    return wrong


def shard(model: Any, mesh: Any) -> Any:
    """Tensor parallelism over one dimension of a mesh, by torch alone."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in model.model.layers:
        plan = {f"self_attn.{each}_proj": ColwiseParallel() for each in "qkv"}
        plan |= {f"mlp.{each}_proj": ColwiseParallel() for each in ("gate", "up")}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)
    return model


def sharded_over_all(rank: int, size: int, folder: str) -> str:
    """A model that transformers has sharded over all ranks, those of the context among them."""
    path = make("llama", folder, rank)
    mesh = dist.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("tp", "cp"))
    return told_by(lambda: PagedCausalLM(load(path, size), context=mesh))


def refused(rank: int, size: int, folder: str) -> list[str]:
    context = Context(dist.group.WORLD, "cpu", head_size=D, dtype=torch.float32)
    builder = AttentionMetadataBuilder(8, 5, 5, 16, num_blocks=64, shards=[context.shard])
    step = builder.build(0, Batch([1], [3], [[4]]))
    cache = KVCache(1, 64, 8, K, D, shard=context.shard)
    states = torch.zeros(1, K, D)
    ranges = torch.zeros(1, 1, 2, dtype=torch.int32)

    def call(**features: Any) -> Any:
        batch = step.block_tables, step.query_start_loc, 1.0, step.context, context.handle
        return attend(torch.zeros(1, H, D), states, states, cache.layers[0], *batch, **features)

    llama = PagedCausalLM(load(make("llama", folder, rank)), context=dist.group.WORLD)
    calls = [
        lambda: call(alibi_slopes=torch.zeros(H)),
        lambda: call(sliding_window=4),
        lambda: call(attention_chunk=4),
        lambda: call(block_sparse=[8, 1, 1, 1, 0, 0, 1]),
        lambda: call(bidirectional_ranges=ranges),
        lambda: builder.build(8, Batch([1], [9], [[4, 5]])),
        lambda: KVCache(1, 64, 9, K, D, shard=context.shard),
        lambda: KVCache(1, 64, 8, K, D, shard=context.shard, sliding_window=4),
        lambda: PagedCausalLM(load(make("mistral", folder, rank)), context=dist.group.WORLD),
        lambda: GenerationLoop(llama, KVCache(2, 64, 8, 2, 16)),
        lambda: PagedCausalLM(llama.model, context="cp"),
    ]
    return [told_by(call) for call in calls]


def told_by(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"
