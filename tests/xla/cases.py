"""The calls that tests of the TPU's kernels share, in Pallas' interpret mode and on a TPU, and the compiled cases."""

import torch

from paged_ops import testing
from paged_ops.lowerings import tpu
from paged_ops.testing import BATCHES, F8_E4M3, F8_E5M2, FEATURES, AttentionCase, CacheSpec, WriteCase


def case(name, batch, *features, **changes):
    spec = {key: changes.pop(key) for key in list(changes) if key in CacheSpec.__dataclass_fields__}
    seqs = BATCHES[batch] if isinstance(batch, str) else batch
    chosen = tuple(FEATURES[feature] for feature in features)
    return AttentionCase(name, seqs, CacheSpec("interleaved", head_size=128, **spec), features=chosen, **changes)


BF16 = torch.bfloat16
ATTENTION = [
    *(case(batch, batch) for batch in BATCHES if batch != "long"),
    case("no-keys-but-queries", ((2, 0), (1, 5), (0, 0), (3, 20), (0, 9))),
    case("no-padding", "decode", padding=(0, 0)),
    case("mixed-bf16", "mixed", dtype=BF16),
    case("decode-bf16-window", "decode", "window", dtype=BF16),
    case("window-cap", "mixed", "window", "cap"),
    case("cap-bf16", "chunked_prefill", "cap", dtype=BF16),
    case("one-kv-head-bf16", "decode", num_kv_heads=1, num_heads=4, dtype=BF16),
    case("four-kv-heads-block-48", "mixed", num_kv_heads=4, block_size=48, dtype=BF16),
    case("e4m3-per-head-bf16", "mixed", dtype=BF16, cache_dtype=F8_E4M3, scales="head"),
    case("e5m2-per-tensor-fp32", "decode", cache_dtype=F8_E5M2, scales="tensor"),
    case("e4m3-unscaled-window", "mixed", "window", dtype=BF16, cache_dtype=F8_E4M3),
    case("fp8-output", "mixed", dtype=BF16, fp8_output=True),
]


def writes(name, **changes):
    spec = {key: changes.pop(key) for key in list(changes) if key in CacheSpec.__dataclass_fields__}
    return WriteCase(name, CacheSpec("interleaved", head_size=128, **spec), **changes)


WRITES = [
    writes("fp32"),
    writes("bf16-strided-special", dtype=BF16, strided=True, slots=torch.int32, special=True),
    writes("e4m3", num_kv_heads=4, cache_dtype=F8_E4M3, scales="head", special=True),
    writes("only-padding", skip=1),
    writes("two-tiles", tokens=200, num_blocks=20, skip=7, num_kv_heads=1, dtype=BF16),
]

# (op, case): what the lowering serves, and what it refuses.
COMPILED = [
    (name, testing.case_named(name, case))
    for name, cases in testing.COMPILED.items()
    if hasattr(tpu, name)
    for case in cases
]
REFUSED = [
    (name, case)
    for name, case in COMPILED
    if ("rows" in case.name and not name.endswith("blocks"))
    or case.name.startswith(("invariant", "selected", "latent-selected", "index-"))
]
CASES = [each for each in COMPILED if each not in REFUSED]
