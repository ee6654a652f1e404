"""The sizes of the attention kernels' tiles and the number of programs: tuned numbers, which are data."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from paged_ops.lowerings.gpu.spec import SLICE, Division, Spec, TileShape, can_slice, divide_heads, has_adjacent_heads
from paged_ops.lowerings.gpu.target import Target

LARGEST_HEAD = 512
# The widest heads of which a tile takes any number of rows, and the most query heads of a tile of wider ones.
WIDEST, MOST_OF_WIDE = 256, 32
# The number of programs where there is no device to ask (Triton's interpreter).
INTERPRETER_PROGRAMS = 5
# Up to this many packed query rows per sequence, batches of equal lengths have their own tiles.
SAME_LENGTH = 64
# The fewest rows of a tile that warpgroups multiply on sm_90 (wgmma).
WARPGROUP_ROWS = 64
# The most packed query rows of sliced tiles: with more, a warp's accumulators would fill its registers.
SLICED_ROWS = 8
# Parts that split_kernel's programs merge at a time.
FAN = 16


def power_of_2(n: int) -> int:
    """The least that is n or more. Triton's own function takes a hundred times as long, as kernels can call it."""
    return 1 << max(n - 1, 0).bit_length()


class Tile(NamedTuple):
    """The tile of one kernel: packed query rows, keys, and how Triton compiles it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int = 0  # 0: no bound; only CUDA takes one

    def options(self, is_cuda: bool) -> dict[str, int]:
        """The options of a launch, by Triton's names."""
        bound = {"maxnreg": self.max_registers} if self.max_registers and is_cuda else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **bound}


class Tiles(NamedTuple):
    """What one call launches: the same for all batches of its shapes."""

    split: Tile
    slices: int  # of a key tile of split_kernel; 0: its tiles are whole
    heads: int  # key/value heads of a unit of split_kernel
    prefill: Tile
    programs: int  # of split_kernel
    all_split: bool  # whether split_kernel serves sequences of every length, except those that hopper/dense.py takes


def padded(size: int, itemsize: int) -> int:
    """A head size as matrix instructions take it. With fp8 values of 32, Triton 3.6 reads past the end of shared
    memory."""
    return max(64 if itemsize == 1 else 16, power_of_2(size))


def padded_values(D: int, Dv: int, itemsize: int) -> int:
    """A value head size as warpgroups' matrix instructions take it: as wide as the keys, up to 128 bytes.

    If caches are not aligned to 16 bytes, keys and values pass through the same shared memory. If values are narrower
    there, ptxas (seen in triton 3.6 and 3.7) computes their addresses from registers that nothing has set: illegal
    accesses and wrong results.
    """
    return max(padded(Dv, itemsize), min(padded(D, itemsize), 128 // itemsize))


def too_large(D: int | None, Dv: int | None) -> list[str]:
    """Why no tile holds heads of these sizes; None: not known."""
    sizes = {"head_size": D, "value_head_size": Dv}
    return [f"{name}: at most {LARGEST_HEAD}, got {size}" for name, size in sizes.items() if (size or 0) > LARGEST_HEAD]


def fit_heads(spec: Spec) -> Spec:
    """The spec with so few query heads per key/value head that a tile holds their rows."""
    wide = max(spec.k_side.size, spec.v_side.size) > WIDEST
    return divide_heads(spec, MOST_OF_WIDE) if wide and spec.rotated is None else spec


def shape(
    tile: Tile, spec: Spec, *, slices: int = 0, paired: bool = False, heads: int = 1, has_values: bool = True
) -> TileShape:
    """The shape of a kernel's tile. ``has_values``: the kernel loads values, and warpgroups multiply them if the
    tile has enough rows."""
    D, Dv, itemsize = spec.k_side.size, spec.v_side.size, spec.storage.dtype.itemsize
    wide = has_values and tile.block_m >= WARPGROUP_ROWS
    value_size = padded_values(D, Dv, itemsize) if wide else padded(Dv, itemsize)
    # Conversion leaves queries in registers, where those of wide heads do not fit; loaded ones are in shared memory.
    converts = D <= WIDEST
    paired = paired and converts
    return TileShape(tile.block_m, tile.block_n, padded(D, itemsize), value_size, slices, paired, heads, converts)


def division(rows: int, S: int, short: int = -1, everyone: bool = False) -> Division:
    """The division of a batch of S sequences: a program counts some of them in one vector."""
    at_once = min(max(64, power_of_2(S)), 1024)
    return Division(rows, everyone, short, at_once, -(-S // at_once))


def by_warps(division: Division) -> Division:
    """The same for few sequences, which a warp counts by itself, in two vectors."""
    return division._replace(at_once=32, times=2) if division.at_once == 64 else division


def programs_apart(K: int, programs: int) -> int:
    """The largest multiple of K key/value heads up to ``programs``, so that adjacent programs take the same tiles of
    all heads; 0 if there is one head, or if more than 5% of the programs would be idle."""
    taking = programs // K * K
    return taking if K > 1 and 20 * taking >= 19 * programs else 0


def whole_units(T: int, S: int, K: int, programs: int, target: Target) -> int:
    """So many programs, two or more on each multiprocessor, may take one whole unit each; 0: units are too few or too
    many. Only for numbers of sequences that :func:`covering_batches` has."""
    if T == S == power_of_2(S) and target.is_hopper:
        for on_each in range(2, programs // target.processors + 1):
            taking = on_each * target.processors
            if S * K <= taking <= 1.05 * S * K:
                return taking
    return 0


def fan_of(tiles: Tiles, spec: Spec, target: Target, S: int) -> int:
    """How many parts split_kernel's own programs merge at a time, if units of equal lengths have between three parts
    and FAN, see split_merge.py; 0: merge_kernel merges them.

    Measured on an H200 (benchmarks/notes/gpu-designs.md): with fewer parts a program often merges two units, and with
    many, or large ones, one program takes longer than many do. Nothing was measured on other GPUs, and Triton 3.7
    does not compile it for ROCm (a pointer that changes in a loop).
    """
    fast = target.is_hopper and tiles.slices and spec.storage.dtype.itemsize == 2
    units = S * spec.K // tiles.heads
    return FAN if fast and 3 * units <= tiles.programs <= FAN * units else 0


def rows_of(T: int, S: int, G: int) -> tuple[int, bool]:
    """The packed query rows of a tile for T rows in S sequences, and whether all sequences may have equally many.

    Decode and speculation: a tile holds the rows of a sequence, if all sequences have equally many. Only the device
    knows whether they have. So split_kernel also takes longer ones, instead of a prefill_kernel that mostly does
    nothing. Otherwise one token each; if there are more tokens than sequences, up to 16 rows.
    """
    group = power_of_2(G)
    rows = power_of_2(-(-T // S) * group)
    if T % S == 0 and rows <= max(SAME_LENGTH, group):
        return rows, True
    return group if T <= S else max(16, group), False


def tiles_of(spec: Spec, target: Target, T: int, S: int) -> Tiles:
    """:func:`choose_tiles` for a call."""
    D, Dv, masks = spec.k_side.size, spec.v_side.size, spec.masks
    form = masks.sparse, can_slice(spec), spec.K if has_adjacent_heads(spec) else 0
    return choose_tiles(spec.dtype, spec.storage.dtype, T, S, spec.G, D, Dv, target, *form)


@functools.lru_cache(maxsize=4096)
def choose_tiles(
    dtype: torch.dtype,
    stored: torch.dtype,
    T: int,
    S: int,
    G: int,
    D: int,
    Dv: int,
    target: Target,
    sparse: bool = False,
    sliceable: bool = False,
    adjacent: int = 0,
) -> Tiles:
    """The tiles for T rows in S sequences. Lengths are not known: any batch of these shapes is computed correctly.

    ``sliceable``: see :func:`~paged_ops.lowerings.gpu.spec.can_slice`. ``adjacent``: the number of key/value heads
    if :func:`~paged_ops.lowerings.gpu.spec.has_adjacent_heads`, else 0.
    """
    group = power_of_2(G)
    rows, same = rows_of(T, S, G)
    kind, width = element_kind(dtype, stored), str(padded(max(D, Dv), stored.itemsize))
    on_cpu = target.device.type == "cpu"
    numbers = {} if on_cpu else target.tiles
    sliced = sliceable and rows <= SLICED_ROWS and (on_cpu or width in numbers.get("slices", {}).get(kind, {}))
    least_units, *two_heads = numbers.get("two_heads", {}).get(kind, {}).get(width, (0,))
    together = two_heads and sliced and same and 2 * rows <= SLICED_ROWS and S * adjacent >= max(least_units, 1)
    split_m = max(SLICED_ROWS if sliced else 16, rows)
    all_split = same or T * G <= split_m
    if on_cpu:
        split = Tile(split_m, 32 if sliced else 16, 4, 1)
        prefill, programs = Tile(max(32, group), 16, 4, 1), INTERPRETER_PROGRAMS
    else:
        of_split = two_heads if together else numbers["slices" if sliced else "split"][kind][width]
        split_n, split_warps, split_stages, per_sm, *bound = of_split
        prefill_m, prefill_n, *prefill_rest = numbers["prefill"][kind][width]
        if int(width) > WIDEST and (split_m + 3 * split_n) * int(width) * dtype.itemsize > target.shared_memory:
            split_stages = min(split_stages, 2)
        split = Tile(split_m, split_n, split_warps, split_stages, *bound)
        if sparse:  # whole tiles are skipped, and stepping to the next one needs registers, which larger tiles use up
            prefill_n = min(prefill_n, 64)
        if group > prefill_m:
            prefill_n = min(prefill_n, 32)
        prefill = Tile(max(prefill_m, group), prefill_n, *prefill_rest)
        if split_m >= 64:  # the rows of a prefill tile; the table was not tuned for them
            split_n = min(split_n, 32)
            stage, queries = (rows * int(width) * dtype.itemsize for rows in (2 * split_n, split_m))
            one_fits = split_m > 64 or int(width) > 128  # one program per multiprocessor; else two share its memory
            space = target.shared_memory // (1 if one_fits else 2) - 3 * queries
            split = Tile(split_m, split_n, 8 if one_fits else 4, max(1, min(split_stages, space // stage)))
        programs = per_sm * target.processors
    slices = min(split.block_n // SLICE, split.num_warps) if sliced else 0
    return Tiles(split, slices, 2 if together else 1, prefill, programs, all_split)


def latent_tile(spec: Spec, target: Target, T: int, S: int) -> tuple[Tile, int]:
    """The tile and the number of programs of latent.py for T rows of H heads in S sequences. fp8 rows that hold their
    scales have tiles of their own: the scales take registers."""
    rows = max(16, power_of_2(-(-T // S)) * power_of_2(spec.heads))
    if target.device.type == "cpu":
        return Tile(min(rows, 64), 16, 4, 1), INTERPRETER_PROGRAMS
    kind = element_kind(spec.dtype, spec.storage.dtype)
    numbers = target.tiles["latent"]["rows" if kind == "fp8" and spec.storage.row_scales else kind]
    M = min(rows, max(map(int, numbers)))
    N, warps, stages, per_sm = numbers[str(M)]
    # Block ids are loaded first, which on CUDA takes every second stage.
    tiles = (stages - 1) // 2 if target.backend == "cuda" else stages - 1
    if (M + N * max(tiles, 1)) * spec.k_side.size * spec.dtype.itemsize > target.shared_memory:
        N, stages = 16, min(stages, 2)
    return Tile(M, N, warps, stages), per_sm * target.processors


def covering_batches(most_tokens: int, most_sequences: int, equal_lengths: bool = True) -> list[tuple[int, int]]:
    """Batches (T, S) that together launch every kernel of any batch up to these sizes.

    Sizes that the kernels' ``plan`` functions distinguish: S by powers of two, and between a few and many; T by equal
    lengths, by fewer rows than sequences, and by unequal lengths with few and with many tiles of query rows. Once these
    batches have run, no later batch waits for a compiler.

    ``equal_lengths`` False leaves out batches whose sequences may all have the same number of tokens, above one, and
    batches of fewer rows than sequences. Such batches are rare unless they are planned, and need half of all kernels.
    """
    edges = [1, 2, 3, *(8 << n for n in range(max(most_sequences, 64).bit_length()))]
    counts = {S for edge in edges for S in (edge, edge + 1) if S < most_sequences} | {most_sequences}
    # The shortest length for each number of packed rows, which are powers of two.
    lengths = [(1 << n) + 1 for n in range(SAME_LENGTH.bit_length() - 1)]
    batches = set()
    for S in counts:
        unequal = [S + 1, 3 * S + 1, 1 << (most_tokens.bit_length() - 1), most_tokens - 1, most_tokens]
        if equal_lengths:
            chosen = [S, S - 1, *(S * length for length in lengths), *unequal]
        else:
            chosen = [S, *(T for T in unequal if T % S or T > SAME_LENGTH * S)]
        batches |= {(T, S) for T in chosen if 0 < T <= most_tokens}
    return sorted(batches, reverse=True)


def equal_lengths(spec: Spec) -> set[int]:
    """Tokens per sequence, above one, with which ``batch_invariant`` calls take different tiles if all sequences have
    equally many: over fp8 caches these are tiles of 8, 16 and 64 packed query rows."""
    most = () if spec.storage.dtype == spec.dtype else (8, 16, SAME_LENGTH)
    return {2, *(max(2, rows // power_of_2(spec.G)) for rows in most)}


def element_kind(dtype: torch.dtype, stored: torch.dtype) -> str:
    """The row of a table, by the query's dtype and the cache's dtype as kernels read it (uint8: fp8 as bits)."""
    if dtype == torch.float32:
        return "fp32"
    if stored == torch.uint8:
        return "bits"
    return "fp8" if stored.itemsize == 1 else "16bit"
