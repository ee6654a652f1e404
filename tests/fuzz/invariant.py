"""Campaign: with ``batch_invariant`` the bits of a row are its own, whatever else the call has.

Each case computes the last rows of some sequences alone, and then again in other calls: with other sequences, in
another order, one token at a time or in chunks, over a cache with other blocks, another block size and layout, with
padding, into given outputs, with another number of threads, and captured in a graph on a GPU. Integer views of out and
lse must be equal. A third of the long sequences cross at least four cuts. Now and then a cut is moved in the calls of
single tokens: then bits must differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import paged_ops
from paged_ops import cpp
from paged_ops.lowerings.cpu import fused
from paged_ops.lowerings.cpu import invariant as on_cpu

from .caches import BITS, FORMS, LATENT_FORMS, ROW_FORM, Form, Store
from .runner import INTERPRETER, Case

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HEADS = ((1, 1), (1, 7), (2, 4), (3, 5), (4, 2), (1, 16), (8, 1), (2, 1), (1, 33))  # K, G
SIZES = (8, 13, 16, 24, 32, 40, 64, 64, 80, 128, 128, 256)
FEATURES: tuple[dict[str, Any], ...] = (
    *({}, {}, {}, {"sliding_window": 13}, {"sliding_window": 700}, {"sliding_window": 90, "num_first_tokens": 70}),
    *({"attention_chunk": 48}, {"soft_cap": 2.0}, {"alibi_slopes": True}, {"sinks": True}),
    *({"bidirectional_ranges": True}, {"block_sparse": [64, 2, 3, 0, 0, 0, 1]}, {"causal": False}),
    {"sliding_window": 300, "num_first_tokens": 5, "attention_chunk": 900, "soft_cap": 5.0, "sinks": True},
    {"bidirectional_ranges": True, "sliding_window": 40, "alibi_slopes": True},
)
PLANTED = 16  # one case of so many moves a cut
PROCESSORS = 132  # of the largest Hopper GPU


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all calls of a case share: all that a row's bits may depend on, and how a GPU's caches lie."""

    dtype: torch.dtype
    kind: torch.dtype  # of the cache
    latent: str  # "", "plain" or "rows" (which hold their scales)
    K: int
    G: int
    D: int
    Dv: int
    features: dict[str, Any]
    path: str  # of the CPU: "fused" or "torch"
    scaled: bool
    forms: tuple[Form, ...]  # of the caches

    @staticmethod
    def draw(rng: random.Random, device: str, plain: bool) -> Setting:
        dtype = rng.choice((torch.float32, torch.float16, torch.bfloat16)[: 2 if device == INTERPRETER else 3])
        dtype = torch.float32 if plain else dtype  # which shows the last bits
        kind = rng.choice((dtype, dtype, dtype, E4M3, E5M2))
        latent = "" if plain else rng.choice(("", "", "", "", "plain", "rows"))
        (K, G), D = rng.choice(HEADS), rng.choice(SIZES)
        Dv = D
        if latent:
            K, G = 1, K * G
            D, Dv = (576, 512) if latent == "rows" else rng.choice(((40, 32), (72, 64), (576, 512), (13, 13)))
            kind = E4M3 if latent == "rows" else kind
        names = (ROW_FORM,) if latent == "rows" else LATENT_FORMS if latent else FORMS
        forms = []
        while len(forms) < 3:
            name, B = rng.choice(names), rng.choice((1, 8, 16, 32, 64))
            if name != "x_packed" or D % (16 // kind.itemsize) == 0:
                forms.append(Form.draw(rng, name, B, K, D, Dv, kind))
        features = {} if plain else rng.choice(FEATURES)
        path = "fused" if device != "cpu" or rng.random() < 0.75 else "torch"
        return Setting(dtype, kind, latent, K, G, D, Dv, features, path, rng.random() < 0.5, tuple(forms))

    def cut(self, device: str) -> int:
        """Keys of a segment."""
        if device != "cpu":
            *hopper, triton = with_cuts(device)
            if hopper and self.has_hopper_kernel():
                return hopper[0].SEGMENT if self.K >= hopper[0].FEW_HEADS else hopper[0].SHORTEST
            return triton.SEGMENT
        fits = "block_sparse" not in self.features and self.latent != "rows"
        return 512 if self.path == "fused" and fits and fused.compiled() is not None else on_cpu.SEGMENT

    def has_hopper_kernel(self) -> bool:
        """Whether it is of the kinds that hopper/invariant.py serves."""
        plain = self.features.keys() <= {"causal"} and self.G <= 64
        stored = self.kind == self.dtype or (self.kind in (E4M3, E5M2) and (self.K == 1 or not self.scaled))
        return plain and stored and self.dtype != torch.float32 and self.D == self.Dv in (64, 128)

    def may_have_decoders(self, device: str) -> bool:
        """Whether hopper/invariant_mixed.py computes some of its batches, if TMA can address the cache."""
        return (
            device != "cpu"
            and len(with_cuts(device)) > 1
            and self.has_hopper_kernel()
            and self.dtype == self.kind
            and self.G <= 8
        )


@dataclasses.dataclass
class Sequence:
    """Tokens of one sequence, and the bits of its last rows."""

    n: int
    key: Tensor
    value: Tensor
    query: Tensor  # of the last rows
    ranges: list[tuple[int, int]]
    bits: tuple[Tensor, Tensor] | None = None


def run(case: Case) -> None:
    with torch.no_grad():
        Rows(case, planted=case.number % PLANTED == PLANTED - 1).run()


class Rows:
    def __init__(self, case: Case, planted: bool) -> None:
        options = case.options
        number = case.number % options.variants if options.variants else case.number
        fixed = random.Random(f"invariant/{options.seed}/{number}")
        self.case, self.rng, self.device, self.planted = case, case.random, case.device, planted
        self.s = s = Setting.draw(fixed, options.device, planted)
        self.dice = case.generator()
        self.H, self.cut = s.K * s.G, s.cut(options.device)
        self.whole = s.features.get("causal") is False or "bidirectional_ranges" in s.features
        scales = self.randn(s.K if s.scaled and not s.latent else 1).abs() * 0.02 + 0.01
        self.scales: dict[str, Tensor] = {}
        if s.kind.itemsize == 1 and s.latent != "rows":
            self.scales = {"k_scale": scales} if s.latent else {"k_scale": scales, "v_scale": scales.flip(0)}
        few = options.device == INTERPRETER
        self.sequences = [self.sequence(few) for _ in range(self.rng.choice((1, 2, 3) if few else (1, 2, 3, 5)))]
        self.heads = {"alibi_slopes": self.randn(self.H) * 0.1, "sinks": self.randn(self.H)}
        self.op = self.attention()

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.dice).to(self.device)

    def sequence(self, few: bool) -> Sequence:
        s, rng = self.s, self.rng
        n = rng.choice((rng.randint(1, 70), rng.randint(1, 2 * self.cut)))
        if self.planted or rng.random() < 1 / 3:
            n = rng.randint(4 * self.cut + 1, 5 * self.cut + 40)
            self.case.counts["long sequences"] += 1
        self.case.counts["sequences"] += 1
        rows = min(n, rng.choice((1, 3, 9)) if few else rng.choice((1, 3, 40, 90, 200, n if n < 500 else 300)))
        key = self.randn(n, s.K, s.D).to(s.dtype)
        value = key[:, :, : s.Dv] if s.latent else self.randn(n, s.K, s.Dv).to(s.dtype)
        query = self.randn(rows, self.H, s.D).to(s.dtype)
        ranges = [sorted((rng.randint(0, n), rng.randint(0, n))) for _ in range(2)]
        return Sequence(n, key, value, query, [(a, b) for a, b in ranges])

    def attention(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """The op of this case's device."""
        if self.case.options.device == INTERPRETER:
            from paged_ops.lowerings import gpu

            return gpu.paged_attention_with_lse
        return torch.ops.paged_ops.paged_attention_with_lse.default

    def run(self) -> None:
        path: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.case.options.device == INTERPRETER:
            path = ordered_matmuls()
        elif self.s.path == "torch":
            path = mock.patch.object(fused, "compiled", return_value=None)
        with path:
            for sequence in self.sequences:
                self.call([(sequence, sequence.n, len(sequence.query))], alone=True)
            wrong = sum(self.call(self.company()) for _ in range(self.rng.choice((2, 3, 4))))
            if self.planted:
                ends = [(each, each.n - row) for each in self.sequences for row in range(min(5, len(each.query)))]
                wrong += sum(self.call([(each, end, 1)]) for each, end in ends)
        if self.planted and not wrong:
            self.case.report(f"a cut was moved and no bit changed: {self.s}")
        self.case.counts["planted"] += self.planted

    def company(self) -> list[tuple[Sequence, int, int]]:
        """Sequences of a batch, each with the number of its tokens and of its new ones."""
        chosen = self.rng.choices(self.sequences, k=self.rng.choice((1, len(self.sequences), 2 * len(self.sequences))))
        one = self.rng.random() < 0.3  # a step of a decode
        batch = []
        for each in chosen:
            rows = len(each.query)
            end = each.n if self.whole else each.n - self.rng.randrange(rows)
            most = rows - (each.n - end)
            batch.append((each, end, 1 if one else self.rng.choice((1, most, self.rng.randint(1, most)))))
        return batch

    def call(self, batch: list[tuple[Sequence, int, int]], alone: bool = False) -> int:
        """Compute rows of a batch; keep their bits, or compare them with those that were kept: the number of rows that
        differ."""
        s, rng = self.s, self.rng
        form = rng.choice(s.forms)
        B = form.B
        of = [-(-each.n // B) for each, _, _ in batch]
        S, M = len(batch) + rng.choice((0, 0, 1, 3)), max(of) + rng.choice((0, 1, 5))
        T = sum(q for _, _, q in batch) + rng.choice((0, 0, 1, 20))
        if s.may_have_decoders(self.case.options.device) and rng.random() < 0.4:
            # Sizes of a prompt with decodes beside it; also without one, as only the device knows the lengths.
            S, T = S + 16, max(T, 128 * -(-PROCESSORS // s.K) // s.G + 16 * (S + 16))
            self.case.counts["calls with decoders"] += 1
        N = sum(of) + rng.choice((1, 2, 7))
        store = Store(form, N, self.device, rng)
        ids, named = rng.sample(range(N), N), {"kv_cache_dtype": self.name(form)}
        tables = torch.full((S, M), rng.choice((N - 1, 2**30)) if self.device.type == "cpu" else 0, dtype=torch.int32)
        query = self.randn(T, self.H, s.D).to(s.dtype)
        starts, lens, ranges = [0], [0] * S, torch.full((S, 2, 2), -1, dtype=torch.int32)
        for n, (each, end, q) in enumerate(batch):
            blocks = [ids.pop() for _ in range(of[n])]
            tables[n, : len(blocks)] = torch.tensor(blocks)
            slots = torch.tensor([blocks[j // B] * B + j % B for j in range(each.n)], device=self.device)
            self.write(store, each, slots, named)
            row = len(each.query) - (each.n - end)
            query[starts[-1] : starts[-1] + q] = each.query[row - q : row]
            starts.append(starts[-1] + q)
            lens[n], ranges[n] = end, torch.tensor(each.ranges)
        starts += [starts[-1]] * (S - len(batch))
        ints = [torch.tensor(each, dtype=torch.int32, device=self.device) for each in (lens, starts)]
        features = dict(s.features, **self.scales, **named, **store.planes(), batch_invariant=True)
        features |= {name: value for name, value in self.heads.items() if name in features}
        if "bidirectional_ranges" in features:
            features["bidirectional_ranges"] = ranges.to(self.device)
        if s.latent:
            features["value_head_size"] = s.Dv
        arguments = (query, store.kv_cache, tables.to(self.device), *ints, s.D**-0.5)
        moves = self.planted and not alone and starts[-1] <= S
        with moved_cut(self.case.options.device, s.path) if moves else contextlib.nullcontext():
            out, lse = self.computed(arguments, features)
        self.case.counts["calls"] += 1
        return sum(
            self.compare(each, end, q, out[a : a + q], lse[a : a + q], alone)
            for (each, end, q), a in zip(batch, starts, strict=False)
        )

    def computed(self, arguments: tuple[Any, ...], features: dict[str, Any]) -> tuple[Tensor, Tensor]:
        threads = torch.get_num_threads()
        if self.device.type == "cpu":
            torch.set_num_threads(self.rng.choice((1, 1, 2, 3)))
        try:
            if self.device.type == "cuda" and self.rng.random() < 0.3 and not self.planted:
                return self.replayed(arguments, features)
            return self.op(*arguments, **features)
        finally:
            torch.set_num_threads(threads)

    def replayed(self, arguments: tuple[Any, ...], features: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Captured in a graph and replayed."""
        self.op(*arguments, **features)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = self.op(*arguments, **features)
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        self.case.counts["replays"] += 1
        return results

    def name(self, form: Form) -> str:
        if form.rows:
            return "fp8_ds_mla"
        return "auto" if not form.as_bytes else {E4M3: "fp8_e4m3", E5M2: "fp8_e5m2"}[form.kind]

    def write(self, store: Store, each: Sequence, slots: Tensor, named: dict[str, Any]) -> None:
        scales = dict(self.scales)
        if store.form.latent:
            rows = each.key[:, 0].split([self.s.Dv, self.s.D - self.s.Dv], 1)
            self.writer("latent_cache_write")(*rows, store.kv_cache, slots, **scales, **named)
        else:
            planes = store.planes()
            self.writer("reshape_and_cache")(each.key, each.value, store.kv_cache, slots, **planes, **scales, **named)

    def writer(self, name: str) -> Callable[..., None]:
        return getattr(paged_ops, name)

    def compare(self, each: Sequence, end: int, q: int, out: Tensor, lse: Tensor, alone: bool) -> int:
        got = tuple(view.contiguous().view(BITS[view.element_size()]) for view in (out, lse))
        if alone:
            each.bits = (got[0].clone(), got[1].clone())
            return 0
        assert each.bits is not None
        row = len(each.query) - (each.n - end)
        pairs = zip(got, (bits[row - q : row] for bits in each.bits), strict=True)
        wrong = [(a != b).flatten(1).any(1) for a, b in pairs]
        either = wrong[0] | wrong[1]
        self.case.counts["planted rows" if self.planted else "rows"] += q
        number = int(either.sum())
        if number and not self.planted:
            outs, lses = (int(each.sum()) for each in wrong)
            self.case.report(f"{number} of {q} rows differ ({outs} in out, {lses} in lse), {end} keys: {self.s}")
        return number


def ordered_matmuls() -> contextlib.AbstractContextManager[Any]:
    """Triton's interpreter with matmuls that add in one order. A row's bits in numpy's depend on its place."""
    import numpy as np

    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
        for k in range(a.shape[-1]):
            total += a[..., k, None].astype(dtype) * b[..., None, k, :].astype(dtype)
        return total

    return mock.patch.object(np, "matmul", matmul)


def with_cuts(device: str) -> tuple[Any, ...]:
    """The modules of GPU kernels that have segments, those for Hopper first."""
    from paged_ops.lowerings.gpu import target
    from paged_ops.lowerings.gpu.attention.triton import invariant

    if device == INTERPRETER or not target.target_of(torch.device(device, 0)).has_hopper_gluon:
        return (invariant,)
    from paged_ops.lowerings.gpu.attention.hopper import invariant as hopper

    return hopper, invariant


@contextlib.contextmanager
def moved_cut(device: str, path: str) -> Iterator[None]:
    """Segments of another length."""
    if device != "cpu":
        from paged_ops.lowerings.gpu.attention import call

        call.forget()
        with contextlib.ExitStack() as patched:
            for each in with_cuts(device):
                for name in {"SEGMENT", "SHORTEST"} & vars(each).keys():
                    patched.enter_context(mock.patch.object(each, name, getattr(each, name) // 2))
            yield
        call.forget()
    elif path == "torch" or fused.compiled() is None:
        with mock.patch.object(on_cpu, "SEGMENT", on_cpu.SEGMENT // 2):
            yield
    else:
        with mock.patch.object(fused, "compiled", return_value=other_function()):
            yield


@functools.cache
def other_function() -> Callable[[Any], int]:
    """The C++ function with segments of another length."""
    folder = Path(tempfile.mkdtemp(prefix="paged_ops_fuzz_"))
    for path in fused.SOURCE.parent.iterdir():
        if path.suffix in (".cpp", ".h"):
            text = path.read_text()
            if path.name == "invariant.h":
                assert "SEGMENT = 512;" in text
                text = text.replace("SEGMENT = 512;", "SEGMENT = 256;")
            (folder / path.name).write_text(text)
    source = fused.ATTENTION._replace(path=folder / fused.SOURCE.name)
    flags = fused.FLAGS.get(torch.backends.cpu.get_cpu_capability(), ())
    try:
        return cpp.load(source, ["c++"], flags, folder)
    finally:
        shutil.rmtree(folder)
