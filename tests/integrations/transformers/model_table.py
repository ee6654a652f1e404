"""The table of docs/models.md: every causal decoder of the installed transformers, served or refused.

``python -m tests.integrations.transformers.model_table [FAMILY...]`` checks families in eager mode, all by default.
``--compiled`` also checks compiled layers: most of an hour on two cores. Both write model_table.json and
docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from paged_ops import supports
from paged_ops.generation import GenerationLoop, SamplingParams
from paged_ops.integrations.transformers import PagedCausalLM
from tests.integrations.transformers.model_families import (
    FAMILIES,
    UNBUILT,
    VOCABULARY,
    head_sizes,
    make_model,
    model_class,
    released_heads,
    text_family,
)

DATA = Path(__file__).parent / "model_table.json"
PAGE = Path(__file__).parents[3] / "docs" / "models.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
DEVICES = ("cpu", "cuda", "rocm")
NEW_TOKENS = 8
BLOCK_SIZE = 4
LENGTHS = (1, 3, 9, 17, 26)  # of prompts, and two more that share their first 12 tokens


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)

    def random(length: int) -> list[int]:
        return torch.randint(5, VOCABULARY - 4, (length,), generator=generator).tolist()

    shared = random(12)
    return [*(random(length) for length in LENGTHS), [*shared, *random(1)], [*shared, *random(7)]]


def by_transformers(model: Any) -> list[list[int]]:
    """The greedy tokens of each prompt alone, not padded, by eager ``generate``."""
    options: dict[str, Any] = dict(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens = []
    for prompt in prompts():
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        tokens.append(model.generate(torch.tensor([prompt]), attention_mask=mask, **options)[0, len(prompt) :].tolist())
    return tokens


def check(family: str, compiled: bool = False, **options: Any) -> dict[str, Any]:
    """The row of a family: ``served`` says whether it is; ``equal`` whether its tokens are those of ``generate``;
    ``reason`` why it is not served, ``keeps`` what its layers keep.

    Small chunks of prompts, blocks of 4, shared prefixes. With ``compiled`` by layers that are compiled, with these
    options of ``torch.compile``.
    """
    if family in UNBUILT:
        return dict(served=False, reason=UNBUILT[family])
    model = make_model(family)
    try:
        paged = PagedCausalLM(model)
    except ValueError as error:
        return dict(served=False, reason=_reason(str(error)))
    if compiled:
        paged.compile_layers(**options)
    kv_cache = paged.allocate_kv_cache(128, BLOCK_SIZE)
    torch._dynamo.utils.counters.clear()
    loop = GenerationLoop(paged, kv_cache, max_num_seqs=8, max_num_tokens=24, max_model_len=64)
    loop.warm_up()  # or the sizes of the first step, some of them equal, would be compiled first
    tokens = loop.generate(prompts(), SamplingParams(max_new_tokens=NEW_TOKENS, stop_token_ids=()))
    assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0) == compiled, "compiled, or not"
    equal = tokens == by_transformers(paged.unwrap())
    return dict(served=True, equal=equal, keeps=_keeps(paged))


def released(family: str) -> str | None:
    """The head sizes of the family's released model, and the devices that serve them: "" for a family without
    attention, None if transformers' default config does not tell."""
    paged = PagedCausalLM(make_model(family))
    attending = paged._wrapping.attending
    for module, how in attending.items():  # that the sizes are read from the right attributes
        spec = paged.layers[how.cache]
        assert head_sizes(module) == (spec.head_size, spec.value_head_size, spec.latent), type(module)
    modules = list(attending)
    paged.unwrap()
    heads = released_heads(family, map(type, modules))
    if not heads and modules:  # the default config has no layer that attends, or makes no model
        return None
    return "; ".join(map(_on_devices, heads or ()))


def _on_devices(heads: tuple[int, int, bool]) -> str:
    D, Dv, latent = heads
    name = f"latent {Dv} + {D - Dv}" if latent else f"{D}" if D == Dv else f"{D}/{Dv}"
    form: dict[str, Any] = {"layout": "LATENT", "num_kv_heads": 1} if latent else {"value_cache": D != Dv}
    asked = dict(head_size=D, value_head_size=Dv, **form)
    return f"{name}: {', '.join(d for d in DEVICES if not supports('paged_attention', d, **asked)) or 'none'}"


def _reason(message: str) -> str:
    """The error without what says the same in every row."""
    return re.sub(r"differ by \d+%", "differ", message.removeprefix("model: ").split("\n")[0])


def _keeps(paged: PagedCausalLM) -> str:
    kinds = Counter(paged.layers)
    parts = []
    for spec, count in kinds.items():
        heads = f"{spec.num_kv_heads} × {spec.head_size}"
        heads += f"/{spec.value_head_size}" if spec.value_head_size != spec.head_size else ""
        if not spec.value_head_size:
            heads = f"index keys of {spec.head_size}"
        if spec.latent:
            heads = f"latent {spec.value_head_size} + {spec.head_size - spec.value_head_size}"
        reach = f" window {spec.window}" if spec.window else f" chunk {spec.chunk}" if spec.chunk else ""
        parts.append(f"{count}: {heads}{reach}")
    if paged.states is not None:
        parts.append(f"{len(paged.states.layers)}: state")
    return ", ".join(parts)


def load() -> dict[str, Any]:
    return json.loads(DATA.read_text()) if DATA.exists() else {"versions": {}, "families": {}}


def versions() -> dict[str, str]:
    return {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}


def render(data: dict[str, Any]) -> str:
    """The tables between the marks of docs/models.md: what is served, composite models, what is refused by reason."""
    rows = data["families"]
    both = sum(row.get("equal") is True and row.get("compiled") is True for row in rows.values())
    served = {family: row for family, row in sorted(rows.items()) if row["served"]}
    within = {family: row["within"] for family, row in sorted(rows.items()) if "within" in row}
    refused: dict[str, list[str]] = {}
    for family, row in sorted(rows.items()):
        if not row["served"] and family not in within:
            name = row["class"]
            reason = row["reason"].replace(f"{name} cannot be served: ", "").replace(name, "the model")
            refused.setdefault(reason.replace("|", "/"), []).append(family)
    lines = [
        f"torch {data['versions']['torch']}, transformers {data['versions']['transformers']}: of"
        f" {len(rows) - len(within)} families {len(served)} are served with equal tokens, {both} of them measured in"
        f" compiled form too. Heads are served on {', '.join(DEVICES)}, unless devices are named.",
        "",
        "| family | class | eager | compiled | released heads | layers of the tiny model |",
        "|---|---|---|---|---|---|",
    ]
    for family, row in served.items():
        known = {True: "equal", False: "**wrong**", None: "not measured"}
        compiled = known.get(row.get("compiled"), "not compilable")
        eager = "equal" if row["equal"] else "**wrong**"
        heads = row.get("released") or ("no attention" if row.get("released") == "" else "unknown")
        heads = heads.replace(f": {', '.join(DEVICES)}", "")
        lines.append(f"| {family} | {row['class']} | {eager} | {compiled} | {heads} | {row['keeps']} |")
    pairs = ", ".join(f"{family} ({name})" for family, name in within.items())
    lines += ["", f"{len(within)} composite models, with the row of their text model: {pairs}.", ""]
    lines += ["| refused, because | families |", "|---|---|"]
    for reason, families in sorted(refused.items(), key=lambda each: (-len(each[1]), each[1])):
        lines.append(f"| {reason} | {', '.join(families)} |")
    return "\n".join(lines)


def write(data: dict[str, Any]) -> None:
    DATA.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    if PAGE.exists():
        page = PAGE.read_text()
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{render(data)}\n{END}{after}")


def record(families: list[str], compiled: bool) -> int:
    """Checks families and writes what was found; returns how many rows are wrong."""
    data = load()
    data["versions"] = versions()
    wrong = 0
    for family in families:
        start = time.perf_counter()
        if text_family(family) != family:
            row: dict[str, Any] = {"served": False, "within": text_family(family)}
        else:
            old = data["families"].get(family, {})
            row = {"class": model_class(family).__name__, **check(family)}
            if row["served"] and compiled and row["equal"]:
                torch._dynamo.reset()
                try:
                    row["compiled"] = check(family, compiled=True)["equal"]
                except torch._dynamo.exc.TorchDynamoException:  # its own code reads values, as some experts' does
                    row["compiled"] = "not compilable"
            elif row["served"] and "compiled" in old:
                row["compiled"] = old["compiled"]
            if row["served"]:
                row["released"] = released(family)
        wrong += row.get("equal") is False or row.get("compiled") is False
        data["families"][family] = row
        print(f"{family}: {row} ({time.perf_counter() - start:.1f} s)", flush=True)
        write(data)
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--compiled", action="store_true")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    sys.exit(1 if record(arguments.families, arguments.compiled) else 0)
