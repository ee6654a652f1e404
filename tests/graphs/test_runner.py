"""Captured steps without a GPU: sizes, modes, padding, and the runner over graphs that replay by calling again."""

import pytest
import torch

from paged_ops import graphs
from paged_ops.cache import KVCache
from paged_ops.graphs import (
    CaptureError,
    DecodeGraphs,
    GraphKey,
    GraphMode,
    Pieces,
    capture_sizes,
    choose_mode,
    compile_pieces,
)
from paged_ops.inspection import CompileReport
from paged_ops.metadata import AttentionMetadataBuilder, Batch, GraphSupport, advance_decodes
from tests.graphs.imitated import ImitatedGraph, ImitatedSession
from tests.graphs.walk import LAYERS, B, D, K, Plain, Toy, V, Walk, poisoned_cache

SEQS, TOKENS, LONGEST = 12, 40, 64


@pytest.fixture
def imitated(monkeypatch):
    for module in (graphs.runner, graphs.pieces):
        monkeypatch.setattr(module, "Graph", ImitatedGraph)
    monkeypatch.setattr(graphs.runner, "CaptureSession", ImitatedSession)
    monkeypatch.setattr(graphs.pieces, "on_gpu", lambda value: isinstance(value, torch.Tensor))
    monkeypatch.setattr(ImitatedGraph, "replays", 0)


def runner(step=None, kv_cache=None, **options):
    options = dict(max_num_seqs=SEQS, max_num_tokens=TOKENS, max_model_len=LONGEST) | options
    return DecodeGraphs(Toy() if step is None else step, kv_cache or poisoned_cache(48), **options)


def decodes(*lengths, blocks=None, spare=0):
    """One token each for sequences of so many cached tokens."""
    blocks = blocks or [[s * 5 + b for b in range(-(-(n + 1 + spare) // B))] for s, n in enumerate(lengths)]
    return Batch([1] * len(lengths), list(lengths), blocks)


def prefill(kv_cache, step, *lengths, blocks=None):
    """Cached tokens for ``decodes(*lengths)``."""
    plain = Plain(step, kv_cache, SEQS, 256, LONGEST)
    blocks = blocks or [[s * 5 + b for b in range(-(-n // B))] for s, n in enumerate(lengths)]
    batch = Batch(list(lengths), [0] * len(lengths), blocks)
    plain(batch, torch.randint(V, (sum(lengths),), generator=torch.Generator().manual_seed(3)))


def test_capture_sizes():
    assert capture_sizes(1) == [1]
    assert capture_sizes(3) == [1, 2, 3]
    assert capture_sizes(30) == [1, 2, 4, 8, 16, 24, 30]
    assert capture_sizes(300)[-4:] == [256, 272, 288, 300]
    assert len(capture_sizes(512)) == 3 + 32 + 16
    with pytest.raises(ValueError, match="largest: expected 1 or more, got 0"):
        capture_sizes(0)


@pytest.mark.parametrize(
    ("support", "query_len", "mode"),
    [
        (GraphSupport.ALWAYS, 1, GraphMode.FULL),
        (GraphSupport.UNIFORM_BATCH, 1, GraphMode.FULL_DECODE_ONLY),
        (GraphSupport.UNIFORM_BATCH, 3, GraphMode.FULL_DECODE_ONLY),
        (GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE, 1, GraphMode.FULL_DECODE_ONLY),
        (GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE, 3, GraphMode.NONE),
        (GraphSupport.NEVER, 1, GraphMode.NONE),
    ],
)
def test_mode_by_support(support, query_len, mode):
    assert choose_mode(support, query_len) is mode


def test_modes_that_are_refused(imitated):
    with pytest.raises(ValueError, match=r"mode: expected one that .*UNIFORM_BATCH.* allows, got FULL"):
        runner(mode="FULL", graph_support=GraphSupport.UNIFORM_BATCH)
    with pytest.raises(ValueError, match=r"mode: expected one that .* allows, got FULL_DECODE_ONLY"):
        runner(mode="FULL_DECODE_ONLY", graph_support=GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE, query_len=2)
    with pytest.raises(ValueError, match="FULLER"):
        runner(mode="FULLER")


def test_no_graphs_on_a_cpu():
    with pytest.raises(ValueError, match="mode: expected NONE, as cpu has no graphs, got FULL"):
        runner(mode="FULL")
    assert runner().mode is GraphMode.NONE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_num_seqs=0), "max_num_seqs: expected at least 1"),
        (dict(max_num_tokens=SEQS - 1), "max_num_tokens: expected at least"),
        (dict(query_len=2, sample=torch.argmax), "sample: expected none for a query_len above 1"),
        (dict(query_len=0), "query_len: expected at least 1"),
        (dict(seq_sizes=[SEQS + 1]), r"seq_sizes: expected sizes in 1\.\.12"),
        (dict(token_sizes=[0, 4]), r"token_sizes: expected sizes in 1\.\.40"),
    ],
)
def test_options_that_are_refused(imitated, options, message):
    with pytest.raises(ValueError, match=message):
        runner(**options)


def keys_of(**options):
    return [(key.num_reqs, key.num_tokens, key.cascade, key.in_pieces) for key in runner(**options).plan()]


def test_what_is_captured(imitated):
    decode = [(S, S, False, False) for S in (12, 8, 4, 2, 1)]
    mixed = [(min(T, SEQS), T, False, False) for T in (40, 32, 24, 16, 8, 4, 2, 1)]
    assert keys_of(mode="NONE") == []
    assert keys_of(mode="FULL_DECODE_ONLY") == decode
    assert keys_of(mode="FULL") == sorted({*decode, *mixed}, key=lambda key: -key[1])
    assert keys_of(mode="PIECEWISE") == [(*key[:3], True) for key in mixed]
    both = keys_of(mode="FULL_AND_PIECEWISE")
    assert sorted(both) == sorted([*decode, *((*key[:3], True) for key in mixed)])
    assert [key[1] for key in both] == sorted((key[1] for key in both), reverse=True)
    assert keys_of(mode="FULL_DECODE_ONLY", query_len=3)[:2] == [(12, 36, False, False), (8, 24, False, False)]
    with_cascade = keys_of(mode="FULL_DECODE_ONLY", cascade=True)
    assert sorted(with_cascade) == sorted([*decode, *((S, T, True, False) for S, T, _, _ in decode)])


def test_capture_reports_and_leaves_the_cache_alone(imitated):
    kv_cache = poisoned_cache(48)
    kv_cache.layers[0].fill_(3.0)
    before = [layer.clone() for layer in kv_cache.layers]
    run = runner(kv_cache=kv_cache, mode="FULL_DECODE_ONLY")
    seen = []
    report = run.capture(lambda done, total, key: seen.append((done, total, key and key.num_tokens)))
    assert seen == [(0, 5, 12), (1, 5, 8), (2, 5, 4), (3, 5, 2), (4, 5, 1), (5, 5, None)]
    assert (report.graphs, len(report.keys)) == (5, 5) and report.seconds > 0
    assert str(report).startswith("5 graphs for 5 sizes (1, 2, 4, 8, 12) in ")
    for layer, old in zip(kv_cache.layers, before, strict=True):
        assert torch.equal(layer.view(torch.int32), old.view(torch.int32))


def test_trials_have_no_position_that_a_model_may_lack():
    """Of a model whose longest sequence does not end with a block: learned positions would be read out of bounds."""
    lengths = []

    def step(input_ids, metadata, last_rows, kv_caches):
        logits = torch.zeros(LONGEST - 1, V)[metadata.positions][last_rows]
        lengths.append(int(metadata.seq_lens.max()))  # not after an error, which a trial ignores
        return logits

    graphs = runner(step, max_model_len=LONGEST - 1)
    for trial in graphs._trials()[:-1]:  # the last one copies blocks
        trial()
    assert lengths == [0, 0, TOKENS, LONGEST]


def test_find(imitated):
    run = runner(mode="FULL")
    assert run.find(decodes(3)) is None  # nothing is captured yet
    run.capture()
    assert run.find(decodes(3)) == GraphKey(1, 1)
    assert run.find(decodes(3, 3, 3)) == GraphKey(4, 4)
    assert run.find(Batch([5, 1], [0, 7], [[0, 1], [2, 3]])) == GraphKey(8, 8)
    assert run.find(Batch([20, 1], [0, 7], [[0] * 5, [2, 3]])) == GraphKey(12, 24)
    assert run.find(Batch([39, 2], [0, 7], [[0] * 10, [2, 3, 4]])) is None  # 41 tokens
    assert run.find(Batch([], [], [])) == GraphKey(1, 1)
    only = runner(mode="FULL_DECODE_ONLY", seq_sizes=[2, 8])
    only.capture()
    assert only.find(decodes(*[3] * 3)) == GraphKey(8, 8)
    assert only.find(decodes(*[3] * 9)) is None
    assert only.find(Batch([2, 1], [0, 7], [[0, 1], [2, 3]])) is None
    verify = runner(mode="FULL_DECODE_ONLY", query_len=3)
    verify.capture()
    assert verify.find(Batch([3] * 3, [4] * 3, [[0, 1], [2, 3], [4, 5]])) == GraphKey(4, 12)
    assert verify.find(decodes(3)) is None


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.parametrize("mode", ["NONE", "FULL", "FULL_DECODE_ONLY"])
def test_replays_tell_the_truth(imitated, mode, compiled):
    model, kv_cache = Toy(), poisoned_cache(48, num_host_blocks=24)
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True) if compiled else model
    run = runner(step, kv_cache, mode=mode)
    with CompileReport(kv_cache.layers) as report:
        run.capture()
        plain = Plain(model, kv_cache, SEQS, TOKENS, LONGEST)
        walk = Walk(kv_cache, SEQS, TOKENS, seed=1, longest=LONGEST - 2)

        def both(batch, ids):
            got = run.replay(batch, ids).clone()
            torch.testing.assert_close(got, plain(batch, ids), rtol=1e-4, atol=1e-4)

        for _ in range(150):
            walk.step(both)
    # Of a compiled step the size 1 is a graph of its own, as everywhere in torch.compile: all others share one.
    assert report.recompiles == compiled * (mode != "NONE"), report.recompile_reasons
    assert report.graphs == compiled + report.recompiles and report.cache_copies == 0, report.copies
    for event in ("admit", "fork", "free", "swap_out", "swap_in", "decode", "mixed"):
        assert walk.events[event] > 3, walk.events
    stats = run.stats
    assert stats.replayed + stats.plain == walk.events["decode"] + walk.events["mixed"]
    assert ImitatedGraph.replays == stats.replayed
    if mode == "NONE":
        assert stats.replayed == 0 and stats.padding == 0
    else:
        assert 0 < stats.padding < 1 and stats.replayed > 30
        assert (stats.plain > 0) == (mode == "FULL_DECODE_ONLY")


def test_padding_is_poisoned(imitated):
    """What a step of 12 leaves in the buffers must not show in one of 3."""
    model, kv_cache = Toy(), poisoned_cache(64)
    run = runner(model, kv_cache, mode="FULL_DECODE_ONLY", seq_sizes=[12])
    run.capture()
    prefill(kv_cache, model, *[6] * 12)
    lengths = [6] * 12
    run.replay(decodes(*lengths), torch.arange(12))
    run.builder._buffers.block_tables.fill_(-(10**6))
    before = [layer[15:].clone() for layer in kv_cache.layers]
    got = run.replay(decodes(6, 6, 6), torch.tensor([4, 5, 6])).clone()
    want = Plain(model, kv_cache, SEQS, TOKENS, LONGEST)(decodes(6, 6, 6), torch.tensor([4, 5, 6]))
    torch.testing.assert_close(got, want)
    for layer, old in zip(kv_cache.layers, before, strict=True):  # the other sequences' blocks
        assert torch.equal(layer[15:].view(torch.int32), old.view(torch.int32))


@pytest.mark.parametrize(
    ("options", "captured"),
    [
        ({"mode": "FULL_DECODE_ONLY"}, True),
        ({"mode": "NONE"}, False),
        # The batch fits a graph of mixed steps alone, which has more tokens than sequences and cannot advance them.
        ({"mode": "FULL", "seq_sizes": [1, 2], "token_sizes": [TOKENS]}, False),
    ],
)
def test_next_steps_on_the_device(imitated, options, captured):
    model, kv_cache, lengths, steps = Toy(), poisoned_cache(64), (7, 3, 9), 6
    run = runner(model, kv_cache, **options, sample=lambda x: x.argmax(-1))
    run.capture()
    prefill(kv_cache, model, *lengths)
    plain = Plain(model, kv_cache, SEQS, TOKENS, LONGEST)
    batch, ids = decodes(*lengths, spare=steps), torch.tensor([1, 2, 3])
    logits = [run.replay(batch, ids, lookahead=steps).clone()]
    logits += [run.replay_next().clone() for _ in range(steps)]
    for step in range(steps + 1):
        want = plain(decodes(*(n + step for n in lengths)), ids)
        torch.testing.assert_close(logits[step], want, rtol=1e-4, atol=1e-4)
        ids = want.argmax(-1)
    assert run.tokens[:3].tolist() == ids.tolist()
    assert run.stats.replayed == (steps + 1) * captured
    with pytest.raises(ValueError, match=r"lookahead: expected a replay .* not used up.* got 0"):
        run.replay_next()


def test_next_step_needs_a_decode_batch(imitated):
    run = runner(mode="FULL", sample=lambda x: x.argmax(-1))
    with pytest.raises(ValueError, match="lookahead"):
        run.replay_next()
    run.capture()
    run.replay(Batch([2], [0], [[0, 1]]), [1, 2], lookahead=3)
    with pytest.raises(ValueError, match="lookahead"):
        run.replay_next()
    without = runner(mode="FULL")
    without.capture()
    without.replay(Batch([1], [0], [[0, 1]]), [1], lookahead=3)
    with pytest.raises(ValueError, match="sample function"):
        without.replay_next()


def test_cascade(imitated):
    model, kv_cache = Toy(), poisoned_cache(64)
    run = runner(model, kv_cache, mode="FULL_DECODE_ONLY", cascade=True, sample=lambda x: x.argmax(-1))
    run.capture()
    shared = [0, 1]
    blocks = [[*shared, 2 + 2 * s, 3 + 2 * s] for s in range(3)]
    prefill(kv_cache, model, 8, blocks=[shared])
    plain = Plain(model, kv_cache, SEQS, TOKENS, LONGEST)
    ids = torch.tensor([1, 2, 3])
    got = run.replay(decodes(8, 8, 8, blocks=blocks), ids, common_prefix_len=8, lookahead=2).clone()
    assert run.stats.replays == {GraphKey(4, 4, cascade=True): 1}
    after = run.replay_next().clone()
    want = plain(decodes(8, 8, 8, blocks=blocks), ids)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    want = plain(decodes(9, 9, 9, blocks=blocks), want.argmax(-1))
    torch.testing.assert_close(after, want, rtol=1e-4, atol=1e-4)


def test_a_moved_cache_is_refused(imitated):
    kv_cache = poisoned_cache(48)
    run = runner(kv_cache=kv_cache, mode="FULL")
    run.capture()
    run.replay(Batch([1], [0], [[0]]), [1])
    kv_cache.layers[1] = kv_cache.layers[1].clone()
    with pytest.raises(ValueError, match=r"kv_cache: expected the layers that were captured, got others at \[1\]"):
        run.replay(Batch([1], [0], [[0]]), [1])
    run.capture()
    run.replay(Batch([1], [0], [[0]]), [1])


def test_a_step_that_fails_under_capture_is_named(imitated):
    model, calls = Toy(), []

    def step(*args):
        calls.append(None)
        if len(calls) > 1:
            raise RuntimeError("called a synchronizing CUDA operation")
        return model(*args)

    run = runner(step, mode="FULL_DECODE_ONLY")
    with pytest.raises(CaptureError, match=r"step: .* at 12 sequences and 12 tokens it fails: called a synchronizing"):
        run.capture(dynamic=False)


def test_wrong_number_of_ids():
    with pytest.raises(ValueError, match="input_ids: expected the 2 tokens of the batch, got 3"):
        runner().replay(Batch([2], [0], [[0]]), [1, 2, 3])


@pytest.mark.parametrize(
    ("batch", "ids", "lookahead", "message"),
    [
        ([2], [1, 2], 0, r"batch: expected a Batch, got \[2\]"),
        (None, [1.5, 2], 0, r"input_ids: expected integers, got \[1.5, 2\]"),
        (None, None, 0, "input_ids: expected integers, got None"),
        (None, torch.tensor([1.5, 2.5]), 0, "input_ids: expected integers, got a float32 tensor"),
        (None, [1, 2], "1", "lookahead: expected an integer, got '1'"),
    ],
)
def test_wrong_types_leave_the_last_step(batch, ids, lookahead, message):
    run = runner()
    run.replay(Batch([2], [0], [[3]]), [1, 2])
    before = run.builder._buffers.storage.clone()
    with pytest.raises(ValueError, match=message):
        run.replay(batch or Batch([2], [4], [[0]]), ids, lookahead=lookahead)
    assert torch.equal(run.builder._buffers.storage, before)


def test_wrong_ids_on_the_device_leave_the_last_step():
    """They are copied there after the metadata was built, which overwrites the last step."""
    run = runner()
    run.replay(Batch([2], [0], [[3]]), [1, 2])
    before = run.builder._buffers.storage.clone()
    run.builder.device = torch.device("meta")  # in place of a GPU
    for ids in (torch.ones(2, 1, dtype=torch.int64, device="meta"), torch.ones(3, dtype=torch.int64, device="meta")):
        with pytest.raises(ValueError, match="input_ids: expected the 2 tokens of the batch, got a int64 tensor"):
            run.replay(Batch([2], [4], [[0]]), ids)
        assert torch.equal(run.builder._buffers.storage, before)


def test_pieces(imitated):
    """A step of three pieces with an op between them that returns a list of two, which move."""
    weight, x = torch.randn(4, 4), torch.randn(3, 4)
    moved = []

    def piece(args):
        (a, b), w, number = args
        args.clear()
        return a @ w + number, b * 2

    def step(call):
        y, residual = call(piece, [[x, x.sin()], weight, 1])
        for n in range(2):
            between = [y.sin(), y.cos()]
            moved.append(between)  # never at the same addresses twice
            y, residual = call(piece, [between, weight, n])[0] + residual, residual
        return y

    pieces = Pieces(ImitatedSession("cpu"))
    want = step(lambda function, args: function(args))
    with pieces.observing():
        step(pieces)
    moved.clear()
    with pieces.capturing():
        torch.testing.assert_close(step(pieces), want)
    assert len(pieces) == 3
    x.normal_()
    want = step(lambda function, args: function(args))
    with pieces.replaying():
        torch.testing.assert_close(step(pieces), want)


def test_room_for_inputs_of_pieces_is_by_device(imitated):
    """Two inputs that differ in nothing else, on two GPUs (here the CPU and nowhere)."""
    pieces, seen = Pieces(ImitatedSession("cpu")), []

    def piece(args):
        (given,) = args
        args.clear()
        seen.append(given.device.type)
        return torch.zeros(2)

    for mode in (pieces.observing, pieces.capturing):
        seen.clear()
        with mode():
            for where in ("cpu", "meta"):
                pieces(piece, [torch.empty(3, device=where)])
    assert seen == ["cpu", "cpu", "meta", "meta"]  # captured and replayed


@pytest.fixture
def partitions(monkeypatch):
    """Inductor partitions a graph for the CPU as it does one for a GPU."""
    scheduler = torch._inductor.scheduler
    original = scheduler.Scheduler.should_partition

    def should_partition(self, node, *args, **kwargs):
        with monkeypatch.context() as inside:
            inside.setattr(scheduler.BaseSchedulerNode, "is_gpu", lambda node: True)
            return original(self, node, *args, **kwargs)

    monkeypatch.setattr(scheduler.Scheduler, "should_partition", should_partition)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "by_layer"), [("PIECEWISE", False), ("FULL_AND_PIECEWISE", True)])
def test_pieces_replayed_by_the_runner(imitated, partitions, mode, by_layer):
    torch._dynamo.reset()
    model, kv_cache = Toy(), poisoned_cache(48, num_host_blocks=24)
    step = Toy() if by_layer else compile_pieces(model)
    if by_layer:
        step.layer = compile_pieces(step.layer)
    run = runner(step, kv_cache, mode=mode, token_sizes=[4, 16, 40])
    report = run.capture()
    pieces = [len(each) for each in run.captured.values() if isinstance(each, Pieces)]
    # Around each attention: what leads to it and what follows, which for the whole model leads to the next one.
    assert pieces == [2 * LAYERS if by_layer else LAYERS + 1] * 3
    full = sum(not key.in_pieces for key in run.captured)
    assert (full > 0) == (mode == "FULL_AND_PIECEWISE") and report.graphs == sum(pieces) + full

    plain = Plain(model, kv_cache, SEQS, TOKENS, LONGEST)
    walk = Walk(kv_cache, SEQS, TOKENS, seed=1, longest=LONGEST - 2)

    def both(batch, ids):
        got = run.replay(batch, ids).clone()
        torch.testing.assert_close(got, plain(batch, ids), rtol=1e-4, atol=1e-4)

    ImitatedGraph.replays = 0
    for _ in range(60):
        walk.step(both)
    assert walk.events["decode"] > 3 and walk.events["mixed"] > 3 and run.stats.plain == 0
    graphs_of = {key: len(each) if isinstance(each, Pieces) else 1 for key, each in run.captured.items()}
    assert ImitatedGraph.replays == sum(graphs_of[key] * times for key, times in run.stats.replays.items())


def test_compile_pieces_outside_a_runner():
    torch._dynamo.reset()
    model, kv_cache = Toy(), KVCache(LAYERS, 48, B, K, D)
    compiled = compile_pieces(model)
    inputs = Plain(compiled, kv_cache, SEQS, TOKENS, LONGEST), Plain(model, kv_cache, SEQS, TOKENS, LONGEST)
    batch, ids = Batch([5, 2], [0, 0], [[0, 1], [2]]), torch.arange(7)
    got, want = (plain(batch, ids) for plain in inputs)
    torch.testing.assert_close(got, want)


def test_advancing_compiles_once():
    torch._dynamo.reset()
    compiled = torch.compile(advance_decodes, fullgraph=True, dynamic=True)
    builders = [AttentionMetadataBuilder(B, 8, 8, 16, num_blocks=64) for _ in range(2)]
    with CompileReport() as report:
        for n in (3, 5, 8):
            batch = decodes(*range(2, 2 + n), spare=3)
            S = min(n + 1, 8)
            steps = [each.build(0, batch, num_reqs=S, num_tokens=S, lookahead=3) for each in builders]
            for _ in range(3):
                compiled(steps[0], B)
                advance_decodes(steps[1], B)
            for name in ("seq_lens", "positions", "slot_mapping"):
                assert torch.equal(getattr(steps[0], name), getattr(steps[1], name)), name
    assert report.graphs == 1 and report.recompiles == 0, report.recompile_reasons


def test_one_compilation_serves_all_layers():
    torch._dynamo.reset()
    kv_cache = KVCache(LAYERS, 48, B, K, D)
    model, by_layer = Toy(), Toy()
    by_layer.layer = torch.compile(by_layer.layer, fullgraph=True)
    batch, ids = Batch([5, 2], [0, 0], [[0, 1], [2]]), torch.arange(7)
    with CompileReport(kv_cache.layers) as report:
        got = Plain(by_layer, kv_cache, SEQS, TOKENS, LONGEST)(batch, ids)
    assert report.graphs == 1 and report.recompiles == report.cache_copies == 0, report.recompile_reasons
    torch.testing.assert_close(got, Plain(model, kv_cache, SEQS, TOKENS, LONGEST)(batch, ids))


def test_no_pieces_before_torch_2_10(monkeypatch, imitated):
    monkeypatch.delattr(torch._inductor.config, "custom_should_partition_ops")
    for call in (lambda: compile_pieces(Toy()), lambda: runner(mode="FULL_AND_PIECEWISE")):
        with pytest.raises(NotImplementedError, match=r"mode: expected torch 2\.10 or newer"):
            call()
