"""The requests of a generation loop: their prompts, state, tokens and outputs."""

from __future__ import annotations

import itertools
import operator
import random
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_ops.checks import NotCopied, describe, expect, is_integer
from paged_ops.generation.distribution import key_of, on_device, random_key
from paged_ops.generation.params import MOST_ID, SamplingParams, TokenLogprobs, check_field
from paged_ops.generation.settings import Defaults, Settings


class NewToken(NamedTuple):
    """A token that a step produced, or the end of a request without one.

    ``finish_reason`` is None, "stop" (a stop token or criterion), "length", "abort" or "error"; every request ends with
    exactly one that is not None. ``token`` is None if the end has none: "abort" and "error".
    """

    request_id: int
    token: int | None
    finish_reason: str | None
    error: str | None = None  # the reason of "error"
    logprobs: TokenLogprobs | None = None


class Output(list[int]):
    """The new tokens of one request, a list.

    Attributes:
        finish_reason: None while it runs.
        error: the reason, if it failed.
        logprobs: one for each token, or None if they were not asked for.
        prompt_logprobs: one for each token of the prompt, or None if they were not asked for. The first is None, as are
            the ones that are not yet computed.
        num_cached_tokens: how many tokens of the prompt were found in the cache, or were computed for another sample,
            when the request was first run.
    """

    def __init__(
        self,
        tokens: Iterable[int] = (),
        finish_reason: str | None = None,
        error: str | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs | None] | None = None,
        num_cached_tokens: int = 0,
    ) -> None:
        super().__init__(tokens)
        self.finish_reason = finish_reason
        self.error = error
        self.logprobs = logprobs
        self.prompt_logprobs = prompt_logprobs
        self.num_cached_tokens = num_cached_tokens

    def add(self, new: NewToken) -> None:
        """Appends a token, or notes an end without one."""
        if new.token is not None:
            self.append(new.token)
        if new.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), new.logprobs]
        self.finish_reason, self.error = new.finish_reason, new.error


@dataclass
class GenerationStats:
    """Counts since the loop was made."""

    steps: int = 0
    overlapped_steps: int = 0  # of these, launched before the tokens of the step before were read
    prompt_tokens: int = 0  # computed, including those computed again after a preemption
    cached_tokens: int = 0  # of prompts, found in the cache
    generated_tokens: int = 0
    seconds: float = 0.0  # within steps
    peak_used_blocks: int = 0
    peak_shared_blocks: int = 0  # owned by more than one sequence at once
    swapped_out: int = 0  # preemptions by swapping
    recomputed: int = 0  # preemptions by freeing

    @property
    def preemptions(self) -> int:
        return self.swapped_out + self.recomputed

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of all steps, prefill included."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0


@dataclass(eq=False)
class Request:
    """A request inside the loop. The object itself is the key of its sequence in the cache."""

    request_id: int
    sample: int  # which of the prompt's n samples
    tokens: list[int]  # prompt and output
    num_prompt: int
    settings: Settings
    extra_key: Hashable
    prefix_key: Hashable  # of the cache: requests share computed prefixes if it is equal
    seed: int
    events: deque[NewToken]  # where its new tokens go
    processors: tuple[Callable[..., Any], ...] = ()
    criteria: tuple[Callable[..., Any], ...] = ()
    others: tuple[Request, ...] = ()  # further samples of the prompt, which start when the prompt is computed
    row: int = -1  # of the block table; -1 when not running
    num_blocks: int = 0  # written to that row
    num_given_back: int = 0  # blocks that the sequence had freed when the row was written
    yielded_at: int = -1  # its length when it last gave all its blocks to others in the cache
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one list for all samples of a prompt
    num_cached_tokens: int = -1  # before it first runs
    num_unread: int = 0  # tokens that are chosen on the device, and that the host does not know yet: 0 or 1
    finish_reason: str | None = None
    error: str | None = None
    _ids: Tensor | None = None  # the tokens on the device, for processors and criteria
    _num_ids: int = 0

    def __post_init__(self) -> None:
        self._key = key_of(self.seed, self.sample)
        # needs more than the likeliest token
        self.is_special = bool(self.settings.chooses or self.processors or self.criteria)
        # its tokens are needed on the host as soon as they are chosen
        self.is_read_at_once = bool(self.processors or self.criteria or self.settings.asks_logprobs)

    def __repr__(self) -> str:
        return f"request {self.request_id}"

    @property
    def length(self) -> int:
        """The number of its tokens, an unread one included."""
        return len(self.tokens) + self.num_unread

    @property
    def has_all_tokens(self) -> bool:
        """Whether it has as many tokens as it may have, an unread one included."""
        return self.length - self.num_prompt >= self.settings.max_new_tokens

    def random_key(self) -> int:
        """The key of the random numbers that choose the next token."""
        return random_key(self._key, self.length)

    def input_ids(self, device: torch.device, newest: int | Tensor | None = None) -> Tensor:
        """The tokens as int64 ``[1, n]``, and a newest one that is not yet among them: an integer, or an unread token
        as int64 ``[1]`` on the device."""
        count, size = len(self.tokens), self.num_prompt + self.settings.max_new_tokens
        if self._ids is None:
            self._ids, self._num_ids = torch.zeros(1, size, dtype=torch.int64, device=device), 0
        fresh = self.tokens[self._num_ids :]
        if isinstance(newest, int):
            fresh = [*fresh, newest]
        if fresh:
            self._ids[0, self._num_ids : self._num_ids + len(fresh)] = on_device(fresh, torch.int64, device)
        self._num_ids = count
        if isinstance(newest, Tensor):
            self._ids[0, count : count + 1] = newest
            self._num_ids += 1
        return self._ids[:, : count + (newest is not None)]

    def ids_but_newest(self, device: torch.device) -> Tensor:
        """Where its tokens are on the device, int64 ``[1, size]``: all but the newest. The caller writes that one, then
        calls :meth:`note_newest`."""
        if self._ids is None or self._num_ids < self.length - 1:
            self.input_ids(device)
        assert self._ids is not None
        return self._ids

    def note_newest(self) -> None:
        self._num_ids = self.length

    def finish_reason_with(self, token: int, stops: bool) -> str | None:
        """Why the request ends with this token, if it does."""
        if stops or token in self.settings.stop:
            return "stop"
        return "length" if len(self.tokens) + 1 - self.num_prompt >= self.settings.max_new_tokens else None

    def end(self, reason: str, error: str | None) -> None:
        """Ends it, and drops what only its next tokens needed: device memory and the user's functions."""
        self.error = error
        self.processors = self.criteria = ()
        self._ids = None
        self.finish_reason = reason

    def output(self) -> Output:
        """The output so far; whole, if there is a reason why it ended."""
        reason, error = self.finish_reason, self.error  # first, as another thread may add a token and its end meanwhile
        logprobs = None if self.settings.logprobs is None else self.logprobs.copy()
        of_prompt = None if self.prompt_logprobs is None else self.prompt_logprobs.copy()
        new = self.tokens[self.num_prompt :]
        if logprobs is not None:
            new = new[: len(logprobs)]
        return Output(new, reason, error, logprobs, of_prompt, max(self.num_cached_tokens, 0))


class RequestMaker:
    """Makes the requests of a loop, and counts them.

    Args:
        defaults: of the parameters that a request does not give.
        vocab_size: of the model.
        seed: of the seeds of requests that have none.
        refuses_prompt_logprobs: why requests may not ask for them; "" if they may.
    """

    def __init__(
        self, defaults: Defaults, vocab_size: int | None, seed: int | None, refuses_prompt_logprobs: str = ""
    ) -> None:
        self._refuses = refuses_prompt_logprobs
        self.next_id = 0
        self._ids = itertools.count()
        self._defaults, self._vocab_size = defaults, vocab_size
        if seed is not None:
            check_field("seed", seed, "seed")
        self._seeds = random.Random(None if seed is None else operator.index(seed))
        self._alone = object()  # in the keys of prefixes that are not shared

    def make(
        self,
        prompts: Sequence[tuple[str, Any]],
        params: Sequence[SamplingParams | None],
        extra_key: Hashable,
        version: Hashable,
        events: deque[NewToken],
    ) -> list[Request]:
        """Requests for named prompts, all of them checked; of several samples the first has the others. ``version``: of
        the weights that will compute them, if it is a part of their prefixes' keys."""
        expect_key(extra_key)
        checked = []
        for (name, prompt), given in zip(prompts, params, strict=True):
            param = SamplingParams() if given is None else given
            expect_params(param)
            tokens = read_prompt(name, prompt, self._vocab_size)
            self._expect_in_vocabulary(param.stop_token_ids)
            settings = self._defaults.settings(param, name, tokens)
            asked = settings.prompt_logprobs
            expect(asked is None or not self._refuses, "prompt_logprobs", f"None, as {self._refuses}", asked)
            criteria = self._defaults.criteria(param)
            each = [(*self._defaults.processors(param, settings, tokens), criteria) for _ in range(settings.n)]
            checked.append((tokens, param.seed, each))
        requests = []
        for tokens, given_seed, each in checked:
            seed = self._seeds.getrandbits(64) if given_seed is None else operator.index(given_seed)
            ids = tuple(itertools.islice(self._ids, len(each)))  # consecutive: no other thread or handler comes between
            requests.append(self._add(ids, tokens, extra_key, version, seed, events, each))
        return requests

    def _expect_in_vocabulary(self, stop_token_ids: Any) -> None:
        """Refuses tokens that can never be chosen, and so never end a sequence."""
        V = self._vocab_size
        outside = [] if V is None else [each for each in stop_token_ids or () if each >= V]
        expect(not outside, "stop_token_ids", f"token ids in 0..{(V or 0) - 1}, the vocabulary", outside)

    def add(
        self,
        first_id: int,
        tokens: list[int],
        settings: Settings,
        extra_key: Hashable,
        version: Hashable,
        events: deque[NewToken],
    ) -> Request:
        """The requests of one prompt with ids from first_id on, as on the rank that chooses their tokens."""
        ids = range(first_id, first_id + settings.n)
        self._ids = itertools.count(max(self.next_id, ids[-1] + 1))
        return self._add(ids, tokens, extra_key, version, 0, events, [(settings, (), ())] * settings.n)

    def _add(
        self,
        ids: Sequence[int],
        tokens: list[int],
        extra_key: Hashable,
        version: Hashable,
        seed: int,
        events: deque[NewToken],
        samples: Sequence[tuple[Settings, tuple[Callable[..., Any], ...], tuple[Callable[..., Any], ...]]],
    ) -> Request:
        # The cache may hold prefixes of other weights, and of other loops.
        prefix_key, of_prompt = extra_key if version is None else (version, extra_key), list[TokenLogprobs | None]()
        asks = samples[0][0].prompt_logprobs is not None
        if asks:
            prefix_key, of_prompt = (self._alone, ids[0]), [None] * len(tokens)
        first, *others = [
            Request(
                request_id=ids[sample],
                sample=sample,
                tokens=tokens.copy(),
                num_prompt=len(tokens),
                settings=settings,
                extra_key=extra_key,
                prefix_key=prefix_key,
                seed=seed,
                events=events,
                processors=processors,
                criteria=criteria,
                prompt_logprobs=of_prompt if asks else None,
            )
            for sample, (settings, processors, criteria) in enumerate(samples)
        ]
        self.next_id = max(self.next_id, ids[-1] + 1)
        first.others = tuple(others)
        return first


class TokenStream(NotCopied, Iterator[NewToken]):
    """The tokens of one prompt as they are generated; made by :meth:`GenerationLoop.stream`.

    Asking for the next token runs steps, of all other requests too. ``close``, leaving its ``with`` block,
    or deleting the stream aborts what is unfinished.

    Attributes:
        request_ids: the ids of the prompt's samples.
    """

    def __init__(
        self,
        requests: tuple[Request, ...],
        events: deque[NewToken],
        fill: Callable[[Iterable[Request], deque[NewToken]], bool],
        drop: Callable[..., None],
    ) -> None:
        self.request_ids = tuple(request.request_id for request in requests)
        self._requests = requests
        self._events = events
        self._fill = fill
        self._drop = drop
        self._lock = threading.RLock()  # of the events, for threads that share the stream

    def __next__(self) -> NewToken:
        new: NewToken | None = None
        try:
            while self._fill(self._requests, self._events):
                with self._lock:
                    if self._events:
                        new = self._events[0]
                        self._events.popleft()
                        return new
        except BaseException:  # an interrupt: the caller did not get it
            if new is not None and not (self._events and self._events[0] is new):
                self._events.appendleft(new)
            raise
        raise StopIteration

    @property
    def outputs(self) -> list[Output]:
        """The output of each sample so far."""
        return [request.output() for request in self._requests]

    def close(self) -> None:
        """Aborts what is unfinished; the stream then ends."""
        self._drop(self._requests)
        self._events.clear()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._drop(self._requests, waits=False)


def expect_params(given: Any) -> None:
    """Refuses parameters of a request that are of another type."""
    if callable(getattr(given, "to_dict", None)):
        raise ValueError(
            f"params: expected SamplingParams, got {type(given).__name__}; give it to the loop, for all requests:"
            " GenerationLoop(generation_config=...)"
        )
    expect(isinstance(given, SamplingParams), "params", "SamplingParams", given)


def expect_key(extra_key: Any) -> None:
    """Refuses a key that a dictionary would not find again: one that has no hash, or is not equal to itself."""
    try:
        hash(extra_key)
    except TypeError:
        raise ValueError(f"extra_key: expected something hashable, got {extra_key!r}") from None
    for part in extra_key if isinstance(extra_key, (tuple, frozenset)) else ():
        expect_key(part)
    try:
        is_equal = bool(extra_key == extra_key) and not isinstance(extra_key, Tensor)
    except Exception:
        is_equal = False
    needed = "something that compares by value, as a string or a number (of a tensor, a digest)"
    expect(is_equal, "extra_key", needed, extra_key)


def read_prompts(prompts: Any) -> list[Any]:
    """The prompts of a batch as a list: from a list, a tensor ``[S, n]``, or a tokenizer's result.

    Of a mapping the ``input_ids`` are taken, except where ``attention_mask`` is 0: padding on either side is removed.
    """
    if isinstance(prompts, (str, bytes)):
        _refuse_text("prompts")
    if isinstance(prompts, Mapping):
        return _without_padding(prompts)
    is_many = prompts.dim() == 2 if isinstance(prompts, Tensor) else isinstance(prompts, Iterable)
    expect(is_many, "prompts", "a list of prompts, or a tensor [S, n]", prompts)
    prompts = list(prompts)
    if prompts and is_integer(prompts[0]) and not getattr(prompts[0], "ndim", 0):
        raise ValueError("prompts: expected a list of prompts, got token ids; put the one prompt into a list")
    return prompts


def read_prompt(argument: str, prompt: Any, vocab_size: int | None) -> list[int]:
    """The token ids of one prompt: from a list, a tensor ``[n]`` or ``[1, n]``, or a tokenizer's result for one prompt.

    Raises:
        ValueError: it is a string or empty, or an id is no integer or not in the vocabulary. The message names the
            prompt.
    """
    if isinstance(prompt, (str, bytes)):
        _refuse_text(argument)
    if isinstance(prompt, Mapping):
        rows = _without_padding(prompt)
        expect(len(rows) == 1, argument, "one prompt", f"{len(rows)}; generate() takes a batch")
        prompt = rows[0]
    if isinstance(prompt, Tensor):
        is_row = prompt.dim() == 1 or (prompt.dim() == 2 and len(prompt) == 1)
        expect(is_row, argument, "a tensor [n] or [1, n]; generate() takes [S, n]", prompt)
        is_whole = not (prompt.dtype.is_floating_point or prompt.dtype.is_complex or prompt.dtype is torch.bool)
        expect(is_whole, argument, "token ids, integers", prompt)
        prompt = prompt.reshape(-1).tolist()
    expect(isinstance(prompt, Iterable) and not isinstance(prompt, Set), argument, "token ids, in order", prompt)
    tokens = []
    for i, token in enumerate(prompt):
        if not is_integer(token):
            raise ValueError(f"{argument}: expected token ids, integers, got {describe(token)} at {i}")
        tokens.append(operator.index(token))
    expect(bool(tokens), argument, "at least one token", "none")
    most = MOST_ID if vocab_size is None else vocab_size
    if min(tokens) < 0 or max(tokens) >= most:
        i, wrong = next((i, token) for i, token in enumerate(tokens) if not 0 <= token < most)
        among = "0 or more" if wrong < 0 else "below 2^63"
        if vocab_size is not None:
            among = f"in 0..{vocab_size - 1}, the vocabulary"
        raise ValueError(f"{argument}: expected token ids {among}, got {wrong} at {i}")
    return tokens


def refuse_padding(prompts: Sequence[Sequence[int]], pad_token_id: int | None) -> None:
    """Refuses a batch that looks padded: rows of one length; some start or end with padding, others do not.

    The padding would be read as tokens of the prompts.
    """
    if pad_token_id is None or len(prompts) < 2 or {len(prompt) for prompt in prompts} != {max(2, len(prompts[0]))}:
        return
    for side, end in (("left", 0), ("right", -1)):
        padded = [prompt[end] == pad_token_id for prompt in prompts]
        if any(padded) and not all(padded):
            raise ValueError(
                f"prompts: expected prompts without padding, got rows of one length, some with padding ({pad_token_id})"
                f" on the {side}; give the tokenizer's whole result, with its attention_mask, or tokenize without"
                " padding"
            )


def _without_padding(encoding: Mapping[str, Any]) -> list[Any]:
    expect("input_ids" in encoding, "prompts", "a mapping with input_ids", sorted(map(str, encoding)))
    for name, value in encoding.items():
        if name not in ("input_ids", "attention_mask") and value is not None:
            raise ValueError(f"{name}: expected input_ids and attention_mask alone, got {name} too; {_remedy(name)}")
    rows, mask = _rows(encoding["input_ids"]), encoding.get("attention_mask")
    if mask is None:
        return rows
    masks = _rows(mask)
    same = len(rows) == len(masks) and all(len(row) == len(kept) for row, kept in zip(rows, masks, strict=False))
    expect(same, "attention_mask", "the shape of input_ids", f"rows of {[len(kept) for kept in masks]}")
    return [
        [token for token, keep in zip(row, kept, strict=True) if keep] for row, kept in zip(rows, masks, strict=True)
    ]


def _remedy(name: str) -> str:
    if name == "token_type_ids":
        return "a loop reads one sequence per prompt; tokenize with return_token_type_ids=False"
    return "a loop reads tokens; leave it out if the prompt has tokens alone, or call the model itself (docs/models.md)"


def _rows(values: Any) -> list[list[Any]]:
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    return [values] if values and not isinstance(values[0], (list, tuple)) else [list(row) for row in values]


def _refuse_text(argument: str) -> None:
    raise ValueError(f"{argument}: expected token ids, got a string; give tokenizer(prompt).input_ids")
