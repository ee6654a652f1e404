"""Tunes the tiles of the GPU kernels on the current device: coordinate descent, one number at a time.

The numbers come from ``lowerings/gpu/configs/*.json``: any tree of objects, lists and integers. This module does not
know their meaning. A workload is run once with a tree that records which numbers are read. Then each of these is
replaced by its neighbours. A neighbour is kept if the workloads that read it are right, and faster by more than the
noise. Values that do not compile, or that give a wrong result, are dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import paged_ops
from paged_ops.bench import cases, measure
from paged_ops.bench.cases import Case, Inputs
from paged_ops.bench.measure import Call, Replay, WrongResultError

if TYPE_CHECKING:
    from paged_ops.lowerings.gpu.target import Target

GAIN = 0.015  # a neighbour must be faster by this share
Place = tuple[str, ...]  # the path of a number in the tree


@dataclasses.dataclass
class Workload:
    """Something to time: ``make`` returns one call per set of inputs, and a check that raises if results are wrong."""

    name: str
    make: Callable[[], tuple[list[Call], Callable[[Replay], object]]]
    num_bytes: int = 0  # approximate size of its inputs on the device
    _kept: tuple[list[Call], Callable[[Replay], object]] | None = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside it all measurements have the same inputs, which are made once."""
        self._kept = self.make()
        try:
            yield
        finally:
            self._kept = None

    def us(self, device: torch.device, repeats: int) -> float:
        """Microseconds of a call.

        Raises:
            WrongResultError: a result is wrong.
        """
        calls, check = self._kept or self.make()
        replay = Replay(calls, device)
        check(replay)
        return replay.median_us(repeats)

    def start_compiling(self) -> frozenset[Any]:
        """Begins to compile the kernels of a call with the present numbers, in other processes. Returns which kernels
        these are; none where kernels cannot be compiled ahead. Inside :meth:`kept`."""
        from paged_ops.lowerings.gpu import precompile

        if not (self._kept and self._kept[0] and precompile.can_precompile()):
            return frozenset()
        with precompile.noting() as jobs:
            self._kept[0][0]()
        precompile.compiler().submit(jobs)
        return frozenset(jobs)


class Watched(dict[str, Any]):
    """An object of the tree that records which of its numbers are read."""

    def __init__(self, items: dict[str, Any], place: Place, seen: set[Place]) -> None:
        super().__init__({name: watch(value, (*place, name), seen) for name, value in items.items()})
        self._place, self._seen = place, seen

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if isinstance(value, int):
            self._seen.add((*self._place, name))
        return value


class WatchedList(list[Any]):
    """A list of numbers that records when it is read."""

    def __init__(self, items: Sequence[int], place: Place, seen: set[Place]) -> None:
        super().__init__(items)
        self._note = lambda: seen.update((*place, str(n)) for n in range(len(self)))

    def __iter__(self) -> Iterator[Any]:
        self._note()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self._note()
        return super().__getitem__(index)


def watch(tree: Any, place: Place, seen: set[Place]) -> Any:
    """The same tree, which adds the paths of numbers that are read to ``seen``."""
    if isinstance(tree, dict):
        return Watched(tree, place, seen)
    return WatchedList(tree, place, seen) if isinstance(tree, list) else tree


def get(tree: Any, place: Place) -> int:
    for name in place:
        tree = tree[int(name)] if isinstance(tree, list) else tree[name]
    return int(tree)


def put(tree: Any, place: Place, value: int) -> None:
    for name in place[:-1]:
        tree = tree[name]
    tree[int(place[-1]) if isinstance(tree, list) else place[-1]] = value


def neighbours(n: int) -> list[int]:
    """The numbers to try instead: half and double; for small ones also one less and one more; none for 0."""
    near = {n // 2, 2 * n, *((n - 1, n + 1) if n < 16 else ())} if n else set()
    return sorted(near - {0, n})


def forget() -> None:
    """Drops the plans of earlier calls, so that the lowering reads the numbers again."""
    for name, module in list(sys.modules.items()):
        if name.startswith("paged_ops.lowerings.gpu"):
            for each in list(vars(module).values()):
                clear = getattr(each, "cache_clear", None)
                if clear is not None and each.__name__ not in LOADERS:
                    clear()
            getattr(module, "forget", lambda: None)()


LOADERS = {"target_of"}  # their results have the trees, which are changed in place


@dataclasses.dataclass
class Step:
    """A changed number, and the gain."""

    place: Place
    before: int
    after: int
    gain: float  # the share of time that was saved


def descend(
    tree: dict[str, Any],
    workloads: Sequence[Workload],
    device: torch.device,
    repeats: int = 10,
    progress: Callable[[str], None] = lambda line: None,
) -> Iterator[Step]:
    """Changes the numbers of ``tree``, in place, until the workloads that read them are fastest; yields each change.

    Args:
        tree: the tree that the lowering reads, not a copy.
        workloads: each is first run once with the present numbers; one that fails is left out. Numbers that it reads
            without launching a kernel that depends on them are not its own.
        device: to run on.
        repeats: replays of each measurement.
        progress: is called with a line before each measurement.
    """
    readers: dict[Place, list[Workload]] = {}
    times: dict[str, float] = {}
    plain, seconds = dict(tree), 0.0

    def with_number(place: Place, value: int, measure: Callable[[], Any]) -> Any:
        """What ``measure`` returns with this number; the error if that does not compile, does not fit, or is wrong."""
        before = get(tree, place)
        put(tree, place, value)
        forget()
        try:
            return measure()
        except Exception as error:
            return error
        finally:
            put(tree, place, before)
            forget()

    for workload in workloads:
        progress(f"{workload.name} as it is")
        seen: set[Place] = set()
        try:
            with workload.kept():
                tree.update(watch(plain, (), seen))
                forget()
                try:
                    times[workload.name] = workload.us(device, repeats)
                    started = time.perf_counter()
                    times[workload.name] = workload.us(device, repeats)  # again, with kernels that are compiled
                    seconds += time.perf_counter() - started
                finally:
                    tree.update(plain)
                    forget()
                own, used = workload.start_compiling(), set()
                for place in seen:
                    for value in neighbours(get(tree, place)):
                        if not own or with_number(place, value, workload.start_compiling) != own:
                            used.add(place[:-1])  # all numbers of a tile: some change no kernel, but how many programs
                for place in seen:
                    if place[:-1] in used:
                        readers.setdefault(place, []).append(workload)
        except Exception as error:
            progress(f"{workload.name} left out: {type(error).__name__}: {error}".splitlines()[0])

    measured = sum(len(neighbours(get(tree, place))) * len(each) for place, each in readers.items())
    seconds /= max(len(times), 1)
    progress(
        f"{len(readers)} numbers are read; their neighbours are at least {measured} measurements, which take about"
        f" {measured * seconds / 60:.0f} minutes at {seconds:.2f} s for each, with kernels that are compiled meanwhile"
    )
    for place in sorted(readers):
        tried = {get(tree, place)}
        while values := [each for each in neighbours(get(tree, place)) if each not in tried]:
            tried |= set(values)
            found: dict[int, dict[str, float]] = {value: {} for value in values}
            for each in readers[place]:
                with each.kept():
                    for value in list(found):
                        us = with_number(place, value, functools.partial(each.us, device, repeats))
                        line = f"{'.'.join(place)} = {value}: {each.name}: "
                        if isinstance(us, Exception):
                            del found[value]
                            progress(f"{line}{type(us).__name__}: {us}".splitlines()[0])
                        else:
                            found[value][each.name] = us
                            progress(f"{line}{us:.1f} µs ({times[each.name]:.1f})")
            ratios = {
                value: math.prod(us / times[name] for name, us in new.items()) ** (1 / len(new))
                for value, new in found.items()
            }
            best = min(ratios, key=ratios.__getitem__) if ratios else get(tree, place)
            if ratios.get(best, 1.0) >= 1 - GAIN:
                break
            before = get(tree, place)
            put(tree, place, best)
            forget()
            times |= found[best]
            yield Step(place, before, best, 1 - ratios[best])


# A workload's first measurement compiles its kernels, and begins to compile those of its neighbours; on an H100's host
# with 16 processors, as the others.
SECONDS_EACH = 6.0
# Later ones, whose kernels are compiled; the numbers that a workload reads, and the neighbours of each.
SECONDS_LATER, READ_EACH, TRIED_EACH = 0.2, 7, 3


def forecast(workloads: Sequence[Workload], device: torch.device) -> str:
    """The expected cost of :func:`descend`, in words. ``descend`` says more once it knows which numbers are read."""
    minutes = len(workloads) * (SECONDS_EACH + READ_EACH * TRIED_EACH * SECONDS_LATER) / 60
    gib = (max((each.num_bytes for each in workloads), default=0) + 8 * measure.cache_bytes(device)) / 2**30
    return (
        f"{len(workloads)} workloads; each number that they read is tried with its neighbours: roughly"
        f" {minutes:.0f} minutes, and up to {gib:.1f} GiB on {device} with nothing else running there"
    )


def attention_workload(case: Case, device: torch.device) -> Workload:
    def make() -> tuple[list[Call], Callable[[Replay], object]]:
        sets = measure.inputs_of(case, device)
        calls: list[Call] = [functools.partial(paged_ops.paged_attention, *each.args, **each.kwargs) for each in sets]
        wanted = functools.cache(lambda n: measure.reference(sets[n]))
        return calls, lambda replay: measure.verify(replay, sets, wanted)

    return Workload(case.key, make, case.bytes)


def attention_workloads(device: torch.device) -> list[Workload]:
    """Each kind of element and each width of heads that has a table of its own; one case for most head sizes."""
    bf16, fp8 = Case("tune", "bf16", ()), Case("tune", "fp8", (), cache_dtype=cases.FP8)
    fp32 = Case("tune", "fp32", (), dtype=torch.float32)
    shapes = [("decode", cases.DECODE[name]) for name in ("64x4096", "ragged128", "8x8192", "1x131072")]
    shapes.append(("prefill", ((4096, 4096),)))
    made = [
        dataclasses.replace(kind, name=f"{name} {len(seqs)}x{max(seqs)[1]} {kind.name}", seqs=seqs)
        for kind in (bf16, fp8)
        for name, seqs in shapes
    ]
    made += [
        dataclasses.replace(
            bf16, name=f"decode {H}/{K} bf16", seqs=cases.DECODE["64x4096"], num_heads=H, num_kv_heads=K
        )
        for H, K in ((32, 32), (16, 2))
    ]
    few = (("decode", cases.DECODE["64x4096"]), ("prefill", ((2048, 2048),)))
    made += [
        dataclasses.replace(kind, name=f"{name} {kind.name} D {D}", seqs=seqs, head_size=D, num_kv_heads=K)
        for kind in (bf16, fp8, fp32)
        for D, K in ((64, 8), (256, 8), (512, 4))
        for name, seqs in few
    ]
    made += [
        Case("tune", f"latent {name} H {H} block {B}", cases.LATENT[name], H, 1, block_size=B, **cases.LATENT_SIZES)
        for H, B in ((16, 64), (16, 16), (32, 64), (128, 64))
        for name in ("64x4096", "ragged128")
    ]
    return [attention_workload(case, device) for case in made]


def cache_workloads(device: torch.device) -> dict[str, list[Workload]]:
    """Workloads of the cache ops, by the op whose numbers they read."""

    def write(tokens: int, stored: torch.dtype) -> Workload:
        def make() -> tuple[list[Call], Callable[[Replay], object]]:
            K, D, B = 8, 128, 16
            sets = max(2, 4 * measure.cache_bytes(device) // (tokens * K * D * 2 * (2 + stored.itemsize)))
            key, value = torch.randn(2, sets, tokens, K, D, dtype=torch.bfloat16, device=device)
            N = -(-sets * tokens // B)
            kv_cache = torch.empty(N, 2, B, K, D, dtype=stored, device=device)
            slots = torch.randperm(N * B, device=device)[: sets * tokens].view(sets, tokens)

            def call(n: int) -> Tensor:
                paged_ops.reshape_and_cache(key[n], value[n], kv_cache, slots[n])
                return kv_cache

            def check(replay: Replay) -> None:
                kv_cache.view(torch.uint8).fill_(0x7F)
                replay.run()
                for side, given in enumerate((key, value)):
                    got = kv_cache[slots // B, side, slots % B].view(torch.uint8)
                    _expect_equal(got, given.to(stored).view(torch.uint8))

            return [functools.partial(call, n) for n in range(sets)], check

        return Workload(f"{tokens} tokens to {str(stored).removeprefix('torch.')}", make)

    def gather() -> tuple[list[Call], Callable[[Replay], object]]:
        sets = measure.inputs_of(Case("tune", "gather", cases.decode(8, 1024)), device)

        def call(each: Inputs) -> Tensor:
            return paged_ops.gather_kv(each.kv_cache, each.block_tables, each.seq_lens, 8 * 1024)[0]

        calls: list[Call] = [functools.partial(call, each) for each in sets]
        want = torch.cat([sets[-1].sequence(s)[0] for s in range(8)])
        return calls, lambda replay: _expect_equal(replay.run_poisoned()[-1], want)

    def merge() -> tuple[list[Call], Callable[[Replay], object]]:
        T, H, D, sets = 4096, 32, 128, 4
        outs = torch.randn(2, sets, T, H, D, dtype=torch.bfloat16, device=device)
        lses = torch.randn(2, sets, T, H, device=device)

        def call(n: int) -> Tensor:
            return paged_ops.merge_attention_states(outs[0, n], lses[0, n], outs[1, n], lses[1, n])[0]

        calls: list[Call] = [functools.partial(call, n) for n in range(sets)]
        weight = torch.sigmoid(lses[0, -1] - lses[1, -1])[..., None]
        want = weight * outs[0, -1].float() + (1 - weight) * outs[1, -1].float()

        def check(replay: Replay) -> None:
            error = measure.relative_error(replay.run_poisoned()[-1], want)
            if not error < measure.LARGEST_ERROR[torch.bfloat16]:
                raise WrongResultError(f"relative error {error}")

        return calls, check

    def copy(block_bytes: int) -> Workload:
        def make() -> tuple[list[Call], Callable[[Replay], object]]:
            pairs = 1024
            sets = max(2, 4 * measure.cache_bytes(device) // (2 * pairs * block_bytes))
            cache = torch.randint(0, 255, (2 * sets * pairs, block_bytes), dtype=torch.uint8, device=device)
            mapping = torch.randperm(len(cache), device=device).view(sets, pairs, 2)

            def call(n: int) -> Tensor:
                paged_ops.copy_blocks([cache], mapping[n])
                return cache

            def check(replay: Replay) -> None:
                cache[mapping[..., 1]] = 0
                replay.run()
                _expect_equal(cache[mapping[..., 1]], cache[mapping[..., 0]])

            return [functools.partial(call, n) for n in range(sets)], check

        return Workload(f"1024 blocks of {block_bytes >> 10} KiB", make)

    return {
        "reshape_and_cache": [write(n, t) for t in (torch.bfloat16, cases.FP8) for n in (8192, 256)],
        "gather_kv": [Workload("8 x 1024 tokens", gather)],
        "merge_attention_states": [Workload("4096 x 32 x 128", merge)],
        "copy_blocks": [copy(32 << 10), copy(1 << 20)],
    }


def _expect_equal(got: Tensor, want: Tensor) -> None:
    if not torch.equal(got, want):
        raise WrongResultError("the result differs from the written data")


def render(tree: Any, indent: str = "", before: str = "", width: int = 118) -> str:
    """JSON with each value on one line if it fits there after ``before``."""
    line = json.dumps(tree)
    if not isinstance(tree, dict) or (before and len(before) + len(line) <= width):
        return line
    inner = indent + "  "
    names = [f"{inner}{json.dumps(name)}: " for name in tree]
    rows = [name + render(value, inner, name, width) for name, value in zip(names, tree.values(), strict=True)]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def write(folder: Path, kind: str, target: Target, tree: dict[str, Any]) -> Path:
    """Writes ``<kind>_<device>.json``, which the lowering reads on devices of that name; other entries of the file are
    kept. The entries of the package's file for newer Tritons are written, too."""
    from paged_ops.lowerings.gpu.target import config_path, later, packaged

    path = config_path(folder, kind, target.name)
    folder.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else {}
    # The tree has the numbers for this Triton.
    newer = later(before if path.exists() else json.loads(packaged(kind, target.name, target.stand_in).read_text()))
    if newer or "triton" in before:
        before["triton"] = newer
    fresh = path.with_suffix(f".{os.getpid()}")  # a reader finds the old file or the new one
    fresh.write_text(render({**before, **tree}) + "\n")
    fresh.replace(path)
    return path
