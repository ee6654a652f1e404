"""What each rank runs in the tests of sharded models of transformers."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
import transformers

from paged_ops.generation import GenerationLoop, SamplingParams
from paged_ops.integrations.transformers import PagedCausalLM, sharded
from paged_ops.integrations.transformers.projections import fuse_projections, split_projections
from paged_ops.parallel.tensor import local_of
from tests.integrations.transformers.latent_configs import CONFIGS as LATENT_CONFIGS
from tests.integrations.transformers.model_families import tiny_config
from tests.integrations.transformers.tiny_configs import CONFIGS, SEEDS, prompts

LIMIT = 60.0
GREEDY = SamplingParams(max_new_tokens=8)
INDEXED = {
    name: functools.partial(tiny_config, name, vocab_size=256) for name in ("deepseek_v32", "minimax_m3_vl_text")
}
TEXTS = [prompt for prompt in prompts() if len(prompt) in (1, 5, 13, 24, 33)]


def make(name: str, folder: str, rank: int, **changes: Any) -> str:
    """The path of a tiny model, written by rank 0."""
    path = os.path.join(folder, "-".join([name, *map(str, changes.values())]))
    if rank == 0 and not os.path.exists(path):
        config = (CONFIGS | LATENT_CONFIGS | INDEXED)[name]()
        for attribute, value in changes.items():
            setattr(config, attribute, value)
        torch.manual_seed(SEEDS.get(name, 3))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        model.save_pretrained(path)
    dist.barrier()
    return path


def load(path: str, size: int = 1) -> Any:
    options: dict[str, Any] = dict(dtype=torch.float32, attn_implementation="eager")
    if size > 1:
        options |= sharded(size)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval()


def texts_of(paged: PagedCausalLM, **options: Any) -> list[list[int]]:
    sizes = dict(max_num_seqs=4, max_num_tokens=24)
    cache = paged.allocate_kv_cache(64, 4)
    with GenerationLoop(paged, cache, rank_time_limit=LIMIT, **sizes, **options) as loop:
        texts = [list(each) for each in loop.generate(TEXTS, GREEDY)]
        assert (loop.graph_stats.replayed > 0) == (str(loop.graph_mode) != "NONE")
        return texts


def kept(model: Any) -> dict[str, tuple[Any, ...]]:
    """What the model's state is: sizes, how they are spread, and a sum of this rank's part."""
    return {
        name: (tuple(each.shape), str(getattr(each, "placements", None)), float(local_of(each).double().sum()))
        for name, each in model.state_dict().items()
    }


def serves(rank: int, size: int, name: str, folder: str, how: tuple[str, ...] = ("eager",), **changes: Any) -> Any:
    """Texts of one process (rank 0 alone has them), and of all together in several ways; heads of the rank's cache."""
    path = make(name, folder, rank, **changes)
    device = (
        torch.device("cuda", rank) if torch.cuda.device_count() >= size else torch.device("cpu")
    )  # where transformers puts it
    expected = texts_of(PagedCausalLM(load(path).to(device))) if rank == 0 else None
    dist.barrier()
    model = load(path, size)
    before, results = kept(model), {}
    for way in how:
        paged = PagedCausalLM(model)
        saved = fuse_projections(model) if "fused" in way else 0
        if "layers" in way:
            paged.compile_layers()
        mode = "FULL_DECODE_ONLY" if "captured" in way else "NONE"
        results[way] = texts_of(paged, compile="whole" in way, graph_mode=mode), saved
        if saved and not changes_heads(paged, size):
            assert kept(model) == before
        assert bool(split_projections(model)) == bool(saved)
        paged.unwrap()
        assert kept(model) == before
    return expected, results, paged.num_kv_heads, paged.head_size


def changes_heads(paged: PagedCausalLM, size: int) -> bool:
    return size > paged.model.config.num_key_value_heads


def fails_while_wrapped(rank: int, size: int, folder: str) -> Any:
    """The model of rank 1 raises in the middle of its first run."""
    from paged_ops.integrations.transformers import model as integration

    integration.WRAP_LIMIT = 4.0
    model = load(make("llama", folder, rank), size)
    attention = model.model.layers[0].self_attn.config

    def boom(*args: Any) -> None:
        raise MemoryError("no room")

    if rank == 1:
        model.model.layers[1].register_forward_pre_hook(boom)
    try:
        PagedCausalLM(model)
    except Exception as error:
        return type(error).__name__, str(error), attention._attn_implementation
    return None


def killed(rank: int, size: int, folder: str, limit: float, after: float) -> Any:
    """The last rank is killed in the middle of a captured loop whose steps overlap: what the others raise, and how many
    seconds later; what a second call raises; the steps until then."""
    paged, died = PagedCausalLM(load(make("llama", folder, rank), size)), os.path.join(folder, "died")
    sizes = dict(max_num_seqs=4, max_num_tokens=24, graph_mode="FULL_DECODE_ONLY", rank_time_limit=limit)
    loop = GenerationLoop(paged, paged.allocate_kv_cache(4096, 4), overlap=True, **sizes)
    long = SamplingParams(max_new_tokens=200, stop_token_ids=())
    loop.warm_up()
    loop.generate(TEXTS[:1], GREEDY)

    def kill() -> None:
        with open(died, "w") as file:
            file.write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    dist.barrier()
    if rank == size - 1:
        threading.Timer(after, kill).start()
    steps = loop.stats.steps
    try:
        loop.generate([text[:1] for text in TEXTS[:3]] * 100, long)  # 15,000 steps
    except Exception as error:
        with open(died) as file:
            seconds = time.time() - float(file.read())
        told, steps = f"{type(error).__name__}: {error}", loop.stats.steps - steps
        try:
            loop.generate(TEXTS[:1], GREEDY)
        except Exception as second:
            return told, seconds, f"{type(second).__name__}: {second}", steps
    return None


def refuses(rank: int, size: int, folder: str) -> Any:
    path = make("llama", folder, rank, hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    try:
        PagedCausalLM(load(path, size))
    except ValueError as error:
        return str(error)
    return None
