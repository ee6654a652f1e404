"""A toy model and a random walk of an engine, for tests of captured steps."""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import paged_ops
from paged_ops.cache import KVCache, OutOfBlocks
from paged_ops.graphs import build_inputs, step_builder
from paged_ops.metadata import Batch

V, H, K, D, B, LAYERS = 96, 4, 2, 32, 4, 2


class Toy(nn.Module):
    """Logits that depend on every earlier token, through the paged cache only. ``features`` are the attention op's."""

    def __init__(self, device="cpu", seed=0, **features):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape, scale):
            return nn.Parameter((torch.randn(shape, generator=generator) * scale).to(device), requires_grad=False)

        self.embed, self.position = weight(V, H * D, scale=1.0), weight(512, H * D, scale=0.5)
        self.qkv = nn.ParameterList(weight(H * D, (H + 2 * K) * D, scale=0.12) for _ in range(LAYERS))
        self.out = nn.ParameterList(weight(H * D, H * D, scale=0.09) for _ in range(LAYERS))
        self.head = weight(H * D, V, scale=0.1)
        self.features = features

    def forward(self, input_ids, metadata, last_rows, kv_caches):
        hidden = self.embed[input_ids] + self.position[metadata.positions % len(self.position)]
        for qkv, out, kv_cache in zip(self.qkv, self.out, kv_caches, strict=True):
            hidden = hidden + self.layer(hidden, qkv, out, kv_cache, metadata)
        return hidden[last_rows] @ self.head

    def layer(self, hidden, qkv, out, kv_cache, metadata):
        query, key, value = (hidden @ qkv).view(-1, H + 2 * K, D).split([H, K, K], dim=1)
        paged_ops.reshape_and_cache(key, value, kv_cache, metadata.slot_mapping)
        starts, scale = metadata.query_start_loc, D**-0.5
        if metadata.cascade is not None:
            c = metadata.cascade
            rows = paged_ops.cascade_attention(
                query, kv_cache, c.prefix_block_table, c.prefix_len, c.suffix_block_tables, c.suffix_lens, starts, scale
            )
        else:
            rows = paged_ops.paged_attention(
                query, kv_cache, metadata.block_tables, metadata.seq_lens, starts, scale, **self.features
            )
        return rows.reshape(-1, H * D) @ out


class Plain:
    """The step without graphs and without padding: the truth."""

    def __init__(self, step, kv_cache, max_num_seqs, max_num_tokens, max_model_len):
        self.step, self.kv_cache = step, kv_cache
        self.builder = step_builder(kv_cache, max_num_seqs, max_num_tokens, max_model_len)

    @torch.no_grad()
    def __call__(self, batch: Batch, input_ids: Tensor) -> Tensor:
        inputs = build_inputs(self.builder, batch, input_ids, batch.num_reqs, batch.num_tokens)
        return self.step(*inputs, self.kv_cache.layers)


def poisoned_cache(num_blocks, device="cpu", num_host_blocks=0, layout=None):
    """All NaN: what a step must not read would show."""
    kv_cache = KVCache(LAYERS, num_blocks, B, K, D, device=device, num_host_blocks=num_host_blocks, layout=layout)
    for layer in kv_cache.layers:
        layer.fill_(torch.nan)
    return kv_cache


@dataclass
class Walk:
    """Random admissions, forks, frees and swaps, with a step between them that computes what is due."""

    kv_cache: KVCache
    max_num_seqs: int
    max_num_tokens: int
    seed: int = 0
    longest: int = 60
    live: list[int] = field(default_factory=list)
    swapped: list[int] = field(default_factory=list)
    events: dict[str, int] = field(default_factory=dict)

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.tokens: dict[int, list[int]] = {}
        self.next_id = 0

    def change(self):
        """One random change of who is in the cache."""
        kind = self.random.choice(["admit", "admit", "fork", "free", "swap_out", "swap_in", "none", "none"])
        try:
            getattr(self, kind)()
        except OutOfBlocks:
            self.count("out of blocks")
            if self.live:
                self.free()

    def count(self, event):
        self.events[event] = self.events.get(event, 0) + 1

    def none(self):
        pass

    def admit(self):
        if len(self.live) >= self.max_num_seqs:
            return
        # Few different tokens and lengths: some prompts share a prefix.
        prompt = [self.random.randrange(2)] * self.random.randrange(1, 9) + [
            self.random.randrange(V) for _ in range(self.random.randrange(1, 9))
        ]
        self.kv_cache.admit(self.next_id, prompt)
        self.tokens[self.next_id] = prompt
        self.live.append(self.next_id)
        self.next_id += 1
        self.count("admit")

    def fork(self):
        done = [s for s in self.live if self.due(s) == 0]
        if done and len(self.live) < self.max_num_seqs:
            parent = self.random.choice(done)
            self.kv_cache.fork(parent, self.next_id)
            self.tokens[self.next_id] = list(self.tokens[parent])
            self.live.append(self.next_id)
            self.next_id += 1
            self.count("fork")

    def free(self):
        if self.live:
            seq = self.live.pop(self.random.randrange(len(self.live)))
            self.kv_cache.free(seq)
            del self.tokens[seq]
            self.count("free")

    def swap_out(self):
        done = [s for s in self.live if self.due(s) == 0]
        if done:
            seq = self.random.choice(done)
            self.kv_cache.swap_out(seq)
            self.live.remove(seq)
            self.swapped.append(seq)
            self.count("swap_out")

    def swap_in(self):
        if self.swapped and len(self.live) < self.max_num_seqs:
            seq = self.random.choice(self.swapped)
            self.kv_cache.swap_in(seq)
            self.swapped.remove(seq)
            self.live.append(seq)
            self.count("swap_in")

    def due(self, seq):
        return self.kv_cache.num_tokens(seq) - self.kv_cache.num_computed_tokens(seq)

    def step(self, run):
        """Schedule a batch, let ``run(batch, input_ids)`` do it, and commit it. Returns its result, or None."""
        self.change()
        self.random.shuffle(self.live)
        query_lens, budget = {}, self.max_num_tokens
        for seq in list(self.live):
            if len(self.tokens[seq]) >= self.longest:
                self.live.remove(seq)
                self.kv_cache.free(seq)
                del self.tokens[seq]
                continue
            if not budget:
                break
            if self.due(seq) == 0:
                try:
                    token = self.random.randrange(V)
                    self.kv_cache.append(seq, [token])
                except OutOfBlocks:
                    self.count("out of blocks")
                    continue
                self.tokens[seq].append(token)
            query_lens[seq] = min(self.due(seq), budget, self.random.choice([1, 3, 99]))
            budget -= query_lens[seq]
        if not query_lens:
            return None
        self.kv_cache.flush_copies()
        computed = {seq: self.kv_cache.num_computed_tokens(seq) for seq in query_lens}
        tables = [[pool.block_ids(seq) for seq in query_lens] for pool in self.kv_cache.pools]
        batch = Batch(list(query_lens.values()), list(computed.values()), tables[0], other_block_ids=tables[1:])
        ids = [token for seq, q in query_lens.items() for token in self.tokens[seq][computed[seq] : computed[seq] + q]]
        result = run(batch, torch.tensor(ids))
        for seq, q in query_lens.items():
            self.kv_cache.commit(seq, q)
        self.count("decode" if set(query_lens.values()) == {1} else "mixed")
        return result
