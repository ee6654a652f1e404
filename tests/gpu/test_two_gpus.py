"""Two GPUs in one process: everything runs where its tensors are, whatever GPU is current.

The other files of GPU tests run on a GPU that is not the current one with ``pytest -m gpu --device cuda:1``.
"""

import threading

import pytest
import torch

from tests.graphs.walk import LAYERS, B, D, K, Plain, Toy, Walk, poisoned_cache

pytest.importorskip("triton")

import triton

import paged_ops
from paged_ops import KVCache, testing
from paged_ops.bench import measure
from paged_ops.bench.read import read
from paged_ops.cache import HybridCache
from paged_ops.cache.states import StateCache, StateSpec
from paged_ops.graphs import DecodeGraphs
from paged_ops.lowerings.gpu.target import target_of
from paged_ops.metadata import AttentionMetadataBuilder, Batch
from paged_ops.registry import OPS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
HERE, THERE = torch.device("cuda", 0), torch.device("cuda", 1)  # the current one, and the other
SEQS, TOKENS, LONGEST = 12, 40, 64
CLOSE = dict(rtol=2e-3, atol=2e-3)
LONG = 200_000_000  # cycles that a GPU is busy for: a tenth of a second


@pytest.fixture(autouse=True)
def current():
    torch.cuda.set_device(HERE)
    with torch.no_grad():
        yield
    assert torch.cuda.current_device() == HERE.index
    torch.cuda.synchronize(HERE)
    torch.cuda.synchronize(THERE)


def keep_busy(where):
    with torch.cuda.device(where):
        torch.cuda._sleep(LONG)


@pytest.fixture
def triton_launches(monkeypatch):
    """The devices on which Triton's own look-up launched."""
    run, seen = triton.JITFunction.run, []

    def counted(self, *args, **kwargs):
        seen.append(torch.cuda.current_device())
        return run(self, *args, **kwargs)

    monkeypatch.setattr(triton.JITFunction, "run", counted)
    return seen


def attention_inputs(where, q_len=1, S=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    kv_cache = torch.randn(64, 2, 16, 8, 128, generator=generator, dtype=torch.float32).bfloat16().to(where)
    tables = torch.randperm(64, generator=generator).int().view(S, 16).to(where)
    lens = torch.tensor([200, 17, 133, 250][:S], dtype=torch.int32, device=where)
    starts = torch.arange(S + 1, dtype=torch.int32, device=where) * q_len
    query = torch.randn(S * q_len, 32, 128, generator=generator, dtype=torch.float32).bfloat16().to(where)
    return query, kv_cache, tables, lens, starts, 128**-0.5


@pytest.mark.parametrize("op", sorted(OPS))
def test_each_op_on_both(op):
    for case in testing.CASES[op][:3]:
        for where in (THERE, HERE):
            testing.check(op, case, where)


def test_targets_are_made_by_index():
    for where in (HERE, THERE):
        assert target_of(where).device == where
        assert target_of(where).name == torch.cuda.get_device_name(where)
        assert target_of(where).processors == torch.cuda.get_device_properties(where).multi_processor_count


@pytest.mark.parametrize("q_len", [1, 16])
def test_launches_beside_the_current_device_skip_triton(q_len, triton_launches):
    arguments = attention_inputs(THERE, q_len, S=4)
    kv_cache = arguments[1]
    key = torch.randn(4, 8, 128, dtype=torch.bfloat16, device=THERE)
    slots, mapping = (torch.arange(4, device=THERE), torch.tensor([[1, 2]], device=THERE))

    def run():
        out, lse = paged_ops.paged_attention_with_lse(*arguments)
        paged_ops.reshape_and_cache(key, key, kv_cache, slots)
        paged_ops.copy_blocks([kv_cache], mapping)
        return paged_ops.merge_attention_states(out, lse, out, lse)[0]

    run()
    again = run()
    first = len(triton_launches)
    assert set(triton_launches) == {THERE.index}
    for _ in range(3):
        for where in (HERE, THERE):
            with torch.cuda.device(where):
                assert torch.equal(run(), again)
    assert len(triton_launches) == first


def test_caches_of_the_gpu_that_was_current():
    """Pinned swaps and staged numbers wait for their own GPU, which is busy; the current one is idle."""
    with torch.cuda.device(THERE):
        kv_cache = KVCache(2, 32, 16, 2, 64, device="cuda", num_host_blocks=16)
        states = StateCache([StateSpec((512, 512), torch.float32)], 4, device="cuda", num_host_slots=2)
        hybrid = HybridCache.for_layers(2, 8, 16, 2, 32, sliding_window=[0, 32], device="cuda", num_host_blocks=4)
    assert {each.device for each in (kv_cache, states, hybrid, *hybrid.pools)} == {THERE}
    assert {layer.device for each in (kv_cache, hybrid) for layer in each.layers} == {THERE}

    kv_cache.admit("s", list(range(100)))
    kv_cache.commit("s", 100)
    states.admit("s")
    for layer in (*kv_cache.layers, *states.tensors):
        layer.normal_()
    want = [layer[kv_cache.block_ids("s")].clone() for layer in kv_cache.layers]
    want_state = states.tensors[0][states.row("s")].clone()
    for is_busy in (False, True):  # once to compile
        if is_busy:
            keep_busy(THERE)
        kv_cache.swap_out("s")
        states.swap_out("s")
        assert not (is_busy and (kv_cache._swapped_event.query() or states._swapped_event.query()))
        kv_cache.synchronize()
        states.synchronize()
        assert torch.equal(states.host_tensors[0][0], want_state.cpu())
        kv_cache.admit("of all blocks", range(1000, 1000 + 32 * 16))  # or blocks would be found where they still are
        for layer in (*kv_cache.layers, *states.tensors):
            layer.fill_(torch.nan)
        kv_cache.free("of all blocks")
        kv_cache.swap_in("s")
        states.swap_in("s")
        assert torch.equal(states.tensors[0][states.row("s")], want_state)
        for layer, before in zip(kv_cache.layers, want, strict=True):
            assert torch.equal(layer[kv_cache.block_ids("s")], before)


@pytest.mark.parametrize("named", ["cuda", "cuda:1"])
def test_staging_is_not_written_before_it_has_crossed(named):
    with torch.cuda.device(THERE):
        builder = AttentionMetadataBuilder(16, 4, 64, 64, named, num_blocks=1000)
    keep_busy(THERE)
    seen, want = [], []
    for step in range(8):
        blocks = [[step * 8 + s * 2, step * 8 + s * 2 + 1] for s in range(4)]
        metadata = builder.build(0, Batch([1] * 4, [16 + step] * 4, blocks))
        seen.append((metadata.block_tables[:, :2].clone(), metadata.slot_mapping.clone(), metadata.seq_lens.clone()))
        want.append((blocks, [row[1] * 16 + step for row in blocks], [17 + step] * 4))
    assert [tuple(each.tolist() for each in step) for step in seen] == want


def test_captures_are_told_apart():
    known, fresh = ([torch.zeros(4, 555 + n, device=THERE)] for n in range(2))
    mapping, later = (torch.tensor(pairs, device=THERE) for pairs in ([[0, 1]], [[1, 2]]))
    paged_ops.copy_blocks(known, mapping)
    torch.cuda.synchronize(THERE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream(THERE)):
        graph.capture_begin()
        try:
            with torch.cuda.device(HERE):  # whose stream captures nothing
                with pytest.raises(ValueError, match="kv_caches: expected a call before the capture"):
                    paged_ops.copy_blocks(fresh, mapping)
                paged_ops.copy_blocks(known, mapping)
        finally:
            graph.capture_end()
    known[0][0] = 7
    graph.replay()
    assert (known[0][1] == 7).all()

    with torch.cuda.stream(torch.cuda.Stream(HERE)):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            torch.zeros(8, device=HERE)
            paged_ops.copy_blocks(known, later)  # on a GPU that captures nothing
        finally:
            graph.capture_end()
    assert (known[0][2] == 7).all()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_graphs_of_both_in_turn(compiled):
    """Captured while the other GPU is current, and replayed step by step against steps that are not captured."""
    torch._dynamo.reset()
    sides = []
    for where in (THERE, HERE):
        model, kv_cache = Toy(where, seed=where.index), poisoned_cache(48, where, num_host_blocks=24)
        step = torch.compile(model, fullgraph=True) if compiled else model
        sizes = dict(max_num_seqs=SEQS, max_num_tokens=TOKENS, max_model_len=LONGEST)
        run = DecodeGraphs(step, kv_cache, mode="FULL", seq_sizes=[2, SEQS], token_sizes=[16, TOKENS], **sizes)
        run.capture()
        plain = Plain(model, kv_cache, SEQS, TOKENS, LONGEST)
        walk = Walk(kv_cache, SEQS, TOKENS, seed=where.index, longest=LONGEST - 2)
        sides.append((run, plain, walk))

    def both(run, plain, batch, ids):
        got = run.replay(batch, ids).clone()
        torch.testing.assert_close(got, plain(batch, ids), **CLOSE)

    for _ in range(60):
        for run, plain, walk in sides:
            walk.step(lambda batch, ids, run=run, plain=plain: both(run, plain, batch, ids))
    assert all(run.stats.replayed > 30 for run, _, _ in sides)


def test_a_thread_for_each_gpu():
    """Whose current device is its own GPU, or the other one."""
    want = {where: paged_ops.paged_attention(*attention_inputs(where, 16)).cpu() for where in (HERE, THERE)}
    wrong = []

    def work(where, current):
        with torch.no_grad():
            torch.cuda.set_device(current)
            arguments = attention_inputs(where, 16)
            key = torch.randn(4, 8, 128, dtype=torch.bfloat16, device=where)
            for n in range(200):
                cache = arguments[1].clone()
                paged_ops.reshape_and_cache(key, key, cache, torch.arange(4, device=where))
                paged_ops.copy_blocks([cache], torch.tensor([[0, 1]]))
                out = paged_ops.paged_attention(*arguments)
                if n % 20 == 0 and not (torch.equal(out.cpu(), want[where]) and torch.equal(cache[0], cache[1])):
                    wrong.append((where, current, n))
            torch.cuda.synchronize(where)

    threads = [threading.Thread(target=work, args=pair) for pair in ((HERE, THERE), (THERE, HERE), (THERE, THERE))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_the_layout_of_one_gpu():
    paged_ops.set_default_layout("HND", THERE)
    try:
        found = [KVCache(LAYERS, 8, B, K, D, device=where).layout for where in (HERE, THERE, "cuda")]
    finally:
        paged_ops.set_default_layout(None)
    assert found == ["NHD", "HND", "NHD"]


def test_a_model_on_two_gpus_is_refused():
    transformers = pytest.importorskip("transformers")
    from paged_ops.integrations.transformers import PagedCausalLM

    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval().to(HERE)
    model.model.layers[1].to(THERE)
    with pytest.raises(ValueError, match="expected the weights on one device, got LlamaForCausalLM on cuda:0, cuda:1"):
        PagedCausalLM(model)


def test_times_are_those_of_the_device():
    """A read of a gigabyte on either GPU takes as long, while the other one is busy, too."""
    us = {}
    for where in (HERE, THERE):
        source, sink = torch.zeros(1 << 28, device=where), torch.empty(1 << 16, device=where)
        replay = measure.Replay([lambda source=source, sink=sink: read(source, sink)], where)
        assert replay.results[0].device == where
        keep_busy(HERE if where == THERE else THERE)
        us[where] = replay.median_us(5)
    least = (1 << 30) / 8e12 * 1e6  # no memory is that fast
    assert us[HERE] > least
    assert 0.5 < us[THERE] / us[HERE] < 2
