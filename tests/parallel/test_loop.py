"""The loops of several ranks decide the same, use rank 0's tokens, and fail together; gloo, two and four processes."""

import re

import pytest

from tests.generation.toy import EXPECTED, GREEDY, PROMPTS, make_loop

SECONDS = 30.0  # within which every failure is told to all


def stats_of(loop):
    return {name: value for name, value in vars(loop.stats).items() if name != "seconds"}


@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 18, "num_host_blocks": 128, "max_num_tokens": 40}, {"num_blocks": 18, "max_num_tokens": 40}],
    ids=["plain", "swaps", "computes again"],
)
@pytest.mark.parametrize(("size", "overlap"), [(2, False), (2, True), (4, False)])
def test_greedy_tokens_and_decisions_equal_one_process(run_on, size, options, overlap):
    options = {**options, "overlap": overlap}
    loop = make_loop(**options)
    assert loop.generate(PROMPTS, GREEDY) == EXPECTED
    assert ("num_blocks" in options) == bool(loop.stats.preemptions)
    assert (loop.stats.overlapped_steps > loop.stats.steps // 3) == overlap
    for outputs, stats in run_on("loop_cases.generates", size, 60, **options):
        assert outputs == EXPECTED
        assert stats == stats_of(loop)


@pytest.mark.parametrize("who", [None, 0, 1])
def test_ranks_meet_once_per_step_if_nothing_happens_in_between(run_on, who):
    for outputs, met, generated, steps in run_on("loop_cases.meets", 2, 60, who=who):
        assert outputs == EXPECTED
        once = generated if who is None else 0
        assert 2 * steps - once <= met <= 2 * steps - once + 3  # also to warm up, and before the first
        assert steps - generated > 10


@pytest.mark.parametrize(("noise", "overlap"), [(False, False), (True, False), (True, True)])
def test_samples_are_those_of_rank_0(run_on, noise, overlap):
    (first, stats), *others = run_on("loop_cases.samples", 2, 60, noise=noise, overlap=overlap)
    assert len({tuple(tokens) for tokens, _ in first}) > 3
    assert all(len(logprobs) == len(tokens) == 12 for tokens, logprobs in first)
    for outputs, others_stats in others:
        assert (outputs, others_stats) == (first, stats)


@pytest.mark.parametrize(("size", "overlap"), [(2, False), (2, True), (4, True)])
def test_others_follow_rank_0(run_on, size, overlap):
    (told, steps), *others = run_on("loop_cases.follows", size, 60, overlap=overlap)
    assert told == (EXPECTED[8], EXPECTED[5], "abort", EXPECTED[3])
    assert others == [(0, steps)] * (size - 1)


def test_others_take_the_ids_of_rank_0(run_on):
    ((refused, outputs), steps), other = run_on("loop_cases.follows_other_ids", 2, 60)
    assert "expected prompts without padding" in refused
    assert outputs == [EXPECTED[5], EXPECTED[6]]
    assert other == (0, steps)


@pytest.mark.parametrize(("size", "overlap"), [(2, False), (4, True)])
def test_an_abort_on_one_rank_is_one_on_all(run_on, size, overlap):
    (first, stats), *others = run_on("loop_cases.aborts", size, 60, overlap=overlap)
    for i, (tokens, reason) in enumerate(first):
        if 2 <= i < 2 + size:
            assert reason == "abort"
            assert 3 <= len(tokens) < 6
            assert tokens == EXPECTED[i][: len(tokens)]
        else:
            assert (tokens, reason) == (EXPECTED[i], "length")
    assert others == [(first, stats)] * (size - 1)


@pytest.mark.parametrize(
    ("where", "who", "overlap"),
    [
        *(("processor", 0, False), ("on_token", 0, False), ("on_token", 1, False), ("everywhere", 0, False)),
        *(("on_token", 1, True), ("everywhere", 0, True)),
    ],
)
def test_an_error_between_collectives_is_raised_by_all_and_the_loop_goes_on(run_on, where, who, overlap):
    results = run_on("loop_cases.fails", 2, 60, where=where, who=who, overlap=overlap)
    for rank, ((kind, text, notes), seconds, again, used) in enumerate(results):
        assert (kind, text) == ("KeyError", "'boom'")
        assert (f"raised by rank {who} of 2" in notes) == (rank != who and where != "everywhere")
        assert seconds < SECONDS
        assert again == EXPECTED[:4]
        assert used == 0


@pytest.mark.parametrize("who", [0, 1])
def test_an_error_while_the_next_step_runs_is_raised_by_all_and_the_loop_goes_on(run_on, who):
    for rank, ((kind, _, notes), seconds, again, used) in enumerate(
        run_on("loop_cases.fails", 2, 60, where="read", who=who, overlap=True)
    ):
        assert kind == "KeyError"
        assert (f"raised by rank {who} of 2" in notes) == (rank != who)
        assert seconds < SECONDS
        assert again == EXPECTED[:4]
        assert used == 0


@pytest.mark.parametrize(("size", "who", "overlap"), [(2, 0, False), (2, 1, True), (4, 2, True)])
def test_an_error_within_the_model_is_raised_by_all(run_on, size, who, overlap):
    results = run_on("loop_cases.fails", size, 60, spoils=True, where="model", who=who, overlap=overlap)
    for rank, ((kind, text, notes), seconds, again, used) in enumerate(results):
        assert (kind, text) == ("KeyError", "'boom'")
        assert (f"raised by rank {who} of {size}" in notes) == (rank != who)
        assert seconds < SECONDS
        assert "RankError: the ranks of this loop cannot continue" in again
        assert "boom" in again
        assert used == 0


@pytest.mark.parametrize(("size", "who"), [(2, 0), (2, 1), (4, 0), (4, 2)])
def test_a_rank_that_dies_is_named_by_all_others(run_on, size, who):
    results = run_on("loop_cases.fails", size, 60, spoils=True, where="dies", who=who)
    assert results.pop(who) == (3,)
    for (kind, text, _), seconds, again, used in results:
        assert kind == "RankError"
        assert f"rank {who} of {size} is gone" in text
        assert seconds < SECONDS
        assert "cannot continue" in again
        assert used == 0


@pytest.mark.parametrize(("size", "who"), [(2, 0), (4, 2)])
def test_a_rank_that_is_late_is_named_by_all_others(run_on, size, who):
    results = run_on("loop_cases.fails", size, 60, spoils=True, without=who, where="late", who=who)
    results.pop(who)
    for (kind, text, _), seconds, _, _ in results:
        assert kind == "RankError"
        assert f"rank {who} of {size} is late: no message within the limit of 5 s" in text
        assert seconds < SECONDS


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("cache", r"is at .*64, 4.* where rank 0 is at .*128, 4"),
        ("requests", r"rank 1 submitted requests of \[9\] tokens where rank 0 submitted \[5\]"),
        ("calls", "rank 1 called warm_up where rank 0 called step"),
    ],
)
def test_ranks_that_do_other_things_are_told(run_on, how, told):
    for kind, text, seconds in run_on("loop_cases.differs", 2, 60, how=how):
        assert kind == "ApartError"
        assert re.search(told, text)
        assert seconds < SECONDS
