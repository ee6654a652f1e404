"""``paged-ops demo`` and ``paged-ops generate``: a model of transformers over a paged cache, with streamed output."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

import paged_ops
from paged_ops import demo_model
from paged_ops.cli.device import (
    Device,
    choose_device,
    choose_device_of_rank,
    ranks_of_torchrun,
    require_compiler,
)
from paged_ops.cli.table import table
from paged_ops.generation import GenerationLoop, GenerationStats, NewToken, SamplingParams
from paged_ops.graphs import GraphMode

if TYPE_CHECKING:  # transformers is an extra
    from paged_ops.integrations.transformers import PagedCausalLM

DEMO_MODEL = Path(demo_model.path())
BLOCK_SIZE = 16
MAX_NUM_SEQS = 32
CAPTURING = "Capturing CUDA graphs"
PROMPT_END = 100  # characters of a prompt that are printed before its continuation
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Graphs = Annotated[
    bool | None, typer.Option("--graphs/--no-graphs", help="Capture decode steps in CUDA graphs; by default on cuda.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Compile = Annotated[bool, typer.Option("--compile/--eager", help="Run the model through torch.compile, or not.")]


def demo(
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.")] = 64,
    num_blocks: Annotated[int, typer.Option(help="Blocks of the cache; with few, sequences are swapped.")] = 128,
    device: Device = None,
    compile: Compile = True,
    graphs: Graphs = None,
    json: Json = False,
) -> None:
    """Serve a ragged batch of prompts with the embedded model, and check every token against transformers.

    Greedy, in float32 with TF32 off. Exit code 1 if a token differs from model.generate().
    """
    console = Console(stderr=json)
    params = SamplingParams(max_new_tokens=max_new_tokens)
    target = choose_device(device)
    _check_graphs(graphs, target)
    if target.type == "cpu":
        torch.set_num_threads(1)  # the model is so small that threads would mostly wait
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    prompts: list[str] = json_module.loads((DEMO_MODEL / "prompts.json").read_text())

    with console.status("Loading the model"):
        model, tokenizer = load(str(DEMO_MODEL), target, torch.float32)
    prompt_ids = [tokenizer(prompt).input_ids for prompt in prompts]
    with console.status(f"Asking transformers' generate() for {len(prompts)} x {max_new_tokens} tokens"):
        expected = [reference(model, ids, max_new_tokens) for ids in prompt_ids]

    params_of_each = [params] * len(prompts)
    result = serve(
        console,
        console,
        model,
        tokenizer,
        prompts,
        prompt_ids,
        params_of_each,
        num_blocks,
        compile=compile,
        graphs=graphs,
    )
    pairs = list(zip(result.outputs, expected, strict=True))
    matches = sum(ours == theirs for ours, theirs in pairs)
    checked = sum(map(len, expected))
    result.numbers |= {
        "tokens_match_reference": matches == len(pairs),
        "sequences_that_match": matches,
        "tokens_checked": checked,
    }
    verdict = f"{checked:,} tokens equal" if matches == len(pairs) else f"{len(pairs) - matches} sequences differ"
    result.print(console, "paged-ops demo", {"checked against generate()": f"{verdict}, float32, TF32 off"})
    if json:
        print(json_module.dumps(result.numbers))
    if matches < len(pairs):
        raise typer.Exit(1)


def generate(
    prompt: Annotated[list[str], typer.Option(help="A prompt; repeat the option for a batch.")],
    model: Annotated[
        str,
        typer.Option(help="A local folder, or the id of a model on the Hugging Face hub; demo is the embedded one."),
    ] = "demo",
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens per prompt.")] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 is greedy; by default from the model's config."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens of this total probability.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Prompt i uses seed + i; by default each run differs.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; by default the model's own.")] = None,
    num_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the cache; by default enough for the batch.")
    ] = None,
    device: Device = None,
    compile: Compile = True,
    graphs: Graphs = None,
    json: Json = False,
) -> None:
    """Continue prompts with a causal language model of transformers over a paged cache.

    Prompts and continuations go to stdout, progress and statistics to stderr.

    Under torchrun the model is sharded over the processes (tensor parallelism), and rank 0 prints:
    torchrun --nproc-per-node 2 -m paged_ops.cli generate --model ... --prompt ...
    """
    rank, num_ranks = ranks_of_torchrun()
    console, log = Console(stderr=json, quiet=rank > 0), Console(stderr=True, quiet=rank > 0)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype}")
    params = [
        SamplingParams(max_new_tokens, temperature, top_p, None if seed is None else seed + i, top_k=top_k)
        for i in range(len(prompt))
    ]
    target = choose_device(device) if num_ranks == 1 else choose_device_of_rank(device)
    _check_graphs(graphs, target)
    name = demo_model.path() if model == "demo" else model
    with log.status(f"Loading {model}"):
        loaded, tokenizer = load(name, target, DTYPES[dtype] if dtype else "auto", num_ranks)
    prompt_ids = [tokenizer(each).input_ids for each in prompt]
    for number, (string, ids) in enumerate(zip(prompt, prompt_ids, strict=True), 1):
        if not ids:
            raise ValueError(
                f"--prompt: expected at least one token, got {string!r} as prompt {number} of {len(prompt)}"
            )
    if num_blocks is None:
        num_blocks = sum(-(-(len(ids) + max_new_tokens) // BLOCK_SIZE) for ids in prompt_ids[:MAX_NUM_SEQS]) + 1
    result = serve(
        console, log, loaded, tokenizer, prompt, prompt_ids, params, num_blocks, compile=compile, graphs=graphs
    )
    result.numbers["texts"] = [tokenizer.decode(output, skip_special_tokens=True) for output in result.outputs]
    result.print(log, model)
    if json and rank == 0:
        print(json_module.dumps(result.numbers))
    if num_ranks > 1:
        torch.distributed.destroy_process_group()


def one_line(error: Exception) -> str:
    """The first line of a message, and the rest if the first line ends with a colon."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(" ".join(lines).split()) if lines[0].rstrip().endswith(":") else lines[0]


def load(name: str, device: torch.device, dtype: torch.dtype | str, num_ranks: int = 1) -> tuple[Any, Any]:
    """A causal language model in evaluation mode and its tokenizer, from a folder or the hub; prints nothing. With
    several ranks the model is sharded over the processes of torchrun."""
    try:
        import transformers
    except ImportError:
        raise ImportError(
            "transformers is not installed; it comes with the extra hf: pip install '.[hf]' in a checkout"
        ) from None
    if name.startswith(("/", ".", "~")) and not Path(name).expanduser().is_dir():
        raise ValueError(f"--model: expected a folder or the id of a model on the hub, got {name}, which is no folder")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sharding: dict[str, Any] = {}
    if num_ranks > 1:
        from paged_ops.integrations.transformers import sharded

        sharding = sharded(num_ranks)
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **sharding
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # readers of damaged files raise all kinds of errors
        raise ValueError(f"--model: cannot load {name}: {one_line(error)}") from None
    # transformers would initialise them with random numbers.
    for what, keys in (("miss", found["missing_keys"]), ("have other sizes of", found["mismatched_keys"])):
        if keys:
            first = min(key if isinstance(key, str) else key[0] for key in keys)
            message = f"its weights {what} {len(keys)} tensors that its config asks for, {first} among them"
            raise ValueError(f"--model: cannot load {name}: {message}")
    return (model if sharding else model.to(device)).eval(), tokenizer


@torch.no_grad()
def reference(model: Any, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """The greedy continuation by ``model.generate``: one prompt at a time, so that nothing is padded."""
    ids = torch.tensor([prompt_ids], device=model.device)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
    return output[0, len(prompt_ids) :].tolist()


class Result:
    """The outputs of a run, and its statistics."""

    def __init__(self, outputs: Sequence[list[int]], numbers: dict[str, Any]) -> None:
        self.outputs = outputs
        self.numbers = numbers

    def print(self, console: Console, title: str, last_rows: dict[str, str] | None = None) -> None:
        """A table for people."""
        n = self.numbers
        rows = {
            "device": f"{n['device']}, {n['dtype']}" + (f", {n['ranks']} ranks" if n["ranks"] > 1 else ""),
            "generated": f"{n['generated_tokens']:,} tokens in {n['steps']} steps",
            "tokens/s": f"{n['tokens_per_second']:,.0f}",
        }
        if n["replayed_steps"]:
            sizes = ", ".join(f"{count} of size {size}" for size, count in n["replayed_sizes"].items())
            rows["CUDA graphs"] = f"{n['replayed_steps']} steps replayed: {sizes}; {n['replayed_padding']:.0%} padding"
        if n["compiled"]:
            rows |= {
                "graphs compiled": f"{n['graphs']} in {n['compile_seconds']:.1f} s",
                "recompiles": str(n["recompiles"]),
                "graph breaks": str(n["graph_breaks"]),
                "cache copies": str(n["cache_copies"]),
            }
        rows |= {
            "blocks used": f"{n['blocks_used']} of {n['num_blocks']} at most",
            "blocks shared": f"{n['blocks_shared']} at most, {n['cached_tokens']} prompt tokens found in the cache",
            "preemptions": f"{n['swapped_out']} swapped, {n['recomputed']} computed again",
            **(last_rows or {}),
        }
        made = table(title=title)
        for name, value in rows.items():
            made.add_row(name, value)
        console.print(made)


def _check_graphs(graphs: bool | None, device: torch.device) -> None:
    if graphs and device.type != "cuda":
        raise ValueError(f"--graphs: expected --device cuda, as {device.type} has no CUDA graphs, got {device}")


def serve(
    console: Console,
    log: Console,
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    prompt_ids: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    num_blocks: int,
    *,
    compile: bool,
    graphs: bool | None,
) -> Result:
    """Generates for all prompts by continuous batching, up to a stop token. Streams outputs to ``console``, progress to
    ``log``."""
    from paged_ops.inspection import CompileReport
    from paged_ops.integrations.transformers import PagedCausalLM

    paged: PagedCausalLM = PagedCausalLM(model)
    kv_cache = paged.allocate_kv_cache(num_blocks, BLOCK_SIZE, num_host_blocks=num_blocks)
    if graphs is None:
        graphs = kv_cache.device.type == "cuda"
    loop = GenerationLoop(
        paged,
        kv_cache,
        max_num_seqs=MAX_NUM_SEQS,
        compile=compile,
        graph_mode=GraphMode.FULL_DECODE_ONLY if graphs else GraphMode.NONE,
        generation_config={"num_return_sequences": None},  # one output per prompt, whatever the model's config says
        tokenizer=tokenizer,
    )
    with CompileReport(kv_cache.layers) as report, ExitStack() as stack:
        start = time.perf_counter()
        if compile:
            require_compiler(model.device)
        if compile or graphs:
            stack.enter_context(progress := _progress(log))
            task = progress.add_task("Compiling the model" if compile else "Running the model once", total=None)
        loop.warm_up(lambda done, total: progress.update(task, description=CAPTURING, completed=done, total=total))
        stack.close()
        compile_seconds = time.perf_counter() - start
        with StreamView(console, tokenizer, prompts, sum(each.max_new_tokens or 0 for each in params)) as view:
            outputs = loop.generate(prompt_ids, params, view.add)
    for number, output in enumerate(outputs, 1):
        if output.error is not None:
            raise ValueError(f"prompt {number} of {len(outputs)} failed: {output.error}")
    stats: GenerationStats = loop.stats
    numbers = {
        "tokens_per_second": stats.tokens_per_second,
        "graphs": report.graphs,
        "recompiles": report.recompiles,
        "graph_breaks": report.graph_breaks,
        "cache_copies": report.cache_copies,
        "blocks_used": stats.peak_used_blocks,
        "blocks_shared": stats.peak_shared_blocks,
        "num_blocks": num_blocks,
        "steps": stats.steps,
        "replayed_steps": loop.graph_stats.replayed,
        "replayed_sizes": {str(key.num_reqs): count for key, count in sorted(loop.graph_stats.replays.items())},
        "replayed_padding": loop.graph_stats.padding,
        "generated_tokens": stats.generated_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "swapped_out": stats.swapped_out,
        "recomputed": stats.recomputed,
        "seconds": stats.seconds,
        "compile_seconds": compile_seconds if compile else 0.0,
        "compiled": compile,
        "device": str(model.device),
        "ranks": 1 if paged.process_group is None else paged.process_group.size(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "paged_ops": paged_ops.__version__,
    }
    return Result(outputs, numbers)


def _progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True)


class StreamView:
    """Streamed outputs and a progress bar: live on a terminal, else each output when it is complete."""

    def __init__(self, console: Console, tokenizer: Any, prompts: Sequence[str], total: int) -> None:
        self._console = console
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._tokens: list[list[int]] = [[] for _ in prompts]
        self._progress = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("tokens", total=total)
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> StreamView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
            if kind is None:
                for i in range(len(self._prompts)):
                    self._print_whole(i)

    def add(self, new: NewToken) -> None:
        """The callback of :meth:`GenerationLoop.generate`."""
        if new.token is not None:
            self._tokens[new.request_id].append(new.token)
            self._progress.advance(self._task)
        if new.finish_reason and not self._console.is_terminal:
            self._print_whole(new.request_id)

    def _text(self, i: int) -> str:
        return str(self._tokenizer.decode(self._tokens[i], skip_special_tokens=True))

    def _print_whole(self, i: int) -> None:
        prompt = self._prompts[i]
        start = prompt if len(prompt) <= PROMPT_END else f"... {prompt[-PROMPT_END:].partition(' ')[2]}"
        self._console.print(Text.assemble((start, "dim"), (self._text(i), "bold")), end="\n\n", soft_wrap=True)

    def _render(self) -> Group:
        """The end of each output on its own line, as far as the screen reaches, and the bar."""
        width, height = self._console.size
        lines = []
        for i in range(min(len(self._prompts), max(1, height - 3))):
            start, output = self._prompts[i][-width // 3 :].replace("\n", " "), self._text(i).replace("\n", " ")
            room = max(8, width - len(start) - 4)
            lines.append(Text.assemble((start, "dim"), output[-room:], no_wrap=True, overflow="ellipsis"))
        return Group(*lines, self._progress)
