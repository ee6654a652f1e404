"""Two GPUs of different kinds in one process, as far as that needs no GPU: what is planned, launched, recorded and kept
for a device is its own, whatever the current device is. tests/gpu/test_two_gpus.py runs on two real ones."""

import contextlib
import random
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("triton")

import triton

import paged_ops
from paged_ops import KVCache, Layout, layouts
from paged_ops.bench import tune
from paged_ops.cache import HybridCache
from paged_ops.cache.states import StateCache, StateSpec
from paged_ops.lowerings import gpu
from paged_ops.lowerings.gpu import blocks, counters, launch, target
from paged_ops.lowerings.gpu.attention import call as attention
from paged_ops.lowerings.gpu.attention import tuning
from paged_ops.metadata import AttentionMetadataBuilder, Batch
from tests.aot import compiler as aot

PROPERTIES = [
    SimpleNamespace(name="NVIDIA A100", major=8, minor=0, multi_processor_count=108,
                    shared_memory_per_block_optin=163 << 10),
    SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132,
                    shared_memory_per_block_optin=227 << 10),
]  # fmt: skip
A100, H200 = (torch.device("cuda", index) for index in range(2))


class OnA100(torch.Tensor):
    """A CPU tensor that says it is on the first GPU; so do its views and what is made from it."""

    device = property(lambda self: A100)
    is_cuda = property(lambda self: True)

    def get_device(self):
        return self.device.index


class OnH200(OnA100):
    device = property(lambda self: H200)


CLASSES = {A100: OnA100, H200: OnH200}


def on(where, *shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype).as_subclass(CLASSES[where])


class Machine:
    """What torch and Triton say of this machine, and what was launched."""

    def __init__(self):
        self.current = 0
        self.capturing = set()  # devices whose current stream captures
        self.launches = []  # kernel's module and name, the device that was current, constants

    @contextlib.contextmanager
    def device(self, where):
        before, self.current = self.current, torch.device(where).index if not isinstance(where, int) else where
        try:
            yield
        finally:
            self.current = before

    def stream(self, where=None):
        index = self.current if where is None else torch.device(where).index
        return SimpleNamespace(index=self.current if index is None else index, cuda_stream=index, wait_event=id)

    def run(self, kernel, *args, grid, warmup, **constants):
        """In Triton's place. As in the interpreter None comes back: there is nothing to launch again."""
        self.launches.append((kernel.fn.__module__.rpartition(".")[2], self.current, constants))


class Event:
    """Notes on which device's stream it was recorded."""

    def __init__(self):
        self.recorded = []

    def record(self, stream):
        self.recorded.append(stream.index)

    def wait(self, stream):
        pass

    synchronize = query = lambda self: True


def forget():
    tune.forget()
    target.target_of.cache_clear()
    for each in (launch._launchers, blocks._tables, blocks._captured):
        each.clear()


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(triton.JITFunction, "run", lambda kernel, *args, **rest: made.run(kernel, *args, **rest))
    move = torch.Tensor.to

    def to(tensor, *args, **kwargs):
        if args and isinstance(args[0], torch.device) and args[0].type == "cuda":
            return tensor.as_subclass(CLASSES[args[0]])
        return move(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    for name, stand_in in {
        "get_device_properties": PROPERTIES.__getitem__,
        "current_device": lambda: made.current,
        "device": made.device,
        "current_stream": made.stream,
        "is_current_stream_capturing": lambda: made.current in made.capturing,
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    forget()
    yield made
    forget()


CURRENT = pytest.mark.parametrize("current", [0, 1])


def attend(where, tokens=200, S=3):
    kv_cache = on(where, 64, 2, 16, 8, 128)
    tables, lens = on(where, S, 16, dtype=torch.int32), on(where, S, dtype=torch.int32)
    starts = on(where, S + 1, dtype=torch.int32)
    gpu.paged_attention(on(where, tokens, 32, 128), kv_cache, tables, lens, starts, 0.1)


@CURRENT
def test_attention_of_each_device(machine, current):
    """The kernels, their tiles and the guard that they are launched under."""
    machine.current = current
    for where in (A100, H200, A100, H200):
        machine.launches.clear()
        attend(where)
        assert machine.current == current
        by_module = {module: constants for module, _, constants in machine.launches}
        assert [index for _, index, _ in machine.launches] == [where.index] * 3
        is_hopper = where == H200
        assert by_module.keys() == {"decode", "dense" if is_hopper else "prefill", "merge"}
        split = by_module["decode"]
        assert split["PDL"] is by_module["merge"]["PDL"] is is_hopper
        keys, warps, stages, *_ = target.read_tiles(PROPERTIES[where.index].name)["split"]["16bit"]["128"]
        assert (split["TILE"].N, split["num_warps"], split["num_stages"]) == (keys, warps, stages)


def test_the_tables_of_both_differ():
    """Or the tests here would show nothing."""
    tables = [target.read_tiles(each.name)["split"]["16bit"]["128"] for each in PROPERTIES]
    assert tables[0] != tables[1]
    numbers = [target.read_numbers(each.name) for each in PROPERTIES]
    for op in ("reshape_and_cache", "gather_kv", "merge_attention_states", "copy_blocks"):
        assert numbers[0][op] != numbers[1][op]


@CURRENT
def test_cache_ops_of_each_device(machine, current):
    machine.current = current
    for where in (A100, H200, A100):
        machine.launches.clear()
        key, out, lse = on(where, 9, 8, 128), on(where, 9, 8, 128), on(where, 9, 8, dtype=torch.float32)
        kv_cache = on(where, 64, 2, 16, 8, 128, dtype=torch.float8_e4m3fn)
        gpu.reshape_and_cache(key, key, kv_cache, on(where, 9, dtype=torch.int64))
        tables, lens = on(where, 3, 16, dtype=torch.int32), on(where, 3, dtype=torch.int32)
        gpu.gather_kv(kv_cache, tables, lens, 100, dtype=torch.bfloat16)
        gpu.merge_attention_states(out, lse, out, lse)
        gpu.copy_blocks([kv_cache], on(where, 3, 2, dtype=torch.int64))
        assert [index for _, index, _ in machine.launches] == [where.index] * 4
        assert {each["PDL"] for *_, each in machine.launches} == {where == H200}
        write, gather, merge, copy = (each for *_, each in machine.launches)
        assert write["NATIVE"] is (where == H200)
        numbers = target.read_numbers(PROPERTIES[where.index].name)
        assert write["BLOCK_T"] * write["BLOCK_C"] == numbers["reshape_and_cache"]["elements"]
        assert gather["BLOCK_T"] * gather["BLOCK_C"] == numbers["gather_kv"]["elements"]
        assert merge["num_warps"] == numbers["merge_attention_states"]["num_warps"]
        assert copy["num_warps"] == numbers["copy_blocks"]["num_warps"]


@pytest.mark.parametrize(("arch", "flavour"), [("gfx942", 3), ("gfx950", 1)])
def test_fp8_bits_of_each_device(machine, monkeypatch, arch, flavour):
    """uint8 is fnuz on gfx94x alone, also beside another."""
    rocm = {
        H200: target.Target(H200, "AMD", "hip", arch, 304, 64 << 10),
        A100: target.Target(A100, "AMD", "hip", "gfx90a", 104, 64 << 10),
    }
    monkeypatch.setattr(gpu.cache, "target_of", rocm.get)
    for where, wanted in ((A100, 1), (H200, flavour), (A100, 1)):
        key, kv_cache = on(where, 9, 8, 128), on(where, 64, 2, 16, 8, 128, dtype=torch.uint8)
        gpu.reshape_and_cache(key, key, kv_cache, on(where, 9, dtype=torch.int64), kv_cache_dtype="fp8")
        assert machine.launches[-1][2]["FORMAT"] == wanted


BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
# dtypes of query and cache, head size (576: a latent cache), query heads, tokens of 4 sequences; rows, keys, warps and
# stages of each tile but the merge's: with 64 KiB of shared memory, and with 160.
TILES_OF_AMD = [
    (BF16, BF16, 576, 16, 4, [(16, 16, 4, 2)], [(16, 16, 4, 2)]),
    (BF16, BF16, 576, 128, 4, [(32, 16, 8, 2)], [(32, 16, 8, 2)]),
    (BF16, E4M3, 576, 128, 2048, [(16, 16, 4, 2)], [(16, 16, 4, 5)]),
    (FP32, FP32, 576, 128, 4, [(16, 16, 8, 1)], [(16, 16, 8, 1)]),
    (BF16, BF16, 128, 16, 4, [(16, 64, 4, 3)], [(16, 64, 4, 3)]),
    (BF16, BF16, 128, 16, 64, [(64, 32, 4, 1)], [(64, 32, 4, 2)]),
    (BF16, BF16, 256, 128, 8, [(64, 32, 8, 1)], [(64, 32, 8, 2)]),
    (BF16, BF16, 128, 16, 2048, [(16, 64, 4, 3), (64, 64, 8, 2)], [(16, 64, 4, 3), (64, 64, 8, 2)]),
    (BF16, E4M3, 64, 16, 2048, [(16, 32, 4, 3), (64, 32, 4, 2)], [(16, 32, 4, 3), (64, 32, 4, 2)]),
    (FP32, FP32, 256, 16, 2048, [(16, 16, 4, 3), (16, 16, 4, 1)], [(16, 16, 4, 3), (16, 16, 4, 1)]),
]


@pytest.mark.parametrize("name", [each for each in aot.TARGETS if each.startswith("hip")])
def test_tiles_of_amd(machine, monkeypatch, name):
    """They depend on the architecture: torch does not report its shared memory."""
    reported, arch = aot.properties(name), name.partition(":")[2]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", [reported, reported].__getitem__)
    space = 160 << 10 if arch == "gfx950" else 64 << 10
    assert target.target_of(A100) == target.Target(
        A100, reported.name, "hip", arch, reported.multi_processor_count, space
    )
    for dtype, stored, D, H, T, *tiles in TILES_OF_AMD:
        machine.launches.clear()
        kv_cache = on(A100, 8, 64, D, dtype=stored) if D == 576 else on(A100, 8, 2, 64, 4, D, dtype=stored)
        latent = {"value_head_size": 512} if D == 576 else {}
        tables, lens, starts = (on(A100, *shape, dtype=torch.int32) for shape in ((4, 64), (4,), (5,)))
        gpu.paged_attention(on(A100, T, H, D, dtype=dtype), kv_cache, tables, lens, starts, 0.1, **latent)
        *attending, _ = (each for _, _, each in machine.launches)
        launched = [(each["TILE"].M, each["TILE"].N, each["num_warps"], each["num_stages"]) for each in attending]
        assert launched == tiles[space > 64 << 10], (dtype, stored, D, H, T)


@CURRENT
def test_what_captures_is_asked_of_the_caches_device(machine, current):
    machine.current = current
    for where in (A100, H200):
        mapping = on(where, 3, 2, dtype=torch.int64)
        machine.capturing = {1 - where.index}
        known = [on(where, 64, 16, 128)]
        gpu.copy_blocks(known, mapping)
        machine.capturing = {where.index}
        gpu.copy_blocks(known, mapping)
        with pytest.raises(ValueError, match="kv_caches: expected a call before the capture"):
            gpu.copy_blocks([on(where, 64, 16, 129)], mapping)
        with pytest.raises(ValueError, match="block_mapping: expected a call outside of a CUDA graph"):
            gpu.swap_blocks(known, [torch.zeros(64, 16, 128, dtype=torch.bfloat16)], torch.tensor([[0, 1]]))


def test_tables_are_bounded_but_for_those_of_graphs(machine, monkeypatch):
    monkeypatch.setattr(blocks, "MOST_TABLES", 4)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    captured, mapping = [on(A100, 64, 16)], on(A100, 3, 2, dtype=torch.int64)
    gpu.copy_blocks(captured, mapping)
    machine.capturing = {0}
    gpu.copy_blocks(captured, mapping)
    machine.capturing = set()
    for n in range(9):
        gpu.copy_blocks([on(A100, 64, 17 + n)], mapping)
    assert len(blocks._tables) == 4 + 1
    assert len(blocks._captured) == 1
    machine.capturing = {0}
    gpu.copy_blocks(captured, mapping)  # its table is still there


def test_launchers_are_bounded(machine, monkeypatch):
    for module in (attention, launch):
        monkeypatch.setattr(module, "MOST_KINDS", 4)
    for tokens in range(1, 9):
        attend(A100, tokens, tokens)
        attend(A100, 300, tokens)
    assert 0 < len(attention._signatures) <= len(attention._calls) <= 4
    assert 0 < len(launch._launchers) <= 4


@pytest.mark.skipif(target.TRITON > target.NEWEST_KNOWN, reason="launches by itself")
def test_beside_the_current_device_triton_is_asked_once(machine, monkeypatch):
    launched = []

    class Kernel:
        arg_names = ("x", "n", "SIZE")

        def __getitem__(self, grid):
            return lambda x, n, **constants: launched.append(("triton", machine.current)) or compiled

    compiled = SimpleNamespace(
        run=lambda x, y, z, stream, *rest: launched.append((stream, machine.current)),
        function=1,
        packed_metadata=(),
    )
    monkeypatch.setattr(launch, "_entry", lambda kernel, _cluster: (kernel.run, (kernel.function,)))
    active = SimpleNamespace(get_current_stream=lambda index: f"stream of {index}")
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    launcher = launch.Launcher(Kernel(), {"SIZE": 8}, H200)
    for current in (0, 1, 0):
        machine.current = current
        launcher((1, 1, 1), (on(H200, 8),), (8,))
        assert machine.current == current
    assert launched == [("triton", 1), ("stream of 1", 1), ("stream of 1", 1)]


# What is kept names its GPU by the index


class OnHost(TorchFunctionMode):
    """Allocates in host memory what is asked for on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


@pytest.fixture
def allocated_on_host():
    with OnHost():
        yield


def test_caches_and_builders_stay_on_the_gpu_that_was_current(machine, allocated_on_host):
    machine.current = 1
    options = {"device": "cuda", "num_host_blocks": 4}
    kv_cache = KVCache(1, 8, 16, 2, 32, **options)
    states = StateCache([StateSpec((4,), torch.float32)], 3, device="cuda", num_host_slots=2)
    hybrid = HybridCache.for_layers(2, 8, 16, 2, 32, sliding_window=[0, 32], states=states, **options)
    builder = AttentionMetadataBuilder(16, 4, 64, 8, "cuda", num_blocks=8)
    made = [kv_cache, states, hybrid, *hybrid.pools, builder]
    machine.current = 0
    assert {each.device for each in made} == {H200}

    batch = Batch(query_lens=[3], num_computed_tokens=[0], block_ids=[[1]])
    builder.build(0, batch)
    kv_cache.admit("s", [1, 2, 3])
    kv_cache.commit("s", 3)
    kv_cache.swap_out("s")
    states.admit("s")
    states.swap_out("s")
    events = [builder._staging[0].event, kv_cache._swapped_event, states._swapped_event]
    assert [each.recorded for each in events] == [[1]] * 3


@pytest.mark.parametrize("named", ["cuda:1", H200])
def test_tensors_are_exported_from_their_gpu(machine, allocated_on_host, monkeypatch, named):
    """As DLPack wants it: it refuses those of another GPU than the current one."""
    export, current = torch.from_dlpack, []
    monkeypatch.setattr(torch, "from_dlpack", lambda tensor: current.append(machine.current) or export(tensor))
    AttentionMetadataBuilder(16, 4, 64, 8, named, num_blocks=8)
    assert set(current) == {1}
    assert machine.current == 0


def test_the_layout_of_one_gpu(machine):
    paged_ops.set_default_layout("HND", "cuda:1")
    try:
        assert paged_ops.get_default_layout("cuda:1") is Layout.HND
        for other in ("cuda:0", "cuda", "cpu"):
            assert paged_ops.get_default_layout(other) is Layout.NHD
        paged_ops.set_default_layout("X_PACKED", "cuda")  # all GPUs
        assert {paged_ops.get_default_layout(each) for each in ("cuda:0", "cuda:1", "cuda")} == {Layout.X_PACKED}
        paged_ops.set_default_layout("HND", "cuda:1")
        paged_ops.set_default_layout(None, "cuda:1")
        assert paged_ops.get_default_layout("cuda:1") is Layout.X_PACKED
        paged_ops.set_default_layout("HND", "cuda:1")
        paged_ops.set_default_layout("INTERLEAVED")
        assert {paged_ops.get_default_layout(each) for each in ("cuda:1", "cuda:0", "cpu")} == {Layout.INTERLEAVED}
        paged_ops.set_default_layout("HND", "cuda:0")
        with pytest.raises(ValueError, match="layout: expected one of"):
            paged_ops.set_default_layout("HDN", "cuda")
        assert paged_ops.get_default_layout("cuda:0") is Layout.HND
    finally:
        paged_ops.set_default_layout(None)
    assert not layouts._chosen


def test_the_layout_of_a_cache_is_that_of_its_gpu(machine, allocated_on_host):
    paged_ops.set_default_layout("HND", "cuda:1")
    try:
        found = {}
        for machine.current in (0, 1):
            found[machine.current] = KVCache(1, 8, 16, 2, 32, device="cuda").layout
        assert found == {0: Layout.NHD, 1: Layout.HND}
    finally:
        paged_ops.set_default_layout(None)


def compiled_for(value, parameter):
    """What Triton compiles a kernel for, of an argument."""
    if isinstance(value, tuple):
        return tuple(compiled_for(each, parameter) for each in value)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return "int" if parameter.do_not_specialize else (value == 1, value % 16 == 0)
    return type(value)


@pytest.fixture
def variants(machine, monkeypatch):
    """The kernels that would be compiled, each with all that it is compiled for."""
    found = set()

    def run(kernel, *args, grid, warmup, **constants):
        given = zip(args, kernel.params, strict=False)
        found.add((kernel.fn.__qualname__, *(compiled_for(*each) for each in given), *sorted(constants.items())))

    monkeypatch.setattr(machine, "run", run)
    monkeypatch.setattr(counters, "_new", lambda place: on(place[0], place[1], dtype=torch.int32))
    return found


@pytest.mark.parametrize("where", [A100, H200], ids=["a100", "h200"])
@pytest.mark.parametrize(
    ("heads", "D", "most"),
    [
        ((32, 8), 128, (8192, 256)), ((32, 8), 128, (2048, 1024)), ((8, 1), 128, (512, 8)), ((64, 1), 128, (8192, 300)),
        ((32, 8), 64, (8192, 64)),
    ],
)  # fmt: skip
def test_no_batch_waits_for_a_compiler_after_the_covering_ones(variants, where, heads, D, most):
    """Of any tokens and sequences within the bounds, with any row length of the block tables."""
    H, K = heads
    query, kv_cache = on(where, most[0], H, D), on(where, 64, 2, 16, K, D)
    tables, starts = on(where, most[1], 32, dtype=torch.int32), on(where, most[1] + 1, dtype=torch.int32)

    def attend(T, S, columns):
        gpu.paged_attention(query[:T], kv_cache, tables[:S, :columns], starts[:S], starts[: S + 1], 0.1)

    batches = tuning.covering_batches(*most)
    for T, S in batches:
        attend(T, S, 1)
    covered = set(variants)
    assert 2 <= len(covered) <= 90
    assert len(batches) <= 400
    draw = random.Random(0)
    for _ in range(250):
        S = draw.choice((draw.randint(1, most[1]), draw.randint(1, 8), 16 * draw.randint(1, max(most[1] // 16, 1))))
        S = min(S, most[1])
        T = draw.choice((S * draw.randint(1, 20), draw.randint(1, most[0]), S + draw.randint(0, 64), S - 1))
        tables = on(where, most[1], draw.randint(1, 40), dtype=torch.int32)
        attend(min(max(T, 1), most[0]), S, None)
        assert variants == covered, (T, S, variants - covered)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_ds_mla"])
def test_one_kernel_gathers_by_block_tables_of_any_width(variants, kv_cache_dtype):
    rows = kv_cache_dtype == "fp8_ds_mla"
    kv_cache = on(H200, 64, 16, 656, dtype=torch.uint8) if rows else on(H200, 64, 16, 576)
    lens = on(H200, 3, dtype=torch.int32)
    for columns in (1, 2, 16, 1000, 1024):
        tables = on(H200, 3, columns, dtype=torch.int32)
        gpu.gather_kv(kv_cache, tables, lens, 40, kv_cache_dtype=kv_cache_dtype, dtype=torch.bfloat16)
    assert len(variants) == 1


@pytest.mark.parametrize("where", [A100, H200], ids=["a100", "h200"])
def test_half_of_the_kernels_serve_decodes_and_unequal_prompts(variants, where):
    most = 8192, 256
    query, kv_cache = on(where, most[0], 32, 128), on(where, 64, 2, 16, 8, 128)
    tables, starts = on(where, most[1], 32, dtype=torch.int32), on(where, most[1] + 1, dtype=torch.int32)

    def attend(T, S):
        gpu.paged_attention(query[:T], kv_cache, tables[:S], starts[:S], starts[: S + 1], 0.1)

    for T, S in tuning.covering_batches(*most, equal_lengths=False):
        attend(T, S)
    covered = set(variants)
    assert len(covered) <= 32
    draw = random.Random(0)
    for _ in range(200):
        S = draw.choice((draw.randint(1, most[1]), draw.randint(1, 8)))
        T = draw.choice((S, draw.randint(S, most[0]), S + draw.randint(1, 600)))
        if T == S or T % S or T > 64 * S:
            attend(T, S)
            assert variants == covered, (T, S, variants - covered)
