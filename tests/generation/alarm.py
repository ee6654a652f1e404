"""Raises an interrupt before a chosen bytecode of the loop's code."""

import dis
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FrameType
from typing import Any

from paged_ops.cache import KVCache, allocator, block_pool, lock, prefixes
from paged_ops.cache import kv_cache as cache
from paged_ops.generation import (
    GenerationLoop,
    SamplingParams,
    changes,
    inbox,
    model_step,
    ranks,
    request,
    sampling,
    steps,
)
from paged_ops.generation import loop as generation
from paged_ops.generation import scheduler as scheduling
from tests.generation.toy import PROMPTS, B, D, K, toy_step

FILES = {
    module.__file__
    for module in (
        *(allocator, block_pool, cache, changes, generation, inbox, lock),
        *(model_step, prefixes, ranks, request, sampling, scheduling, steps),
    )
}


@contextmanager
def traced(trace: Callable[..., Any]) -> Iterator[None]:
    """Traces with the garbage collector off: else it may free loops of earlier tests here, by code that is counted."""
    gc.disable()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        gc.enable()


class Alarm:
    """Raises KeyboardInterrupt before the n-th bytecode that the code of the loop runs; notes the lines when n is 0."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.count = 0
        self.lines: list[tuple[CodeType, int]] = []
        self.where = ""
        self._returns: dict[CodeType, set[int]] = {}

    def armed(self) -> AbstractContextManager[None]:
        return traced(self._trace)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name in ("__del__", "free_all"):
            return None
        if event == "call":
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        elif event == "opcode" and not self._is_delivery(frame):
            self.count += 1
            if not self.at:
                self.lines.append((frame.f_code, frame.f_lineno))
            elif self.count == self.at:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace

    def _is_delivery(self, frame: FrameType) -> bool:
        """Whether the next bytecode returns the tokens: CPython looks for signals behind a call, and not there."""
        code = frame.f_code
        if code.co_name not in ("step", "__next__"):
            return False
        if code not in self._returns:
            self._returns[code] = {
                each.offset
                for before, each in itertools.pairwise(dis.get_instructions(code))
                if each.opname == "RETURN_VALUE" and "CALL" not in before.opname
            }
        return frame.f_lasti in self._returns[code]


def make_loop() -> GenerationLoop:
    """Chunked prompts, a shared prefix, forks, swapping and recomputation within a dozen steps."""
    kv_cache = KVCache(1, 7, B, K, D, num_host_blocks=3)
    loop = GenerationLoop(toy_step, kv_cache, max_num_seqs=4, max_num_tokens=12)
    loop.submit(PROMPTS[5][:9], SamplingParams(max_new_tokens=6, temperature=1.5, seed=1, n=2, logprobs=1))
    loop.submit(PROMPTS[5][:10], SamplingParams(max_new_tokens=9))
    loop.submit(PROMPTS[4], SamplingParams(max_new_tokens=9, logits_processor=lambda ids, scores: scores.roll(1, -1)))
    return loop
