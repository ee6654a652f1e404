"""Campaign: captured and padded steps against plain ones, with a cache each; both are compared whole at the end.

A case is one runner: its sizes, mode and options drawn, then many random batches. On the CPU the graphs are imitated:
a replay calls the captured function again with the tensors of its capture. Padding changes the order of sums, so a
captured step in half precision need not equal the plain one: both are compared with the same step in float32, and the
captured one may err twice as much as the plain one ever did.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from paged_ops import graphs
from paged_ops.cache import KVCache
from paged_ops.graphs import DecodeGraphs, build_inputs, step_builder
from paged_ops.metadata import Batch

from .runner import Case
from .toy import Toy

STEPS = {"cpu": 60, "cuda": 1500}
# Few, as each compiles kernels of its own.
MODELS: tuple[dict[str, Any], ...] = (
    {"H": 4, "K": 2, "D": 32, "dtype": torch.float32},
    {"H": 4, "K": 1, "D": 64, "dtype": torch.bfloat16},
    {"H": 4, "K": 2, "D": 32, "dtype": torch.float32, "sliding_window": 7},
    {"H": 8, "K": 8, "D": 64, "dtype": torch.float16, "soft_cap": 8.0},
    {"H": 4, "K": 2, "D": 32, "dtype": torch.float32, "attention_chunk": 12},
)
CLOSE = 2e-3  # of float32, where padding changes which tile a row lies in


class ImitatedSession:
    """Stands in for CaptureSession where there is no GPU."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0

    def __enter__(self) -> ImitatedSession:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def sync_is_error(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class ImitatedGraph:
    """Stands in for Graph: a replay calls the function again, into the result of the capture."""

    def __init__(self, session: Any) -> None:
        self.function = self.result = None

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        return True

    def capture(self, function: Any) -> Any:
        self.function, self.result = function, function()
        return self.result

    def replay(self) -> Any:
        return self.result.copy_(self.function())


@contextlib.contextmanager
def graphs_of(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        yield
        return
    with (
        mock.patch.object(graphs.runner, "Graph", ImitatedGraph),
        mock.patch.object(graphs.runner, "CaptureSession", ImitatedSession),
        mock.patch.object(torch, "compile", lambda function, **_: function),
    ):
        yield


def run(case: Case) -> None:
    """One runner and its steps."""
    with graphs_of(case.device), torch.no_grad():
        Walk(case).run()


class Walk:
    """Sequences on blocks of their own (some share a prefix), and random batches of them."""

    def __init__(self, case: Case) -> None:
        rng: random.Random = case.random
        self.case, self.rng, device = case, rng, case.device
        named = dict(MODELS[rng.randrange(len(MODELS))])
        self.model = Toy(rng.randrange(1000), device=device, **named)
        self.B = rng.choice((1, 4, 4, 16, 7))
        self.longest = rng.choice((30, 64, 100))
        self.seqs, query_len = rng.choice((1, 2, 5, 12, 20)), rng.choice((1, 1, 1, 2, 4))
        self.tokens = self.seqs * query_len + rng.choice((0, 7, 40))
        self.blocks_a_seq = -(-self.longest // self.B)
        N = self.blocks_a_seq * (self.seqs + 2)
        sizes = (self.model.layers, N, self.B, self.model.K, self.model.D)
        # Of the captured steps, of the plain ones, and of what both are measured by.
        dtypes = (self.model.dtype, self.model.dtype, torch.float32)
        self.caches = [KVCache(*sizes, dtype=dtype, device=device) for dtype in dtypes]
        self.exact = self.model.in_float32()
        for cache in self.caches:
            for layer in cache.layers:
                layer.fill_(torch.nan)
        mode = rng.choice(("FULL", "FULL", "FULL_DECODE_ONLY"))
        plain_features = not self.model.features
        self.cascade = plain_features and rng.random() < 0.3
        self.samples = query_len == 1 and rng.random() < 0.4
        options: dict[str, Any] = {"mode": mode, "query_len": query_len, "cascade": self.cascade}
        if self.samples:
            options["sample"] = lambda logits: logits.argmax(-1)
        if rng.random() < 0.4:
            options["seq_sizes"] = rng.sample(range(1, self.seqs + 1), rng.randint(1, min(3, self.seqs)))
        if rng.random() < 0.4 and mode == "FULL":
            options["token_sizes"] = rng.sample(range(1, self.tokens + 1), rng.randint(1, min(3, self.tokens)))
        limits = {"max_num_seqs": self.seqs, "max_num_tokens": self.tokens, "max_model_len": self.longest}
        self.runner = DecodeGraphs(self.model, self.caches[0], **limits, **options)
        self.plain_builder = step_builder(self.caches[1], self.seqs, self.tokens, self.longest)
        self.query_len = query_len
        self.what = f"{named} B={self.B} {limits} {options}"
        self.errors: list[Tensor] = []  # of the captured and the plain step
        self.kinds: dict[str, int] = {}
        # Sequences: blocks and cached tokens. A shared prefix is the first blocks of sequence 0.
        ids = rng.sample(range(N), N)
        take = self.blocks_a_seq
        self.blocks = [ids[s * take : (s + 1) * take] for s in range(self.seqs)]
        self.lens = [0] * self.seqs
        self.shared = 0

    def run(self) -> None:
        rng, case = self.rng, self.case
        self.runner.capture()
        if self.cascade:
            self.share_a_prefix()
        steps = STEPS["cuda" if case.device.type == "cuda" else "cpu"]
        for _ in range(steps):
            self.step()
            if self.cascade and not self.shared and rng.random() < 0.02:
                self.share_a_prefix()
        self.compare_caches()
        stats = self.runner.stats
        case.counts["replays"] += stats.replayed
        case.counts["plain steps"] += stats.plain
        for name in ("decode", "mixed", "cascade", "advanced"):
            case.counts[name] += self.kinds.get(name, 0)
        captured, plain = torch.stack(self.errors).T.tolist()
        # A plain step of float32 has no error here: it is what the captured one is measured by.
        limit = 2 * max(plain) + CLOSE
        bad = [(step, value) for step, value in enumerate(captured) if not value <= limit]
        case.worst[f"logits {str(self.model.dtype)[6:]}"] = max(captured) / limit
        if bad:
            case.report(f"errors over {limit} at {len(bad)} of {len(captured)} comparisons: {bad[:5]}\n{self.what}")

    def share_a_prefix(self) -> None:
        """All sequences begin with the same whole blocks."""
        length = self.B * self.rng.randint(1, max(1, (self.longest // 2) // self.B))
        if length + 2 > self.longest:
            return
        first = self.blocks[0][: length // self.B]
        self.lens = [0] * self.seqs
        self.shared = 0
        for start in range(0, length, self.tokens):
            self.lens[0] = start
            self.do([0], [min(self.tokens, length - start)])
        for s in range(self.seqs):
            own = [block for block in self.blocks[s] if block not in first]
            spare = [b for b in range(self.caches[0].num_blocks) if all(b not in each for each in self.blocks)]
            while len(own) < self.blocks_a_seq - len(first):
                own.append(spare.pop())
            self.blocks[s] = [*first, *own[: self.blocks_a_seq - len(first)]]
            self.lens[s] = length
        self.shared = length

    def step(self) -> None:
        rng = self.rng
        chosen = rng.sample(range(self.seqs), rng.randint(0 if rng.random() < 0.02 else 1, self.seqs))
        for s in chosen:
            if self.lens[s] >= self.longest - self.query_len - 12:
                self.lens[s] = self.shared
        kind = rng.choice(("decode", "decode", "decode", "mixed"))
        if kind == "decode":
            chosen = chosen[: self.tokens // self.query_len]
            q_lens = [self.query_len] * len(chosen)
        else:
            q_lens, left = [], self.tokens
            for s in chosen:
                most = min(left, self.longest - 12 - self.lens[s], rng.choice((1, 3, 99)))
                q_lens.append(max(0, most))
                left -= q_lens[-1]
        self.do(chosen, q_lens)

    def do(self, chosen: list[int], q_lens: list[int]) -> None:
        """A step of the runner and the same without padding, and maybe the steps after it."""
        rng = self.rng
        starts = [self.lens[s] for s in chosen]
        decode = bool(chosen) and all(q == 1 for q in q_lens)
        ahead = rng.randint(1, 8) if self.samples and decode and rng.random() < 0.3 else 0
        if rng.random() < 0.1:
            ids = torch.randint(self.model.V, (sum(q_lens),)).to(self.case.device)
        else:
            ids = torch.tensor([rng.randrange(self.model.V) for _ in range(sum(q_lens))], dtype=torch.int64)
        prefix = self.shared if self.cascade and chosen and decode and rng.random() < 0.7 else 0
        tables = [self.blocks[s] for s in chosen]
        logits = self.runner.replay(Batch(q_lens, starts, tables), ids, common_prefix_len=prefix, lookahead=ahead)
        self.compare(logits, q_lens, starts, tables, ids)
        for name, happened in (("decode", decode), ("mixed", not decode), ("cascade", prefix > 0)):
            self.kinds[name] = self.kinds.get(name, 0) + happened
        for s, q in zip(chosen, q_lens, strict=True):
            self.lens[s] += q
        for _ in range(rng.randint(0, ahead)):
            ids = logits.argmax(-1)
            logits = self.runner.replay_next()
            starts = [self.lens[s] for s in chosen]
            self.compare(logits, q_lens, starts, tables, ids)
            self.kinds["advanced"] = self.kinds.get("advanced", 0) + 1
            for s in chosen:
                self.lens[s] += 1

    def compare(
        self, logits: Tensor, q_lens: list[int], starts: list[int], tables: list[list[int]], ids: Tensor
    ) -> None:
        """Against the step without padding and the one in float32, on caches of their own."""
        n, t = len(q_lens), sum(q_lens)
        if logits.shape[0] != n:
            self.case.report(f"expected {n} rows of logits, got {logits.shape[0]}\n{self.what}")
            return
        if not t:
            return
        got = logits.clone()
        inputs = build_inputs(self.plain_builder, Batch(q_lens, starts, tables), ids, n, t)
        step = (inputs.input_ids, inputs.metadata, inputs.last_rows)
        plain, exact = self.model(*step, self.caches[1].layers), self.exact(*step, self.caches[2].layers)
        live = torch.tensor([q > 0 for q in q_lens]).to(got.device)[:, None]
        self.measure(*(torch.where(live, each, 0.0) for each in (got, plain, exact)))

    def compare_caches(self) -> None:
        """What the captured steps wrote is what the plain ones wrote, and nothing else."""
        for captured, plain, exact in zip(*(cache.layers for cache in self.caches), strict=True):
            poison = captured.isnan() != plain.isnan()
            if bool(poison.any()):
                self.case.report(f"{int(poison.sum())} elements of a layer written by one side alone\n{self.what}")
            self.measure(*(each.nan_to_num(0.0) for each in (captured, plain, exact)))

    def measure(self, captured: Tensor, plain: Tensor, exact: Tensor) -> None:
        self.errors.append(torch.stack([(each.float() - exact).abs().amax() for each in (captured, plain)]))
