"""Campaign: random programs of ops, compiled as one graph, against the same programs run eagerly.

A case is one program: layers that write and attend in many orders, reads and writes once more, views, copies between
blocks and caches, a branch or a loop of the graph, arithmetic in between. It runs on several batches, each time on
caches of its own. Results and caches must be equal, but for rounding: the eager program also runs on inputs that differ
by an ulp, and what that changes is how well the result is determined. In a chained program each op depends on the
result of the one before, as in a model. In a free one it depends on any earlier result, and results are added up at the
end: many are first used when their cache was written again. No program may copy a cache, by the lint of
``paged_ops.inspection``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config

import paged_ops
from paged_ops.inspection import CompileReport

from .runner import Case

H, K, D = 4, 2, 16
WIDTH = H * D
OFTEN = ("layer",) * 4 + ("read again",) * 2
KINDS = (*OFTEN, "write again", "gather", "lse", "cascade", "cond", "while", "merge", "norm", "copy", "swap")
# torch refuses a loop that captures aliases: before 2.13 whatever it captures, since then two views of one tensor.
NO_LOOPS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
# How caches reach the graph: the shapes that one layer takes.
FORMS: dict[str, Callable[[int, int], list[tuple[int, ...]]]] = {
    "nhd": lambda N, B: [(N, 2, B, K, D)],
    "hnd": lambda N, B: [(N, 2, K, B, D)],
    "hnd inside": lambda N, B: [(N, 2, K, B, D)],
    "arena": lambda N, B: [(N, 2, B, K, D)],
    "separate": lambda N, B: [(N, B, K, D), (N, B, K, D)],
    "interleaved": lambda N, B: [(N, B, 2 * K, D)],
    "x_packed": lambda N, B: [(2, N, B * K * D)],
    "planes": lambda N, B: [(2, N, B, K, D)],
    "unbound": lambda N, B: [(N, 2, B, K, D)],
}
# Those that are split inside into keys and values: two views of one tensor.
SPLIT: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "x_packed": lambda flat: paged_ops.layouts.split_kv_cache(flat, K, D),
    "planes": lambda kv: kv.unbind(0),
    "unbound": lambda kv: kv.unbind(1),
}
CLOSE = 1e-4
ULPS = 8  # by which the two forms may differ inside


def run(case: Case) -> None:
    """One program, compiled and eager."""
    with torch.no_grad():
        torch._dynamo.reset()
        inductor_config.compile_threads = 1  # the processes of a run share the cores
        try:
            Program(case).run()
        finally:
            torch._dynamo.reset()


class Program:
    def __init__(self, case: Case) -> None:
        rng = case.random
        self.case, self.rng, self.device = case, rng, case.device
        self.dice = case.generator()
        self.L, self.B = rng.choice((1, 2, 3)), rng.choice((1, 4, 16))
        self.T, self.S = rng.choice(((4, 4), (12, 3), (9, 5), (2, 2)))
        self.M = 24 // self.B
        self.N = self.S * self.M + 5
        self.form = rng.choice(tuple(FORMS))
        self.chained = rng.random() < 0.6
        self.features = rng.choice(
            (
                {},
                {},
                {"sliding_window": 5},
                {"soft_cap": 4.0},
                {"attention_chunk": 6},
                {"sliding_window": 3, "soft_cap": 2.0},
            )
        )
        loops = not NO_LOOPS and self.form not in SPLIT
        kinds = tuple(kind for kind in KINDS if loops or kind != "while")
        self.steps = [(rng.choice(kinds), rng.randrange(self.L)) for _ in range(rng.randint(2, 7))]
        self.old = [rng.randrange(100) for _ in self.steps]  # which earlier result a step takes, where not the last
        self.weights = {
            name: self.numbers(*shape) * WIDTH**-0.5
            for name, shape in (("qkv", (WIDTH, (H + 2 * K) * D)), ("out", (WIDTH, WIDTH)), ("gate", (WIDTH, WIDTH)))
        }
        self.what = f"{self.form} L={self.L} B={self.B} T={self.T} S={self.S} {self.features} {self.steps}"
        self.what += " chained" if self.chained else f" free {self.old}"

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.dice).to(self.device)

    # The program -----------------------------------------------------------------------------------------------------

    def caches(self) -> list[Tensor]:
        """What the program takes: the tensors that its caches are, or are made from inside of it."""
        shapes = FORMS[self.form](self.N, self.B)
        if self.form == "arena":
            return [self.numbers(self.L, *shape) for shape in shapes]
        made = [self.numbers(*shape) for _ in range(self.L) for shape in shapes]
        return [each.transpose(2, 3) for each in made] if self.form == "hnd" else made

    def views(self, caches: list[Tensor]) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """The caches as the ops take them, a layer each."""
        if self.form == "arena":
            return [(caches[0][layer], {}) for layer in range(self.L)]
        if self.form == "hnd inside":
            return [(each.transpose(2, 3), {}) for each in caches]
        if self.form == "separate":
            return [(caches[2 * layer], {"value_cache": caches[2 * layer + 1]}) for layer in range(self.L)]
        if self.form in SPLIT:
            return [(key, {"value_cache": value}) for key, value in map(SPLIT[self.form], caches)]
        return [(each, {}) for each in caches]

    def __call__(self, hidden: Tensor, caches: list[Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        views, results = self.views(caches), [hidden]
        for number, (kind, layer) in enumerate(self.steps):
            source = results[-1] if self.chained else results[self.old[number] % len(results)]
            results.append(self.step(kind, source, *views[layer], views, batch))
        return (results[-1],) if self.chained else (results[-1], sum(results))

    def step(
        self,
        kind: str,
        hidden: Tensor,
        kv: Tensor,
        planes: dict[str, Tensor],
        views: list[tuple[Tensor, dict[str, Tensor]]],
        batch: dict[str, Tensor],
    ) -> Tensor:
        w = self.weights
        if kind == "norm":
            return torch.nn.functional.silu(hidden @ w["gate"]) * torch.rsqrt(hidden.square().mean(-1, True) + 1e-3)
        if kind == "copy":
            paged_ops.copy_blocks([each for one, more in views for each in (one, *more.values())], batch["pairs"])
            return hidden + 0.5
        if kind == "swap":
            source, more = views[0]
            paged_ops.swap_blocks([source, *more.values()], [kv, *planes.values()], batch["swapped"])
            return hidden - 0.5
        query, key, value = (hidden @ w["qkv"]).view(-1, H + 2 * K, D).split([H, K, K], dim=1)
        if kind in ("layer", "write again", "lse", "merge"):
            key = key * torch.cos(batch["positions"])[:, None, None] + key.flip(-1)
            paged_ops.reshape_and_cache(key, value, kv, batch["slots"], **planes)
        if kind == "write again":
            paged_ops.reshape_and_cache(value, key, kv, batch["slots"], **planes)
        tables, lens, starts = batch["tables"], batch["lens"], batch["starts"]
        named = {**planes, **self.features}
        scale = D**-0.5
        if kind == "gather":
            keys, values = paged_ops.gather_kv(kv, tables, lens, 30, **planes)
            seen = (keys * values).sum(0).reshape(1, -1)
            return hidden + torch.cat([seen, seen.sin()], 1)
        if kind == "lse":
            out, lse = paged_ops.paged_attention_with_lse(query, kv, tables, lens, starts, scale, **named)
            out = out * torch.sigmoid(lse.nan_to_num(0.0, 0.0, 0.0))[:, :, None]
        elif kind == "merge":
            left = paged_ops.paged_attention_with_lse(query, kv, tables, lens, starts, scale, **named)
            right = paged_ops.paged_attention_with_lse(
                query, kv, batch["prefix"], batch["prefix_len"], batch["all"], scale, causal=False, **planes
            )
            out, _ = paged_ops.merge_attention_states(*left, *right)
        elif kind == "cascade":
            prefix = batch["prefix"], batch["prefix_len"]
            out = paged_ops.cascade_attention(query, kv, *prefix, tables, lens, starts, scale, **planes)
        elif kind == "cond":

            def attends(query: Tensor, kv: Tensor, tables: Tensor, lens: Tensor, starts: Tensor) -> Tensor:
                return paged_ops.paged_attention(query, kv, tables, lens, starts, scale, **self.features) * 1.0

            def rests(query: Tensor, kv: Tensor, tables: Tensor, lens: Tensor, starts: Tensor) -> Tensor:
                return query * 2.0

            if planes:
                return hidden * 1.5
            operands = (query.contiguous(), kv, tables, lens, starts)
            out = torch.cond(batch["flag"], attends, rests, operands)
        elif kind == "while":

            def goes_on(i: Tensor, query: Tensor) -> Tensor:
                return i < 3

            def body(i: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
                seen = paged_ops.paged_attention(query, kv, tables, lens, starts, scale, **named)
                return i + 1, query * 0.5 + seen

            from torch._higher_order_ops.while_loop import while_loop

            _, out = while_loop(goes_on, body, (torch.zeros_like(batch["count"]), query.contiguous()))
        else:
            out = paged_ops.paged_attention(query, kv, tables, lens, starts, scale, **named)
        return hidden + out.reshape(-1, WIDTH) @ w["out"]

    # Its batches -----------------------------------------------------------------------------------------------------

    def batch(self) -> dict[str, Tensor]:
        rng, B = self.rng, self.B
        q = [0] * self.S
        for _ in range(rng.randint(0, self.T)):
            q[rng.randrange(self.S)] += 1
        lens = [rng.randint(rows, max(rows, self.M * B)) if rows else rng.choice((0, 3)) for rows in q]
        lens = [min(n, self.M * B) for n in lens]
        q = [min(rows, n) for rows, n in zip(q, lens, strict=True)]
        ids = rng.sample(range(self.N), self.N)
        tables = [ids[s * self.M : (s + 1) * self.M] for s in range(self.S)]
        positions = [n - rows + r for rows, n in zip(q, lens, strict=True) for r in range(rows)]
        owner = [s for s, rows in enumerate(q) for _ in range(rows)]
        slots = [tables[s][p // B] * B + p % B for s, p in zip(owner, positions, strict=True)]
        padding = self.T - len(slots)
        starts = [sum(q[:s]) for s in range(self.S + 1)]
        spare = ids[self.S * self.M :]
        ints: dict[str, tuple[Any, torch.dtype]] = {
            "tables": (tables, torch.int32),
            "lens": (lens, torch.int32),
            "starts": (starts, torch.int32),
            "slots": (slots + [-1] * padding, torch.int64),
            "positions": (positions + [0] * padding, torch.int64),
            "prefix": ([spare[:2]], torch.int32),
            "prefix_len": ([rng.randint(0, B)], torch.int32),
            "all": ([0, starts[-1]], torch.int32),
            "pairs": ([[tables[0][0], spare[2]], [tables[-1][-1], spare[3]]], torch.int64),
            "count": (0, torch.int64),
            "flag": (rng.random() < 0.5, torch.bool),
        }
        tensors = {name: torch.tensor(values, dtype=dtype) for name, (values, dtype) in ints.items()}
        on_device = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        return {**on_device, "swapped": tensors["pairs"]}

    def run(self) -> None:
        # With open sizes torch's branches fail in its own symbols, and slices that are written are refused.
        closed = any(kind in ("cond", "while") for kind, _ in self.steps) or self.form in ("arena", *SPLIT)
        dynamic = self.rng.choice((None, False) if closed else (None, False, True))
        compiled = torch.compile(self.__call__, fullgraph=True, dynamic=dynamic)
        pristine, batches = self.caches(), [self.batch() for _ in range(3)]
        with CompileReport(caches=pristine) as report:
            for batch in batches:
                hidden = self.numbers(self.T, WIDTH)
                nudged = hidden * (1 + torch.randn_like(hidden) * 2**-23)
                sides = []
                for function, given in ((compiled, hidden), (self.__call__, hidden), (self.__call__, nudged)):
                    caches = copy.deepcopy(pristine)
                    sides.append((function(given, caches, batch), caches))
                for name, got, want, other in zip(("result", "cache"), *sides, strict=True):
                    self.compare(name, got, want, other)
                self.case.counts["runs"] += 1
        self.case.counts["programs"] += 1
        self.case.counts["graphs"] += report.graphs
        assert report.graph_breaks == 0, f"{report.graph_breaks} graph breaks\n{self.what}"
        assert report.graphs >= 1
        assert report.cache_copies == 0, f"{report.copies}\n{self.what}"

    def compare(self, name: str, got: Any, want: Any, nudged: Any) -> None:
        def message(text: str) -> str:
            return f"{name}: {text}\n{self.what}"

        for one, other, third in zip(got, want, nudged, strict=True):
            rounding = ULPS * float((third - other).nan_to_num(0.0).abs().max()) if other.numel() else 0.0
            torch.testing.assert_close(one, other, equal_nan=True, msg=message, rtol=CLOSE, atol=CLOSE + rounding)
