"""StateCache: the bookkeeping and the tensors against a dictionary of what each sequence's state should be."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._python_dispatch

from paged_ops.cache import OutOfBlocks
from paged_ops.cache.states import PADDING_ROW, StateCache, StateSpec
from paged_ops.metadata import AttentionMetadataBuilder, Batch, advance_decodes
from tests.helpers.defaults import defaults

SPECS = [StateSpec((3, 2), torch.float32), StateSpec((4,), torch.int64), StateSpec((), torch.bfloat16)]


def make(num_slots: int = 3, num_host_slots: int = 2) -> StateCache:
    states = StateCache(SPECS, num_slots, num_host_slots=num_host_slots)
    for tensor in states.tensors + states.host_tensors:
        tensor.fill_(77)  # what nobody wrote
    return states


def write(states: StateCache, seq_id: str, value: int) -> None:
    """What a model's step does."""
    for tensor in states.tensors:
        tensor[states.row(seq_id) ^ 1] = value


def read(states: StateCache, seq_id: str) -> list[int]:
    """The distinct numbers of a sequence's state."""
    row = states.row(seq_id)
    return sorted({int(x) for tensor in states.tensors for x in tensor[row].reshape(-1).tolist()})


def snapshot(states: StateCache) -> Any:
    return copy.deepcopy(states._slots), [tensor.clone() for tensor in states.tensors + states.host_tensors]


def same(a: Any, b: Any) -> bool:
    return bool(a[0] == b[0]) and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def test_a_step_that_is_not_committed_changes_nothing() -> None:
    states = make()
    states.admit("a")
    assert read(states, "a") == [0]
    write(states, "a", 5)
    assert read(states, "a") == [0]
    write(states, "a", 6)
    states.commit("a")
    assert read(states, "a") == [6]
    write(states, "a", 7)
    states.fork("a", "b")
    states.swap_out("a")
    states.swap_in("a")
    assert read(states, "a") == read(states, "b") == [6]


def test_random_programs_keep_each_sequences_state() -> None:
    generator = random.Random(0)
    for _ in range(30):
        states = make(generator.randint(0, 4), generator.randint(0, 3))
        live: dict[str, int] = {}
        swapped: dict[str, int] = {}
        pending: dict[str, int] = {}
        for index in range(150):
            room, host_room = len(live) < states.num_slots, len(swapped) < states.num_host_slots
            assert (states.num_free_slots, states.num_free_host_slots) == (
                states.num_slots - len(live),
                states.num_host_slots - len(swapped),
            )
            name, value = f"s{index}", generator.randint(1, 99)
            what = generator.choice(["admit", "fork", "write", "commit", "free", "out", "in"])
            here = generator.choice(sorted(live)) if live else None
            there = generator.choice(sorted(swapped)) if swapped else None
            if what == "admit" and room:
                states.admit(name)
                live[name] = 0
            elif what == "fork" and here and room:
                states.fork(here, name)
                live[name] = live[here]
            elif what == "write" and here:
                write(states, here, value)
                pending[here] = value
            elif what == "commit" and here in pending:
                states.commit(here)
                live[here] = pending.pop(here)
            elif what == "free" and (here or there):
                gone = here or there
                assert gone is not None
                states.free(gone)
                for each in (live, swapped, pending):
                    each.pop(gone, None)
            elif what == "out" and here and host_room:
                states.swap_out(here)
                pending.pop(here, None)
                swapped[here] = live.pop(here)
            elif what == "in" and there and room:
                states.swap_in(there)
                live[there] = swapped.pop(there)
            for seq_id, expected in live.items():
                assert read(states, seq_id) == [expected]
            rows = states.rows(list(live))
            assert len({row // 2 for row in rows} | {PADDING_ROW // 2}) == len(rows) + 1
            for tensor in states.tensors:
                assert bool((tensor[PADDING_ROW : PADDING_ROW + 2] == 77).all())


@pytest.mark.parametrize("call", ["admit", "fork", "swap_out", "swap_in"])
def test_an_interrupt_leaves_the_sequence_before_the_call(call: str) -> None:
    for at in range(len(SPECS)):
        states = make()
        states.admit("a")
        write(states, "a", 5)
        states.commit("a")
        if call == "swap_in":
            states.swap_out("a")
        before, count = snapshot(states)[0], 0

        class Interrupted(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                nonlocal count
                count += func in (torch.ops.aten.zero_.default, torch.ops.aten.copy_.default)
                if count > at:  # noqa: B023
                    raise KeyboardInterrupt
                return func(*args, **(kwargs or {}))

        arguments = {"admit": ("b",), "fork": ("a", "b")}.get(call, ("a",))
        with pytest.raises(KeyboardInterrupt), Interrupted():
            getattr(states, call)(*arguments)
        assert snapshot(states)[0] == before
        getattr(states, call)(*arguments)
        if call == "swap_out":
            states.swap_in("a")
        assert read(states, "a") == [5]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.admit("a"), ValueError, "seq_id: 'a' is in use"),
        (lambda s: s.fork("a", "b"), ValueError, "seq_id: 'b' is in use"),
        (lambda s: s.fork("x", "y"), ValueError, "seq_id: 'x' is unknown"),
        (lambda s: s.fork("c", "y"), ValueError, "seq_id: 'c' is swapped out"),
        (lambda s: s.commit("c"), ValueError, "seq_id: 'c' is swapped out"),
        (lambda s: s.row("x"), ValueError, "seq_id: 'x' is unknown"),
        (lambda s: s.free("x"), ValueError, "seq_id: 'x' is unknown"),
        (lambda s: s.swap_in("a"), ValueError, "seq_id: 'a' is not swapped out"),
        (lambda s: s.swap_out("c"), ValueError, "seq_id: 'c' is swapped out"),
        (lambda s: s.admit("x"), OutOfBlocks, "device states: expected a free slot of 2, got none"),
        (lambda s: s.fork("a", "x"), OutOfBlocks, "device states"),
        (lambda s: s.swap_in("c"), OutOfBlocks, "device states"),
        (lambda s: s.swap_out("a"), OutOfBlocks, "host states: expected a free slot of 1, got none"),
    ],
)
def test_bad_calls_change_nothing(call: Callable[[StateCache], object], error: type[Exception], message: str) -> None:
    states = make(2, 1)
    states.admit("c")
    states.swap_out("c")
    states.admit("a")
    states.admit("b")
    before = snapshot(states)
    with pytest.raises(error, match=message):
        call(states)
    assert same(before, snapshot(states))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"specs": []}, "specs: expected one or more"),
        ({"num_slots": -1}, "num_slots: expected at least 0, got -1"),
        ({"num_host_slots": -1}, "num_host_slots: expected at least 0, got -1"),
    ],
)
def test_bad_sizes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StateCache(**{"specs": SPECS, "num_slots": 1, **arguments})


def test_reset_frees_all_and_bytes_are_counted() -> None:
    states = make(3, 2)
    for seq_id in "ab":
        states.admit(seq_id)
    states.swap_out("a")
    states.reset()
    assert (states.num_free_slots, states.num_free_host_slots, "a" in states) == (3, 2, False)
    assert StateCache.bytes_per_slot(SPECS) == 2 * (3 * 2 * 4 + 4 * 8 + 2)
    assert states.nbytes == 4 * StateCache.bytes_per_slot(SPECS)
    assert states.host_nbytes == StateCache.bytes_per_slot(SPECS)


def test_other_default_devices_and_dtypes() -> None:
    with defaults("meta", torch.float64):
        states = make(2, 1)
        states.admit("a")
        write(states, "a", 4)
        states.commit("a")
        states.swap_out("a")
        states.swap_in("a")
        assert read(states, "a") == [4]
        assert [(t.device.type, t.dtype) for t in states.tensors] == [("cpu", spec.dtype) for spec in SPECS]


def metadata_builder(**changes: Any) -> AttentionMetadataBuilder:
    return AttentionMetadataBuilder(4, 6, 40, 8, num_blocks=64, **{"num_state_rows": 12, **changes})


def batch_with(state_slots: list[int] | None, query_lens: tuple[int, ...] = (3, 1)) -> Batch:
    return Batch(query_lens, [0] * len(query_lens), [[s] for s in range(len(query_lens))], state_slots=state_slots)


@pytest.mark.parametrize("num_staging_buffers", [None, 1])
def test_a_steps_metadata_names_the_rows_of_states(num_staging_buffers: int | None) -> None:
    builder = metadata_builder(num_staging_buffers=num_staging_buffers)
    address = builder.build_for_capture(6).state_slots.data_ptr()
    for rows, S in (([7, 4, 10], 6), ([3, 6], 5), ([], 4), ([9], 1), (None, 3)):
        n = len(rows or [])
        slots = builder.build(0, batch_with(rows, (1,) * n), num_reqs=S).state_slots
        assert slots.tolist() == (rows or []) + [PADDING_ROW] * (S - n)
        assert (slots.dtype, slots.data_ptr()) == (torch.int32, address)
    assert builder.build_for_capture(3).state_slots.tolist() == [PADDING_ROW] * 3
    assert metadata_builder(num_state_rows=0).build(0, batch_with(None)).state_slots is None


def test_rows_of_states_move_with_their_requests_and_flip_with_their_tokens() -> None:
    batch = batch_with([7, 4], (3, 1))
    batch.swap(0, 1)
    assert batch.state_slots.tolist() == [4, 7]
    metadata = metadata_builder().build(0, batch_with([7, 4], (1, 1)), num_reqs=3, num_tokens=3)
    advance_decodes(metadata, 4)
    assert metadata.state_slots.tolist() == [6, 5, PADDING_ROW]


@pytest.mark.parametrize(
    ("make_builder", "rows", "message"),
    [
        (metadata_builder, [1, 4], r"state_slots: expected rows in \[2, 12\), as StateCache.rows gives, got \[1, 4\]"),
        (metadata_builder, [2, 12], r"state_slots: expected rows in \[2, 12\)"),
        (metadata_builder, [4, 5], r"state_slots: expected a slot for each request alone, got \[4, 5\]"),
        (metadata_builder, None, "state_slots: expected one for each request, as the builder has states, got None"),
        (lambda: metadata_builder(num_state_rows=0), [2, 4], "state_slots: expected None, as the builder has no state"),
        (lambda: metadata_builder(num_state_rows=-1), None, "num_state_rows: expected at least 0"),
        (metadata_builder, [2], "state_slots: expected one for each of the 2 requests, got 1"),
    ],
)
def test_wrong_rows_of_states(make_builder: Callable[[], Any], rows: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_builder().build(0, batch_with(rows))
