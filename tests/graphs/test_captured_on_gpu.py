"""Captured steps on a GPU: every replay is compared with a step that is neither captured nor padded."""

import pytest
import torch
from torch._dynamo.utils import counters

import paged_ops
from paged_ops.cache import KVCache
from paged_ops.graphs import CaptureError, DecodeGraphs, GraphKey, Pieces, build_inputs, compile_pieces, step_builder
from paged_ops.inspection import CompileReport
from paged_ops.metadata import Batch
from tests.graphs.walk import LAYERS, B, D, K, Plain, Toy, V, Walk, poisoned_cache
from tests.helpers.gpu import GPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

SEQS, TOKENS, LONGEST = 12, 40, 64
CLOSE = dict(rtol=2e-3, atol=2e-3)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def greedy(logits):
    return logits.argmax(-1)


def runner(step, kv_cache, **options):
    options = dict(max_num_seqs=SEQS, max_num_tokens=TOKENS, max_model_len=LONGEST) | options
    return DecodeGraphs(step, kv_cache, **options)


def walk_and_compare(run, model, kv_cache, steps, every=1, seed=0, sync_is_error=True):
    """A random walk of steps through ``run``, every so-manyth of them compared; the walk and the number compared."""
    plain = Plain(model, kv_cache, SEQS, TOKENS, LONGEST)
    walk = Walk(kv_cache, SEQS, TOKENS, seed=seed, longest=LONGEST - 2)
    compared = done = 0

    def both(batch, ids):
        nonlocal compared, done
        done += 1
        if sync_is_error and done > 3:
            torch.cuda.set_sync_debug_mode("error")
        try:
            got = run(batch, ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if done % every == 0:
            compared += 1
            got = got.clone()
            torch.testing.assert_close(got, plain(batch, ids), **CLOSE)

    while done < steps:
        walk.step(both)
    for event in ("admit", "fork", "free", "swap_out", "swap_in", "decode", "mixed"):
        assert walk.events[event] > steps // 500, walk.events
    return walk, compared


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
def test_replays_tell_the_truth(mode, compiled):
    model, kv_cache = Toy(GPU), poisoned_cache(48, GPU, num_host_blocks=24)
    run = runner(torch.compile(model, fullgraph=True) if compiled else model, kv_cache, mode=mode)
    with CompileReport(kv_cache.layers) as compilation:
        before = torch.cuda.memory_reserved(GPU)
        report = run.capture()
        reserved = torch.cuda.memory_reserved(GPU) - before
        walk_and_compare(run.replay, model, kv_cache, 300)
    assert report.graphs == len(run.captured) == len(run.plan())
    assert report.num_bytes > 0 and reserved < 512 << 20  # other processes may share the device that is reported of
    # Of a compiled step the size 1 is a graph of its own, as everywhere in torch.compile: all others share one.
    assert compilation.graphs == 2 * compiled and compilation.recompiles == compiled, compilation.recompile_reasons
    assert compilation.cache_copies == 0, compilation.copies
    assert run.stats.replayed > 100 and (run.stats.plain > 0) == (mode == "FULL_DECODE_ONLY")


@pytest.mark.slow
def test_a_hundred_thousand_replays(record_property):
    model, kv_cache = Toy(GPU), poisoned_cache(64, GPU, num_host_blocks=32)
    run = runner(model, kv_cache, mode="FULL")
    run.capture()
    walk, compared = walk_and_compare(run.replay, model, kv_cache, 100_000, every=40, seed=5, sync_is_error=False)
    assert compared >= 2000 and run.stats.replayed == 100_000 and run.stats.plain == 0
    assert set(run.stats.replays) == set(run.captured), "a size that was never replayed"
    noted = {"replays": run.stats.replayed, "compared": compared, **walk.events, "padding": round(run.stats.padding, 3)}
    for name, number in noted.items():
        record_property(name, number)


def decodes(lengths, spare=0, blocks=None):
    blocks = blocks or [[s * 9 + b for b in range(-(-(n + 1 + spare) // B))] for s, n in enumerate(lengths)]
    return Batch([1] * len(lengths), list(lengths), blocks)


def prefill(kv_cache, step, lengths, blocks=None):
    blocks = blocks or [[s * 9 + b for b in range(-(-n // B))] for s, n in enumerate(lengths)]
    ids = torch.randint(V, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    Plain(step, kv_cache, SEQS, 512, LONGEST)(Batch(list(lengths), [0] * len(lengths), blocks), ids)


SPARSE = paged_ops.BlockSparse(8, 1, 2)


@pytest.mark.parametrize(
    "features",
    [{}, {"attention_chunk": 8}, {"sliding_window": 5, "soft_cap": 8.0}, {"block_sparse": SPARSE}],
    ids=["plain", "chunk", "window-cap", "block-sparse"],
)
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "uncaptured"])
def test_next_steps_on_the_device(captured, features):
    lengths, steps = (7, 3, 19), 10
    model, kv_cache = Toy(GPU, **features), poisoned_cache(64, GPU)
    run = runner(model, kv_cache, mode="FULL_DECODE_ONLY" if captured else "NONE", sample=greedy)
    run.capture()
    prefill(kv_cache, model, lengths)
    plain = Plain(model, kv_cache, SEQS, TOKENS, LONGEST)
    batch, ids = decodes(lengths, spare=steps), torch.tensor([1, 2, 3])
    logits = [run.replay(batch, ids, lookahead=steps).clone()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits += [run.replay_next().clone() for _ in range(steps)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step in range(steps + 1):
        want = plain(decodes([n + step for n in lengths]), ids)
        torch.testing.assert_close(logits[step], want, **CLOSE)
        ids = logits[step].argmax(-1)
    assert run.tokens[:3].tolist() == ids.tolist()
    assert run.stats.replayed == (steps + 1) * captured


def test_cascade():
    model, kv_cache = Toy(GPU), poisoned_cache(64, GPU)
    run = runner(model, kv_cache, mode="FULL_DECODE_ONLY", cascade=True, sample=greedy)
    run.capture()
    shared = [0, 1, 2, 3]
    blocks = [[*shared, 4 + 2 * s, 5 + 2 * s] for s in range(9)]
    prefill(kv_cache, model, [16], blocks=[shared])
    plain = Plain(model, kv_cache, SEQS, TOKENS, LONGEST)
    ids = torch.arange(9)
    logits = [run.replay(decodes([16] * 9, blocks=blocks), ids, common_prefix_len=16, lookahead=4).clone()]
    logits += [run.replay_next().clone() for _ in range(4)]
    assert run.stats.replays == {GraphKey(12, 12, cascade=True): 5}
    for step, got in enumerate(logits):
        torch.testing.assert_close(got, plain(decodes([16 + step] * 9, blocks=blocks), ids), **CLOSE)
        ids = got.argmax(-1)


def test_padding_is_poisoned():
    model, kv_cache = Toy(GPU), poisoned_cache(128, GPU)
    run = runner(model, kv_cache, mode="FULL_DECODE_ONLY", seq_sizes=[12])
    run.capture()
    prefill(kv_cache, model, [6] * 12)
    run.replay(decodes([6] * 12), torch.arange(12))
    run.builder._buffers.block_tables.fill_(-(10**6))
    before = [layer[27:].clone() for layer in kv_cache.layers]
    got = run.replay(decodes([6] * 3), torch.tensor([4, 5, 6])).clone()
    want = Plain(model, kv_cache, SEQS, TOKENS, LONGEST)(decodes([6] * 3), torch.tensor([4, 5, 6]))
    torch.testing.assert_close(got, want, **CLOSE)
    for layer, old in zip(kv_cache.layers, before, strict=True):  # the other sequences' blocks
        assert torch.equal(layer[27:].view(torch.int32), old.view(torch.int32))


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "layer by layer"])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_pieces(mode, by_layer):
    model, kv_cache = Toy(GPU), poisoned_cache(48, GPU, num_host_blocks=24)
    step = compile_pieces(model)
    if by_layer:
        step = Toy(GPU)
        step.layer = compile_pieces(step.layer)
    run = runner(step, kv_cache, mode=mode, token_sizes=[4, 16, 40])
    report = run.capture()
    pieces = [len(each) for each in run.captured.values() if isinstance(each, Pieces)]
    # Around each attention: what leads to it and what follows, which for the whole model leads to the next one.
    assert pieces == [2 * LAYERS if by_layer else LAYERS + 1] * 3
    full = sum(not key.in_pieces for key in run.captured)
    assert full == (0 if mode == "PIECEWISE" else 5) and report.graphs == sum(pieces) + full
    walk_and_compare(run.replay, model, kv_cache, 300)
    assert run.stats.plain == 0


def test_pieces_that_are_none():
    with pytest.raises(ValueError, match=r"step: expected one from compile_pieces .* got one without pieces"):
        runner(Toy(GPU), poisoned_cache(48, GPU), mode="PIECEWISE").capture()


def test_a_host_sync_is_refused():
    model, kv_cache = Toy(GPU), poisoned_cache(48, GPU)

    def step(input_ids, *rest):
        if int(input_ids.max()) < 0:
            raise AssertionError
        return model(input_ids, *rest)

    with pytest.raises(CaptureError, match=r"step: .*no host sync.* at 12 sequences and 12 tokens .*synchronizing"):
        runner(step, kv_cache, mode="FULL_DECODE_ONLY").capture()
    run = runner(model, kv_cache, mode="FULL_DECODE_ONLY")  # nothing is broken afterwards
    run.capture()
    assert run.replay(decodes([0]), [1]).isfinite().all()


def test_an_unpinned_swap_is_refused():
    model, kv_cache = Toy(GPU), poisoned_cache(48, GPU)
    host = [torch.zeros(layer.shape) for layer in kv_cache.layers]

    def step(input_ids, metadata, last_rows, kv_caches):
        paged_ops.swap_blocks(kv_caches, host, torch.tensor([[0, 0]]))
        return model(input_ids, metadata, last_rows, kv_caches)

    with pytest.raises(CaptureError, match="no unpinned copy"):
        runner(step, kv_cache, mode="FULL_DECODE_ONLY").capture()


def test_a_moved_cache_is_refused():
    model, kv_cache = Toy(GPU), poisoned_cache(48, GPU)
    run = runner(model, kv_cache, mode="FULL_DECODE_ONLY")
    run.capture()
    kv_cache.layers[1] = kv_cache.layers[1].clone()
    with pytest.raises(ValueError, match=r"kv_cache: expected the layers that were captured, got others at \[1\]"):
        run.replay(decodes([0]), [1])


def test_two_runners_on_two_streams():
    sides = []
    for seed in range(2):
        model, kv_cache = Toy(GPU, seed=seed), poisoned_cache(64, GPU)
        run = runner(model, kv_cache, mode="FULL_DECODE_ONLY", sample=greedy)
        run.capture()
        prefill(kv_cache, model, (9, 2, 5, 7))
        sides.append((run, model, kv_cache, torch.cuda.Stream(GPU), []))
    torch.cuda.synchronize(GPU)
    steps = 20
    for step in range(steps + 1):  # interleaved, without waiting
        for run, _, _, stream, logits in sides:
            with torch.cuda.stream(stream):
                if step == 0:
                    got = run.replay(decodes((9, 2, 5, 7), spare=steps), [1, 2, 3, 4], lookahead=steps)
                else:
                    got = run.replay_next()
                logits.append(got.clone())
    torch.cuda.synchronize(GPU)
    for _, model, kv_cache, _, logits in sides:
        ids = torch.tensor([1, 2, 3, 4])
        plain = Plain(model, kv_cache, SEQS, TOKENS, LONGEST)
        for step, got in enumerate(logits):
            torch.testing.assert_close(got, plain(decodes([n + step for n in (9, 2, 5, 7)]), ids), **CLOSE)
            ids = got.argmax(-1)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_compile_modes(mode):
    """One graph, nothing skipped, copied or compiled again, over 200 steps of changing batches in one bucket."""
    model, kv_cache = Toy(GPU), poisoned_cache(48, GPU, num_host_blocks=24)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    builder = step_builder(kv_cache, SEQS, TOKENS, LONGEST)

    def run(batch, ids):
        step = build_inputs(builder, batch, ids, SEQS, TOKENS)
        logits = compiled(*step, kv_cache.layers)
        return logits[: batch.num_reqs].clone()

    counters.clear()
    no_skips = torch._inductor.config.patch({"triton.cudagraph_or_error": mode != "default"})
    with no_skips, CompileReport(kv_cache.layers) as report:
        walk_and_compare(run, model, kv_cache, 200, every=5, sync_is_error=False)
    assert report.graphs == 1 and report.graph_breaks == report.recompiles == 0, report.recompile_reasons
    assert report.cache_copies == 0, report.copies
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_one_compilation_serves_all_layers():
    kv_cache = KVCache(LAYERS, 48, B, K, D, device=GPU)
    model = Toy(GPU)
    reference = Toy(GPU)
    model.layer = torch.compile(model.layer, fullgraph=True)
    batch, ids = Batch([5, 2], [0, 0], [[0, 1], [2]]), torch.arange(7)
    with CompileReport(kv_cache.layers) as report:
        got = Plain(model, kv_cache, SEQS, TOKENS, LONGEST)(batch, ids)
    assert report.graphs == 1 and report.recompiles == 0, report.recompile_reasons
    torch.testing.assert_close(got, Plain(reference, kv_cache, SEQS, TOKENS, LONGEST)(batch, ids), **CLOSE)
