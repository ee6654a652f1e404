"""Draws of the GPU's kernels against those on the CPU: the same tokens. On a GPU, or in Triton's interpreter:
``TRITON_INTERPRET=1 pytest -m interpreter tests/gpu/test_draw.py``.
"""

import os

import pytest
import torch

if not (os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)
pytest.importorskip("triton")

from paged_ops.generation.distribution import draw, inverse_of, random_key
from paged_ops.lowerings.gpu.draw import draw_rows

IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.interpreter if IN_INTERPRETER else pytest.mark.gpu
DEVICE = "cpu" if IN_INTERPRETER else "cuda"
WIDTHS = [(61, torch.float32), (3000, torch.float16), (9000, torch.bfloat16)]
if not IN_INTERPRETER:
    WIDTHS += [(128_256, torch.bfloat16), (128_256, torch.float32), (262_144, torch.bfloat16)]

# top_k, top_p, min_p, temperature
LIMITS = [
    (0, 1.0, 0.0, 1.0),
    (1, 1.0, 0.0, 0.5),
    (5, 0.9, 0.1, 2.0),
    (300_000, 0.5, 0.0, 1.0),
    (50, 1.0, 0.0, 1e-3),
    (0, 1e-9, 0.0, 1.0),
    (20, 0.1, 0.01, 30.0),
    (0, 0.7, 0.3, 1.0),
    (7, 0.99, 0.0, 1e39),
    (1500, 1.0, 0.02, 1e-40),
]


@pytest.mark.parametrize("spread", [0.0, 0.01, 2.0, 8.0])
@pytest.mark.parametrize(("width", "dtype"), WIDTHS)
def test_draws_are_those_of_the_cpu(width: int, dtype: torch.dtype, spread: float) -> None:
    """With each limit and all of them, rows that serve several draws, masked tokens, and equal ones."""
    generator = torch.Generator().manual_seed(width)
    R, S = len(LIMITS), 4
    logits = (torch.randn(S, width, generator=generator) * spread).to(dtype)
    logits[1, ::3], logits[2, :-5] = -torch.inf, -torch.inf
    rows = torch.randint(S, (R,), generator=generator)
    keys = torch.tensor([random_key(width, 0, position) for position in range(R)])
    top_k, top_p, min_p, temperature = (torch.tensor(each, dtype=torch.float64) for each in zip(*LIMITS, strict=True))
    top_k = top_k.long().clamp(max=width)
    wanted = draw(logits[rows].float(), temperature, keys, top_k, top_p, min_p, width)
    on_device = logits.to(DEVICE)
    given = rows.tolist(), keys.tolist(), top_k.tolist(), inverse_of(temperature), top_p, min_p
    assert draw_rows(on_device, on_device.max(-1).values, *given).tolist() == wanted.tolist()


def test_rows_without_a_likeliest_token_end() -> None:
    logits = torch.randn(4, 700, device=DEVICE)
    logits[0], logits[1, 5], logits[2, 7] = -torch.inf, torch.inf, torch.nan
    half = torch.full((4,), 0.5)
    for top_k in (0, 3):
        tokens = draw_rows(logits, logits.max(-1).values, range(4), range(4), [top_k] * 4, half, half, half * 0)
        assert bool(((tokens >= 0) & (tokens < 700)).all())
