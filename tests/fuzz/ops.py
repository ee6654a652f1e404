"""Campaign: every op against :mod:`.truth`, on any device.

A case writes random sequences into a poisoned cache, then asks many batches of the ops about them: attention with and
without lse, into fresh memory and into ``out``, gathers, cascades, merges; at last it copies and swaps
blocks, and compares every bit of the memory. All that an op must not read is hostile. What the checks of a case find is
read from the device once, at its end.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

import paged_ops
from paged_ops import registry

from . import indexer, truth
from .caches import BITS, Store
from .runner import INTERPRETER, Case
from .settings import E4M3, KINDS, Setting, setting_of
from .truth import Features, by_head

# Logits and lse are float32 and a few roundings away from exact ones: in base 2, with biases, through tanh. So many
# units in the last place of the largest number on the way to them; a weight is off by as much, relatively.
ULPS = 4
# What the root mean square error of a head's elements may be, over that of the plain computation.
SHARP = 2
# So many logits a case computes at once.
LOGITS = {"cpu": 600_000, "cuda": 20_000_000}
FEW_CALLS = 3  # in Triton's interpreter


def run(case: Case) -> None:
    """One case."""
    if case.options.device == INTERPRETER:
        registry.LOWERINGS["CPU"] = registry.LOWERINGS["CUDA"]  # before the first call, which finds its lowering
    with torch.no_grad():
        World(case, setting_of(case)).run()


class World:
    """A cache with sequences in it, and its expected content."""

    def __init__(self, case: Case, setting: Setting) -> None:
        self.case, self.setting, self.device = case, setting, case.device
        self.rng = case.random
        self.np = np.random.default_rng(self.rng.getrandbits(62))
        self.host, self.dice = case.generator(), case.generator(case.device)
        form = setting.form
        W, B = setting.sequences, form.B
        lens = [self.rng.randint(1, setting.longest) for _ in range(W)]
        lens[self.rng.randrange(W)] = setting.longest
        self.lens = np.array(lens)
        self.L = setting.longest
        need = -(-self.lens // B)
        N = int(need.sum()) + 3
        ids = self.np.permutation(N)
        self.M = int(need.max()) + self.rng.choice((0, 1, 2))
        self.blocks = np.zeros((W, self.M), dtype=np.int64)
        for w, start in enumerate(np.cumsum(need) - need):
            self.blocks[w, : need[w]] = ids[start : start + need[w]]
        self.store = Store(form, N, self.device, self.rng)
        self.checks: list[tuple[str, Tensor]] = []  # what was compared, and error over budget (or numbers of errors)
        self.on = dict(setting.features)
        self.arguments = self._arguments()

    # Numbers ---------------------------------------------------------------------------------------------------------

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.dice, device=self.device)

    def put(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        tensor = torch.as_tensor(np.ascontiguousarray(values))
        return tensor.to(dtype).to(self.device)

    def batch_of(self, values: np.ndarray, dtype: torch.dtype, step: int = 1) -> list[Tensor]:
        """``values [C, ...]`` as C tensors in one memory, each aligned to 16 bytes or, in some settings, not."""
        C, flat = len(values), values.reshape(len(values), -1)
        spread = flat.shape[1] * step
        room = -(-max(spread, 1) // 16) * 16 + (1 if self.setting.misaligned else 0)
        memory = np.full((C, room), np.iinfo(np.int32).min if dtype == torch.int32 else -(2**40), dtype=np.int64)
        memory[:, : flat.shape[1] * step : step] = flat
        on_device = torch.from_numpy(memory).to(dtype).to(self.device)
        inner = [math.prod(values.shape[dim + 1 :]) * step for dim in range(1, values.ndim)]
        return [row.as_strided(values.shape[1:], inner) for row in on_device]

    def room(self, C: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """C results of one shape ``[C, ...]`` full of NaN, each aligned to 16 bytes where the setting wants it."""
        size = math.prod(shape)
        width = -(-max(size, 1) // 16) * 16 + (16 // dtype.itemsize + 1 if self.setting.misaligned else 0)
        memory = torch.empty(C, width, dtype=dtype, device=self.device)
        _poison(memory)
        return memory[:, :size].view(C, *shape) if size == width else memory[:, :size].unflatten(1, shape)

    def _arguments(self) -> dict[str, Any]:
        """The keyword arguments of attention, and the features of the truth."""
        s, on = self.setting, dict(self.on)
        H = s.H
        tensors = ("alibi_slopes", "sinks", "bidirectional_ranges", "selected_keys")
        named: dict[str, Any] = {k: v for k, v in on.items() if k not in tensors}
        if "selected_keys" in on:
            named["selected_block_size"] = on["selected_keys"][0]
        self.sinks = self.slopes = None
        if "sinks" in on:
            self.sinks = named["sinks"] = self.numbers(H) * on["sinks"]
        if "alibi_slopes" in on:
            spread = torch.linspace(1.0, 0.01, H, dtype=torch.float32).to(self.device)
            self.slopes = named["alibi_slopes"] = spread * on["alibi_slopes"]
        self.k_scale = self.v_scale = None
        if s.scales[0]:
            self.k_scale = torch.rand(s.scales[0], generator=self.dice, device=self.device) * 0.05 + 0.004
        if s.scales[1]:
            self.v_scale = torch.rand(s.scales[1], generator=self.dice, device=self.device) * 0.05 + 0.004
        self.of_cache: dict[str, Any] = self.store.planes()
        if s.kv_cache_dtype != "auto":
            self.of_cache["kv_cache_dtype"] = s.kv_cache_dtype
        if self.k_scale is not None:
            self.of_cache["k_scale"] = self.k_scale
        if self.v_scale is not None:
            self.of_cache["v_scale"] = self.v_scale
        if s.form.latent:
            named["value_head_size"] = s.form.Dv
            self.v_scale = self.k_scale
        self.output_scale = None
        if s.fp8_output:
            self.output_scale = named["output_scale"] = torch.tensor([0.01], dtype=torch.float32).to(self.device)
        self.features = Features(
            s.scale,
            on.get("causal", True),
            on.get("sliding_window", 0),
            on.get("attention_chunk", 0),
            on.get("soft_cap", 0.0),
            self.slopes,
            self.sinks,
            on.get("block_sparse"),
        )
        return named | self.of_cache

    # What is done ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        case = self.case
        self.write()
        for T, S in self.setting.shapes:
            self.attention(T, S)
        if self.setting.cascade and not self.poison_in:
            self.cascade(*self.setting.shapes[-1])
        self.gathers()
        self.merges()
        if self.rng.random() < 0.1:
            self.nothing()
        self.check_memory("memory after reading", self.store)
        self.copies()
        self.read_checks()
        indexer.check(case)  # last, so that the numbers drawn before are those of earlier versions
        case.counts["tokens written"] += int(self.lens.sum())

    def count(self, op: str, calls: int = 1) -> None:
        self.case.counts["calls"] += calls
        self.case.counts[f"calls of {op}"] += calls

    def write(self) -> None:
        """All tokens in a random order, some slots twice: what came last stays."""
        s, form = self.setting, self.setting.form
        W, L, K, B = len(self.lens), self.L, form.K, form.B
        amplitude = self.rng.choice((1.0, 1.0, 3.0, 30.0 if s.fp8 else 0.3))
        key = (self.numbers(W, L, K, form.D) * amplitude).to(s.dtype)
        value = (self.numbers(W, L, K, form.Dv) * amplitude).to(s.dtype)
        special = self.rng.random() < 0.15
        self.draw_poison()
        bad = self.bad[:, :, None, None]
        for name, tensor in (("key", key), ("value", value)):
            if name in self.poison_in:
                tensor.masked_fill_(bad, self.poison)
        if form.rows:  # whose rotated columns are bfloat16, for which there are many codes of NaN
            key[..., form.Dv :].nan_to_num_(1.0, 1.0, 1.0)
        if form.latent:
            value = key[..., : form.Dv]
        w, j = (np.arange(L) < self.lens[:, None]).nonzero()
        order = self.np.permutation(len(w))
        w, j = w[order], j[order]
        slots = self.blocks[w, j // B] * B + j % B
        # Rows: garbage for some of the slots, then every token, padding among them.
        again = self.np.random(len(slots)) < 0.1
        rows = np.concatenate([np.full(int(again.sum()), -1), np.arange(len(w))])
        slots = np.concatenate([slots[again], slots])
        calls = np.split(np.arange(len(rows)), [int(again.sum())])
        for part in calls:
            for first in range(0, len(part), s.write_rows):
                chunk = part[first : first + s.write_rows]
                self._write_rows(key, value, w, j, rows[chunk], slots[chunk], special)
        if special:  # NaN, infinities and what saturates: in slots of their own, the last block's
            spare = self.put(np.arange(B)[: s.write_rows] + self._spare_block() * B)
            odd_key, odd_value = self._special(len(spare), form.D), self._special(len(spare), form.Dv)
            odd_value = odd_key[..., : form.Dv] if form.latent else odd_value
            self._write(odd_key, odd_value, spare.to(s.slot_dtype))
            self.store.expect(spare, self._stored(odd_key, self.k_scale)[1], self._stored(odd_value, self.v_scale)[1])
        real_key, key_bits = self._stored(key, self.k_scale)
        real_value, value_bits = self._stored(value, self.v_scale)
        at = self.put(slots[len(slots) - len(w) :])
        picked = self.put(w * L + j)
        self.store.expect(at, key_bits.flatten(0, 1)[picked], value_bits.flatten(0, 1)[picked])
        self.any_nan = special or self.poison_in != ""
        self.check_memory("reshape_and_cache", self.store)
        live = self.put(np.arange(L) < self.lens[:, None], torch.bool)[:, :, None, None]
        # What later calls read: float64 [W, L, K, D], 0 where there is no token.
        self.held = (
            torch.where(live, real_key * by_head(self.k_scale), 0.0),
            torch.where(live, real_value * by_head(self.v_scale), 0.0),
        )
        self.key, self.value = (each.masked_fill(bad, 0.0) for each in self.held)
        self.largest = self.value.abs().amax().clamp(min=1e-30)

    def draw_poison(self) -> None:
        """Some tokens whose key or value is NaN or infinite: what does not see them must not be reached by them."""
        shape = len(self.lens), self.L
        chosen, self.poison_in, self.poison = np.zeros(shape, dtype=bool), "", 0.0
        if self.rng.random() < 0.2:
            chosen = self.np.random(shape) < self.rng.choice((1.0 / self.L, 0.2))
            self.poison_in = self.rng.choice(("value", "key", "key and value"))
            self.poison_in = "key and value" if self.setting.form.latent else self.poison_in
            self.poison = torch.nan if self.setting.fp8 else self.rng.choice((torch.nan, torch.inf, -torch.inf))
        self.bad = self.put(chosen, torch.bool)

    def _spare_block(self) -> int:
        used = {int(b) for w, n in enumerate(self.lens) for b in self.blocks[w, : -(-int(n) // self.setting.form.B)]}
        return next(b for b in range(self.store.N) if b not in used)

    def _special(self, rows: int, width: int) -> Tensor:
        odd = self.numbers(rows, self.setting.form.K, width)
        numbers = (torch.nan, torch.inf, -torch.inf, 1e4, -6e4, 1e-6, 0.0, -0.0, 448.0, 464.0, 465.0, 61440.0)
        flat = odd.view(-1)
        for n, number in enumerate(numbers):
            flat[n * 5 : n * 5 + 1] = number
        return odd.to(self.setting.dtype)

    def _stored(self, real: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the cache keeps of numbers ``[..., K, D]``: as float64 without the scale, and as bits."""
        form = self.setting.form
        if form.rows:
            held, bits = truth.scaled_rows(real)
            return held, bits
        if not self.setting.fp8:
            return real.double(), real.view(BITS[form.kind.itemsize])
        codes = truth.fp8(real.float() / by_head(scale), form.kind)
        return codes, codes.float().to(form.kind).view(torch.uint8)

    def _write_rows(
        self,
        key: Tensor,
        value: Tensor,
        w: np.ndarray,
        j: np.ndarray,
        rows: np.ndarray,
        slots: np.ndarray,
        special: bool,
    ) -> None:
        """One call: the rows of a chunk between rows of padding; rows of -1 are garbage."""
        s = self.setting
        size = s.write_rows
        place = np.sort(self.np.permutation(size)[: len(rows)])
        mapping = np.full(size, -1)
        mapping[self.np.random(size) < 0.2] = self.rng.choice((-17, -(2**31), -2))
        mapping[place] = slots
        source = np.full(size + s.extra_rows, -1)
        real = rows >= 0
        source[place[real]] = w[rows[real]] * self.L + j[rows[real]]
        at = self.put(source)
        live = (at >= 0)[:, None, None]
        garbage = torch.nan if special else 7.0
        picked = at.clamp(min=0)
        keys = torch.where(live, key.flatten(0, 1)[picked], garbage)
        values = torch.where(live, value.flatten(0, 1)[picked], garbage)
        step = 2 if s.misaligned else 1
        self._write(keys, values, self.batch_of(mapping[None], s.slot_dtype, step)[0])

    def _write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        T, K, D = key.shape
        fused, Dv = self.setting.fused, value.shape[2]
        if self.setting.form.latent:
            parts = key[:, 0, :Dv], key[:, 0, Dv:]
            if fused == "alone":
                parts = parts[0].contiguous(), parts[1].contiguous()
            paged_ops.latent_cache_write(*parts, self.store.kv_cache, slots, **self.of_cache)
            self.count("latent_cache_write")
            return
        if fused == "tail":
            memory = torch.cat([key, value], 2)
            key, value = memory[:, :, :D], memory[:, :, D:]
        elif fused == "heads" and D == Dv:
            memory = torch.cat([key.new_full((T, self.setting.H, D), torch.nan), key, value], 1)
            key, value = memory[:, -2 * K : -K], memory[:, -K:]
        paged_ops.reshape_and_cache(key, value, self.store.kv_cache, slots, **self.of_cache)
        self.count("reshape_and_cache")

    # Batches ---------------------------------------------------------------------------------------------------------

    def draw_batches(
        self, C: int, T: int, S: int, first: int = 0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """C batches over sequences from ``first`` on: their sequences, lengths, rows ``[C, S]`` and tables."""
        W, rng = len(self.lens), self.rng
        which = np.zeros((C, S), dtype=np.int64)
        n, q = np.zeros((C, S), dtype=np.int64), np.zeros((C, S), dtype=np.int64)
        for c in range(C):
            kind = rng.choice(KINDS)
            live = 0 if kind == "empty" and rng.random() < 0.3 else rng.randint(1, S)
            left = T
            for s in range(live):
                w = rng.randrange(first, W)
                full = int(self.lens[w])
                length = full if rng.random() < 0.6 else rng.randint(1, full)
                if kind == "decode":
                    rows = 1
                elif kind == "speculative":
                    rows = min(length, rng.randint(2, 16))
                elif kind == "prefill":
                    rows = length
                elif kind == "chunked":
                    rows = rng.randint(1, length)
                elif kind == "past":
                    rows = length + rng.randint(0, 5)
                else:
                    rows = min(length, rng.choice((1, 1, 3, length)))
                if kind in ("holes", "empty") and rng.random() < 0.4:
                    rows = 0
                    length = rng.choice((0, length))
                rows = min(rows, left)
                which[c, s], n[c, s], q[c, s] = w, length, rows
                left -= rows
        tables = self.hostile_tables((C, S, self.M))
        columns = np.arange(self.M)
        needed = columns * self.setting.form.B < n[:, :, None]
        tables = np.where(needed, self.blocks[which], tables)
        return which, n, q, tables

    def draw_ranges(self, n: np.ndarray, q: np.ndarray) -> np.ndarray | None:
        """Ranges ``[C, S, Q, 2]`` about the rows of C batches, some of them padding; None where there are none."""
        if "bidirectional_ranges" not in self.on:
            return None
        shape = *n.shape, self.on["bidirectional_ranges"]
        first, last = (np.broadcast_to(each[:, :, None], shape) for each in (np.maximum(n - 2 * q - 9, 0), n + 3))
        start = self.np.integers(first, last)
        end = np.where(
            self.np.random(shape) < 0.5, self.np.integers(first, last), start + self.np.integers(0, 40, shape)
        )
        start = np.where(self.np.random(shape) < 0.1, self.np.choice([-1, -7, -(2**31), 2**31 - 1], shape), start)
        end = np.where(self.np.random(shape) < 0.1, self.np.choice([-1, 0, -(2**31), 2**31 - 1], shape), end)
        return np.stack([start, end], -1)

    def draw_selected(self, C: int, T: int) -> np.ndarray | None:
        """Distinct entries ``[C, T, G, k]`` of C batches with padding between them, some past their sequences; None
        where keys are not selected."""
        if "selected_keys" not in self.on:
            return None
        block, per_head, k = self.on["selected_keys"]
        G, blocks = self.setting.form.K if per_head else 1, -(-self.L // block) + 1
        entries = self.np.random((C, T, G, max(blocks, k))).argsort(-1)[..., :k]
        return np.where(self.np.random(entries.shape) < 0.2, self.np.choice([-1, -(2**31)], entries.shape), entries)

    def hostile_tables(self, shape: tuple[int, ...]) -> np.ndarray:
        hostile = np.array([2**30, -1, -(2**31), 2**31 - 1, self.store.N, 0])
        return hostile[self.np.integers(0, len(hostile), shape)]

    def queries(self, C: int, T: int, q: np.ndarray) -> list[Tensor]:
        """C queries, rows of padding NaN, as the setting lays them."""
        s = self.setting
        H, K, D = s.H, s.form.K, s.form.D
        live = self.put(np.arange(T) < q.sum(1)[:, None], torch.bool)[:, :, None, None]
        values = (self.numbers(C, T, H, D) * s.loud).to(s.dtype)
        values = torch.where(live, values, self.rng.choice((torch.nan, torch.inf)))
        heads = H + 2 * K if s.fused == "heads" else H
        width = D + 8 if s.fused == "tail" else D
        room = self.room(C, (T, heads, width), s.dtype)
        room[:, :, :H, :D] = values
        return [each[:, :H, :D] for each in room]

    def attention(self, T: int, S: int) -> None:
        s = self.setting
        C = self.num_calls(T)
        which, n, q, tables = self.draw_batches(C, T, S)
        starts = np.concatenate([np.zeros((C, 1), dtype=np.int64), q.cumsum(1)], 1)
        tables_ = self.batch_of(tables, torch.int32, s.table_step)
        step = 2 if s.misaligned else 1
        lens_, starts_ = self.batch_of(n, torch.int32, step), self.batch_of(starts, torch.int32, step)
        queries = self.queries(C, T, q)
        shape, out_dtype = (T, s.H, s.form.Dv), E4M3 if s.fp8_output else s.dtype
        into_out, into_lse = self.room(C, shape, out_dtype), self.room(C, shape[:2], torch.float32)
        outs, lses = [], []
        kinds = torch.ops.paged_ops
        ranges = self.draw_ranges(n, q)
        ranges_ = None if ranges is None else self.batch_of(ranges, torch.int32, step)
        selected = self.draw_selected(C, T)
        selected_ = None if selected is None else self.batch_of(selected, torch.int32, step)
        for c in range(C):
            arguments = (queries[c], self.store.kv_cache, tables_[c], lens_[c], starts_[c], s.scale)
            named = self.arguments
            if ranges_ is not None:
                named = {**named, "bidirectional_ranges": ranges_[c]}
            if selected_ is not None:
                named = {**named, "selected_keys": selected_[c]}
            given = self.rng.random() < 0.3
            if given and s.with_lse:
                kinds.paged_attention_with_lse.out(*arguments, **named, out=into_out[c], lse=into_lse[c])
                out, lse = into_out[c], into_lse[c]
            elif given:
                kinds.paged_attention.out(*arguments, **named, out=into_out[c])
                out, lse = into_out[c], into_lse[c]
            else:
                _poison(torch.empty(shape, dtype=out_dtype, device=self.device))  # what a fresh result finds
                result = self.attend(arguments, named)
                out, lse = result if isinstance(result, tuple) else (result, into_lse[c])
                if c == 0:
                    second = self.attend(arguments, named)
                    pairs = zip(_tuple(result), _tuple(second), strict=True)
                    differ = sum((_bits(a) != _bits(b)).sum() for a, b in pairs)
                    self.checks.append((f"attention {T, S}: not deterministic", torch.as_tensor(differ).double()))
                    self.count("attention")
            outs.append(out)
            lses.append(lse)
        self.count("attention", C)
        rows = self.rows_of(which, n, q, T)
        f = self.features
        if ranges is not None:
            of_nowhere = np.zeros((1, *ranges.shape[2:]), dtype=np.int64)
            of_rows = self.put(np.concatenate([ranges.reshape(C * S, -1, 2), of_nowhere]))[rows[3]]
            f = f._replace(ranges=of_rows, later="ranges_in_window" in self.on)
        if selected is not None:
            of_nowhere = np.full((1, *selected.shape[2:]), -1, dtype=np.int64)
            of_rows = np.concatenate([selected.reshape(C * T, *selected.shape[2:]), of_nowhere])
            f = f._replace(selected=self.put(of_rows)[rows[0]], block=self.on["selected_keys"][0])
        exact, plain = (self.expected(f, torch.stack(queries), rows, dtype) for dtype in self.dtypes())
        name = f"attention {T, S}"
        clean, sees = self.unreached(f, rows, C, T, S)
        self.compare(f"{name}: out", _stack(outs), exact[0], plain[0], exact[2], clean)
        saturates = s.fp8_output and self.poison == self.poison
        weighed = "value" in self.poison_in and (self.poison_in == "value" or self.poison != self.poison)
        apart = "block_sparse" in self.on or self.on.get("selected_keys", (1, False))[1]  # heads see different keys
        if sees is not None and weighed and not apart and not saturates:
            finite = (_stack(outs).view(E4M3 if s.fp8_output else s.dtype).float().isfinite()).flatten(2).any(2)
            self.checks.append((f"{name}: wrong, finite where NaN is seen", (finite & sees).sum().double()))
        if s.with_lse:  # float32 whatever the dtype of the query
            if s.dtype != torch.float32:
                plain = self.expected(f, torch.stack(queries), rows, torch.float32)
            slack = exact[2]
            # Keys times their scale are rounded to the query's dtype: in PyTorch's kernel for the CPU, and of rows.
            if s.form.rows or (self.case.options.device == "cpu" and s.dtype == torch.bfloat16):
                slack = slack * max(1.0, torch.finfo(s.dtype).eps / torch.finfo(torch.float32).eps / ULPS)
            self.compare_lse(f"{name}: lse", torch.stack(lses), exact[1], plain[1], slack, clean)

    def attend(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        function = paged_ops.paged_attention_with_lse if self.setting.with_lse else paged_ops.paged_attention
        return function(*arguments, **named)

    def num_calls(self, T: int) -> int:
        budget = LOGITS["cuda" if self.device.type == "cuda" else "cpu"]
        most = FEW_CALLS if self.case.options.device == INTERPRETER else 32
        return max(2, min(most, budget // (2 * T * self.setting.H * self.L)))

    def dtypes(self) -> list[torch.dtype]:
        """That of the truth, and that of the plain computation, by whose error the budget is measured."""
        return [torch.float64, self.setting.dtype]

    def rows_of(self, which: np.ndarray, n: np.ndarray, q: np.ndarray, T: int) -> tuple[Tensor, ...]:
        """Live rows by the sequence of the cache that they attend to: where they stand in ``[C * T]`` (the last is
        nowhere), their positions, the keys of their sequences, and which of ``[C * S]`` these are: each ``[W, R]``."""
        C, S = which.shape
        first = q.cumsum(1) - q
        c, s = (np.repeat(index.ravel(), q.ravel()) for index in np.indices((C, S)))
        r = np.arange(len(c)) - np.repeat(q.ravel().cumsum() - q.ravel(), q.ravel())
        at = c * T + first[c, s] + r
        i, keys, w = n[c, s] - q[c, s] + r, n[c, s], which[c, s]
        order = np.argsort(w, kind="stable")
        per = np.bincount(w, minlength=len(self.lens))
        column = np.arange(len(w)) - np.repeat(per.cumsum() - per, per)
        table = np.zeros((4, len(self.lens), max(int(per.max(initial=0)), 1)), dtype=np.int64)
        table[0], table[3] = C * T, C * S
        table[:, w[order], column] = np.stack([at, i, keys, c * S + s])[:, order]
        return self.put(table).unbind(0)

    def unreached(
        self, f: Features, rows: tuple[Tensor, ...], C: int, T: int, S: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Which rows ``[C, T]`` poison may not reach, and which see it themselves. On the CPU a row is reached by what
        it sees; elsewhere the rows of a sequence may share a tile, which a block-sparse pattern does not cut."""
        if not self.poison_in:
            return None, None
        at, i, n, group = rows

        def meet_poison(f: Features) -> Tensor:
            seen = truth.seen(f, i, n, self.L, self.setting.H, self.setting.form.K)
            return (seen & self.bad[:, None, None, None, :]).flatten(3).any(3).any(1)  # [W, R]

        sees = reached = meet_poison(f)
        if self.case.options.device != "cpu":
            near = meet_poison(f._replace(sparse=None))
            groups = torch.zeros(C * S + 1, dtype=torch.int64, device=self.device)
            reached = groups.index_add_(0, group.flatten(), near.flatten().long())[group] > 0
        result = []
        for flags in (reached, sees):
            by_row = torch.zeros(C * T + 1, dtype=torch.bool, device=self.device)
            by_row[at] = flags
            result.append(by_row[:-1].view(C, T))
        return ~result[0], result[1]

    def expected(
        self, f: Features, queries: Tensor, rows: tuple[Tensor, ...], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Out ``[C, T, H, Dv]`` and lse ``[C, T, H]`` of C batches, computed in ``dtype``, and how far off a logit in
        float32 may be."""
        at, i, n, _ = rows
        C, T, H, D = queries.shape
        nothing = torch.zeros(1, H, D, dtype=queries.dtype, device=self.device)
        q = torch.cat([queries.reshape(C * T, H, D), nothing])[at]
        out, lse, peak = truth.attend(f, q, self.key, self.value, i, n, dtype)
        all_out = torch.zeros(C * T + 1, H, out.shape[3], dtype=dtype, device=self.device)
        all_lse = torch.full((C * T + 1, H), -torch.inf, dtype=dtype, device=self.device)
        all_out[at], all_lse[at] = out, lse
        slack = ULPS * _ulp(torch.float32, peak.double())
        return all_out[:-1].view(C, T, H, -1), all_lse[:-1].view(C, T, H), slack

    def compare(
        self, name: str, got: Tensor, exact: Tensor, plain: Tensor, slack: Tensor, clean: Tensor | None = None
    ) -> None:
        """Twice the error of the plain computation, one ulp at the largest value, and what ``slack`` in the logits does
        to it; by call ``[C]``. ``clean``: the rows ``[C, T]`` that are compared."""
        off = plain.double() - exact
        inside = slack * self.largest
        budget = 2 * off.abs().amax() + _ulp(self.setting.dtype, self.largest) + inside
        if self.output_scale is None:
            error = got.double() - exact
            if clean is not None:
                error = torch.where(clean[:, :, None, None], error, 0.0)
            self.checks.append((name, error.abs().flatten(1).amax(1) / budget))
            # Over a head's elements a missing key shows in contexts where one ulp of the largest value would hide it.
            eps = torch.finfo(self.setting.dtype).eps
            budget = SHARP * _rms(off).amax() + eps * _rms(exact).amax() + inside
            self.checks.append((f"{name} (rms)", _rms(error).flatten(1).amax(1) / budget))
            return
        # Rounding keeps order: between what the ends of the budget become.
        low, high = (truth.fp8((exact + side * budget) / self.output_scale.double(), E4M3) for side in (-1, 1))
        real = got.view(E4M3).double()
        outside = ~((real >= low) & (real <= high))
        if clean is not None:
            outside &= clean[:, :, None, None]
        self.checks.append((f"{name} outside", outside.flatten(1).sum(1).double()))

    def compare_lse(
        self, name: str, got: Tensor, exact: Tensor, plain: Tensor, slack: Tensor, clean: Tensor | None = None
    ) -> None:
        finite = exact.masked_fill(exact == -torch.inf, 0.0)
        off = plain.double().masked_fill(exact == -torch.inf, 0.0) - finite
        budget = 2 * off.abs().amax() + ULPS * _ulp(torch.float32, finite.abs().amax().clamp(min=1.0)) + slack
        error = torch.where(got.double() == exact, 0.0, (got.double() - exact).abs())
        if clean is not None:
            error = torch.where(clean[:, :, None], error, 0.0)
        self.checks.append((name, error.flatten(1).amax(1) / budget))

    def cascade(self, T: int, S: int) -> None:
        """Sequence 0 is the prefix of all, or a part of it."""
        s = self.setting
        C = self.num_calls(T)
        which, n, q, tables = self.draw_batches(C, T, S, first=1)
        q = np.minimum(q, n)
        prefix = self.np.integers(0, self.lens[0] + 1, C)
        starts = np.concatenate([np.zeros((C, 1), dtype=np.int64), q.cumsum(1)], 1)
        prefix_tables = self.hostile_tables((C, 1, self.M))
        needed = np.arange(self.M) * s.form.B < prefix[:, None, None]
        prefix_tables = np.where(needed, self.blocks[0], prefix_tables)
        lists = [
            self.batch_of(prefix_tables, torch.int32, s.table_step),
            self.batch_of(prefix[:, None], torch.int32),
            self.batch_of(tables, torch.int32, s.table_step),
            self.batch_of(n, torch.int32),
            self.batch_of(starts, torch.int32),
        ]
        queries = self.queries(C, T, q)
        outs = [
            paged_ops.cascade_attention(
                queries[c], self.store.kv_cache, *(each[c] for each in lists), s.scale, **self.arguments
            )
            for c in range(C)
        ]
        self.count("cascade_attention", C)
        total = q.sum(1)[:, None]
        zeros = np.zeros((C, 1), dtype=np.int64)
        before = self.rows_of(zeros, prefix[:, None], total, T)
        after = self.rows_of(which, n, q, T)
        results, slack = [], torch.zeros(())
        for dtype in self.dtypes():
            no_sinks = self.features._replace(causal=False, sinks=None)
            prefixes = self.expected(no_sinks, torch.stack(queries), before, dtype)
            suffixes = self.expected(self.features, torch.stack(queries), after, dtype)
            results.append(truth.merge(*prefixes[:2], *suffixes[:2]))
            slack = torch.maximum(prefixes[2], suffixes[2]) if dtype == torch.float64 else slack
        self.compare(f"cascade_attention {T, S}: out", _stack(outs), results[0][0], results[1][0], slack)

    def gathers(self) -> None:
        s = self.setting
        C, S = 3, s.shapes[0][1]
        which, n, _, tables = self.draw_batches(C, 4 * self.L, S)
        tables_, lens_ = self.batch_of(tables, torch.int32, s.table_step), self.batch_of(n, torch.int32)
        for c in range(C):
            total = int(n[c].sum())
            capacity = max(0, total + self.rng.choice((0, 3, -1, -total // 2, -total)))
            dtype = self.rng.choice((torch.float32, torch.float16, torch.bfloat16) if s.fp8 else (s.dtype, None))
            if self.case.options.device == "cpu" and not s.fp8:
                dtype = self.rng.choice((dtype, torch.float32, torch.bfloat16))
            if self.case.options.device == INTERPRETER and dtype == torch.bfloat16:
                dtype = torch.float32  # it rounds to bfloat16 in its own way
            of_cache = {**self.of_cache, "dtype": dtype}
            got = paged_ops.gather_kv(self.store.kv_cache, tables_[c], lens_[c], capacity, **of_cache)
            w = np.repeat(which[c], n[c])
            j = np.arange(total) - np.repeat(n[c].cumsum() - n[c], n[c])
            at = self.put((w * self.L + j)[:capacity])
            for name, result, held in zip(("key", "value"), got, self.held, strict=True):
                want = held.flatten(0, 1)[at]
                if name == "value" and s.form.latent:
                    want = want[..., :0]
                if s.fp8:
                    want = want.float()  # the product with a scale is taken in float32
                want = want.to(dtype or s.dtype)
                differs = (result[: len(at)] != want) & ~(want.isnan() & result[: len(at)].isnan())
                wrong = differs.sum() + (result[len(at) :] != 0).sum()
                self.checks.append((f"gather_kv: wrong elements of {name}", wrong.double()))
                if result.dtype != want.dtype or len(result) != capacity:
                    self.case.report(f"gather_kv: {result.dtype} {list(result.shape)}")
        self.count("gather_kv", C)

    def merges(self) -> None:
        """Partial results with empty sides, whose outputs are NaN."""
        s = self.setting
        T, H, Dv = s.shapes[0][0], s.H, s.form.Dv
        C = 2
        outs = self.numbers(2, C, T, H, Dv).to(s.dtype)
        lses = self.numbers(2, C, T, H) * self.rng.choice((1.0, 10.0))
        gone = torch.rand(lses.shape, generator=self.dice, device=self.device) < self.rng.choice((0.0, 0.2, 0.5))
        lses = torch.where(gone, self.rng.choice((torch.inf, -torch.inf)), lses)
        outs = torch.where(gone[..., None], torch.nan, outs)
        if s.fused == "tail":
            outs = torch.cat([outs, outs], -1)[..., :Dv]
        got = [paged_ops.merge_attention_states(outs[0, c], lses[0, c], outs[1, c], lses[1, c]) for c in range(C)]
        self.count("merge_attention_states", C)
        exact = truth.merge(outs[0].double(), lses[0].double(), outs[1].double(), lses[1].double())
        plain = truth.merge(outs[0], lses[0], outs[1], lses[1])
        largest = outs.nan_to_num(0.0).abs().amax().double().clamp(min=1e-30)
        budget = 2 * (plain[0].double() - exact[0]).abs().amax() + _ulp(s.dtype, largest)
        error = (torch.stack([out for out, _ in got]).double() - exact[0]).abs().flatten(1).amax(1)
        self.checks.append(("merge_attention_states: out", error / budget))
        plain_lse = torch.logaddexp(*(each.masked_fill(each == torch.inf, -torch.inf) for each in lses))
        self.compare_lse(
            "merge_attention_states: lse",
            torch.stack([lse for _, lse in got]),
            exact[1],
            plain_lse,
            torch.zeros_like(largest),
        )

    def nothing(self) -> None:
        """Tensors without elements: writes do nothing, attention returns zeros."""
        s, rng = self.setting, self.rng
        T, S = (rng.choice((0, size)) for size in s.shapes[0])
        M = rng.choice((0, self.M))
        N = 0 if T and S and M else rng.choice((0, 2))
        store = Store(s.form, N, self.device, rng)
        query = torch.full((T, s.H, s.form.D), torch.nan, dtype=s.dtype, device=self.device)
        tables = torch.full((S, M), 2**30, dtype=torch.int32, device=self.device)
        zeros = torch.zeros(S + 1, dtype=torch.int32, device=self.device)
        named = {**self.arguments, **store.planes()}
        result = _tuple(self.attend((query, store.kv_cache, tables, zeros[1:], zeros, s.scale), named))
        wrong = (result[0].float() != 0).sum() + sum((lse != -torch.inf).sum() for lse in result[1:])
        of_cache = {**self.of_cache, **store.planes()}
        rows = query.new_full((T, s.form.K, s.form.D), 1.0), query.new_full((T, s.form.K, s.form.Dv), 1.0)
        slots = torch.full((T if N == 0 else 0,), -1, dtype=s.slot_dtype, device=self.device)
        if s.form.latent:
            rotated = rows[0][:, 0, s.form.Dv :]
            paged_ops.latent_cache_write(rows[1][:, 0], rotated, store.kv_cache, slots, **of_cache)
        else:
            paged_ops.reshape_and_cache(*rows, store.kv_cache, slots, **of_cache)
        key, value = paged_ops.gather_kv(store.kv_cache, tables, zeros[1:], T, dtype=s.dtype, **of_cache)
        wrong = wrong + (key != 0).sum() + (value != 0).sum() + store.wrong()
        empty = torch.zeros(0, 2, dtype=torch.int64)
        paged_ops.copy_blocks([], empty)
        paged_ops.copy_blocks(store.tensors(), empty)
        paged_ops.swap_blocks(store.tensors(), self.store.tensors(), empty)
        for name, calls in (("attention", 1), ("reshape_and_cache", 1), ("gather_kv", 1), ("copy_blocks", 2)):
            self.count(name, calls)
        self.count("swap_blocks")
        self.checks.append((f"nothing: wrong elements {(T, S, M, N)}", wrong.double()))

    # Blocks ----------------------------------------------------------------------------------------------------------

    def copies(self) -> None:
        """Copies inside the cache, out of it, back into it; every bit of both memories is compared."""
        rng, N = self.rng, self.store.N
        for _ in range(2):
            pairs = self.draw_pairs(N, N, disjoint=True)
            mapping = torch.from_numpy(pairs)
            if rng.random() < 0.5:
                mapping = mapping.to(self.device)
            paged_ops.copy_blocks(self.store.tensors(), mapping)
            self.store.expect_copies(self.store, self.put(pairs))
        self.count("copy_blocks", 2)
        self.check_memory("memory after copy_blocks", self.store)
        there = torch.device("cpu") if rng.random() < 0.5 else self.device
        other = Store(self.setting.form, rng.randint(1, N + 3), there, rng)
        out, back = self.draw_pairs(N, other.N), self.draw_pairs(other.N, N)
        held = self.store.expected
        if there.type != self.device.type:
            return self.swap_with_host(other, out, back)
        paged_ops.swap_blocks(self.store.tensors(), other.tensors(), torch.from_numpy(out))
        other.expect_copies(self.store, self.put(out))
        paged_ops.swap_blocks(other.tensors(), self.store.tensors(), torch.from_numpy(back))
        self.store.expect_copies(other, self.put(back))
        self.count("swap_blocks", 2)
        assert held is self.store.expected
        self.check_memory("memory after swap_blocks", self.store)
        self.check_memory("other memory after swap_blocks", other)

    def swap_with_host(self, other: Store, out: np.ndarray, back: np.ndarray) -> None:
        """The host's memory, pinned or not, is checked on the host: this waits for the device."""
        pin, held = self.rng.random() < 0.7, other.bits.clone()
        host = [_pinned(tensor) if pin else tensor for tensor in other.tensors()]
        paged_ops.swap_blocks(self.store.tensors(), host, torch.from_numpy(out))
        paged_ops.swap_blocks(host, self.store.tensors(), torch.from_numpy(back))
        self.count("swap_blocks", 2)
        # Through a twin on the device, that holds what the host should hold.
        twin = Store(self.setting.form, other.N, self.device, self.rng)
        twin.bits.copy_(held)
        twin.expected.copy_(held)
        twin.expect_copies(self.store, self.put(out))
        self.store.expect_copies(twin, self.put(back))
        self.check_memory("memory after swap_blocks with the host", self.store)
        torch.cuda.synchronize(self.device)
        for tensor, is_at in zip(host, twin.tensors(), strict=True):
            is_at.copy_(tensor)
        self.check_memory("host memory after swap_blocks", twin)

    def draw_pairs(self, N: int, M: int, disjoint: bool = False) -> np.ndarray:
        """Pairs (source of N, destination of M): no destination twice; disjoint: no block in both roles."""
        targets = self.np.permutation(M)[: self.rng.randint(0, min(M, 6))]
        sources = np.setdiff1d(np.arange(N), targets) if disjoint else np.arange(N)
        if not len(sources):
            return np.zeros((0, 2), dtype=np.int64)
        if self.rng.random() < 0.3:  # runs of neighbours
            first = self.rng.randrange(len(sources))
            picked = sources[(first + np.arange(len(targets))) % len(sources)]
            targets = np.sort(targets)
        else:
            picked = self.np.choice(sources, len(targets))
        return np.stack([picked, targets], 1)

    def check_memory(self, name: str, store: Store) -> None:
        self.checks.append((f"{name}: wrong elements", store.wrong(self.any_nan).double()))

    def read_checks(self) -> None:
        """The one look at the device."""
        numbers = torch.cat([ratio.reshape(-1) for _, ratio in self.checks]).tolist()
        sizes = [ratio.numel() for _, ratio in self.checks]
        found: dict[str, list[str]] = {}
        for (name, _), size, end in zip(self.checks, sizes, itertools.accumulate(sizes), strict=True):
            ratios = numbers[end - size : end]
            exact = any(word in name for word in ("wrong", "not deterministic", "outside"))
            bad = [f"call {c}: {ratio:.4g}" for c, ratio in enumerate(ratios) if not ratio <= (0.0 if exact else 1.0)]
            if bad:
                found.setdefault(name, []).extend(bad)
            if not exact:
                kind = f"{name.split()[0].rstrip(':')} {name.partition(': ')[2]} {str(self.setting.dtype)[6:]}"
                worst = max((ratio for ratio in ratios if ratio == ratio), default=0.0)
                self.case.worst[kind] = max(worst, self.case.worst.get(kind, 0.0))
        if found:
            lines = [f"{name}: {', '.join(bad[:6])}{', ...' * (len(bad) > 6)}" for name, bad in found.items()]
            self.case.report("\n".join([*lines, str(self.setting)]))


def _rms(error: Tensor) -> Tensor:
    return error.square().mean(-1).sqrt()


def _ulp(dtype: torch.dtype, at: Tensor) -> Tensor:
    """The distance of neighbouring numbers of ``dtype`` at a float64 magnitude on the device."""
    return torch.finfo(dtype).eps * truth.power_of_two(torch.frexp(at).exponent - 1)


def _poison(memory: Tensor) -> None:
    if memory.dtype.itemsize == 1:
        memory.view(torch.uint8).fill_(0x7F)
    else:
        memory.fill_(torch.nan)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(BITS[tensor.element_size()])


def _stack(outs: list[Tensor]) -> Tensor:
    if outs[0].dtype.itemsize == 1:
        return torch.stack([out.view(torch.uint8) for out in outs])
    return torch.stack(outs)


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _pinned(tensor: Tensor) -> Tensor:
    """The same strides in pinned memory."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    flat = tensor.as_strided((extent,), (1,)).clone().pin_memory()
    return flat.as_strided(tensor.shape, tensor.stride())
