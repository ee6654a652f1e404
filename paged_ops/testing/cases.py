"""The named cases of each op, and the subset for compiled runs.

Longer than 500 lines, as all cases are in one list per op.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch

from paged_ops import layouts, masks
from paged_ops.features import EXCLUSIVE, IndexOptions
from paged_ops.testing.inputs import (
    F8_E4M3,
    F8_E5M2,
    FORMS,
    LATENT_FORMS,
    AttentionCase,
    BlocksCase,
    CacheSpec,
    CascadeCase,
    GatherCase,
    IndexCase,
    LatentWriteCase,
    MergeCase,
    WriteCase,
)

BATCHES: dict[str, tuple[tuple[int, int], ...]] = {
    "decode": ((1, 1), (1, 17), (1, 64), (1, 130), (1, 33)),
    "speculative": ((2, 2), (5, 40), (16, 16), (3, 129), (1, 7)),
    "chunked_prefill": ((17, 50), (32, 96), (5, 5)),
    "prefill": ((33, 33), (64, 64), (7, 7)),
    "mixed": ((1, 40), (3, 19), (20, 61), (33, 33), (1, 128)),
    "holes": ((0, 12), (1, 30), (0, 0), (7, 7), (0, 5)),
    "query_past_keys": ((9, 4), (2, 1), (1, 3)),
    "long": ((1, 700), (130, 390), (1, 257)),
    "padding_only": (),
    # The shapes of eight sequences of seven tokens: kernels chosen by shapes must serve both.
    "uneven": ((0, 3), (40, 90), (0, 0), (8, 30), (2, 2), (0, 7), (1, 200), (5, 5)),
}
SPARSE = masks.SparsePattern(block_size=16, local_blocks=2, vert_stride=3)
FEATURES: dict[str, tuple[str, Any]] = {
    "noncausal": ("causal", False),
    "window": ("sliding_window", 13),
    "chunk": ("attention_chunk", 24),
    "cap": ("soft_cap", 2.0),
    "alibi": ("alibi_slopes", True),
    "sinks": ("sinks", True),
    "sparse": ("block_sparse", [*SPARSE]),
    "ranges": ("bidirectional_ranges", True),
    "first": ("num_first_tokens", 5),
    "selected": ("selected_keys", (3, True)),  # keys per entry, and whether each key/value head has its own entries
}


def _allowed(*names: str) -> bool:
    arguments = {"causal=False" if name == "noncausal" else FEATURES[name][0] for name in names}
    return not any(arguments >= set(pair) for pair in EXCLUSIVE)


def _attention_cases() -> Iterator[AttentionCase]:
    def case(name: str, batch: str = "mixed", **changes: Any) -> AttentionCase:
        spec = {key: changes.pop(key) for key in list(changes) if key in CacheSpec.__dataclass_fields__}
        return AttentionCase(name, BATCHES[batch], CacheSpec(**spec), **changes)

    for batch, dtype in itertools.product(BATCHES, layouts.MODEL_DTYPES):
        yield case(f"{batch}-{short(dtype)}", batch, dtype=dtype)
    for size in (0, 1, 2):
        for names in itertools.combinations(FEATURES, size):
            if size and _allowed(*names):
                chosen = tuple(FEATURES[name] for name in names)
                yield case("-".join(names), features=chosen)
                yield case("-".join(names) + "-bf16-decode", "decode", features=chosen, dtype=torch.bfloat16)
    for name in FEATURES:  # only a window makes first tokens matter
        if name not in ("window", "first") and _allowed("window", "first", name):
            chosen = tuple(FEATURES[each] for each in ("window", "first", name))
            for batch in ("long", "decode", "prefill"):
                yield case(f"window-first-{name}-{batch}", batch, features=chosen)
    every = tuple(FEATURES[name] for name in ("window", "first", "chunk", "cap", "alibi", "sinks"))
    for form in FORMS:
        yield case(f"{form}-fp16", form=form, dtype=torch.float16)
        yield case(f"{form}-all-features", form=form, features=every, strided_query=True)
        yield case(f"{form}-b48-decode-bf16", "decode", form=form, block_size=48, dtype=torch.bfloat16)
        for stored, name in ((F8_E4M3, "auto"), (F8_E5M2, "auto"), (torch.uint8, "fp8"), (torch.uint8, "fp8_e5m2")):
            scales = {"auto": "head", "fp8": "tensor"}.get(name)
            fp8: dict[str, Any] = {"cache_dtype": stored, "kv_cache_dtype": name, "scales": scales, "form": form}
            yield case(f"{form}-{short(stored)}-{name}-fp16", dtype=torch.float16, **fp8)
    for D in (8, 13, 24, 32, 40, 72, 80, 96, 112, 120, 128, 192, 256, 512):
        yield case(f"d{D}", head_size=D)
        yield case(f"d{D}-fp16-decode", "decode", head_size=D, dtype=torch.float16)
    wide: dict[str, Any] = {"head_size": 512, "num_heads": 16}  # of Gemma-4
    yield case("d512-e5m2-bf16", "long", dtype=torch.bfloat16, cache_dtype=F8_E5M2, **wide)
    yield case("d512-all-features-bf16", "long", dtype=torch.bfloat16, features=every, strided_query=True, **wide)
    yield case("d512-x_packed-bf16", "speculative", dtype=torch.bfloat16, form="x_packed", **wide)
    yield case("d512-e4m3-fp16", "speculative", dtype=torch.float16, cache_dtype=F8_E4M3, scales="head", **wide)
    many: dict[str, Any] = {"head_size": 264, "num_heads": 80}  # GPU kernels divide the 40 of a key/value head
    yield case("d264-h80-e4m3-fp16", "speculative", dtype=torch.float16, cache_dtype=F8_E4M3, scales="head", **many)
    for D, Dv in ((192, 128), (64, 80), (13, 24), (128, 64), (512, 256), (64, 512)):
        yield case(f"d{D}-dv{Dv}", form="separate", head_size=D, value_head_size=Dv)
    for B in (1, 8, 16, 32, 64, 128, 544, 1056):
        yield case(f"b{B}", block_size=B, form="hnd")
        yield case(f"b{B}-decode", "decode", block_size=B)
    for H, K in ((1, 1), (4, 4), (6, 2), (5, 1), (16, 1), (40, 8), (71, 1)):
        yield case(f"h{H}-k{K}", num_heads=H, num_kv_heads=K)
        yield case(f"h{H}-k{K}-decode-bf16", "decode", num_heads=H, num_kv_heads=K, dtype=torch.bfloat16)
    for kind in ({"homo_head": True}, {"homo_head_group": True}, {"rank": 1, "world_size": 2}, {"local_blocks": 0}):
        sparse = SPARSE._replace(vert_stride=8)._replace(**kind)
        for batch in ("long", "mixed", "decode"):
            name = f"sparse-{next(iter(kind))}-{batch}"
            yield case(name, batch, features=(("block_sparse", [*sparse]), FEATURES["sinks"]))
    # Masks go wrong at edges: long histories, whole prompts, rows before position 0, empty queries.
    for size in (1, 2):
        for names in itertools.combinations(FEATURES, size):
            if _allowed(*names):
                chosen = tuple(FEATURES[name] for name in names)
                for batch in ("long", "prefill", "query_past_keys") + (("holes",) if size == 1 else ()):
                    yield case(f"{'-'.join(names)}-{batch}", batch, features=chosen)
    tiles = ((128, 16, "nhd", 8, 2), (128, 48, "hnd", 12, 2), (64, 8, "nhd", 8, 1), (128, 64, "plane_first", 8, 8))
    for D, B, form, H, K in (*tiles, (64, 128, "separate", 6, 1)):  # prefill for tensor cores
        shape = {"head_size": D, "block_size": B, "form": form, "num_heads": H, "num_kv_heads": K}
        yield case(f"long-d{D}-b{B}-{form}-bf16", "long", dtype=torch.bfloat16, strided_query=True, **shape)
        for name in ("noncausal", "sinks"):
            features = (FEATURES[name],)
            yield case(f"long-d{D}-b{B}-{form}-{name}-fp16", "long", dtype=torch.float16, features=features, **shape)
    for dtype in layouts.MODEL_DTYPES:
        yield case(f"fp8-output-{short(dtype)}", dtype=dtype, fp8_output=True)
    yield case("fp8-output-fp8-cache", dtype=torch.float16, cache_dtype=F8_E4M3, scales="head", fp8_output=True)
    vectors: dict[str, Any] = {"strided_vectors": True, "features": (FEATURES["alibi"], FEATURES["sinks"])}
    yield case("strided-vectors-fp16", dtype=torch.float16, cache_dtype=F8_E4M3, scales="head", **vectors)
    yield case("strided-vectors-decode-bf16", "decode", dtype=torch.bfloat16, **vectors)
    yield case("no-padding", "decode", padding=(0, 0))
    for name, feature in FEATURES.items():
        yield case(f"uneven-{name}", "uneven", padding=(0, 0), features=(feature,))
    yield case("uneven-sparse-bf16", "uneven", padding=(0, 0), features=(FEATURES["sparse"],), dtype=torch.bfloat16)
    yield AttentionCase("one-token", ((1, 1),), padding=(0, 0))
    for scale in (0.0, -0.125, 1e-40, 1e-50):  # of any sign and size; the last is 0 in float32
        for batch, dtype in (("mixed", torch.float32), ("prefill", torch.float16), ("decode", torch.bfloat16)):
            yield case(f"scale{scale:g}-{batch}", batch, dtype=dtype, scale=scale)
    later = (FEATURES["ranges"], FEATURES["window"], ("ranges_in_window", True))
    for batch, dtype, others in (
        ("mixed", torch.float32, ()),
        ("speculative", torch.bfloat16, ("alibi", "sinks", "cap")),
        ("holes", torch.float16, ("first", "chunk")),
        ("decode", torch.bfloat16, ()),
        ("long", torch.bfloat16, ("first",)),
    ):
        chosen = (*later, *(FEATURES[name] for name in others))
        yield case("-".join(("later-ranges", batch, *others)), batch, dtype=dtype, features=chosen)
    yield case("later-ranges-invariant", features=(*later, ("batch_invariant", True)))
    for name in ("window", "cap", "sparse", "ranges"):
        yield case(f"scale0-{name}", features=(FEATURES[name],), scale=0.0)
    for batch, dtype, how in (
        ("mixed", torch.float16, (1, False)),
        ("decode", torch.bfloat16, (1, True)),
        ("decode", torch.float16, (7, False)),
        ("uneven", torch.float32, (16, False)),
        ("holes", torch.float16, (5, True)),
        ("padding_only", torch.float32, (1, True)),
    ):
        yield case(f"selected{how[0]}-{batch}-{short(dtype)}", batch, dtype=dtype, features=(("selected_keys", how),))
    for form in FORMS:
        chosen = (*every, FEATURES["selected"])
        yield case(f"selected-{form}-all-features", "speculative", form=form, features=chosen, dtype=torch.float16)
    few: dict[str, Any] = {"cache_dtype": F8_E4M3, "scales": "head", "features": (FEATURES["selected"],)}
    yield case("selected-e4m3-bf16", "decode", dtype=torch.bfloat16, **few)
    yield case("selected-e4m3-h80-d264-fp16", "decode", dtype=torch.float16, num_heads=80, head_size=264, **few)
    yield from _latent_cases()
    yield from _invariant_cases()
    yield from _random_cases(100)
    yield from _random_cases(20, first=100, latent=True)


def _latent_cases() -> Iterator[AttentionCase]:
    def case(name: str, batch: str = "mixed", **changes: Any) -> AttentionCase:
        sizes: dict[str, Any] = {"form": "latent", "num_kv_heads": 1, "head_size": 40, "value_head_size": 32, **changes}
        spec = {key: sizes.pop(key) for key in list(sizes) if key in CacheSpec.__dataclass_fields__}
        return AttentionCase(f"latent-{name}", BATCHES[batch], CacheSpec(**spec), **sizes)

    for number, batch in enumerate(BATCHES):
        for dtype in layouts.MODEL_DTYPES if batch == "mixed" else (layouts.MODEL_DTYPES[number % 3],):
            yield case(f"{batch}-{short(dtype)}", batch, dtype=dtype)
    for name, feature in FEATURES.items():
        yield case(name, features=(feature,))
        yield case(f"{name}-long", "long", features=(feature,))
        yield case(f"{name}-bf16-decode", "decode", features=(feature,), dtype=torch.bfloat16)
    yield case("later-ranges", features=(FEATURES["ranges"], FEATURES["window"], ("ranges_in_window", True)))
    every = tuple(FEATURES[name] for name in ("window", "first", "chunk", "cap", "alibi", "sinks"))
    for form in LATENT_FORMS:
        yield case(f"{form}-all-features", form=form, features=every, strided_query=True, dtype=torch.float16)
    real = {"head_size": 576, "value_head_size": 512}  # DeepSeek-V2 and V3, Kimi-K2
    for H, batch, dtype in (
        (16, "decode", torch.bfloat16),
        (128, "speculative", torch.float16),
        (16, "mixed", torch.float32),
    ):
        yield case(f"576-h{H}-{batch}-{short(dtype)}", batch, num_heads=H, dtype=dtype, **real)
    for R, P in ((256, 32), (13, 5), (24, 0), (96, 16)):
        yield case(f"{R}-{P}", head_size=R + P, value_head_size=R)
        yield case(f"{R}-{P}-decode-fp16", "decode", head_size=R + P, value_head_size=R, dtype=torch.float16)
    for B in (1, 8, 48, 64, 544):
        yield case(f"b{B}", block_size=B)
        yield case(f"b{B}-decode-fp16", "decode", block_size=B, dtype=torch.float16)
    for H in (1, 5, 16, 71):
        yield case(f"h{H}-decode-fp16", "decode", num_heads=H, dtype=torch.float16)
        yield case(f"h{H}-uneven", "uneven", num_heads=H, padding=(0, 0))
    for stored, name in ((F8_E4M3, "auto"), (F8_E5M2, "auto"), (torch.uint8, "fp8")):
        fp8: dict[str, Any] = {"cache_dtype": stored, "kv_cache_dtype": name}
        yield case(f"{short(stored)}-fp16", dtype=torch.float16, scales="tensor", **fp8)
        yield case(f"{short(stored)}-decode-bf16", "decode", dtype=torch.bfloat16, **fp8)
        yield case(f"{short(stored)}-576-decode", "decode", scales="tensor", num_heads=16, **fp8, **real)
    yield case("fp8-output", dtype=torch.float16, cache_dtype=F8_E4M3, scales="tensor", fp8_output=True)
    rows: dict[str, Any] = {"cache_dtype": torch.uint8, "kv_cache_dtype": layouts.FP8_DS_MLA, **real}
    yield case("scale0", scale=0.0)
    for number, batch in enumerate(("decode", "speculative", "mixed", "holes", "query_past_keys", "long")):
        dtype = layouts.MODEL_DTYPES[(number + 2) % 3]
        yield case(f"rows-{batch}-{short(dtype)}", batch, dtype=dtype, **rows)
    for name, feature in FEATURES.items():
        yield case(f"rows-{name}-fp16", features=(feature,), dtype=torch.float16, **rows)
    yield case("rows-padded-all-features", form="latent_padded", features=every, strided_query=True, **rows)
    for B, H in ((1, 16), (64, 16), (64, 71), (48, 128)):
        yield case(f"rows-b{B}-h{H}-decode-bf16", "decode", block_size=B, num_heads=H, dtype=torch.bfloat16, **rows)
    yield case("rows-fp8-output", dtype=torch.float16, fp8_output=True, **rows)


def _invariant_cases() -> Iterator[AttentionCase]:
    """Calls with ``batch_invariant``: every mask, layout and dtype, and many cuts. tests/fuzz compares their bits."""

    def case(name: str, batch: str = "mixed", features: tuple[str, ...] = (), **changes: Any) -> AttentionCase:
        spec = {key: changes.pop(key) for key in list(changes) if key in CacheSpec.__dataclass_fields__}
        chosen = (*(FEATURES[each] for each in features), ("batch_invariant", True))
        return AttentionCase(f"invariant-{name}", BATCHES[batch], CacheSpec(**spec), features=chosen, **changes)

    for batch, dtype in itertools.product(("decode", "long", "holes", "query_past_keys"), layouts.MODEL_DTYPES):
        yield case(f"{batch}-{short(dtype)}", batch, dtype=dtype)
    yield case("padding_only", "padding_only")
    for name in FEATURES:
        yield case(name, "uneven", (name,), padding=(0, 0))
        yield case(f"{name}-fp16", "mixed", (name,), dtype=torch.float16)
    for number, form in enumerate(FORMS):
        features = ("window", "first", "chunk", "cap", "alibi", "sinks")
        yield case(f"{form}-all-features", "mixed", features, form=form, strided_query=True)
        stored = (F8_E4M3, F8_E5M2)[number % 2]
        scaled: dict[str, Any] = {"cache_dtype": stored, "scales": ("head", "tensor")[number % 2]}
        yield case(f"{form}-{short(stored)}-fp16", "speculative", form=form, dtype=torch.float16, **scaled)
    for H, K, D in ((71, 1, 64), (16, 1, 128), (6, 2, 80), (4, 4, 256), (5, 1, 13)):
        yield case(f"h{H}-k{K}-d{D}", num_heads=H, num_kv_heads=K, head_size=D)
        yield case(f"h{H}-k{K}-d{D}-bf16", "decode", num_heads=H, num_kv_heads=K, head_size=D, dtype=torch.bfloat16)
    yield case("d192-dv128-fp16", form="separate", head_size=192, value_head_size=128, dtype=torch.float16)
    yield case("fp8-output-fp16", dtype=torch.float16, fp8_output=True)
    latent: dict[str, Any] = {"form": "latent", "num_kv_heads": 1, "head_size": 40, "value_head_size": 32}
    yield case("latent-fp32", "uneven", **latent)
    yield case("latent-window-sinks-fp16", "speculative", ("window", "sinks"), dtype=torch.float16, **latent)
    yield case("latent-e4m3-fp16", "decode", cache_dtype=F8_E4M3, scales="tensor", dtype=torch.float16, **latent)
    yield case("latent-selected", "uneven", ("selected",), **latent)
    real: dict[str, Any] = {"form": "latent", "num_kv_heads": 1, "head_size": 576, "value_head_size": 512}
    yield case("latent-h40-d576-fp16", "decode", num_heads=40, dtype=torch.float16, **real)
    yield case("h80-k2-d264-fp16", "decode", num_heads=80, num_kv_heads=2, head_size=264, dtype=torch.float16)
    yield case("latent-rows-fp16", "speculative", **dataclasses.asdict(_scaled_rows("latent", 16, torch.float16)))


def _random_cases(count: int, first: int = 0, latent: bool = False) -> Iterator[AttentionCase]:
    """Seeded random mixtures, beyond the pairs of the lists."""
    for n in range(first, first + count):
        rng = random.Random(n)
        form = rng.choice(LATENT_FORMS if latent else FORMS)
        dtype = rng.choice(layouts.MODEL_DTYPES)
        stored = rng.choice((None, None, F8_E4M3, F8_E5M2))
        K, G = rng.choice(((1, 1), (1, 7), (2, 4), (3, 5), (4, 2), (2, 16)))
        D = rng.choice((16, 32, 64, 80, 128, 192) if form == "x_packed" else (13, 24, 40, 64, 72, 96, 128, 256))
        Dv = rng.choice((None, 32, 56)) if form == "separate" else None
        scales = rng.choice((None, "tensor", "head")) if stored else None
        if latent:
            K, G, Dv = 1, K * G, rng.choice((8, 32, 50, 64))
            D = Dv + rng.choice((0, 8, 14, 64))
        spec = CacheSpec(form, K, D, Dv, rng.choice((1, 8, 16, 48, 64)), dtype, stored, "auto", scales)
        names = [
            name for name in FEATURES if random.Random(f"{name}-{n}").random() < 0.4
        ]  # independent of the other names
        while not _allowed(*names):
            names.remove(rng.choice(names))
        if "sparse" in names and 16 % spec.block_size:
            spec = dataclasses.replace(spec, block_size=16)
        batch = [(rng.choice((1, 1, 2, 5, 33)), rng.choice((3, 40, 300))) for _ in range(6)]
        batch = [(q, rng.randint(1, longest)) for q, longest in batch]  # some sequences have more rows than keys
        yield AttentionCase(
            f"random-{n}",
            tuple(batch),
            spec,
            num_heads=K * G,
            features=tuple(FEATURES[name] for name in names),
            fp8_output=rng.random() < 0.1,
            strided_query=rng.random() < 0.3,
            padding=(rng.randint(0, 3), rng.randint(0, 5)),
            seed=n,
        )


def _cache_specs() -> Iterator[tuple[str, CacheSpec]]:
    for form, dtype in itertools.product(FORMS, layouts.MODEL_DTYPES):
        yield f"{form}-{short(dtype)}", CacheSpec(form, dtype=dtype, head_size=32)
    for form, (stored, name) in itertools.product(FORMS, ((F8_E4M3, "auto"), (F8_E5M2, "fp8_e5m2"))):
        for scales, dtype in ((None, torch.float32), ("tensor", torch.float16), ("head", torch.bfloat16)):
            spec = CacheSpec(form, 3, 32, None, 8, dtype, stored, name, scales)
            yield f"{form}-{short(stored)}-{scales}-{short(dtype)}", spec
    for name in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        yield f"uint8-{name}", CacheSpec(cache_dtype=torch.uint8, kv_cache_dtype=name, scales="head")
    for D, B in ((13, 1), (24, 544), (80, 16), (256, 48), (120, 1056)):
        yield f"d{D}-b{B}", CacheSpec("hnd", 2, D, None, B)
    yield "dv", CacheSpec("separate", head_size=48, value_head_size=32, dtype=torch.bfloat16)


def _latent_specs() -> Iterator[tuple[str, CacheSpec]]:
    for form, dtype in itertools.product(LATENT_FORMS, layouts.MODEL_DTYPES):
        yield f"{form}-{short(dtype)}", CacheSpec(form, 1, 40, 32, dtype=dtype)
    for scales, dtype in ((None, torch.float32), ("tensor", torch.bfloat16)):
        yield f"latent-e4m3-{scales}-{short(dtype)}", CacheSpec("latent", 1, 40, 32, 8, dtype, F8_E4M3, "auto", scales)
    for name in ("fp8", "fp8_e5m2"):
        yield f"latent-uint8-{name}", CacheSpec("latent", 1, 40, 32, 16, torch.float32, torch.uint8, name, "tensor")
    for R, P, B in ((512, 64, 64), (13, 5, 1), (24, 0, 544)):
        yield f"latent-{R}-{P}-b{B}", CacheSpec("latent", 1, R + P, R, B, torch.bfloat16)
    for form, dtype, B in zip(("latent", "latent_padded", "latent"), layouts.MODEL_DTYPES, (16, 64, 1), strict=True):
        yield f"{form}-rows-{short(dtype)}-b{B}", _scaled_rows(form, B, dtype)


def _index_specs() -> Iterator[tuple[str, CacheSpec]]:
    """Caches of index keys with a scale per token."""
    for form, dtype, B in zip(("latent", "latent_padded", "latent"), layouts.MODEL_DTYPES, (16, 64, 1), strict=True):
        name = f"index-{short(dtype)}-b{B}"
        yield name, CacheSpec(form, 1, 128, 128, B, dtype, torch.uint8, layouts.FP8_DS_INDEX)


def _scaled_rows(form: str, B: int, dtype: torch.dtype) -> CacheSpec:
    return CacheSpec(form, 1, 576, 512, B, dtype, torch.uint8, layouts.FP8_DS_MLA)


def _latent_write_cases() -> Iterator[LatentWriteCase]:
    for name, spec in itertools.chain(_latent_specs(), _index_specs()):
        blocks = max(4, -(-32 // spec.block_size))
        yield LatentWriteCase(name, spec, num_blocks=blocks)
        yield LatentWriteCase(f"{name}-strided", spec, num_blocks=blocks, strided=True, slots=torch.int32, special=True)
    spec = CacheSpec("latent", 1, 40, 32)
    yield LatentWriteCase("nothing", spec, tokens=0, extra=0, skip=0)
    yield LatentWriteCase("only-padding", spec, skip=1)
    yield LatentWriteCase("no-rows-but-extra", spec, tokens=0, extra=4, skip=0)


def _write_cases() -> Iterator[WriteCase]:
    for name, spec in _cache_specs():
        blocks = max(4, -(-32 // spec.block_size))
        yield WriteCase(name, spec, num_blocks=blocks)
        yield WriteCase(f"{name}-strided", spec, num_blocks=blocks, strided=True, slots=torch.int32, special=True)
    yield WriteCase("nothing", tokens=0, extra=0, skip=0)
    yield WriteCase("only-padding", skip=1)
    yield WriteCase("no-rows-but-extra", tokens=0, extra=4, skip=0)


def short(dtype: torch.dtype) -> str:
    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", F8_E4M3: "e4m3", F8_E5M2: "e5m2"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def _gather_cases() -> Iterator[GatherCase]:
    for name, spec in itertools.chain(_cache_specs(), _latent_specs()):
        fp8 = spec.stored.itemsize == 1
        yield GatherCase(name, BATCHES["holes"], spec, out_dtype=spec.dtype if fp8 else None)
    for capacity in (0, -1, -20, -1000):
        yield GatherCase(f"capacity{capacity}", BATCHES["holes"], capacity=capacity)
    yield GatherCase("to-fp32", BATCHES["mixed"], CacheSpec(dtype=torch.bfloat16), out_dtype=torch.float32)
    yield GatherCase("to-bf16", BATCHES["mixed"], CacheSpec(), out_dtype=torch.bfloat16)
    yield GatherCase("padding-only", ())


def _index_cases() -> Iterator[IndexCase]:
    def case(name: str, batch: str = "mixed", *, B: int = 16, **changes: Any) -> IndexCase:
        sizes: dict[str, Any] = {"form": "latent", "num_kv_heads": 1, "head_size": 32, "num_heads": 4, **changes}
        named = IndexOptions._fields[: IndexOptions._fields.index("k_scale")]
        chosen = tuple((each, sizes.pop(each)) for each in named if each in sizes)
        sizes["block_size"] = B  # of the cache
        spec = {key: sizes.pop(key) for key in list(sizes) if key in CacheSpec.__dataclass_fields__}
        return IndexCase(name, BATCHES[batch], CacheSpec(**spec), features=chosen, **sizes)

    dsa: dict[str, Any] = {"weights": torch.float32, "relu": True}
    msa: dict[str, Any] = {"per_head": True, "pool": "max", "block_size": 8, "local_blocks": 2, "k": 5}
    for number, batch in enumerate(BATCHES):
        dtype = layouts.MODEL_DTYPES[number % 3]
        yield case(f"dsa-{batch}-{short(dtype)}", batch, dtype=dtype, **dsa)
        yield case(f"dsa-{batch}-exact", batch, exact=True, dtype=layouts.MODEL_DTYPES[(number + 1) % 3], **dsa)
        yield case(f"msa-{batch}-exact", batch, exact=True, dtype=dtype, **msa)
        yield case(f"msa-{batch}-{short(dtype)}", batch, dtype=layouts.MODEL_DTYPES[(number + 2) % 3], **msa)
    yield case("sum-of-heads", exact=True)
    yield case("per-head-fp16", per_head=True, dtype=torch.float16)
    yield case("mean-exact", "long", pool="mean", block_size=4, exact=True, **dsa)
    yield case("mean-per-head-fp16", pool="mean", per_head=True, block_size=5, local_blocks=1, dtype=torch.float16)
    yield case("max-of-sums-bf16", "long", pool="max", block_size=16, local_blocks=3, dtype=torch.bfloat16, **dsa)
    yield case("local-keys-exact", local_blocks=3, exact=True, **dsa)
    yield case("noncausal-exact", causal=False, exact=True, **dsa)
    yield case("noncausal-msa", "query_past_keys", causal=False, **msa)
    yield case("weights-fp16", "decode", weights=torch.float16, relu=True, dtype=torch.float16, strided_query=True)
    yield case("weights-bf16-exact", weights=torch.bfloat16, relu=True, dtype=torch.bfloat16, exact=True)
    for k in (1, 100, 700, 1000):
        yield case(f"k{k}-exact", "long", k=k, exact=True, **dsa)
    yield case("k100-msa-b48", "long", B=48, k=100, block_size=8, local_blocks=9, pool="max", per_head=True)
    for B, Di, heads in ((1, 24, 1), (48, 128, 64), (64, 13, 5), (544, 64, 3)):
        yield case(f"b{B}-d{Di}-h{heads}-exact", B=B, head_size=Di, num_heads=heads, exact=True, **dsa)
        yield case(f"b{B}-d{Di}-h{heads}-fp16", "long", B=B, head_size=Di, num_heads=heads, **dsa)
    yield case("padded-fp16", form="latent_padded", dtype=torch.float16, **dsa)
    for stored, name in ((F8_E4M3, "auto"), (F8_E5M2, "auto"), (torch.uint8, "fp8"), (torch.uint8, "fp8_e5m2")):
        fp8: dict[str, Any] = {"cache_dtype": stored, "kv_cache_dtype": name}
        yield case(f"{short(stored)}-{name}-fp16", dtype=torch.float16, scales="tensor", **fp8, **dsa)
        yield case(f"{short(stored)}-{name}-exact", "decode", dtype=torch.bfloat16, exact=True, **fp8, **msa)
    for (name, spec), batch in zip(_index_specs(), ("decode", "speculative", "holes"), strict=True):
        chosen = tuple(dsa.items())
        yield IndexCase(f"{name}-{batch}", BATCHES[batch], spec, 64, chosen)
        yield IndexCase(f"{name}-{batch}-exact", BATCHES[batch], spec, 4, chosen, exact=True)
    yield case("no-padding-exact", "decode", padding=(0, 0), exact=True, **dsa)


def _blocks_cases(swap: bool) -> Iterator[BlocksCase]:
    for form, dtype in itertools.product(FORMS, (torch.float32, torch.bfloat16, F8_E4M3, torch.uint8)):
        yield BlocksCase(f"{form}-{short(dtype)}", swap, CacheSpec(form, head_size=32, cache_dtype=dtype))
    for form, dtype in zip(LATENT_FORMS, (torch.bfloat16, F8_E4M3), strict=True):
        yield BlocksCase(f"{form}-{short(dtype)}", swap, CacheSpec(form, 1, 40, 32, cache_dtype=dtype))
    yield BlocksCase("latent-rows", swap, _scaled_rows("latent_padded", 16, torch.bfloat16))
    yield BlocksCase("no-pairs", swap, pairs=())
    yield BlocksCase("no-caches", swap, layers=0)
    yield BlocksCase("odd-block", swap, CacheSpec(num_kv_heads=3, head_size=13, block_size=1, cache_dtype=torch.uint8))
    yield BlocksCase("runs", swap, pairs=((0, 4), (1, 5), (2, 6), (3, 8)))
    if swap:
        yield BlocksCase("both-roles", swap, pairs=((0, 1), (1, 0), (1, 2)))
    else:
        yield BlocksCase("device-mapping", swap, mapping_on_host=False)


def _merge_cases() -> Iterator[MergeCase]:
    for dtype, D, H in itertools.product(layouts.MODEL_DTYPES, (32, 80, 128, 256), (1, 4)):
        yield MergeCase(f"{short(dtype)}-d{D}-h{H}", head_size=D, num_heads=H, dtype=dtype)
    yield MergeCase("all-empty", empty=2.0)
    yield MergeCase("none-empty", empty=0.0)
    yield MergeCase("no-tokens", tokens=0)
    yield MergeCase("odd-d13", head_size=13)


def _cascade_cases() -> Iterator[CascadeCase]:
    suffixes = {"decode": ((1, 1), (1, 17), (1, 40)), "mixed": ((1, 9), (5, 5), (20, 33)), "padding": ()}
    for (name, seqs), prefix in itertools.product(suffixes.items(), (0, 16, 64, 75)):
        yield CascadeCase(f"{name}-prefix{prefix}", seqs, prefix=prefix)
    for form in FORMS:
        spec = CacheSpec(form, dtype=torch.bfloat16)
        yield CascadeCase(f"{form}-bf16", suffixes["mixed"], spec, features=(FEATURES["sinks"], FEATURES["cap"]))
    fp8 = CacheSpec(dtype=torch.float16, cache_dtype=F8_E4M3, scales="head")
    yield CascadeCase("fp8", suffixes["mixed"], fp8, fp8_output=True)
    for name, cache_dtype in (("latent", None), ("latent-e4m3", F8_E4M3)):
        scales = None if cache_dtype is None else "tensor"
        latents = CacheSpec("latent", 1, 40, 32, dtype=torch.bfloat16, cache_dtype=cache_dtype, scales=scales)
        yield CascadeCase(name, suffixes["mixed"], latents)
    yield CascadeCase("latent-rows", suffixes["mixed"], _scaled_rows("latent", 16, torch.bfloat16))


Case = AttentionCase | WriteCase | BlocksCase | MergeCase

CASES: dict[str, list[Case]] = {
    "reshape_and_cache": list(_write_cases()),
    "latent_cache_write": list(_latent_write_cases()),
    "paged_attention": list(_attention_cases()),
    "paged_attention_with_lse": list(_attention_cases()),
    "merge_attention_states": list(_merge_cases()),
    "cascade_attention": list(_cascade_cases()),
    "select_keys": list(_index_cases()),
    "copy_blocks": list(_blocks_cases(swap=False)),
    "swap_blocks": list(_blocks_cases(swap=True)),
    "gather_kv": list(_gather_cases()),
}


def case_named(op: str, name: str) -> Case:
    """One case of an op by its name."""
    found = [case for case in CASES[op] if case.name == name]
    assert len(found) == 1, f"{name}: expected one case of {op}, found {len(found)}"
    return found[0]


# The cases for compiled runs: at most 60, with every feature and form at least once.
COMPILED: dict[str, tuple[str, ...]] = {
    "reshape_and_cache": ("nhd-fp32", "hnd-bf16", "plane_first-fp16", "interleaved-fp32", "separate-e4m3-head-bf16",
                          "x_packed-fp16", "x_packed-e4m3-tensor-fp16-strided", "uint8-fp8_e5m2", "only-padding"),
    "latent_cache_write": ("latent-fp32", "latent_padded-bf16-strided", "latent-e4m3-tensor-bf16", "only-padding",
                           "latent_padded-rows-fp16-b64-strided", "index-fp16-b64"),
    "paged_attention": ("decode-fp32", "mixed-bf16", "prefill-fp16", "holes-fp32", "padding_only-fp32", "window-cap",
                        "noncausal-sinks", "chunk-alibi", "window-sinks-bf16-decode", "sinks-sparse",
                        "hnd-all-features", "interleaved-fp16", "x_packed-fp16", "separate-e4m3-auto-fp16",
                        "plane_first-uint8-fp8-fp16", "nhd-e5m2-auto-fp16", "fp8-output-bf16", "window-ranges",
                        "d192-dv128", "d13", "latent-mixed-fp32", "latent-e4m3-decode-bf16", "latent-sinks",
                        "latent-rows-decode-bf16", "invariant-decode-fp16", "invariant-window",
                        "selected16-uneven-fp32", "latent-selected", "later-ranges-mixed"),
    "paged_attention_with_lse": ("mixed-fp32", "speculative-fp16", "sinks", "cap-alibi", "query_past_keys-fp32",
                                 "x_packed-all-features", "h71-k1", "b544-decode", "latent-mixed-fp16",
                                 "invariant-long-fp32"),
    "merge_attention_states": ("fp32-d32-h1", "bf16-d128-h4", "all-empty"),
    "cascade_attention": ("decode-prefix64", "mixed-prefix75", "hnd-bf16", "fp8", "latent-e4m3", "latent-rows"),
    "select_keys": ("dsa-mixed-fp16", "msa-decode-exact", "e4m3-auto-fp16", "index-fp16-b64-speculative"),
    "copy_blocks": ("nhd-fp32", "x_packed-bf16", "latent-bf16", "latent-rows", "device-mapping", "no-caches"),
    "swap_blocks": ("nhd-fp32", "hnd-bf16", "both-roles"),
    "gather_kv": ("nhd-fp32", "x_packed-e4m3-tensor-fp16", "uint8-fp8_e5m2", "capacity-20", "latent-bf16",
                  "latent_padded-rows-fp16-b64"),
}  # fmt: skip
