"""Named cases, input makers and tolerances, for tests, benchmarks and lowerings of other packages.

``CASES[op]`` lists the cases of an op; ``case.inputs(device)`` makes its arguments; :func:`check` runs the op on them
and compares it with the reference. Everything that an op must not read is NaN (or an id out of range), every buffer
lies between guard regions, and preallocated outputs are filled with NaN first.
"""

from paged_ops.testing.cases import BATCHES, CASES, COMPILED, FEATURES, SPARSE, Case, case_named, short
from paged_ops.testing.compare import (
    LSE_ULPS,
    assert_close,
    assert_result,
    assert_same_bytes,
    check,
    check_out,
    clone_inputs,
    mutated_arguments,
    ulp,
)
from paged_ops.testing.inputs import (
    F8_E4M3,
    F8_E5M2,
    FORMS,
    GUARD_BYTE,
    GUARD_BYTES,
    LATENT_FORMS,
    NAN_BYTE,
    AttentionCase,
    BlocksCase,
    CacheSpec,
    CascadeCase,
    GatherCase,
    IndexCase,
    Inputs,
    LatentWriteCase,
    Memory,
    MergeCase,
    WriteCase,
)

__all__ = [
    "BATCHES",
    "CASES",
    "COMPILED",
    "F8_E4M3",
    "F8_E5M2",
    "FEATURES",
    "FORMS",
    "GUARD_BYTE",
    "GUARD_BYTES",
    "LATENT_FORMS",
    "LSE_ULPS",
    "NAN_BYTE",
    "SPARSE",
    "AttentionCase",
    "BlocksCase",
    "CacheSpec",
    "CascadeCase",
    "Case",
    "GatherCase",
    "IndexCase",
    "Inputs",
    "LatentWriteCase",
    "Memory",
    "MergeCase",
    "WriteCase",
    "assert_close",
    "assert_result",
    "assert_same_bytes",
    "case_named",
    "check",
    "check_out",
    "clone_inputs",
    "mutated_arguments",
    "short",
    "ulp",
]
