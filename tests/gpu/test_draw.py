"""The GPU's kernels that choose tokens against the rules on the CPU: the same tokens. On a GPU, or in Triton's
interpreter:
``TRITON_INTERPRET=1 pytest -m interpreter tests/gpu/test_draw.py``.
"""

import os

import pytest
import torch

if not (os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)
pytest.importorskip("triton")

from paged_ops.generation.distribution import bits_of, draw, key_of, penalize, random_key
from paged_ops.generation.settings import Settings
from paged_ops.lowerings.gpu.draw import draw_rows, likeliest
from paged_ops.lowerings.gpu.penalties import penalized

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
    keys = torch.tensor([random_key(key_of(width, 0), position) for position in range(R)])
    top_k, top_p, min_p, temperature = (torch.tensor(each, dtype=torch.float64) for each in zip(*LIMITS, strict=True))
    top_k = top_k.long().clamp(max=width)
    wanted = draw(logits[rows].float(), temperature, keys, top_k, top_p, min_p, width)
    on_device = logits.to(DEVICE)
    limits = [(min(k, width), *Settings(top_p=p, min_p=m, temperature=t).limits) for k, p, m, t in LIMITS]
    given = [(*each, *more) for *each, more in zip(rows.tolist(), keys.tolist(), limits, strict=True)]
    assert draw_rows(on_device, on_device.max(-1).values, given).tolist() == wanted.tolist()


def test_rows_without_a_likeliest_token_end() -> None:
    logits = torch.randn(4, 700, device=DEVICE)
    logits[0], logits[1, 5], logits[2, 7] = -torch.inf, torch.inf, torch.nan
    for top_k in (0, 3):
        limits = Settings(top_p=0.5, temperature=2.0).limits
        tokens = draw_rows(logits, logits.max(-1).values, [(r, r, top_k, *limits) for r in range(4)])
        assert bool(((tokens >= 0) & (tokens < 700)).all())


@pytest.mark.parametrize(("width", "dtype"), WIDTHS)
def test_the_first_of_the_likeliest_tokens(width: int, dtype: torch.dtype) -> None:
    logits = torch.randn(7, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    logits[0, 3:9], logits[1], logits[2, 1:] = 9.0, -torch.inf, -torch.inf
    logits[3, -1], logits[4, 5], logits[5, 7] = 9.0, torch.inf, torch.nan
    best, tokens = likeliest(logits.to(DEVICE))
    wanted = logits.max(-1)
    torch.testing.assert_close(best.cpu(), wanted.values, rtol=0, atol=0, equal_nan=True)
    rows = [0, 2, 3, 4, 6]
    assert tokens.cpu()[rows].tolist() == wanted.indices[rows].tolist()
    assert bool(((tokens >= 0) & (tokens < width)).all())


@pytest.mark.parametrize(("width", "dtype"), WIDTHS)
def test_penalties_are_those_of_the_cpu(width: int, dtype: torch.dtype) -> None:
    """Bit for bit: tokens that repeat, ids without logits, newest tokens that the host knows and those it does not."""
    generator = torch.Generator().manual_seed(width)
    lengths, num_prompt = [1, 40, 2300, 7, 1500], [1, 30, 100, 0, 1499]
    penalties = [(1.5, 0.0, 0.0), (1.0, 0.3, 0.1), (0.7, 0.2, 0.37), (1.0, 0.0, 0.0), (2.0, -0.5, 0.25)]
    logits = (torch.randn(6, width, generator=generator) * 3).to(dtype)
    rows, unread = [5, 0, 1, 3, 3], torch.tensor([11, 0, 7])
    tokens = [torch.randint(min(width + 20, 700), (n,), generator=generator) for n in lengths]
    for each, start in zip(tokens, num_prompt, strict=True):
        each[start:] %= width  # a prompt's ids alone may have no logits
    tokens[1][-1], tokens[4][-1] = unread[2], unread[0]
    wanted = logits[rows].float()
    penalize(wanted, tokens, num_prompt, *zip(*penalties, strict=True))
    ids = [torch.cat((each[:-1], torch.full((3,), -(2**40)))).to(DEVICE) for each in tokens]  # the newest is unknown
    newest = [int(tokens[0][-1]), -3, int(tokens[2][-1]), 0, -1]
    given = [
        (row, each.data_ptr(), 0 if n == 7 else n, start, new, *map(bits_of, numbers))
        for row, each, n, start, new, numbers in zip(rows, ids, lengths, num_prompt, newest, penalties, strict=True)
    ]
    for _ in range(2):
        scores = penalized(logits.to(DEVICE), given, unread.to(DEVICE))
        assert torch.equal(scores.cpu(), wanted)
    for own, each, n in zip(ids, tokens, lengths, strict=True):
        assert n == 7 or own[:n].tolist() == each.tolist()
        assert own[n:].tolist() == [-(2**40)] * 2
