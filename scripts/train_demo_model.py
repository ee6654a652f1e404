"""Train the small Llama model that ``paged-ops demo`` serves (``paged_ops/demo_model``).

The text is the six novels of Jane Austen (1775-1817), which are in the public domain everywhere. They are read out of
the Debian package ``r-cran-janeaustenr`` 1.0.0-1, which packs the Project Gutenberg editions as an R data base::

    apt-get download r-cran-janeaustenr=1.0.0-1
    python scripts/train_demo_model.py r-cran-janeaustenr_1.0.0-1_all.deb

The run is deterministic for one seed, one device and one version of torch. It needs torch, transformers and
tokenizers; on a CPU add ``--steps 20`` to try it out.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import os
import re
import struct
import tarfile
import time
import zlib
from collections import Counter
from pathlib import Path

# cuBLAS is deterministic only with a fixed workspace, and reads this when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

PACKAGE_SHA256 = "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95"
RDB_PATH = "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
END_OF_TEXT = "<|endoftext|>"
MAX_POSITION = 2048
CROP_LENGTHS = (256, 512, 1024, 2048)
HEADING = re.compile(r"\s*(chapter|volume) +[ivxl\d]+\s*", re.IGNORECASE)
ENDING = re.compile(r"\s*(finis|the end|a note on the text)\s*", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")


def read_deb_member(deb: bytes, path: str) -> bytes:
    """The content of the file ``path`` of a Debian package, an ``ar`` archive that holds ``data.tar.*``."""
    if not deb.startswith(b"!<arch>\n"):
        raise ValueError("text: expected a Debian package (.deb), got a file that is no ar archive")
    offset = 8
    while offset < len(deb):
        header, size = deb[offset : offset + 60], int(deb[offset + 48 : offset + 58])
        offset += 60
        if header.startswith(b"data.tar"):
            with tarfile.open(fileobj=io.BytesIO(deb[offset : offset + size])) as archive:
                member = archive.extractfile(path)
                assert member is not None
                return member.read()
        offset += size + size % 2
    raise ValueError("text: the Debian package has no data.tar member")


def read_r_strings(data: bytes) -> list[str]:
    """The character vector that ``data``, R's XDR serialisation of version 3, holds."""
    offset = 14  # "X\n", format version, version of the writer, oldest reader
    offset += 4 + struct.unpack_from(">i", data, offset)[0]  # the native encoding's name
    flags, count = struct.unpack_from(">ii", data, offset)
    assert flags & 0xFF == 16, "expected a character vector (STRSXP)"
    offset += 8
    lines = []
    for _ in range(count):
        _, length = struct.unpack_from(">ii", data, offset)
        lines.append(data[offset + 8 : offset + 8 + length].decode())
        offset += 8 + length
    assert offset == len(data)
    return lines


def read_novels(deb: bytes) -> list[list[str]]:
    """The lines of each novel: an ``.rdb`` file is a run of records, a 4-byte length and then a zlib stream."""
    rdb, novels = read_deb_member(deb, RDB_PATH), []
    while rdb:
        stream = zlib.decompressobj()
        novels.append(read_r_strings(stream.decompress(rdb[4:])))
        rdb = stream.unused_data
    return novels


def chapters_of(lines: list[str]) -> list[str]:
    """A novel as chapters, one paragraph a line, without title page, headings, emphasis marks and closing notes."""
    chapters: list[list[str]] = []
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if ENDING.fullmatch(line):
            break
        if HEADING.fullmatch(line):
            chapters.append([])
        elif line.strip():
            paragraph.append(line)
        else:
            text = " ".join(" ".join(paragraph).replace("_", "").split())
            if text and "*" not in text and chapters:
                chapters[-1].append(text)
            paragraph = []
    return ["\n".join(chapter) + "\n" for chapter in chapters if chapter]


def train_tokenizer(text: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level byte-pair encoding (as in GPT-2), with one special token, id 0, which begins each chapter."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, chapters: list[str]) -> Tensor:
    """All chapters as one int64 vector, each behind an end-of-text token."""
    return torch.tensor([i for e in tokenizer.encode_batch([END_OF_TEXT + c for c in chapters]) for i in e.ids])


def random_crops(tokens: Tensor, batch_tokens: int, generator: torch.Generator) -> Tensor:
    """A batch int64 ``[batch_tokens // length, length]`` of crops from anywhere in the text.

    The length varies from batch to batch, so that the model learns both short prompts and its whole context.
    """
    length = CROP_LENGTHS[int(torch.randint(len(CROP_LENGTHS), (), generator=generator))]
    starts = torch.randint(len(tokens) - length, (batch_tokens // length, 1), generator=generator)
    return tokens[starts + torch.arange(length)]


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama with grouped-query attention and tied embeddings; dropout also on what each block adds."""
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=MAX_POSITION,
        attention_dropout=0.0,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)

    def drop(module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
        return F.dropout(output, args.dropout, module.training)

    if args.dropout:
        for layer in model.model.layers:
            layer.self_attn.o_proj.register_forward_hook(drop)
            layer.mlp.register_forward_hook(drop)
        model.model.embed_tokens.register_forward_hook(drop)
    return model


def next_token_loss(model: LlamaForCausalLM, batch: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean cross-entropy, in nats a token, of each token of ``batch`` given those before it."""
    with torch.autocast(batch.device.type, dtype, enabled=dtype != torch.float32):
        logits = model(batch[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def greedy(model: LlamaForCausalLM, prompts: Tensor, new_tokens: int) -> Tensor:
    """``prompts``, int64 ``[batch, length]``, each followed by ``new_tokens`` tokens, the likeliest one each time."""
    tokens, cache, step = prompts, None, prompts
    for _ in range(new_tokens):
        output = model(step, past_key_values=cache, use_cache=True)
        cache, step = output.past_key_values, output.logits[:, -1:].argmax(-1)
        tokens = torch.cat((tokens, step), 1)
    return tokens


def repetition_loss(
    model: LlamaForCausalLM, prompts: Tensor, new_tokens: int, starts_word: Tensor, n: int = 4
) -> tuple[Tensor, Tensor]:
    """Sequence-level unlikelihood: the mean of ``-log(1 - p)`` over what the model repeats when it decodes greedily.

    A token of a greedy continuation counts when it ends a run of ``n`` tokens that occurred before in the same
    sequence and ``starts_word`` (bool, one entry a token of the vocabulary) holds: to unlearn a word's later pieces
    would make words that do not exist. Also returns the share of such tokens. The idea is that of Welleck et al.,
    "Neural text generation with unlikelihood training" (2019): a small model trained on likelihood alone falls into
    loops.
    """
    model.eval()
    sequences = greedy(model, prompts, new_tokens)
    model.train()
    continuation = sequences[:, -new_tokens:]
    runs = sequences.unfold(1, n, 1)
    same = (runs[:, :, None] == runs[:, None]).all(-1)
    repeated = same.tril(-1).any(-1)[:, -new_tokens:] & starts_word[continuation]
    logits = model(sequences[:, :-1]).logits[:, -new_tokens:].float()
    p = torch.exp(-F.cross_entropy(logits.flatten(0, 1), continuation.flatten(), reduction="none"))
    loss = -torch.log1p(-p.clamp(max=1 - 1e-4)) * repeated.flatten()
    return loss.mean(), repeated.float().mean()


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, tokens: Tensor, device: str, length: int = 512) -> float:
    """``next_token_loss`` in float32 over ``tokens``, cut into pieces of ``length``."""
    model.eval()
    pieces = tokens[: len(tokens) // length * length].view(-1, length)
    losses = [next_token_loss(model, piece.to(device), torch.float32) for piece in pieces.split(16)]
    model.train()
    return float(torch.stack(losses).mean())


def train(model: LlamaForCausalLM, tokens: Tensor, held_out: Tensor, args: argparse.Namespace) -> list[dict]:
    """AdamW with a linear warm-up and a cosine down to zero; returns the log."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    on_cuda = args.device == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95), fused=on_cuda)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / args.warmup) * (0.5 + 0.5 * math.cos(math.pi * step / args.steps)),
    )
    generator = torch.Generator().manual_seed(args.seed)
    log, running, start = [], [], time.perf_counter()
    for step in range(1, args.steps + 1):
        batch = random_crops(tokens, args.batch_tokens, generator).to(args.device, non_blocking=True)
        loss = next_token_loss(model, batch, torch.bfloat16 if on_cuda else torch.float32)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        running.append(loss.detach())
        if step % args.log_every == 0 or step == args.steps:
            entry = {
                "step": step,
                "train_loss": round(float(torch.stack(running).mean()), 4),
                "held_out_loss": round(evaluate(model, held_out, args.device), 4),
            }
            log.append(entry)
            running = []
            print(f"{time.perf_counter() - start:7.1f} s  {json.dumps(entry)}", flush=True)
    return log


def unlearn_repetition(
    model: LlamaForCausalLM, tokenizer: Tokenizer, tokens: Tensor, held_out: Tensor, args: argparse.Namespace
) -> list[dict]:
    """A short second phase that adds ``repetition_loss`` to the likelihood; returns the log."""
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    starts_word = torch.tensor([not piece[0].islower() for piece, _ in pieces], device=args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.repetition_learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / args.repetition_steps)
    generator = torch.Generator().manual_seed(args.seed + 1)
    log, start = [], time.perf_counter()
    for step in range(1, args.repetition_steps + 1):
        length = int(torch.randint(4, 64, (), generator=generator))
        starts = torch.randint(len(tokens) - length, (args.repetition_batch, 1), generator=generator)
        prompts = tokens[starts + torch.arange(length)].to(args.device)
        repetition, share = repetition_loss(model, prompts, args.repetition_tokens, starts_word)
        batch = random_crops(tokens, args.batch_tokens, generator).to(args.device)
        likelihood = next_token_loss(model, batch, torch.bfloat16 if args.device == "cuda" else torch.float32)
        (likelihood + args.repetition_weight * repetition).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == args.repetition_steps:
            loss = evaluate(model, held_out, args.device)
            entry = {"repetition_step": step, "repeated_share": round(float(share), 4), "held_out_loss": round(loss, 4)}
            log.append(entry)
            print(f"{time.perf_counter() - start:7.1f} s  {json.dumps(entry)}", flush=True)
    return log


def continue_text(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, new_tokens: int) -> str:
    """The greedy continuation of ``prompt``."""
    ids = tokenizer.encode(prompt).ids
    tokens = greedy(model, torch.tensor([ids], device=model.device), new_tokens)
    return tokenizer.decode(tokens[0, len(ids) :].tolist(), skip_special_tokens=False)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, output: Path, record: dict) -> None:
    """A folder that ``LlamaForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained`` read."""
    model.config.use_cache = True
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0, do_sample=False)
    model.save_pretrained(output)
    tokenizer.save(str(output / "tokenizer.json"), pretty=False)
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_POSITION, **special}
    settings["clean_up_tokenization_spaces"] = False
    (output / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (output / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="r-cran-janeaustenr_1.0.0-1_all.deb")
    parser.add_argument("--output", type=Path, default=Path("paged_ops/demo_model"))
    parser.add_argument("--prompts", type=Path, default=Path("paged_ops/demo_model/prompts.json"))
    parser.add_argument("--words", type=Path, help="also write the commonest words of the text here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--intermediate-size", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=200, help="steps")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--repetition-steps", type=int, default=100)
    parser.add_argument("--repetition-batch", type=int, default=128)
    parser.add_argument("--repetition-tokens", type=int, default=96)
    parser.add_argument("--repetition-weight", type=float, default=4.0)
    parser.add_argument("--repetition-learning-rate", type=float, default=2e-4)
    parser.add_argument("--log-every", type=int, default=500, help="steps")
    parser.add_argument("--sample-tokens", type=int, default=96)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    deb = args.text.read_bytes()
    if hashlib.sha256(deb).hexdigest() != PACKAGE_SHA256:
        raise ValueError(f"text: {args.text} is not r-cran-janeaustenr 1.0.0-1 (sha256 {PACKAGE_SHA256})")
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs a kernel an allocation

    novels = [chapters_of(lines) for lines in read_novels(deb)]
    chapters = [chapter for novel in novels for chapter in novel[:-2]]
    held_out_chapters = [chapter for novel in novels for chapter in novel[-2:]]
    tokenizer = train_tokenizer(chapters, args.vocab_size)
    tokens, held_out = encode(tokenizer, chapters), encode(tokenizer, held_out_chapters)
    if args.words:
        counts = Counter(word.lower() for chapter in chapters for word in WORD.findall(chapter))
        args.words.write_text("\n".join(sorted(word for word, _ in counts.most_common(4000))) + "\n")

    model = make_model(args).to(args.device)
    parameters = sum(p.numel() for p in model.parameters())
    characters = sum(map(len, chapters))
    print(f"{parameters:,} parameters, {len(tokens):,} tokens of {characters:,} characters, {len(held_out):,} held out")
    log = train(model, tokens, held_out, args)
    log += unlearn_repetition(model, tokenizer, tokens, held_out, args)

    model = model.to(torch.bfloat16).eval()
    output_loss = evaluate(model.float(), held_out, args.device)  # of the rounded weights, as the demo runs them
    record = {
        "parameters": parameters,
        "training_tokens": len(tokens),
        "held_out_tokens": len(held_out),
        "held_out_loss_of_saved_weights": round(output_loss, 4),
        "arguments": {k: v for k, v in sorted(vars(args).items()) if not isinstance(v, Path)},
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, tokenizers)},
        "log": log,
    }
    model.eval()
    for prompt in json.loads(args.prompts.read_text()):
        print("-" * 120 + f"\n{prompt} |{continue_text(model, tokenizer, prompt, args.sample_tokens)}", flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    save(model.to(torch.bfloat16), tokenizer, args.output, record)
    print(f"held-out loss of the saved weights: {output_loss:.4f} nats a token")


if __name__ == "__main__":
    main()
