"""Campaign: the loops that share a cache, and the threads that share a loop.

Two or three loops on one small cache take turns: each request must come to its end with the right tokens, or its loop
says that blocks are out; none computes for ever. Or threads generate, stream, submit, step, abort and close on one loop
while a timer's signals interrupt the main thread or call back from their handler.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
from typing import Any

from paged_ops.generation import NewToken

from .loop import Sent, Session
from .runner import Case

ACTIONS, ROUNDS = 60, 12
QUIET = 150  # steps of all loops without a token, an end or an OutOfBlocks: by then they do not end


def run(case: Case) -> None:
    """Loops on one cache, or threads on one loop."""
    if case.random.random() < 0.6:
        Together(case).run()
    else:
        Threads(case).run()


class Together:
    def __init__(self, case: Case) -> None:
        self.case, self.rng = case, case.random
        first = Session(case)
        self.sessions = [first, *(Session(case, beside=first) for _ in range(self.rng.choice((1, 1, 2))))]

    def run(self) -> None:
        try:
            for _ in range(ACTIONS * len(self.sessions)):
                self.rng.choice(self.sessions).act()
            self.finish()
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *(each.what for each in self.sessions)])) from error
        for session in self.sessions:
            session.count()

    def finish(self) -> None:
        """Each loop steps in turn, to the end. Where none can go on, one request is aborted."""
        counts = self.case.counts
        quiet = idle = 0
        for session in self.sessions:
            session.interrupts = session.fails = session.handlers = 0.0
        if self.rng.random() < 0.2:
            self.sessions.pop().finish_closed()
        while any(session.loop.has_work for session in self.sessions):
            before, refused = self.progress(), counts["steps out of blocks"]
            for session in self.sessions:
                if session.loop.has_work:
                    session.step()
            idle = 0 if self.progress() != before else idle + 1
            quiet = 0 if idle == 0 or counts["steps out of blocks"] != refused else quiet + 1
            assert quiet < QUIET, "the loops compute for ever, without a token"
            if idle == QUIET:
                session = next(session for session in self.sessions if session.loop.has_work)
                session.abort(min(i for i, sent in session.sent.items() if sent.ended is None))
                counts["aborts for want of blocks"] += 1
                idle = 0
        for session in self.sessions:
            session.read_streams()
        self.sessions[0].assert_empty()

    def progress(self) -> list[int]:
        return [session.loop.stats.generated_tokens for session in self.sessions]


class Threads(Session):
    """One loop. ``step`` gives some thread the tokens of all requests, so these are put together at the end."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.fails = self.interrupts = self.handlers = 0.0
        self.found: list[NewToken] = []
        self.aborted: set[int] = set()
        self.wrong: list[BaseException] = []

    def run(self) -> None:
        case, seeds = self.case, [self.rng.getrandbits(30) for _ in range(self.rng.randint(2, 5))]
        closes = self.rng.random() < 0.2
        strikes = self.rng.choice((None, "raise", "call"))
        before = sys.getswitchinterval()
        sys.setswitchinterval(self.rng.choice((1e-6, 1e-4, 5e-3)))
        threads = [threading.Thread(target=self.work, args=(seed,), daemon=True) for seed in seeds[1:]]
        try:
            for thread in threads:
                thread.start()
            self.work(seeds[0], strikes)
            if closes:
                self.aborted |= set(self.sent)
                self.loop.close()
            for thread in threads:
                thread.join(120)
                assert not thread.is_alive(), f"a thread waits for ever\n{self.what}"
        finally:
            sys.setswitchinterval(before)
        if self.wrong and not (closes and all(isinstance(error, ValueError) for error in self.wrong)):
            raise AssertionError(f"{len(self.wrong)} threads failed\n{self.what}") from self.wrong[0]
        while self.loop.has_work:
            self.found += self.loop.step()
        try:
            self.check_found(closes)
            self.assert_empty()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.what}") from error
        case.counts["threads"] += len(seeds)

    def work(self, seed: int, strikes: str | None = None) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(ROUNDS):
                act = rng.choice((self.generates, self.streams_, self.submits, self.submits))
                self.case.counts[f"threads: {act.__name__}"] += 1
                if strikes is None:
                    act(rng)
                else:
                    self.with_signals(strikes, act, rng)
        except BaseException as error:
            self.wrong.append(error)

    def with_signals(self, strikes: str, act: Any, rng: random.Random) -> None:
        """Signals of a timer while this thread, the main one, acts."""

        def handler(number: int, frame: Any) -> None:
            self.case.counts["signals"] += 1
            if strikes == "raise":
                raise KeyboardInterrupt
            self.submits(rng, steps=False)

        before = signal.signal(signal.SIGALRM, handler)
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 2e-2))
                act(rng)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            pass
        finally:
            signal.signal(signal.SIGALRM, before)

    def ask(self, rng: random.Random) -> tuple[list[int], Any]:
        """A prompt and its parameters, from random numbers of this thread."""
        mine = Session.__new__(Session)
        mine.__dict__.update(self.__dict__, rng=rng)
        prompt = mine.prompt()
        return prompt, mine.params(prompt)

    def generates(self, rng: random.Random) -> None:
        asked = [self.ask(rng) for _ in range(rng.randint(1, 3))]
        seen: list[NewToken] = []
        outputs = self.loop.generate(*map(list, zip(*asked, strict=True)), seen.append if rng.random() < 0.5 else None)
        for prompt, params in asked:
            for sample in range(params.n or 1):
                output = outputs.pop(0)
                aborted = output.finish_reason == "abort"  # by close
                self.check(-1, Sent(prompt, params, None, sample, list(output), output.finish_reason, aborted), output)
        ended = [new.request_id for new in seen if new.finish_reason]
        assert len(ended) == len(set(ended)), f"requests that end twice: {ended}"

    def streams_(self, rng: random.Random) -> None:
        prompt, params = self.ask(rng)
        stream, most = self.loop.stream(prompt, params), rng.choice((2, 1000, 1000))
        got: dict[int, list[int]] = {i: [] for i in stream.request_ids}
        try:
            for new in stream:
                if new.token is not None:
                    got[new.request_id].append(new.token)
                most -= 1
                if not most:
                    break
            else:
                for output, request_id in zip(stream.outputs, got, strict=True):
                    assert got[request_id] == output, f"delivered {got}, kept {stream.outputs}"
            for tokens, output in zip(got.values(), stream.outputs, strict=True):
                assert tokens == output[: len(tokens)], f"delivered {got}, kept {stream.outputs}"
        finally:
            stream.close()

    def submits(self, rng: random.Random, steps: bool = True) -> None:
        prompt, params = self.ask(rng)
        first = self.loop.submit(prompt, params)
        self.sent.update({first + sample: Sent(prompt, params, None, sample) for sample in range(params.n or 1)})
        if rng.random() < 0.3:
            self.aborted.add(first)
            self.loop.abort(first)
        if steps:
            for _ in range(rng.randint(0, 4)):
                self.found += self.loop.step()

    def check_found(self, closes: bool) -> None:
        """All tokens of what was submitted, whichever thread they went to."""
        tokens: dict[int, list[int]] = {i: [] for i in self.sent}
        for new in self.found:
            if new.request_id not in self.sent:  # its submit was interrupted
                continue
            if new.token is not None:
                tokens[new.request_id].append(new.token)
            if new.finish_reason is not None:
                assert self.sent[new.request_id].ended is None, f"request {new.request_id} ends twice"
                self.sent[new.request_id].ended = new.finish_reason
        for request_id, sent in self.sent.items():
            output = self.loop.output(request_id)
            assert output.finish_reason is not None, f"request {request_id} never ended"
            sent.aborted = request_id in self.aborted or closes
            if sent.ended is None or len(tokens[request_id]) < len(output):
                self.case.counts["taken by an interrupt"] += 1  # of this thread, as step() gave it what is of all
                sent.ended = output.finish_reason
                tokens[request_id] = list(output)
            assert sorted(tokens[request_id]) == sorted(output), f"delivered {tokens[request_id]}, kept {output}"
            sent.got = list(output)
            self.check(request_id, sent, output)
