"""What each rank runs in the tests of the loop: a toy model whose heads are spread over the ranks."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

import paged_ops
from paged_ops.cache import KVCache
from paged_ops.generation import GenerationLoop, NewToken, SamplingParams
from paged_ops.generation.sampling import Awaited, Chosen
from tests.generation.toy import EMBED, GREEDY, POSITION, PROMPTS, TO_KEY, TO_LOGITS, TO_VALUE, B, D, H, K

LIMIT = 5.0


class ShardedToy:
    """The toy model of tests/generation/test_loop.py: H / size query heads at each rank, key/value heads repeated."""

    def __init__(self, rank: int, size: int) -> None:
        heads = H // size
        kept = sorted({head * K // H for head in range(rank * heads, (rank + 1) * heads)})
        self.num_kv_heads, self.query = len(kept), slice(rank * heads * D, (rank + 1) * heads * D)
        columns = torch.cat([torch.arange(head * D, (head + 1) * D) for head in kept])
        self.to_key, self.to_value = TO_KEY[:, columns], TO_VALUE[:, columns]
        self.process_group = dist.group.WORLD
        self.calls = 0
        self.fault: Any = None  # called in the middle of a step

    def __call__(self, input_ids, metadata, last_rows, kv_caches):
        self.calls += 1
        hidden = EMBED[input_ids] + POSITION[metadata.positions]
        key, value = ((hidden @ each).view(-1, self.num_kv_heads, D) for each in (self.to_key, self.to_value))
        paged_ops.reshape_and_cache(key, value, kv_caches[0], metadata.slot_mapping)
        batch = (metadata.block_tables, metadata.seq_lens, metadata.query_start_loc)
        query = hidden[:, self.query].view(len(hidden), -1, D)
        out = paged_ops.paged_attention(query, kv_caches[0], *batch, D**-0.5)
        if self.fault is not None:
            self.fault(self.calls)
        logits = out.flatten(1)[last_rows] @ TO_LOGITS[self.query]
        dist.all_reduce(logits)
        return logits


def make_loop(rank: int, size: int, num_blocks: int = 128, num_host_blocks: int = 0, **options: Any) -> GenerationLoop:
    toy = ShardedToy(rank, size)
    cache = KVCache(1, num_blocks, B, toy.num_kv_heads, D, num_host_blocks=num_host_blocks)
    loop = GenerationLoop(toy, cache, rank_time_limit=LIMIT, **options)
    loop.toy = toy
    return loop


def stats_of(loop: GenerationLoop) -> dict[str, Any]:
    left = loop.kv_cache.stats()
    assert (left.used_blocks, left.host_used_blocks) == (0, 0)
    return {name: value for name, value in vars(loop.stats).items() if name != "seconds"}


def generates(rank: int, size: int, **options: Any) -> Any:
    """All ranks call the same."""
    with make_loop(rank, size, **options) as loop:
        outputs = loop.generate(PROMPTS, GREEDY)
        return [list(each) for each in outputs], stats_of(loop)


def meets(rank: int, size: int, who: int | None) -> Any:
    """How often the ranks meet, and how many steps there are; one of them may look at each token."""
    with make_loop(rank, size) as loop:
        met, meet = [], loop._ranks._ranks.rendezvous
        loop._ranks._ranks.rendezvous = lambda *args, **options: met.append(None) or meet(*args, **options)
        outputs = loop.generate(PROMPTS, GREEDY, (lambda new: None) if rank == who else None)
        steps = loop.stats.steps
        loop.submit(PROMPTS[3], GREEDY)
        loop.run()
        return [list(each) for each in outputs], len(met), steps, loop.stats.steps


def samples(rank: int, size: int, noise: bool = False, overlap: bool = False) -> Any:
    """Several samples of each prompt, whose seeds each rank draws for itself, with log-probabilities; and with logits
    that differ from rank to rank."""
    with make_loop(rank, size, overlap=overlap) as loop:
        if noise:
            inner = loop._model.graphs.step
            loop._model.graphs.step = lambda *args: inner(*args) + 3.0 * torch.randn(1, 61)
            torch.manual_seed(rank)
        params = SamplingParams(max_new_tokens=12, temperature=1.5, n=3, logprobs=2)
        outputs = loop.generate(PROMPTS[3:6], params)
        return [(list(each), each.logprobs) for each in outputs], stats_of(loop)


def follows_other_ids(rank: int, size: int) -> Any:
    """Rank 0 gives ids that it does not queue, and queues requests in another order than it made them."""
    loop = make_loop(rank, size)
    loop._pad_token_id = 0
    if rank:
        loop.follow()
        return loop.kv_cache.num_used_blocks, loop.stats.steps
    try:
        loop.generate([[0, 5, 6], [3, 4, 6]], GREEDY)  # padded, which is seen when the requests have their ids
    except ValueError as error:
        refused = str(error)
    first = loop.submit(PROMPTS[8], GREEDY)
    loop.step()
    loop.abort(first)
    later, earlier = (loop._inbox.make([("prompt", PROMPTS[i])], [GREEDY], None, loop._inbox.events) for i in (5, 6))
    loop._inbox.add(earlier)  # as two threads may do that submit at once
    loop._inbox.add(later)
    outputs = loop.run()
    loop.close()
    return (refused, [list(outputs[each[0].request_id]) for each in (later, earlier)]), loop.stats.steps


def follows(rank: int, size: int, overlap: bool = False) -> Any:
    """Rank 0 alone gets requests, aborts some and has a processor; the others follow."""
    loop = make_loop(rank, size, overlap=overlap)
    if rank:
        loop.follow()
        return loop.kv_cache.num_used_blocks, loop.stats.steps
    seen: list[NewToken] = []
    loop.warm_up()
    first = loop.submit(PROMPTS[8], GREEDY)
    seen += loop.step() + loop.step()
    second = loop.submit(PROMPTS[5], SamplingParams(max_new_tokens=12, logits_processor=lambda ids, scores: scores))
    third = loop.submit(PROMPTS[6], GREEDY, extra_key="other")
    seen += loop.step() + loop.step()
    loop.abort(third)
    loop.run(seen.append)
    time.sleep(0.5)  # the others wait meanwhile
    with loop.stream(PROMPTS[3], GREEDY) as stream:
        streamed = [new.token for new in stream]
    loop.close()
    tokens = {i: [new.token for new in seen if new.request_id == i and new.token is not None] for i in (first, second)}
    end = next(new.finish_reason for new in seen if new.request_id == third and new.finish_reason)
    return (tokens[first], tokens[second], end, streamed), loop.stats.steps


def aborts(rank: int, size: int, overlap: bool = False) -> Any:
    """Each rank aborts another request, from where its tokens arrive."""
    with make_loop(rank, size, overlap=overlap) as loop:

        def on_token(new: NewToken) -> None:
            if new.request_id == rank + 2 and len(loop.output(new.request_id)) == 3:
                loop.abort(new.request_id)

        outputs = loop.generate(PROMPTS, GREEDY, on_token)
        return [(list(each), each.finish_reason) for each in outputs], stats_of(loop)


def fails(rank: int, size: int, where: str, who: int, overlap: bool = False) -> Any:
    """One rank fails; what each raises, and whether the loop goes on."""

    def boom(*args: Any) -> Any:
        raise KeyError("boom")

    loop = make_loop(rank, size, overlap=overlap)
    params = GREEDY
    if where == "model" and rank == who:
        loop.toy.fault = lambda calls: boom() if calls == 4 else None
    if where == "read" and rank == who:  # of the tokens of a step, while the next one runs
        kind = Awaited if rank else Chosen
        read, calls = kind.read, iter(range(100))
        kind.read = lambda chosen: boom() if next(calls) == 4 else read(chosen)
    if where == "everywhere":
        loop.toy.fault = lambda calls: boom() if calls == 4 else None
    if where == "dies" and rank == who:
        loop.toy.fault = lambda calls: os._exit(3) if calls == 4 else None
    if where == "late" and rank == who:
        loop.toy.fault = lambda calls: time.sleep(25) if calls == 4 else None
    if where == "processor":  # which rank 0 alone calls
        params = SamplingParams(max_new_tokens=12, logits_processor=boom)
    on_token = None
    if where == "on_token" and rank == who:
        on_token = lambda new: boom() if new.token is not None and len(loop.output(0)) == 3 else None  # noqa: E731
    started = time.monotonic()
    try:
        loop.generate(PROMPTS[:4], params, on_token)
    except BaseException as error:
        failed = time.monotonic() - started
        told = type(error).__name__, str(error), "\n".join(getattr(error, "__notes__", []))
        loop.toy.fault = None
        if where == "read" and rank == who:
            kind.read = read
        try:
            again = [list(each) for each in loop.generate(PROMPTS[:4], GREEDY)]
        except Exception as second:
            again = f"{type(second).__name__}: {second}"
        loop.close()
        return told, failed, again, loop.kv_cache.num_used_blocks
    return None


def differs(rank: int, size: int, how: str) -> Any:
    """The ranks do not do the same."""
    started = time.monotonic()
    try:
        with make_loop(rank, size, num_blocks=64 if how == "cache" and rank else 128) as loop:
            if how == "requests":
                loop.submit(PROMPTS[3 + rank], GREEDY)
            elif how == "calls" and rank:
                loop.warm_up()
            elif how == "alone" and rank:
                time.sleep(3 * LIMIT)
                return None
            else:
                loop.submit(PROMPTS[3], GREEDY)
            loop.run()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return None
