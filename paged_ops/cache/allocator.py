"""The blocks of each sequence: allocation, sharing, copy-on-write, and swapping to the host.

Paged memory with copy-on-write and preemption by swapping is the idea of PagedAttention (Kwon et al. 2023,
arXiv:2309.06180); the reuse of full prefix blocks, idle ones in least-recently-used order, comes from vLLM's
automatic prefix caching and RadixAttention (SGLang, Zheng et al. 2023, arXiv:2312.07104).

Letters: N blocks, B tokens per block.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from paged_ops.cache.block_pool import BlockPool, CacheStats, most_blocks_kept, num_first_blocks
from paged_ops.cache.block_pool import OutOfBlocks as OutOfBlocks
from paged_ops.cache.lock import CacheLock
from paged_ops.cache.prefixes import Prefix, PrefixIndex, servable_lengths
from paged_ops.checks import as_token_ids, at_least, flag, integers, is_integer
from paged_ops.masks import oldest_key


@dataclass(slots=True)
class _Sequence:
    tokens: list[int]
    blocks: list[int]  # of the device pool or, when swapped, of the host pool
    num_computed: int  # tokens whose keys and values an issued step wrote
    num_reserved: int  # tokens that have slots, computed ones included
    prefixes: list[Prefix]  # the root, then one for each full block of computed tokens
    num_freed: int = 0  # blocks freed, counted from the one after the first tokens; `blocks` does not have them
    swapped: bool = False


class BlockAllocator:
    """The blocks of each sequence: only bookkeeping, in plain Python without tensors.

    A sequence has tokens (reserved slots, in order); the first ``num_computed_tokens`` are written. Two kinds of blocks
    are shared:

    - All blocks of a fork and its parent. The first of them that appends to a shared last block gets a new block, and a
      copy is queued.
    - Full blocks of *committed* tokens, between sequences whose tokens up to there, and whose ``extra_key``, are equal.
      Blocks that a step has yet to write are not found, so no sequence attends to missing tokens.

    With a ``sliding_window`` w or an ``attention_chunk`` c (0 is none) each layer sees no further than that: the query
    at position i sees the keys j > i - w, and the keys of its own chunk, j // c = i // c. Then a commit frees the
    blocks that no later token can see; with a window, the blocks of the first ``num_first_tokens`` stay. Kernels may
    read masked keys, so the block table names the oldest block within reach in place of freed ones. A prefix is shared
    if the cache has all blocks that its end sees. The slots of a prompt can be reserved in parts (``first_chunk``,
    ``reserve``), so that it may be longer than the cache.

    Work is assumed to run in the order of its issue (one stream): a step sees all writes of earlier steps. Methods
    raise ``ValueError`` for a ``seq_id`` that is unknown, swapped out, or not new where a new one is needed, and
    ``OutOfBlocks`` when blocks run out; either way nothing has changed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        *,
        sliding_window: int = 0,
        attention_chunk: int = 0,
        num_first_tokens: int = 0,
    ) -> None:
        at_least(0, num_blocks=num_blocks, num_host_blocks=num_host_blocks, num_first_tokens=num_first_tokens)
        at_least(0, sliding_window=sliding_window, attention_chunk=attention_chunk)
        at_least(1, block_size=block_size)
        self.num_blocks, self.block_size, self.num_first_tokens = num_blocks, block_size, num_first_tokens
        self.sliding_window, self.attention_chunk = sliding_window, attention_chunk
        self._num_first = num_first_blocks(block_size, sliding_window, num_first_tokens)
        self._forgets = bool(sliding_window or attention_chunk)
        self.pool, self.host_pool = BlockPool(num_blocks, "device"), BlockPool(num_host_blocks, "host")
        self._sequences: dict[Hashable, _Sequence] = {}
        self.weights_version: Hashable = None  # of the model that first used the cache; other versions are in the keys
        self._copies: dict[int, int] = {}  # pending, by destination; each holds a reference to its source
        self._prefixes = PrefixIndex(block_size)
        self.lock = CacheLock()
        counts = ("admitted_tokens", "hit_tokens", "copied_blocks", "swapped_out_blocks", "swapped_in_blocks")
        self._counts = dict.fromkeys(counts, 0)

    def admit(
        self,
        seq_id: Hashable,
        token_ids: Iterable[int],
        extra_key: Hashable = None,
        *,
        first_chunk: int | None = None,
        max_cached: int | None = None,
    ) -> int:
        """Adds a sequence and reserves slots for its tokens. Returns how many of them (a multiple of B, less than all)
        are in the cache already; the step computes the others.

        Args:
            seq_id: a new name.
            token_ids: the prompt.
            extra_key: sequences with different keys never share (an adapter's id, a digest of an image; the ``seq_id``
                itself for a sequence that must not share).
            first_chunk: tokens that the first step computes. Layers with a window or chunk reserve slots only for
                these, and ``reserve`` does for later ones. Layers that see everything always reserve all slots.
            max_cached: the most tokens to take from the cache.
        """
        self._check_new(seq_id)
        tokens = as_token_ids(token_ids)
        prefixes, plan, num_reserved = self._plan(tokens, extra_key, first_chunk, max_cached)
        blocks = self.pool.take(plan)
        num_cached = (len(prefixes) - 1) * self.block_size
        freed = self._num_freed(num_cached)
        self._sequences[seq_id] = _Sequence(tokens, blocks, num_cached, num_reserved, prefixes, freed)
        self._counts["admitted_tokens"] += len(tokens)
        self._counts["hit_tokens"] += num_cached
        return num_cached

    def can_admit(
        self,
        token_ids: Iterable[int],
        extra_key: Hashable = None,
        *,
        first_chunk: int | None = None,
        max_cached: int | None = None,
        spare_blocks: int = 0,
    ) -> bool:
        """Whether ``admit`` would find the blocks it needs now, and leave ``spare_blocks`` of them free."""
        at_least(0, spare_blocks=spare_blocks)
        _, plan, _ = self._plan(as_token_ids(token_ids), extra_key, first_chunk, max_cached)
        return self.pool.fits(plan + [None] * spare_blocks)

    def cached_lengths(self, token_ids: Iterable[int], extra_key: Hashable = None) -> list[int]:
        """The numbers of leading tokens that ``admit`` could find in the cache now, from 0 up."""
        blocks = self._chain(as_token_ids(token_ids), extra_key)[1]
        return [length * self.block_size for length in self._servable(blocks)]

    def reserve(self, seq_id: Hashable, num_tokens: int) -> None:
        """Reserves slots for the next ``num_tokens`` uncomputed tokens of a prompt admitted with a ``first_chunk``."""
        seq = self._live(seq_id)
        waiting = len(seq.tokens) - seq.num_computed
        if not is_integer(num_tokens, 0) or num_tokens > waiting:
            raise ValueError(f"num_tokens: expected 0..{waiting} (not computed, of {seq_id!r}), got {num_tokens}")
        stop = seq.num_computed + num_tokens
        if stop > seq.num_reserved:
            seq.blocks += self.pool.take([None] * self._num_missing(seq, stop))
            seq.num_reserved = stop

    def num_reservable(self, seq_id: Hashable) -> int:
        """How many of the tokens that are not computed have slots, or would find the blocks for them now."""
        seq = self._live(seq_id)
        most = (seq.num_freed + len(seq.blocks) + self.pool.num_free) * self.block_size
        return max(seq.num_reserved, min(most, len(seq.tokens))) - seq.num_computed

    def append(self, seq_id: Hashable, token_ids: Iterable[int]) -> None:
        """Reserves slots for tokens that a coming step writes. If the last block has room but also other owners,
        the sequence gets a fresh block, and a copy is queued that must be done before that step."""
        seq = self._live(seq_id)
        tokens = as_token_ids(token_ids)
        copies_tail, num_new = self._growth(seq, len(tokens))
        fresh = self.pool.take([None] * num_new) if num_new else []
        if copies_tail:
            tail, copy = seq.blocks[-1], fresh.pop(0)
            source = self._copies.get(tail, tail)  # of a tail that itself waits for a copy, its source
            self.pool.share(source)  # held, so that it cannot become a destination of the same launch
            self._copies[copy] = source  # first, so that no interrupt can lose the copy
            seq.blocks[-1] = copy
            self._release(tail)
        seq.blocks += fresh
        seq.num_reserved = len(seq.tokens) + len(tokens)
        seq.tokens += tokens

    def can_append(self, seq_id: Hashable, num_tokens: int = 1) -> bool:
        """Whether ``append`` of that many tokens would find the blocks it needs now."""
        return self.pool.fits([None] * self._growth(self._live(seq_id), num_tokens)[1])

    def commit(self, seq_id: Hashable, num_written: int, token_ids: Sequence[int] | None = None) -> None:
        """Records that the step which writes the next ``num_written`` reserved tokens was issued (``token_ids``, if
        they were unknown before). Full blocks can be shared from now on; blocks that no later token sees are freed."""
        seq, tokens = self._live(seq_id), self.check_commit(seq_id, num_written, token_ids)
        if tokens is not None:
            seq.tokens[seq.num_computed : seq.num_computed + num_written] = tokens
        seq.num_computed += num_written
        num_full, num_known = seq.num_computed // self.block_size, len(seq.prefixes) - 1
        if num_full > num_known:
            self._prefixes.extend(seq.prefixes, seq.tokens, num_full)
            for index in range(num_known, num_full):
                self.pool.remember(seq.blocks[index - seq.num_freed], seq.prefixes[index + 1])
        if self._forgets:
            self._give_back(seq_id, seq)

    def check_commit(self, seq_id: Hashable, num_written: int, token_ids: Sequence[int] | None) -> list[int] | None:
        """Raises what ``commit`` would. Returns the token ids, as Python's integers."""
        seq = self._live(seq_id)
        reserved = seq.num_reserved - seq.num_computed
        if not is_integer(num_written, 0) or num_written > reserved:
            raise ValueError(f"num_written: expected 0..{reserved} (reserved tokens of {seq_id!r}), got {num_written}")
        tokens = None if token_ids is None else as_token_ids(token_ids)
        if tokens is not None and len(tokens) != num_written:
            raise ValueError(f"token_ids: expected num_written = {num_written} of them, got {len(tokens)}")
        if num_written and seq.blocks[seq.num_computed // self.block_size - seq.num_freed] in self._copies:
            raise ValueError(f"seq_id: the last block of {seq_id!r} waits for a copy; flush copies before each step")
        return tokens

    def rollback(self, seq_id: Hashable) -> None:
        """Drops the tokens that were not committed (a rejected draft, a step that was given up)."""
        self.truncate(seq_id, self.num_computed_tokens(seq_id))

    def truncate(self, seq_id: Hashable, num_tokens: int) -> None:
        """Drops the tokens from ``num_tokens`` on; none of them may be committed."""
        seq = self._live(seq_id)
        if not is_integer(num_tokens, seq.num_computed) or num_tokens > len(seq.tokens):
            committed = f"{seq.num_computed}..{len(seq.tokens)} (committed and all tokens of {seq_id!r})"
            raise ValueError(f"num_tokens: expected {committed}, got {num_tokens}")
        del seq.tokens[num_tokens:]
        seq.num_reserved = min(seq.num_reserved, num_tokens)
        while len(seq.blocks) > self._num_blocks(seq.num_reserved) - seq.num_freed:
            self._release(seq.blocks.pop())

    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Adds a sequence with the parent's tokens on the parent's blocks (parallel sampling, beam search). The
        parent's tokens must all be committed, as no step would write the reserved ones for the child."""
        self._check_new(child_id)
        parent = self._live(parent_id)
        if left := len(parent.tokens) - parent.num_computed:
            has = f"{parent_id!r} has {left} reserved tokens that are not committed"
            raise ValueError(f"parent_id: {has}; fork after commit or rollback")
        for block in parent.blocks:
            self.pool.share(block)
        self._sequences[child_id] = replace(
            parent, tokens=parent.tokens.copy(), blocks=parent.blocks.copy(), prefixes=parent.prefixes.copy()
        )

    def free(self, seq_id: Hashable) -> None:
        """Removes a sequence, swapped out or not; blocks that no other sequence owns become free, or idle when full."""
        seq = self._get(seq_id)
        del self._sequences[seq_id]
        release = self.host_pool.release if seq.swapped else self._release
        for block in reversed(seq.blocks):  # so that the end of a prefix is evicted before its start
            release(block)

    def reset(self, free_sequences: bool = False) -> None:
        """Forgets all prefixes, on the host too. For changed weights or adapters, as the cache holds the old ones' keys
        and values. Raises ``ValueError`` if there are sequences, unless asked to free them first."""
        if not flag("free_sequences", free_sequences) and self._sequences:
            raise ValueError(
                f"free_sequences: expected no sequence in the cache, got {len(self._sequences)}; free them, or say True"
            )
        for seq_id in list(self._sequences):
            self.free(seq_id)
        self._prefixes.clear()
        self.pool.forget()
        self.host_pool.forget()
        self.weights_version = None

    def recover(self) -> None:
        """Repairs the bookkeeping after an exception within a call (KeyboardInterrupt, between any two statements). The
        pools are restored from the sequences and the pending copies. The interrupted call then has happened whole, or
        not at all. O(N); changes nothing if nothing is wrong."""
        owners: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
        for seq in self._sequences.values():
            seq.num_reserved = min(seq.num_reserved, len(seq.tokens))
            num_tokens = seq.num_computed if seq.swapped else seq.num_reserved
            del seq.blocks[self._num_blocks(num_tokens) - seq.num_freed :]
            owners[seq.swapped].update(seq.blocks)
        for block in [block for block in self._copies if not owners[False][block]]:
            del self._copies[block]
        owners[False].update(self._copies.values())
        self.pool.recover(owners[False])
        self.host_pool.recover(owners[True])
        for seq in self._sequences.values():
            self._prefixes.extend(seq.prefixes, seq.tokens, seq.num_computed // self.block_size)
            for block, prefix in zip(seq.blocks, self._kept(seq.prefixes[1:], seq.num_freed), strict=False):
                (self.host_pool if seq.swapped else self.pool).remember(block, prefix)

    def swap_out(self, seq_id: Hashable) -> list[tuple[int, int]]:
        """Moves a sequence to host blocks. Returns pairs (device block, host block), which must be copied before other
        work is issued. Blocks without content, or with content that is on the host already, are left out."""
        seq = self._live(seq_id)
        if self._copies:
            raise ValueError(f"seq_id: {seq_id!r} cannot be swapped out while copies are pending; flush copies first")
        return self._move(seq_id, seq)

    def swap_in(self, seq_id: Hashable) -> list[tuple[int, int]]:
        """Moves a sequence back to the device; pairs (host block, device block) as in ``swap_out``."""
        return self._move(seq_id, self._swapped(seq_id))

    def can_swap_out(self, seq_id: Hashable) -> bool:
        """Whether ``swap_out`` would find the host blocks it needs now."""
        return self.host_pool.fits(self._swap_plan(self._live(seq_id)))

    def can_swap_in(self, seq_id: Hashable, *, num_tokens: int = 0, spare_blocks: int = 0) -> bool:
        """Whether ``swap_in`` would find its blocks now, and after it the next ``num_tokens`` uncomputed tokens (by
        ``reserve`` or ``append``) theirs, with ``spare_blocks`` left over."""
        seq = self._swapped(seq_id)
        at_least(0, num_tokens=num_tokens, spare_blocks=spare_blocks)
        stop = max(seq.num_reserved, seq.num_computed + num_tokens)
        more = self._num_blocks(stop) - self._num_blocks(seq.num_reserved) + spare_blocks
        return self.pool.fits(self._swap_plan(seq) + [None] * more)

    def pending_copies(self) -> list[tuple[int, int]]:
        """The (source block, destination block) pairs of copy-on-write, which must be copied before other work is
        issued. No block is both source and destination, and no destination occurs twice."""
        return [(source, destination) for destination, source in self._copies.items()]

    def take_copies(self) -> list[tuple[int, int]]:
        """Removes the pending copies from the list: the caller has issued them, or does so next."""
        pairs = self.pending_copies()
        self._copies.clear()
        for source, _ in pairs:
            self._release(source)
        self._counts["copied_blocks"] += len(pairs)
        return pairs

    def block_ids(self, seq_id: Hashable) -> list[int]:
        """The sequence's row of the block table. In place of freed blocks it names the oldest block within reach."""
        seq, first = self._live(seq_id), self._num_first
        return seq.blocks[:first] + seq.blocks[first : first + 1] * seq.num_freed + seq.blocks[first:]

    @property
    def reserves_in_parts(self) -> bool:
        """Whether a prompt's slots can be reserved in chunks and blocks are freed, as with a window or chunk."""
        return self._forgets

    def num_given_back(self, seq_id: Hashable) -> int:
        """How many blocks a sequence has freed. ``block_ids`` changes only with this number and the number of slots."""
        return self._live(seq_id).num_freed

    def slots(self, seq_id: Hashable, start: int | None = None, stop: int | None = None) -> list[int]:
        """The slots (block · B + offset) of tokens start..stop-1; by default, of the uncommitted reserved tokens."""
        seq = self._live(seq_id)
        start, stop = seq.num_computed if start is None else start, seq.num_reserved if stop is None else stop
        size, first = self.block_size, self._num_first
        freed = range(first * size, (first + seq.num_freed) * size)
        if not 0 <= start <= stop <= seq.num_reserved or (freed and start < freed.stop and stop > freed.start):
            kept = f"0..{freed.start} or {freed.stop}" if freed and first else str(freed.stop if freed else 0)
            has_slots = f"{kept}..{seq.num_reserved} (the tokens of {seq_id!r} that have slots)"
            raise ValueError(f"start, stop: expected a range within {has_slots}, got {start}..{stop}")
        gone = seq.num_freed if start >= freed.stop else 0
        return [seq.blocks[at // size - gone] * size + at % size for at in range(start, stop)]

    def num_tokens(self, seq_id: Hashable) -> int:
        """Tokens of the sequence: computed and reserved."""
        return len(self._get(seq_id).tokens)

    def num_computed_tokens(self, seq_id: Hashable) -> int:
        """Tokens whose keys and values are in the cache: shared at admission or committed."""
        return self._get(seq_id).num_computed

    @property
    def max_seq_len(self) -> int:
        """The longest sequence that the cache can hold if there is no other."""
        reach = self.sliding_window, self.attention_chunk, self.num_first_tokens
        if self._forgets and self.num_blocks >= most_blocks_kept(self.block_size, *reach):
            return 2**31 - 1  # lengths are int32
        return self.num_blocks * self.block_size

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences own; O(1)."""
        return self.num_blocks - self.pool.num_free

    @property
    def seq_ids(self) -> list[Hashable]:
        """All sequences, in the order of their admission."""
        return list(self._sequences)

    def __contains__(self, seq_id: Hashable) -> bool:
        return seq_id in self._sequences

    def is_swapped_out(self, seq_id: Hashable) -> bool:
        """Whether the sequence is on the host."""
        return self._get(seq_id).swapped

    def stats(self) -> CacheStats:
        """Counts for logs and tests; O(N)."""
        return CacheStats.of(self.pool, self.host_pool, **self._counts)

    def _get(self, seq_id: Hashable) -> _Sequence:
        seq = self._sequences.get(seq_id)
        if seq is None:
            raise ValueError(f"seq_id: {seq_id!r} is unknown: never admitted, or freed already")
        return seq

    def _live(self, seq_id: Hashable) -> _Sequence:
        seq = self._sequences.get(seq_id)
        if seq is None or seq.swapped:
            self._get(seq_id)
            raise ValueError(f"seq_id: {seq_id!r} is swapped out; swap it in first")
        return seq

    def _swapped(self, seq_id: Hashable) -> _Sequence:
        seq = self._get(seq_id)
        if not seq.swapped:
            raise ValueError(f"seq_id: {seq_id!r} is not swapped out")
        return seq

    def _check_new(self, seq_id: Hashable) -> None:
        if seq_id in self._sequences:
            raise ValueError(f"seq_id: {seq_id!r} is in use; free it first or choose another")

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _num_freed(self, num_computed: int) -> int:
        """Counts blocks after the first tokens that no token from ``num_computed`` on sees; the newest always stays."""
        oldest = oldest_key(num_computed, self.sliding_window, self.attention_chunk)
        return max(0, min(oldest, num_computed - 1) // self.block_size - self._num_first)

    def _kept(self, of_blocks: list[Any], num_freed: int) -> list[Any]:
        return of_blocks[: self._num_first] + of_blocks[self._num_first + num_freed :]

    def _servable(self, blocks: list[int | None]) -> list[int]:
        return servable_lengths(blocks, self.block_size, self._num_first, self._num_freed)

    def _give_back(self, seq_id: Hashable, seq: _Sequence) -> None:
        num_freed = self._num_freed(seq.num_computed)
        if count := num_freed - seq.num_freed:
            unseen = seq.blocks[self._num_first : self._num_first + count]
            # one assignment, so that an interrupt leaves both as they were or both changed
            self._sequences[seq_id] = replace(seq, blocks=self._kept(seq.blocks, count), num_freed=num_freed)
            for block in unseen:
                self._release(block)

    def _chain(self, tokens: list[int], extra_key: Hashable) -> tuple[list[Prefix], list[int | None]]:
        """The root and the known prefixes of the leading blocks; and for each block, its id if it is in the cache."""
        if not tokens:
            raise ValueError("token_ids: expected at least one token, got none")
        prefixes = [self._prefixes.root(extra_key)]
        blocks: list[int | None] = []
        for index in range((len(tokens) - 1) // self.block_size):  # logits need a query: one token is left
            prefix = self._prefixes.find(prefixes[-1], tokens, index)
            block = None if prefix is None else self.pool.find(prefix)
            if prefix is None or (block is None and not self._forgets):
                break
            prefixes.append(prefix)
            blocks.append(block)
        return prefixes, blocks

    def _plan(
        self, tokens: list[int], extra_key: Hashable, first_chunk: int | None, max_cached: int | None
    ) -> tuple[list[Prefix], list[int | None], int]:
        """The prefixes that an admission finds, its request to the pool, and how many tokens get slots."""
        prefixes, blocks = self._chain(tokens, extra_key)
        most = len(blocks) if max_cached is None else integers(0, max_cached=max_cached)[0] // self.block_size
        length = max(length for length in self._servable(blocks) if length <= most)
        num_reserved = len(tokens)
        if first_chunk is not None:
            at_least(1, first_chunk=first_chunk)
            if self._forgets:
                num_reserved = min(num_reserved, length * self.block_size + first_chunk)
        found = self._kept(blocks[:length], self._num_freed(length * self.block_size))
        fresh: list[int | None] = [None] * (self._num_blocks(num_reserved) - length)
        return prefixes[: length + 1], found + fresh, num_reserved

    def _num_missing(self, seq: _Sequence, num_tokens: int) -> int:
        """The number of further blocks that the sequence needs to have ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size) - seq.num_freed - len(seq.blocks)

    def _growth(self, seq: _Sequence, num_tokens: int) -> tuple[bool, int]:
        """Whether an append must copy the last block first, and how many fresh blocks it needs in all."""
        if type(num_tokens) is not int or num_tokens < 0:
            at_least(0, num_tokens=num_tokens)
        copies_tail = False
        if num_tokens and seq.num_reserved % self.block_size and (owners := self.pool.ref_counts[seq.blocks[-1]]) > 1:
            copies_tail = owners - sum(source == seq.blocks[-1] for source in self._copies.values()) > 1
        return copies_tail, self._num_missing(seq, len(seq.tokens) + num_tokens) + copies_tail

    def _release(self, block: int) -> None:
        if self.pool.release(block) and block in self._copies:
            self._release(self._copies.pop(block))  # the copy is no longer needed

    def _swap_plan(self, seq: _Sequence) -> list[int | None]:
        """What to take from the other memory. The host holds only computed tokens, the device also reserved ones."""
        target, num_tokens = (self.pool, seq.num_reserved) if seq.swapped else (self.host_pool, seq.num_computed)
        found = [target.find(prefix) for prefix in self._kept(seq.prefixes[1:], seq.num_freed)]
        return found + [None] * (self._num_blocks(num_tokens) - seq.num_freed - len(found))

    def _move(self, seq_id: Hashable, seq: _Sequence) -> list[tuple[int, int]]:
        source, target = (self.host_pool, self.pool) if seq.swapped else (self.pool, self.host_pool)
        plan = self._swap_plan(seq)
        blocks = target.take(plan)
        # The shorter side, where zip stops, is the host's: no blocks for reserved tokens.
        pairs = [(old, new) for old, new, known in zip(seq.blocks, blocks, plan, strict=False) if known is None]
        try:
            self._copy_between(pairs, to_host=not seq.swapped)
        except BaseException:  # the sequence stays where it is; the former content of the fresh blocks is forgotten
            for block in reversed(blocks):
                target.release(block)
            raise
        for block, prefix in zip(blocks, self._kept(seq.prefixes[1:], seq.num_freed), strict=False):
            target.remember(block, prefix)
        for block in reversed(seq.blocks):
            source.release(block)
        self._sequences[seq_id] = replace(seq, blocks=blocks, swapped=not seq.swapped)  # both in one assignment
        self._counts["swapped_in_blocks" if seq.swapped else "swapped_out_blocks"] += len(pairs)
        return pairs

    def _copy_between(self, pairs: list[tuple[int, int]], to_host: bool) -> None:
        """Issues the copies of a swap, before the sequence changes; this class has no memory to copy."""

    def __copy__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name}: a shallow copy would own the same blocks a second time; use copy.deepcopy")
