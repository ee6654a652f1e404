"""The TPU branch compiled ahead of time for TPUs that are not here, by libtpu: kernels alone and the decode graph of a
Llama. `python -m tests.xla.test_xla_aot` appends what the compiler says of memory to benchmarks/data/tpu_aot.jsonl."""

import datetime
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

if __name__ == "__main__":
    from tests.xla import conftest  # noqa: F401 - the environment that libtpu needs
import torch
import torch_xla

import paged_ops
from paged_ops.lowerings.tpu import ragged
from tests.xla import tpu_compiler

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import compile_decode  # noqa: E402

pytestmark = pytest.mark.xla

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
MIB = 1 << 20


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype).to("xla")


def attention_inputs(T, H, K, B, S, M, dtype, cache_dtype, N=512):
    kv_cache = paged_ops.allocate_kv_cache("INTERLEAVED", N, B, K, 128, cache_dtype, "xla")
    batch = zeros(S, M, dtype=torch.int32), zeros(S, dtype=torch.int32), zeros(S + 1, dtype=torch.int32)
    return zeros(T, H, 128, dtype=dtype), kv_cache, *batch


def attention(target, T=64, H=32, K=8, B=16, S=64, M=64, dtype=BF16, cache_dtype=BF16, **features):
    """paged_attention alone."""
    query, kv_cache, *batch = attention_inputs(T, H, K, B, S, M, dtype, cache_dtype)
    torch_xla.sync()
    with tpu_compiler.tracing_for(target):
        out = paged_ops.paged_attention(query, kv_cache, *batch, 128**-0.5, **features)
        return tpu_compiler.traced([out]), kv_cache.nbytes


def write(target, T=64, K=8, B=16, dtype=BF16, cache_dtype=BF16, N=512):
    """reshape_and_cache alone, its cache donated."""
    kv_cache = paged_ops.allocate_kv_cache("INTERLEAVED", N, B, K, 128, cache_dtype, "xla")
    key, value, slots = zeros(T, K, 128, dtype=dtype), zeros(T, K, 128, dtype=dtype), zeros(T, dtype=torch.int64)
    torch_xla.sync()
    with tpu_compiler.tracing_for(target):
        paged_ops.reshape_and_cache(key, value, kv_cache, slots)
        return tpu_compiler.donating(tpu_compiler.traced([kv_cache]), kv_cache.shape), kv_cache.nbytes


def llama(target, T=64, S=64, M=64, B=16, N=2048, layers=4):
    """A step of Llama-3-8B's shape with fewer layers and a small vocabulary, bfloat16, the caches donated."""
    config = compile_decode.Config(layers, 4096, 32, 8, 128, 14336, vocabulary=1024)
    with torch.device("xla"):
        model = compile_decode.Llama(config).to(BF16).eval()
    kv_caches = [paged_ops.allocate_kv_cache("INTERLEAVED", N, B, 8, 128, BF16, "xla") for _ in range(layers)]
    metadata = paged_ops.AttentionMetadata(
        query_start_loc_cpu=torch.zeros(S + 1, dtype=torch.int32),
        query_start_loc=zeros(S + 1, dtype=torch.int32),
        seq_lens_cpu=torch.zeros(S, dtype=torch.int32),
        seq_lens=zeros(S, dtype=torch.int32),
        num_reqs=S,
        num_actual_tokens=T,
        max_query_len=T,
        max_seq_len=1,
        block_tables=zeros(S, M, dtype=torch.int32),
        slot_mapping=zeros(T, dtype=torch.int64),
        num_computed_tokens_cpu=torch.zeros(S, dtype=torch.int32),
        positions=zeros(T, dtype=torch.int64),
    )
    ids, last_rows = zeros(T, dtype=torch.int64), zeros(S, dtype=torch.int64)
    torch_xla.sync()
    with tpu_compiler.tracing_for(target):
        tokens = model(ids, metadata, last_rows, kv_caches).argmax(-1)
        module = tpu_compiler.traced([*kv_caches, tokens])
    return tpu_compiler.donating(module, kv_caches[0].shape), layers * kv_caches[0].nbytes


# What is recorded as data: every dtype, decode and prefill, small and large blocks.
RECORDED = {
    "attention bf16 decode": (attention, {}),
    "attention bf16 prefill": (attention, {"T": 2048, "S": 8}),
    "attention bf16 block 128": (attention, {"B": 128, "M": 32}),
    "attention f32": (attention, {"dtype": torch.float32, "cache_dtype": torch.float32}),
    "attention e4m3 cache": (attention, {"cache_dtype": E4M3}),
    "attention e5m2 cache": (attention, {"cache_dtype": E5M2}),
    "attention window cap": (attention, {"sliding_window": 128, "soft_cap": 50.0}),
    "attention most tables": (attention, {"S": 240, "M": 1024}),
    "write bf16 decode": (write, {}),
    "write bf16 prefill": (write, {"T": 2048}),
    "write f32": (write, {"dtype": torch.float32, "cache_dtype": torch.float32}),
    "write e4m3": (write, {"cache_dtype": E4M3}),
    "llama decode": (llama, {}),
    "llama prefill": (llama, {"T": 1024, "S": 8, "B": 128, "M": 16, "N": 256}),
}
# What the tests compile for every TPU.
TESTED = ("attention bf16 prefill", "attention bf16 block 128", "attention e4m3 cache", "write e4m3", "llama decode")


def memory_of(name, target):
    make, sizes = RECORDED[name]
    start = time.perf_counter()
    with torch.no_grad():
        module, cache_bytes = make(target, **sizes)
    traced = time.perf_counter()
    executable = tpu_compiler.compile_for(target, module)
    compiled = time.perf_counter()
    stats = executable.get_compiled_memory_stats()
    return {
        "cache_bytes": cache_bytes,
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "aliased_bytes": stats.alias_size_in_bytes,
        "temporary_bytes": stats.temp_size_in_bytes,
        "code_bytes": stats.generated_code_size_in_bytes,
        "trace_seconds": round(traced - start, 2),
        "compile_seconds": round(compiled - traced, 2),
    }


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.parametrize("kind", tpu_compiler.TARGETS)
def test_compiles_without_a_copy_of_the_cache(kind, name):
    if kind == "v4" and "attention e4m3" in name:
        with pytest.raises(ValueError, match="reads no fp8 on a TPU v4"):
            memory_of(name, tpu_compiler.TARGETS[kind])
        return
    memory = memory_of(name, tpu_compiler.TARGETS[kind])
    if "attention" not in name:
        assert memory["aliased_bytes"] == memory["cache_bytes"]
        assert memory["temporary_bytes"] < memory["cache_bytes"]
    assert memory["temporary_bytes"] < 64 * MIB


def accepted(S, M):
    return ragged._kernel_reasons({"block_tables": (S, M)}) == []


@pytest.mark.parametrize(
    ("S", "M", "fits"), [(240, 1024, True), (1920, 17, True), (256, 1000, False), (2048, 32, False)]
)
def test_scalar_memory_is_our_error_before_it_is_the_compilers(S, M, fits):
    """What the check lets through compiles; what the compiler has no room for the check has refused."""
    target = tpu_compiler.TARGETS["v5e"]
    assert accepted(S, M) == fits
    if fits:
        tpu_compiler.compile_for(target, attention(target, T=16, H=8, K=4, S=S, M=M)[0])
        return
    with pytest.raises(ValueError, match="use larger blocks"):
        attention(target, T=16, H=8, K=4, S=S, M=M)
    tables = ragged.BLOCK_TABLE_BYTES
    ragged.BLOCK_TABLE_BYTES = 1 << 30
    try:
        module, _ = attention(target, T=16, H=8, K=4, S=S, M=M)
    finally:
        ragged.BLOCK_TABLE_BYTES = tables
    with pytest.raises(Exception, match="smem"):
        tpu_compiler.compile_for(target, module)


def test_smallest_block_size_fits():
    """The page-size helper leads to tables that the check accepts."""
    for max_model_len, max_num_seqs in ((8192, 256), (131072, 64), (32768, 512)):
        block_size = paged_ops.layouts.min_tpu_block_size(max_model_len, max_num_seqs)
        assert accepted(max_num_seqs, -(-max_model_len // block_size))


def record(kinds):
    """Append one line a case and TPU."""
    versions = {name: version(name) for name in ("torch", "torch_xla", "jax", "jaxlib", "libtpu")}
    path = ROOT / "benchmarks/data/tpu_aot.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    with path.open("a") as file:
        for kind in kinds:
            target = tpu_compiler.TARGETS[kind]
            for name in RECORDED:
                sizes = {k: v if isinstance(v, (int, float)) else str(v) for k, v in RECORDED[name][1].items()}
                line = {"date": day, "tpu": kind, "topology": target.topology, "case": name, "sizes": sizes}
                try:
                    line |= memory_of(name, target)
                except Exception as error:  # what does not compile is a result too
                    line["error"] = f"{type(error).__name__}: {error}".partition("\n")[0]
                print(json.dumps({**line, "versions": versions}), file=file, flush=True)
                print(kind, name, line.get("error", "compiled"), flush=True)


if __name__ == "__main__":
    record(sys.argv[1:] or list(tpu_compiler.TARGETS))
