"""How a case is measured: graph replays over rotated inputs, poisoned and verified results, ceilings of the same run.

On a GPU all calls of a case are captured in one CUDA graph, one call per set of inputs; together the sets are several
times as large as the last-level cache. The results are filled with NaN, the graph is replayed, and the first and the
last result are compared with a float32 reference before anything is timed. Events time a replay. Other memory is read
before it, which hides the launch of the graph and empties the cache. Times are medians, taken twice. On a CPU the calls
run one after the other, and uninitialised memory is filled with NaN.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paged_ops.bench.cases import Case, Inputs, make_inputs
from paged_ops.device import as_current

Call = Callable[[], Tensor]
CPU_CACHE_BYTES = 64 << 20
LARGEST_ERROR = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 5e-3}
LOGITS_AT_ONCE = 1 << 28  # elements of the reference's logits
REST_SECONDS = 0.02  # between compute-bound replays, so that the power limit does not act


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The device's ceilings in this run: bytes per second read or copied, operations per second of a bf16 matmul."""

    read: float
    copy: float
    matmul: float

    def floor_us(self, case: Case) -> float:
        """The least time that the bytes or the operations of a case need."""
        return max(case.bytes / self.read, case.flops / self.matmul) * 1e6

    def is_compute_bound(self, case: Case) -> bool:
        return case.flops / self.matmul > case.bytes / self.read


class WrongResultError(RuntimeError):
    """A provider's result differs from the reference."""


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor_name()


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # only Linux has it
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def cache_bytes(device: torch.device) -> int:
    """The size of the last-level cache."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else CPU_CACHE_BYTES


def inputs_of(case: Case, device: torch.device) -> list[Inputs]:
    """Sets of inputs that together are four times as large as the last-level cache."""
    torch.manual_seed(0)
    return make_inputs(case, device, 4 * cache_bytes(device), most=256 if device.type == "cuda" else 2)


class Replay:
    """Calls that can be repeated: as a CUDA graph, or on a CPU one after the other."""

    def __init__(self, calls: Sequence[Call], device: torch.device) -> None:
        self._calls = calls
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self.results = [call() for call in calls]  # compiles everything
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._graph = torch.cuda.CUDAGraph()
            with as_current(device), torch.cuda.graph(self._graph, stream=torch.cuda.Stream(device)):
                self.results = [call() for call in calls]
            self._other = torch.zeros(4 * cache_bytes(device) // 4, dtype=torch.float32, device=device)

    def __len__(self) -> int:
        return len(self._calls)

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self.results = [call() for call in self._calls]

    def run_poisoned(self) -> list[Tensor]:
        """The results of a run that writes into memory full of NaN."""
        if self._graph is None:
            with _nan_memory():
                self.run()
        else:
            for result in self.results:
                result.fill_(torch.nan)
            self.run()
            torch.cuda.synchronize(self._device)
        return self.results

    def median_us(self, repeats: int, rest: float = 0.0) -> float:
        """Microseconds of one call."""
        times = []
        for n in range(repeats + 3):
            time.sleep(rest)
            if self._graph is None:
                start = time.perf_counter()
                self.run()
                us = (time.perf_counter() - start) * 1e6
            else:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                stream = torch.cuda.current_stream(self._device)
                self._other.sum()
                begin.record(stream)
                self._graph.replay()
                end.record(stream)
                end.synchronize()
                us = begin.elapsed_time(end) * 1e3
            if n >= 3:
                times.append(us / len(self._calls))
        return statistics.median(times)

    def clock_mhz(self, repeats: int, rest: float) -> float:
        """The clock of an NVIDIA GPU's multiprocessors after a call."""
        from paged_ops.bench.clock import clock_mhz

        clocks = []
        for _ in range(repeats):
            time.sleep(rest)
            self._other.sum()
            self.run()
            clocks.append(clock_mhz(self._device))
        return statistics.median(clocks)


@contextlib.contextmanager
def _nan_memory() -> Iterator[None]:
    """Inside it, uninitialised memory holds NaN."""
    deterministic: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = fill


def reference(inputs: Inputs) -> Tensor:
    """softmax(scale · q·kᵀ)·v in float32, ``[T, H, Dv]``, one sequence at a time."""
    case = inputs.case
    out = inputs.query.new_empty(*inputs.query.shape[:2], case.value_size, dtype=torch.float32)
    G, start = case.num_heads // case.num_kv_heads, 0
    for s, (q_len, seq_len) in enumerate(case.seqs):
        k, v = (each.float().transpose(0, 1) for each in inputs.keys_and_values(s))  # [K, n, D], [K, n, Dv]
        j = torch.arange(seq_len, device=k.device)
        rows = max(1, LOGITS_AT_ONCE // (case.num_heads * seq_len))
        for first in range(0, q_len, rows):
            count = min(rows, q_len - first)
            part = slice(start + first, start + first + count)
            i = torch.arange(first, first + count, device=k.device) + seq_len - q_len
            q = inputs.query[part].float().view(count, -1, G, case.head_size).permute(1, 2, 0, 3)  # [K, G, q, D]
            logits = (q.flatten(1, 2) @ k.transpose(1, 2)).view(*q.shape[:3], seq_len) * inputs.scale
            hidden = j > i[:, None]
            if inputs.selected_keys is not None:
                keys = inputs.selected_keys[part, 0].long()
                seen = hidden.new_zeros(count, seq_len + 1).scatter_(1, keys.where(keys >= 0, seq_len), True)
                hidden |= ~seen[:, :-1]
            weights = logits.masked_fill_(hidden, -torch.inf).softmax(-1)
            outputs = (weights.flatten(1, 2) @ v).view(*q.shape[:3], case.value_size)
            out[part] = outputs.permute(2, 0, 1, 3).flatten(1, 2)
        start += q_len
    return out


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖; NaN where anything is NaN."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def verify(replay: Replay, sets: Sequence[Inputs], reference_of: Callable[[int], Tensor] | None = None) -> float:
    """The larger of the errors of the first and the last call, run into poisoned memory. ``reference_of``: a set's
    reference by its number, where it is known.

    Raises:
        WrongResultError: an error exceeds the limit of the dtype, or a result was not written.
    """
    results = replay.run_poisoned()
    ends = dict.fromkeys((0, len(sets) - 1))
    wanted = {n: reference_of(n) if reference_of else reference(sets[n]) for n in ends}
    errors = [relative_error(results[n].view_as(want), want) for n, want in wanted.items()]
    limit = LARGEST_ERROR[sets[0].case.dtype]
    if not all(error <= limit for error in errors):
        raise WrongResultError(f"relative error: expected at most {limit}, got {' and '.join(map(str, errors))}")
    return max(errors)


def measure(
    calls: Sequence[Call],
    sets: Sequence[Inputs],
    ceilings: Ceilings,
    repeats: int = 30,
    reference_of: Callable[[int], Tensor] | None = None,
) -> dict[str, Any]:
    """Time the calls of a provider, one for each set of inputs, after their results were verified. ``reference_of``: a
    set's reference by its number, where it is known.

    Returns:
        ``us`` of one call, ``us_twice`` as measured the first and the second time, ``error``, ``floor_us``, ``percent``
        of the floor, ``gbps`` and ``tflops`` of the bytes and operations that the case needs; of a compute-bound case
        on an NVIDIA GPU ``mhz``, its clock, with which times of different runs compare.

    Raises:
        WrongResultError: a result is wrong.
    """
    case, device = sets[0].case, sets[0].query.device
    true_lens = sets[0].seq_lens.clone()
    if case.captured_len is not None:
        for each in sets:
            each.seq_lens.fill_(case.captured_len)
    replay = Replay(calls, device)
    for each in sets:
        each.seq_lens.copy_(true_lens)
    error = verify(replay, sets, reference_of)
    bursts = device.type == "cuda" and ceilings.is_compute_bound(case)
    rest = REST_SECONDS if bursts else 0.0
    twice = [replay.median_us(repeats, rest) for _ in range(2)]
    us = statistics.mean(twice)
    floor = ceilings.floor_us(case)
    has_clock = bursts and torch.version.hip is None
    return {
        "us": round(us, 2),
        "us_twice": [round(each, 2) for each in twice],
        "error": float(f"{error:.3g}"),
        "floor_us": round(floor, 2),
        "percent": round(100 * floor / us, 1),
        "gbps": round(case.bytes / us / 1e3, 1),
        "tflops": round(case.flops / us / 1e6, 2),
        "calls": len(calls),
        **({"mhz": round(replay.clock_mhz(5, rest))} if has_clock else {}),
    }


def host_us(call: Callable[[], object], device: torch.device, calls: int = 20, repeats: int = 20) -> float:
    """Microseconds of host time to enqueue a call while the device waits: the median of averages."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) * 1e6 / calls)
    return statistics.median(times)


def measure_ceilings(device: torch.device) -> Ceilings:
    """The best speed of reads, copies and a bf16 matmul (float32 on a CPU), in bursts."""
    cuda = device.type == "cuda"
    floats = (1 << 30) if cuda else (1 << 25)
    source = torch.randn(floats // 64, device=device).repeat(64)
    target = torch.empty_like(source)
    n, dtype = (8192, torch.bfloat16) if cuda else (1024, torch.float32)
    a, b, c = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(3))

    def best_us(call: Call, repeats: int = 10) -> float:
        replay = Replay([call], device)
        return min(replay.median_us(repeats, REST_SECONDS) for _ in range(2))

    read = _reader(device)
    return Ceilings(
        read=source.nbytes / best_us(lambda: read(source)) * 1e6,
        copy=2 * source.nbytes / best_us(lambda: torch.add(source, 1, out=target)) * 1e6,
        matmul=2 * n**3 / best_us(lambda: torch.mm(a, b, out=c)) * 1e6,
    )


def _reader(device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function that reads a tensor as fast as the device can, and writes almost nothing."""
    if device.type == "cpu":
        return torch.sum
    from paged_ops.bench.read import read

    return functools.partial(read, sink=torch.empty(1 << 16, device=device))
