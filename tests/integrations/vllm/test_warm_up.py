"""Nothing is compiled after the engine's start: kernels of any step are those that were asked for before requests."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.gpu.imitated import expect_nothing_later, run_cases

CASES = ("dense", "window", "one head", "latent")
INVARIANT = ("invariant", "invariant window", "invariant one head", "invariant latent")


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES, INVARIANT], ids=["default", "batch-invariant"])
def test_no_step_asks_for_a_kernel(cases: tuple[str, ...]) -> None:
    """On an imitated H200, with the engine's metadata: decodes, short prompts of one length, and mixtures."""
    *every, faulty = run_cases("tests.integrations.vllm.warm_steps", 45, *cases, f"{cases[0]} without sizes")
    for found in every:
        expect_nothing_later(found)
    assert faulty["later"], "the test can fail"
