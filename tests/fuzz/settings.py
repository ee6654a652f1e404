"""What stays the same in one case of the ops: dtypes, sizes, form of the cache, features. Drawn by a seed.

On a GPU a setting decides which kernels are compiled, so that a long run draws from a bounded number of them.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch

import paged_ops

from .caches import FORMS, LATENT_FORMS, ROW_FORM, Form
from .runner import INTERPRETER, Case

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEADS = ((1, 1), (1, 7), (2, 4), (3, 5), (4, 2), (2, 16), (8, 1), (4, 4), (2, 1), (1, 71), (5, 3))  # K, G
HEAD_SIZES = (8, 13, 16, 24, 32, 40, 64, 64, 64, 72, 80, 96, 112, 120, 128, 128, 128, 192, 256, 512)
BLOCK_SIZES = (1, 3, 5, 8, 16, 16, 16, 17, 24, 32, 48, 64, 128, 544)
KINDS = ("decode", "speculative", "prefill", "chunked", "mixed", "past", "holes", "empty")


@dataclasses.dataclass(frozen=True)
class Setting:
    dtype: torch.dtype
    form: Form
    H: int
    longest: int  # tokens of a sequence
    sequences: int  # in the cache
    shapes: tuple[tuple[int, int], ...]  # (T, S) of the batches
    kv_cache_dtype: str
    scales: tuple[int, int]  # of keys and values: how many numbers, 0 for none
    fp8_output: bool
    features: tuple[tuple[str, Any], ...]
    scale: float
    fused: str  # how key, value and query lie: "alone", "heads" (a fused qkv) or "tail" (side by side)
    extra_rows: int  # of key and value past slot_mapping
    write_rows: int
    slot_dtype: torch.dtype
    table_step: int  # columns of the memory from one entry of a block table to the next
    misaligned: bool
    with_lse: bool
    cascade: bool
    loud: float  # standard deviation of the queries

    @property
    def fp8(self) -> bool:
        return self.form.kind in (E4M3, E5M2)


def setting_of(case: Case) -> Setting:
    """The setting of a case: its own, or one of ``variants`` that all processes share."""
    options = case.options
    if not options.variants:
        return draw(case.random, options.device)
    number = case.number % options.variants
    return draw(random.Random(f"variant/{options.seed}/{number}"), options.device)


def draw(rng: random.Random, device: str) -> Setting:
    """A setting that the device supports, by what ``paged_ops.supports`` says."""
    while True:
        setting = _draw(rng, device)
        kind = "cpu" if device == "cpu" else "cuda"
        named = {name: True if name in ("alibi_slopes", "sinks") else value for name, value in setting.features}
        properties = {
            "dtype": setting.dtype,
            "cache_dtype": setting.form.kind,
            "head_size": setting.form.D,
            "value_head_size": setting.form.Dv,
            "block_size": setting.form.B,
            "layout": paged_ops.Layout.LATENT if setting.form.latent else None,
        }
        if not paged_ops.supports("paged_attention", kind, **named, **properties):
            return setting


def _draw(rng: random.Random, device: str) -> Setting:
    # Arithmetic in bfloat16 is wrong in Triton's interpreter.
    dtype = rng.choice(DTYPES[:2] if device == INTERPRETER else DTYPES)
    name = rng.choice((*FORMS, *LATENT_FORMS, ROW_FORM))
    kind = E4M3 if name == ROW_FORM else rng.choice((dtype, dtype, dtype, E4M3, E5M2))
    K, G = rng.choice(HEADS)
    x = 16 // kind.itemsize if name == "x_packed" else 1
    D = rng.choice([size for size in HEAD_SIZES if size % x == 0])
    Dv = rng.choice((D, 32, 56, 7, 128)) if name.startswith("separate") else D
    if name in LATENT_FORMS:
        K, G, Dv = 1, K * G, rng.choice((8, 13, 32, 50, 64, 256, 512))
        D = Dv + rng.choice((0, 5, 8, 32, 64))
    if name == ROW_FORM:
        K, G, D, Dv = 1, K * G, 576, 512
    B = rng.choice(BLOCK_SIZES)
    longest = rng.choice((6, 20, 40, 40, 70, 130, 300, rng.choice((100, 700))))
    if device == INTERPRETER:
        longest = min(longest, 100)
    elif device != "cpu" and rng.random() < 0.1:
        longest = 3000
    form = Form.draw(rng, name, B, K, D, Dv, kind)
    fp8 = kind.itemsize == 1
    names = {E4M3: ("fp8", "fp8_e4m3"), E5M2: ("fp8_e5m2",)}.get(kind, ("auto",))
    names = ("fp8_ds_mla",) if name == ROW_FORM else names
    features = _features(rng, B, longest)
    on = dict(features)
    S = rng.choice((1, 2, 3, 5, 8, 8, 13))
    shapes = {(S, S), (S * rng.choice((2, 3, 5)), S), (rng.choice((5, 17, 40, 64, 100)), S)}
    if rng.random() < 0.2:
        shapes.add((rng.choice((1, 150, 150 if device == "cpu" else 500)), S))
    cascades = on.keys() <= {"soft_cap", "sinks"}
    return Setting(
        dtype=dtype,
        form=form,
        H=K * G,
        longest=longest,
        sequences=rng.choice((2, 4, 6, 9)),
        shapes=tuple(sorted(rng.sample(sorted(shapes), min(len(shapes), rng.choice((2, 3)))))),
        kv_cache_dtype=rng.choice(names if form.as_bytes else (*names, "auto")),
        scales=(rng.choice((0, 1, K)), 0 if form.latent else rng.choice((0, 1, K)))
        if fp8 and name != ROW_FORM
        else (0, 0),
        fp8_output=rng.random() < 0.12,
        features=features,
        scale=rng.choice((D**-0.5,) * 6 + (1.0, 0.05, -(D**-0.5), 0.0)),
        fused=rng.choice(("alone", "heads", "tail")),
        extra_rows=rng.choice((0, 0, 3)),
        write_rows=rng.choice((8, 32, 64)),
        slot_dtype=rng.choice((torch.int64, torch.int32)),
        table_step=rng.choice((1, 1, 1, 2)),
        misaligned=rng.random() < 0.2,
        with_lse=rng.random() < 0.5,
        cascade=cascades and rng.random() < 0.6,
        loud=rng.choice((1.0, 1.0, 1.0, 0.1, 5.0)),
    )


def _features(rng: random.Random, B: int, longest: int) -> tuple[tuple[str, Any], ...]:
    if rng.random() < 0.12:  # alone but for sinks, by the specification
        size = B * rng.choice((1, 1, 2, 4))
        homo, by_group = rng.choice(((0, 0), (0, 0), (1, 0), (0, 1)))
        world = rng.choice((1, 1, 2, 4))
        vertical, local = rng.choice((1, 2, 3, 8, 16)), rng.choice((0, 1, 2, 5))
        sparse = [size, local, vertical, homo, by_group, rng.randrange(world), world]
        on: dict[str, Any] = {"block_sparse": sparse}
    else:
        on = {}
        if rng.random() < 0.12:
            on["causal"] = False
        else:
            if rng.random() < 0.3:
                on["sliding_window"] = rng.choice((1, 2, rng.randint(1, longest), longest, 2**31 - 1, 2**31, 2**40))
            if rng.random() < 0.2:
                on["attention_chunk"] = rng.choice((1, 2, rng.randint(1, longest), B, 2 * longest, 2**31 - 1, 2**33))
        if rng.random() < 0.2:
            on["soft_cap"] = rng.choice((0.5, 2.0, 30.0, 50.0))
        if rng.random() < 0.2:
            on["alibi_slopes"] = rng.choice((1.0, 0.1, -0.5))  # the largest of them
    if rng.random() < 0.25:
        on["sinks"] = rng.choice((1.0, 5.0))  # their standard deviation
    if "causal" not in on and "block_sparse" not in on and rng.random() < 0.3:
        on["bidirectional_ranges"] = rng.choice((0, 1, 1, 2, 3, 4, 8, 17))  # how many a sequence
        if rng.random() < 0.3:
            on["ranges_in_window"] = True
    elif "causal" not in on and "block_sparse" not in on and rng.random() < 0.15:
        # keys per entry, whether each key/value head has its own entries, and their number
        on["selected_keys"] = rng.choice((1, 1, 3, B)), rng.random() < 0.5, rng.choice((0, 1, 5, 17, 40))
    return tuple(on.items())
