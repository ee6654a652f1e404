"""Penalties, and draws from a distribution: rows of scores to tokens, for all rows at once.

Random numbers are a hash of (seed, sample, position): a draw does not depend on the rest of the batch, has no state
that a failed step would have to restore, and is the same on every device. Weights are rounded to integers before they
are added up, so a total does not depend on the order of additions.

Top-p needs no sorting: a token is drawn, and the weights before it, of likelier tokens, are added up. If they reach
the limit, it is not among the tokens that stay, and the next draw is from those before it. A token that is accepted
has the probability that it would have among the tokens that stay.

Sources of the ideas: nucleus sampling of Holtzman et al. (2019, arXiv:1904.09751), drawn by rejection as in FlashInfer
(Ye et al. 2025, arXiv:2501.01005); min-p of Nguyen et al. (2024, arXiv:2407.01082), the repetition penalty of Keskar et
al. (2019, arXiv:1909.05858); counter-based random numbers of Salmon et al. (SC 2011), here with SplitMix64 (Steele, Lea
and Flood, OOPSLA 2014).

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 256  # tokens whose weights are added up at once
_COLDEST, _HOTTEST = 1e-30, 3e38  # float32 holds both, and the quotients of scores by them


def penalize(
    scores: Tensor,
    tokens: Sequence[Tensor],
    num_prompt: Sequence[int],
    repetition: Sequence[float],
    presence: Sequence[float],
    frequency: Sequence[float],
) -> None:
    """Lowers the scores of tokens that a sequence already has, in place.

    Args:
        scores: float32 ``[R, V]``, contiguous.
        tokens: of each row, prompt and output, int64 ``[n]`` on the device of the scores.
        num_prompt: of each row, how many of them are the prompt.
        repetition: of each row; positive scores of tokens of the prompt and the output are divided by it, others are
            multiplied by it. A prompt may have tokens that have no score.
        presence: of each row, taken from the scores of tokens of the output.
        frequency: of each row, taken once for each time that a token is in the output.
    """
    flat = scores.view(-1)
    if any(each != 1 for each in repetition):
        own, at = _places(scores, tokens)
        padded = torch.cat((flat, flat.new_zeros(1)))
        seen, factor = padded[at], on_device(repetition, torch.float32, scores.device)[own]
        padded[at] = torch.where(seen < 0, seen * factor, seen / factor)
        flat.copy_(padded[:-1])
    if any(presence) or any(frequency):
        own, at = _places(scores, [each[start:] for each, start in zip(tokens, num_prompt, strict=True)])
        per_token, per_time = on_device([*presence, *frequency], torch.float32, scores.device).view(2, -1)[:, own]
        counts = torch.zeros_like(flat).index_put_((at,), flat.new_ones(()), accumulate=True)[at]
        flat[at] = flat[at] - per_token - per_time * counts


def draw(
    scores: Tensor,
    temperature: Tensor,
    keys: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    largest_k: int = 0,
) -> Tensor:
    """One token per row, int64 ``[R]``, from scores ``[R, V]``.

    Scores are divided by the temperature. Then top-k, top-p and min-p each leave some of the tokens that the one before
    has left, with probabilities relative to those.

    Args:
        scores: float32; -inf is never drawn.
        temperature: float32 ``[R]``, above 0.
        keys: int64 ``[R]``: a row's random number is a function of its key only; see :func:`random_key`.
        top_k: int64 ``[R]``, the number of likeliest tokens that stay, and those as likely as the last of them; 0 is
            all. None is 0 in all rows.
        top_p: float64 ``[R]``: the fewest likeliest tokens whose probabilities reach this sum stay. None is 1 in all
            rows.
        min_p: float32 ``[R]``: tokens stay whose probability is at least this part of the likeliest one's. None is 0 in
            all rows.
        largest_k: the largest of ``top_k``.
    """
    # The largest is 0 before the division, so even the smallest temperature gives 0 and -inf, not inf.
    likely = (scores - scores.amax(-1, keepdim=True)).mul_(inverse_of(temperature)[:, None]).exp_().nan_to_num_(0.0)
    R, V = scores.shape
    if top_k is not None and largest_k:
        likeliest = scores.topk(min(largest_k, V), -1).values
        last = likeliest.gather(-1, (top_k - 1).clamp(0, likeliest.shape[-1] - 1)[:, None])
        likely.masked_fill_(scores < last.masked_fill_((top_k == 0)[:, None], -torch.inf), 0.0)
    chunks = torch.zeros(R, -(-V // CHUNK), CHUNK, dtype=torch.int64, device=scores.device)
    weights = chunks.view(R, -1)[:, :V]
    weights.copy_(likely.mul(unit_of(V)))
    limit = None if top_p is None else torch.where(top_p < 1, top_p * chunks.sum((1, 2)).double(), torch.inf)
    if min_p is not None:
        weights.masked_fill_(likely < min_p.float()[:, None], 0)
    tokens = _pick(chunks, keys)
    if limit is None:
        return tokens
    rows, drawn, ids = torch.arange(R, device=scores.device), tokens, torch.arange(V, device=scores.device)
    while True:
        score = scores.gather(1, drawn[:, None])
        is_before = (scores > score) | ((scores == score) & (ids < drawn[:, None]))
        chunks.view(len(rows), -1)[:, :V].masked_fill_(~is_before, 0)
        before = chunks.sum((1, 2))
        again = ((before > 0) & (before >= limit)).nonzero()[:, 0]
        if not len(again):
            return tokens
        rows, scores, chunks, limit, keys = (each[again] for each in (rows, scores, chunks, limit, keys))
        keys = keys + _signed(_STRIDE)
        drawn = _pick(chunks, keys)
        tokens[rows] = drawn


def unit_of(vocabulary: int) -> float:
    """The weight of a row's likeliest token. The sum of all weights is at most 2^62."""
    return 2.0 ** (62 - (vocabulary - 1).bit_length())


def inverse_of(temperature: Tensor) -> Tensor:
    """What scores are multiplied by, float32 ``[R]``."""
    return temperature.clamp(_COLDEST, _HOTTEST).float().reciprocal()


def bits_of(number: float) -> int:
    """The bits of a float64, as a signed integer: kernels get tables of integers."""
    bits: int = struct.unpack("q", struct.pack("d", number))[0]
    return bits


def log_softmax(scores: Tensor) -> Tensor:
    """Of float32 ``[R, V]``. The bits of a row do not depend on the other rows."""
    return torch.log_softmax(_aligned(scores), -1)[:, : scores.shape[-1]]


def _aligned(scores: Tensor) -> Tensor:
    """The scores, on a GPU with columns of -inf up to whole 16 bytes: torch's softmax adds in an order that depends on
    where a row begins."""
    rest = 0 if scores.device.type == "cpu" else -scores.shape[-1] % 4
    return torch.nn.functional.pad(scores, (0, rest), value=-torch.inf) if rest else scores


def key_of(seed: int, sample: int) -> int:
    """The key of a sample, for :func:`random_key`."""
    return _joined(_joined(0, seed), sample)


def random_key(key: int, position: int) -> int:
    """A key for :func:`draw`, as a signed 64-bit number: equal seeds, samples and positions, equal random numbers.
    ``key``: of :func:`key_of`."""
    return _signed(_joined(key, position))


def uniforms(keys: Tensor) -> Tensor:
    """Random numbers in (0, 1), float64 ``[R]``: the upper 52 bits of the first output of SplitMix64 that starts at
    each key (int64 ``[R]``), and a half."""
    bits = keys + _signed(_STRIDE)
    for shift, factor in _ROUNDS:
        bits = (bits ^ _shifted(bits, shift)) * _signed(factor)
    bits = bits ^ _shifted(bits, _LAST_SHIFT)
    return (_shifted(bits, 12).double() + 0.5) * 2.0**-52


def on_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host as a tensor on a device, without waiting for the device."""
    on_gpu = device.type == "cuda"
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=on_gpu).to(device, non_blocking=True)


def _pick(chunks: Tensor, keys: Tensor) -> Tensor:
    """Draws a token by its weight, int64 ``[R]``, from weights ``[R, chunks, CHUNK]``."""
    # First the chunk, then the token: sums are faster than running sums.
    reached = chunks.sum(-1).cumsum(-1)
    total = reached[:, -1:]
    # A token is drawn if the target lies within its weight, so one of weight 0 never is.
    target = torch.minimum((uniforms(keys)[:, None] * total.double()).long(), total - 1)
    chunk = torch.searchsorted(reached, target, right=True).clamp_(max=chunks.shape[1] - 1)
    of_chunk = chunks.gather(1, chunk[:, :, None].expand(-1, -1, CHUNK))[:, 0]
    target -= reached.gather(1, chunk) - of_chunk.sum(-1, keepdim=True)
    token = torch.searchsorted(of_chunk.cumsum(-1), target, right=True)
    return (chunk * CHUNK + token)[:, 0]


def _places(scores: Tensor, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The row of each of the tokens, and where its score lies in all scores, flattened: behind them if it has none."""
    sizes = [len(each) for each in tokens]
    counts = on_device(sizes, torch.int64, scores.device)
    own = torch.arange(len(sizes), device=scores.device).repeat_interleave(counts, output_size=sum(sizes))
    ids, width = torch.cat(list(tokens)), scores.shape[-1]
    return own, torch.where(ids < width, ids + own * width, scores.numel())


_ALL = 2**64 - 1
_STRIDE = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def _joined(key: int, number: int) -> int:
    return _mixed((key ^ number) + _STRIDE & _ALL)


def _mixed(bits: int) -> int:
    for shift, factor in _ROUNDS:
        bits = (bits ^ bits >> shift) * factor & _ALL
    return bits ^ bits >> _LAST_SHIFT


def _signed(bits: int) -> int:
    return bits - (bits >> 63 << 64)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """A shift to the right that fills with zeros; int64's own fills with the sign."""
    return (bits >> by) & (2 ** (64 - by) - 1)
