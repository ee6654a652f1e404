"""Campaign: as invariant_batches.py, over the kinds of calls that the batch-invariant Hopper kernel serves.

Caches have blocks of any size, aligned or not, so that keys and values are loaded in each of the three ways, in the
queries' dtype or in fp8.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch

from . import invariant_batches
from .caches import FORMS, Form
from .invariant import E4M3, E5M2, Setting
from .runner import Case

DTYPES = torch.bfloat16, torch.float16
HEADS = (8, 4), (2, 4), (1, 8), (4, 1), (1, 16), (2, 3), (1, 33), (8, 1), (1, 64), (4, 7)  # K, G
MASKS: tuple[dict[str, Any], ...] = ({}, {}, {"causal": False})
BLOCKS = 1, 8, 12, 16, 48, 64


def setting_of(number: int, seed: int, device: str) -> Setting:
    rng = random.Random(f"invariant_hopper/{seed}/{number}")
    drawn = invariant_batches.setting_of(number, seed, device)
    dtype, D, (K, G) = rng.choice(DTYPES), rng.choice((64, 128)), rng.choice(HEADS)
    kind = rng.choice((dtype, E4M3, E5M2))
    forms = tuple(Form.draw(rng, rng.choice(FORMS), rng.choice(BLOCKS), K, D, D, kind) for _ in range(2))
    features = {} if number % invariant_batches.PLANTED == 0 else rng.choice(MASKS)
    own = dict(dtype=dtype, kind=kind, latent="", K=K, G=G, D=D, Dv=D, features=features, path="fused", scaled=False)
    return dataclasses.replace(drawn, **own, forms=forms)


def run(case: Case) -> None:
    prepare(case).run()


def prepare(case: Case) -> invariant_batches.Pool:
    return invariant_batches.Pool(case, setting_of)
