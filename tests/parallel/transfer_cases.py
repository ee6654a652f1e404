"""What the ranks of test_transfer.py do."""

import torch

import paged_ops
from paged_ops.parallel import transfer
from paged_ops.parallel.transfer import recv_blocks, send_blocks

SENT, RECEIVED = [5, 0, 3, 7, 3], [1, 6, 2, 0, 4]
FORMS = {
    "nhd": {},
    "hnd": {"layout": "HND"},
    "interleaved": {"layout": "INTERLEAVED"},
    "x_packed": {"layout": "X_PACKED"},
    "joined": {"value_head_size": 24},
    "joined hnd": {"value_head_size": 24, "layout": "HND"},
    "layers differ": {"num_kv_heads": [2, 1, 4], "head_size": [16, 32, 8], "dtype": torch.bfloat16},
    "fp8": {"dtype": torch.float8_e4m3fn},
    "latent": {"layout": "LATENT", "num_kv_heads": 1, "head_size": 40, "value_head_size": 32},
}


def cache(rank, num_blocks=8, **changes):
    options = {"num_kv_heads": 2, "head_size": 16, "block_size": 4, "dtype": torch.float32, "layout": "NHD"} | changes
    block_size, heads, size = (options.pop(name) for name in ("block_size", "num_kv_heads", "head_size"))
    made = paged_ops.KVCache(3, num_blocks, block_size, heads, size, **options)
    generator = torch.Generator().manual_seed(rank)
    for layer in made.layers:
        storage = layer.untyped_storage()
        content = torch.randint(0, 256, (len(storage),), dtype=torch.uint8, generator=generator)
        torch.empty(0, dtype=torch.uint8).set_(storage).copy_(content)
    return made


def contents(kv_cache):
    """The bytes of each tensor by block, found without the package's own regions."""
    packed = kv_cache.layout is paged_ops.Layout.X_PACKED
    parts = [plane for layer in kv_cache.layers for plane in (layer.unbind(0) if packed else (layer,))]
    return [part.contiguous().view(torch.uint8).flatten(1) for part in parts]


def moves(rank, size, form, staging=None):
    """Rank 0 sends blocks, one of them twice; every other block of rank 1 stays what it is."""
    transfer.STAGING = staging or 64 << 20
    mine, start = cache(rank, **FORMS[form]), cache(0, **FORMS[form])
    if rank == 0:
        send_blocks(mine, SENT, 1)
        return all(map(torch.equal, contents(mine), contents(start)))
    before = contents(mine)
    recv_blocks(mine, RECEIVED, 0)
    for got, had, sent in zip(contents(mine), before, contents(start), strict=True):
        expected = had.clone()
        expected[RECEIVED] = sent[SENT]
        if not torch.equal(got, expected):
            return False
    return True


def message_of(call, *args):
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return None


def refused(rank, size, here, there):
    """What each rank is told, that nothing was written, and that the next call goes through."""
    changes = there if rank else here
    call = {"send": send_blocks, "recv": recv_blocks}[changes.get("call", "recv" if rank else "send")]
    mine = cache(rank, **changes.get("cache", {}))
    before = contents(mine)
    given = None if changes.get("no_cache") else mine
    message = message_of(call, given, changes.get("block_ids", [1, 2]), 1 - rank)
    unchanged = all(map(torch.equal, contents(mine), before))
    return message, unchanged, moves(rank, size, "nhd")


def alone(rank, size):
    """Errors that need no other rank."""
    calls = ((cache(rank), rank), (cache(rank), 9), (object(), 1 - rank))
    return [message_of(send_blocks, kv_cache, [0], peer) for kv_cache, peer in calls]


def nothing(rank, size):
    (send_blocks, recv_blocks)[rank](cache(rank), [], 1 - rank)
    return True


def copies_first(rank, size):
    """A copy that is queued belongs to what is sent."""
    mine = cache(rank)
    if rank == 0:
        mine.admit("a", range(6))
        mine.commit("a", 6)
        mine.fork("a", "b")
        mine.append("b", [9])  # writes its last block, which is shared: a copy is due
        ((source, target),) = mine.pending_copies()
        assert mine.block_ids("b")[-1] == target
        send_blocks(mine, [target, source], 1)
        return not mine.pending_copies()
    recv_blocks(mine, [0, 1], 0)
    return all(torch.equal(part[0], part[1]) for part in contents(mine))
