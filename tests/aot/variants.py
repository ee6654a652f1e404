"""The variants that a target compiles."""

from __future__ import annotations

import re

from paged_ops.lowerings.gpu.target import NEWEST_KNOWN, OLDEST_GLUON, TRITON
from tests.aot import attention, cache, hopper, latent, linear, parallel
from tests.aot.compiler import SOME, Variant

HAS_GLUON = OLDEST_GLUON <= TRITON <= NEWEST_KNOWN


def variants(target: str | None) -> list[Variant]:
    """The committed lists; for a target, without what does not ship for it, or is compiled for others."""
    gluon = hopper.VARIANTS if target is None or (target == "cuda:90" and HAS_GLUON) else []
    plain = *cache.VARIANTS, *attention.VARIANTS, *latent.VARIANTS, *linear.VARIANTS, *parallel.VARIANTS
    listed = [*plain, *gluon]
    if target is None:
        return listed
    shipped = (variant for variant in listed if target in (variant.targets or (target,)))
    return [variant for variant in shipped if re.search(SOME.get(target, ""), variant.name)]
