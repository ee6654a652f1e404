"""The two halves of a step: it is launched, and later finished.

To launch a step is to reserve its slots and to issue its work to the device, up to the choice of tokens. To finish it
is to read the tokens and to decide what follows from them. In between, the device computes and the host is free: it
launches the next step, whose newest tokens go from one step to the other on the device.

Source of the idea: steps that are scheduled one ahead of the device, as in NanoFlow (Zhu et al. 2024, arXiv:2408.12757)
and SGLang's overlapped scheduler.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from paged_ops.cache.block_pool import OutOfBlocks
from paged_ops.cache.hybrid import HybridCache
from paged_ops.cache.kv_cache import KVCache
from paged_ops.generation.changes import NO_CHOICES, Launched, StepChanges, prompt_rows, rows_of
from paged_ops.generation.distribution import on_device
from paged_ops.generation.model_step import ModelRunner
from paged_ops.generation.ranks import OneRank
from paged_ops.generation.request import GenerationStats
from paged_ops.generation.sampling import Awaited, Choices, Chosen, choose, logprobs_of
from paged_ops.generation.scheduler import Scheduled, Scheduler


class Steps:
    """Launches and finishes the steps of a loop. No request changes in either; the changes are a result.

    Args:
        model, scheduler, kv_cache, ranks, stats: of the loop.
        overlaps: whether the host may launch a step before it has read the tokens of the one before.
    """

    def __init__(
        self,
        model: ModelRunner,
        scheduler: Scheduler,
        kv_cache: KVCache | HybridCache,
        ranks: OneRank,
        stats: GenerationStats,
        overlaps: bool,
    ) -> None:
        self._model, self._scheduler, self._kv_cache, self._ranks = model, scheduler, kv_cache, ranks
        self._stats = stats
        self._overlaps = overlaps

    def launch(self, before: Launched | None = None) -> Launched:
        """Schedules and issues a step, while the step ``before`` still runs. Its requests are empty if none runs now.

        Raises:
            OutOfBlocks: no request can run; or, with a step before, one would have to be preempted.
            Exception: of the model, or of a function of the user.
        """
        self._kv_cache.lock.wait_for_issued(self._kv_cache.device)
        if before is not None and before.unread is not None:
            before.unread.keep_for_current_stream()
        launched = Launched(is_overlapped=before is not None)
        choices = self._ranks.run(functools.partial(self._issue, launched, before))
        if choices is not None:
            launched.choices = choices
        self._ranks.in_turn = None if self._ranks.in_turn is None else choices is not None
        return launched

    def launch_after(self, before: Launched) -> Launched | None:
        """The step after one that still runs; None if the host must finish that first."""
        if not self.can_overlap(before):
            return None
        try:
            launched = self.launch(before)
        except OutOfBlocks:  # which request to preempt is decided when all tokens are known
            self._scheduler.cancel()
            return None
        if launched.step.requests:
            return launched
        self._scheduler.finish()
        return None

    def can_overlap(self, before: Launched) -> bool:
        """Whether the next step can be launched while ``before`` runs: no token is needed on the host at once, no
        sample waits for the first one's prompt, and no sequence has to be preempted or resumed."""
        scheduler, in_turn = self._scheduler, self._ranks.in_turn
        in_turn = scheduler.is_in_turn if in_turn is None else in_turn
        if not self._overlaps or in_turn or scheduler.swapped or not before.step.requests:
            return False
        cache, running = self._kv_cache, scheduler.running
        for pool in cache.pools:
            num_free = pool.num_blocks - pool.num_used_blocks
            if num_free < len(running) and num_free < sum(
                cache.num_tokens(request) % pool.block_size == 0 for request in running
            ):
                return False
        return True

    def finish(self, launched: Launched, following: Launched | None, is_committed: bool) -> StepChanges:
        """Waits for the tokens of a step, and returns all the changes to make. ``following``: the step that was
        launched while it ran."""
        choices, stats = launched.choices, self._stats
        if isinstance(choices, Chosen):
            choices = self._ranks.run(choices.read, has_collectives=False)
        changes = StepChanges(commits=[] if is_committed else launched.step.requests, finished=launched)
        if launched.step.requests:
            changes.add_choices(launched, choices)
            changes.stats = {
                "steps": stats.steps + 1,
                "overlapped_steps": stats.overlapped_steps + launched.is_overlapped,
                "prompt_tokens": stats.prompt_tokens + launched.step.prompt_tokens,
                "cached_tokens": stats.cached_tokens + launched.step.cached_tokens,
                "generated_tokens": stats.generated_tokens + len(changes.tokens),
                "peak_used_blocks": max(stats.peak_used_blocks, launched.num_used_blocks),
            }
        changes.follow(following)
        return changes

    def _issue(self, launched: Launched, before: Launched | None) -> Choices | None:
        """The choices of a step; None if they stay on the device, in ``launched``. Adds what is scheduled to it. Ranks
        other than 0 return None, and have room there for rank 0's tokens."""
        if before is None or self._ranks.in_turn is not None:
            self._model.check_weights()
        launched.step = self._scheduler.schedule(may_preempt=before is None)
        launched.num_used_blocks = self._kv_cache.num_used_blocks
        scheduled = launched.step.requests
        if not scheduled:
            return NO_CHOICES
        rows, launched.sampled = rows_of(scheduled)
        if any(request.others for request in launched.sampled):
            launched.add_samples(rows, len(self._scheduler.free_rows))
        batch, input_ids = self._scheduler.batch(scheduled)
        self._kv_cache.flush_copies()
        of_prompts, next_tokens, counts = prompt_rows(scheduled)
        unread = None if before is None else before.unread
        if unread is not None and unread.requests:
            self._ranks.share(unread.tokens)
        given = input_ids if unread is None else with_unread(scheduled, input_ids, unread)
        logits = self._model.run(batch, given, of_prompts)
        self._ranks.has_run(batch, input_ids)
        if not self._ranks.leads:
            if self._overlaps:
                launched.choices = awaited = Awaited(launched.sampled, logits.device)
                self._kv_cache.lock.issued = awaited.event
            return None
        choices = choose(logits[: batch.num_reqs], rows, launched.sampled, unread)
        if isinstance(choices, Chosen):
            self._kv_cache.lock.issued = choices.event
            if self._overlaps and not (of_prompts or self._scheduler.is_in_turn):
                launched.choices = choices
                return None
            choices = choices.read()
        if of_prompts:
            choices = choices._replace(of_prompts=logprobs_of(logits[batch.num_reqs :], next_tokens, counts))
        return choices


def with_unread(scheduled: Sequence[Scheduled], input_ids: list[int], unread: Chosen) -> Tensor | list[int]:
    """The token ids of a step, on the device, with the tokens that the host does not know yet."""
    at = [row for row, (request, start, _) in enumerate(scheduled) if start == len(request.tokens)]
    if not at:
        return input_ids
    device, source = unread.tokens.device, [unread.index[scheduled[row][0]] for row in at]
    newest = unread.tokens
    if source != list(range(len(newest))):
        newest = newest[on_device(source, torch.int64, device)]
    if len(at) == len(input_ids):
        return newest
    if at == list(range(len(at))):
        return torch.cat((newest, on_device(input_ids[len(at) :], torch.int64, device)))
    ids = on_device(input_ids, torch.int64, device)
    ids[on_device(at, torch.int64, device)] = newest
    return ids
