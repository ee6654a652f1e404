"""Which sequences of a step are expanded to keys and values of all heads, where only the last ones can be."""

import pytest

from paged_ops.integrations import expanded
from paged_ops.integrations.expanded import Sizes, first_expanded, saved

V3, LITE = Sizes(128, 512, 128, 128), Sizes(16, 512, 128, 128)


def test_multiplications_saved_are_counted() -> None:
    sizes, (H, R, Dn, Dv) = Sizes(3, 10, 4, 2), (3, 10, 4, 2)
    pairs = sum(1 for i in range(5, 9) for j in range(9) if j <= i)  # 4 new tokens of 9
    assert saved(4, 9, sizes) == H * (pairs * 2 * R - pairs * (Dn + Dv) - 9 * R * (Dn + Dv))


@pytest.mark.parametrize(
    ("sizes", "new", "tokens", "first"),
    [
        (V3, [1, 1, 1], [9000, 9000, 9000], 3),  # decodes
        (V3, [], [], 0),
        (V3, [1, 2000], [9000, 2000], 1),
        (V3, [2000, 1], [2000, 9000], 2),  # only the last ones can be
        (V3, [1, 127, 8000], [50, 127, 8000], 2),
        (V3, [1, 200, 8000], [50, 200, 8000], 2),  # 200 without history costs more than it saves
        (V3, [1, 200, 8000], [50, 9000, 8000], 1),
        (V3, [1, 8000, 200], [50, 8000, 200], 1),  # costs less than leaving the prompt before it
        (LITE, [1, 2000], [50, 2000], 2),
        (LITE, [1, 2000, 2000, 2000], [50, 2000, 2000, 2000], 1),  # together they pay
        (LITE, [1, 4000], [50, 4000], 1),
    ],
)
def test_the_choice_that_saves_most(sizes: Sizes, new: list[int], tokens: list[int], first: int) -> None:
    assert first_expanded(new, tokens, sizes) == first
    totals = [sum(saved(n, t, sizes) for n, t in zip(new[s:], tokens[s:], strict=True)) for s in range(len(new) + 1)]
    allowed = [s for s in range(len(new) + 1) if all(n >= expanded.FEWEST_TOKENS for n in new[s:])]
    best = max(totals[s] for s in allowed)
    assert totals[first] == best or (first == len(new) and best <= expanded.OVERHEAD)
