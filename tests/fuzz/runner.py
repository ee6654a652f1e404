"""Runs the cases of a campaign: in this process, or at length in several that are watched and started again.

A case is a number. With the seed it decides everything that the case does, whatever ran before it and however many
processes share the work; process p of P runs the cases c with ``c % P == p``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

MOST_FINDINGS = 200  # that are written down in full; the rest is counted
INTERPRETER = "interpreter"  # the device of GPU kernels in Triton's interpreter
AHEAD = 6  # cases that are prepared
LOST_DEVICE = 3  # exit code of a worker whose device is of no more use to it


@dataclasses.dataclass(frozen=True)
class Options:
    """What all cases of a run share."""

    seed: int = 0
    device: str = "cpu"
    variants: int = 0  # kinds of kernels to draw from; 0: no bound


@dataclasses.dataclass
class Case:
    """One case of a campaign: its random numbers and its findings."""

    campaign: str
    number: int
    options: Options
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    worst: dict[str, float] = dataclasses.field(default_factory=dict)  # by check: error over its budget
    findings: list[str] = dataclasses.field(default_factory=list)
    usable: bool = True  # the device

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.campaign}/{self.options.seed}/{self.number}")

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.options.device == INTERPRETER else self.options.device)

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Random numbers of tensors, seeded by the case."""
        return torch.Generator(device).manual_seed(self.random.getrandbits(62))

    def report(self, what: str) -> None:
        self.findings.append(what)


@dataclasses.dataclass
class Results:
    """What a run found."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    worst: dict[str, float] = dataclasses.field(default_factory=dict)
    findings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    seconds: Counter[str] = dataclasses.field(default_factory=Counter)  # of workers, by what they did

    def add(self, case: Case) -> None:
        self.merge(Results(case.counts + Counter(cases=1), case.worst, []))
        for what in case.findings:
            self.found(case.number, what)

    def found(self, number: int, what: str) -> None:
        self.counts["findings"] += 1
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append({"case": number, "what": what[-3000:]})

    def merge(self, other: Results) -> None:
        self.counts += other.counts
        self.seconds += other.seconds
        for check, ratio in other.worst.items():
            self.worst[check] = max(ratio, self.worst.get(check, 0.0))
        self.findings = [*self.findings, *other.findings][:MOST_FINDINGS]

    def as_json(self) -> dict[str, Any]:
        worst = {check: float(f"{ratio:.3g}") for check, ratio in sorted(self.worst.items())}
        about = {"counts": dict(sorted(self.counts.items())), "worst": worst, "findings": self.findings}
        spent = {what: round(seconds, 3) for what, seconds in self.seconds.items()}
        return {**about, "seconds of workers": spent} if spent else about

    @staticmethod
    def from_json(text: str) -> Results:
        data = json.loads(text)
        return Results(
            Counter(data["counts"]), data["worst"], data["findings"], Counter(data.get("seconds of workers", {}))
        )


Campaign = Callable[[Case], None]


class Prepared(Protocol):
    """A case that is about to run."""

    def ready(self) -> bool:
        """Whether its kernels are compiled."""

    def run(self) -> None: ...


def run_case(campaign: str, function: Campaign, number: int, options: Options, results: Results) -> bool:
    """Run one case; whatever it raises is a finding. False if the device is lost."""
    case = Case(campaign, number, options)
    _attempt(case, function)
    results.add(case)
    return case.usable


def _attempt(case: Case, function: Callable[[Case], Any]) -> Any:
    try:
        return function(case)
    except Exception as error:
        case.report(traceback.format_exc())
        if isinstance(error, RuntimeError) and ("CUDA error" in str(error) or "HIP error" in str(error)):
            case.usable = False


def run_cases(
    campaign: str, function: Campaign, numbers: Iterable[int], options: Options, seconds: float = float("inf")
) -> Results:
    """Cases in turn in this process, for tests: at least one, for at most ``seconds``."""
    results, deadline = Results(), time.monotonic() + seconds
    for number in numbers:
        run_case(campaign, function, number, options, results)
        if time.monotonic() > deadline:
            break
    return results


def work(
    campaign: str,
    function: Campaign,
    options: Options,
    first: int,
    stride: int,
    until: float,
    state: Path,
    prepare: Callable[[Case], Prepared] | None = None,
) -> int:
    """A worker: cases first, first + stride, ... until a time of the clock; ``state`` has what it found so far. Some
    are prepared ahead, so that their kernels are compiled meanwhile; until those of one are, other cases of the kinds
    before run."""
    variants = options.variants
    new = iter(range(first, first + variants, stride)) if variants else itertools.count(first, stride)
    coming: list[tuple[Case, Prepared | None]] = []
    cases: dict[int, int] = {}  # of each kind, by its first case
    results, written = Results(), time.monotonic()

    @contextlib.contextmanager
    def spent(what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        results.seconds[what] += time.monotonic() - began

    def prepared(number: int) -> tuple[Case, Prepared | None]:
        case = Case(campaign, number, options)
        with spent("preparing"):
            return case, None if prepare is None else _attempt(case, prepare)

    def is_ready(each: tuple[Case, Prepared | None]) -> bool:
        return each[1] is None or each[1].ready()

    with open(state.with_suffix(".case"), "w+b", buffering=0) as current:
        os.pwrite(current.fileno(), f"{first:<20d}".encode(), 0)
        while not results.counts or time.time() < until:
            coming.extend(prepared(number) for number in itertools.islice(new, AHEAD - len(coming)))
            ready = next(filter(is_ready, coming), None)
            if ready is not None:
                coming.remove(ready)
                case, rest = ready
                cases[case.number] = 0
            elif cases:
                number = min(cases, key=lambda each: cases[each])
                cases[number] += 1
                case, rest = prepared(number + variants * cases[number])
            else:
                with spent("waiting for compilers"):
                    time.sleep(0.05)
                continue
            os.pwrite(current.fileno(), f"{case.number:<20d}".encode(), 0)
            with spent("running"):
                if rest is not None:
                    _attempt(case, lambda _, rest=rest: rest.run())
                elif prepare is None:
                    _attempt(case, function)
            results.add(case)
            if time.monotonic() - written > 1 or not case.usable:
                _write(state, results)
                written = time.monotonic()
            if not case.usable:
                return LOST_DEVICE
    _write(state, results)
    return 0


def _write(path: Path, results: Results) -> None:
    path.with_suffix(".new").write_text(json.dumps(results.as_json()))
    path.with_suffix(".new").replace(path)


@dataclasses.dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    state: Path
    errors: Path
    case: str = ""
    since: float = 0.0

    def current(self) -> int | None:
        path = self.state.with_suffix(".case")
        text = path.read_text().strip() if path.exists() else ""
        return int(text) if text else None


def run_long(
    campaign: str,
    options: Options,
    *,
    seconds: float,
    processes: int,
    case_seconds: float = 180.0,
    out: Path | None = None,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run workers for ``seconds``. One that dies or hangs is a finding; another continues after its case."""
    began, until = time.time(), time.time() + seconds
    totals = Results()
    with tempfile.TemporaryDirectory() as name:
        folder, count = Path(name), 0
        workers: dict[int, _Worker] = {}

        def start(slot: int, first: int) -> None:
            nonlocal count
            count += 1
            state, errors = folder / f"{count}.json", folder / f"{count}.err"
            command = [sys.executable, "-m", "tests.fuzz", campaign, "--device", options.device]
            command += ["--seed", str(options.seed), "--variants", str(options.variants)]
            command += ["--work", str(first), str(processes), str(until), str(state)]
            # Each compiles kernels with its share of the cores, as ranks do.
            environment = {**os.environ, "LOCAL_WORLD_SIZE": str(processes)}
            with open(errors, "wb") as stderr:
                process = subprocess.Popen(command, stdout=stderr, stderr=stderr, env=environment)
            workers[slot] = _Worker(process, state, errors, since=time.time())

        def collect(worker: _Worker) -> None:
            if worker.state.exists():
                totals.merge(Results.from_json(worker.state.read_text()))

        def summary() -> dict[str, Any]:
            found = Results()
            found.merge(totals)
            for worker in workers.values():
                if worker.state.exists():
                    found.merge(Results.from_json(worker.state.read_text()))
            about = {"campaign": campaign, **dataclasses.asdict(options), "processes": processes}
            about |= {"seconds": round(time.time() - began, 1), **versions(options.device), **(extra or {})}
            return {**about, **found.as_json()}

        for slot in range(processes):
            start(slot, slot)
        told = saved = time.time()
        while workers:
            time.sleep(0.2)
            now = time.time()
            for slot, worker in list(workers.items()):
                code, number = worker.process.poll(), worker.current()
                if str(number) != worker.case:
                    worker.case, worker.since = str(number), now
                stuck = code is None and now - worker.since > case_seconds
                if code is None and not stuck:
                    continue
                if stuck:
                    worker.process.kill()
                    worker.process.wait()
                collect(worker)
                del workers[slot]
                if code == 0:
                    continue
                said = worker.errors.read_text(errors="replace")[-2000:]
                if stuck:
                    if now < until:
                        totals.found(-1 if number is None else number, f"no end after {case_seconds:.0f} s\n{said}")
                elif code != LOST_DEVICE:
                    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    totals.found(-1 if number is None else number, f"the process died: {name}\n{said}")
                # One that dies before its first case would die again.
                if now < until and number is not None:
                    start(slot, number + processes)
            if now > saved + 5 and out is not None:
                out.write_text(json.dumps(summary(), indent=1) + "\n")
                saved = now
            if now > told + 10:
                told = now
                print(f"{now - began:.0f} s", json.dumps(summary()["counts"]), flush=True)
        found = summary()
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def versions(device: str) -> dict[str, Any]:
    """What the results were got with."""
    kind = device.partition(":")[0]
    name = torch.cuda.get_device_name(torch.device(device)) if kind == "cuda" else platform.processor() or "cpu"
    about = {"device_name": name, "torch": torch.__version__, "python": platform.python_version()}
    about["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        import triton

        about["triton"] = triton.__version__
    except ImportError:
        pass
    return about | {"date": time.strftime("%Y-%m-%d", time.gmtime())}
