"""Tables and a plot of the records. One command regenerates them from data, so that the documents stay true.

A document marks a table by ``<!-- bench: GROUP, DEVICE -->`` before and ``<!-- /bench -->`` after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
BLOCK = re.compile(r"(<!-- bench: (?P<group>[\w-]+), (?P<device>[^>]+?) -->\n).*?(<!-- /bench -->)", re.DOTALL)
OURS = "paged_ops"
PEERS = ("FlashAttention-3", "FlashInfer", "FlashMLA", "vLLM Triton")  # whose versions are printed
SHOWN = {"heads": "32/8", "block_size": 16}  # the cases of the plot
DENSE = "SDPA dense"  # has no blocks, so it is not a peer
COLOURS = ("#d1495b", "#3d7ea6", "#6a994e", "#5c677d", "#3f3f74", "#b08ea2", "#7f5539", "#e3a857")
COLOUR_OF = dict(zip((OURS, *PEERS, "FlexAttention", "varlen_attn", DENSE), COLOURS, strict=True))
# The table of README: description, group, heads, case.
SUMMARY = (
    ("decode, 64 sequences of 4096 tokens", "decode", "32/8", "64x4096"),
    ("decode, 128 sequences of 16 to 16384 tokens", "decode", "32/8", "ragged128"),
    ("decode, one key/value head, 64 sequences of 4096 tokens", "decode", "8/1", "64x4096"),
    ("prefill of 8192 tokens", "prefill", "32/8", "1x8192 block 16"),
    ("prefill of 2048 tokens and 63 decodes in one batch", "prefill", "32/8", "2048@8192+63x4096 block 16"),
    ("decode with an fp8 cache, 64 × 4096", "fp8", "32/8", "64x4096"),
    ("latent decode (MLA), 16 heads, 64 × 4096, blocks of 64", "latent", "16/1", "64x4096 block 64"),
)
BEHIND = 0.01  # a case is behind if it is slower than a peer by more than this share


def file_name(device: str) -> str:
    """A device's name as a part of a file name."""
    return re.sub(r"\W+", "_", device.lower()).strip("_")


def load(data: Path) -> list[Record]:
    """All records of a folder's ``bench_*.jsonl``, in the order of their dates."""
    lines = [line for path in sorted(data.glob("bench_*.jsonl")) for line in path.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda record: record["date"])


def latest(records: Iterable[Record], device: str, group: str) -> list[Record]:
    """For each case and provider, the last record that has a speed, in the order of first records."""
    found: dict[tuple[str, ...], Record] = {}
    for record in records:
        if (record["device"], record["group"]) == (device, group) and "failed" not in record:
            found[(*key(record), record.get("provider", ""))] = record
    return list(found.values())


def key(record: Record) -> tuple[str, str, str]:
    """The key of a case."""
    return record["group"], record.get("heads", ""), record["case"]


def load_others(data: Path, device: str) -> dict[tuple[str, str, str], Record]:
    """The times of others and the targets, from ``targets_<device>.json`` if it exists."""
    path = data / f"targets_{file_name(device)}.json"
    return {key(entry): entry for entry in json.loads(path.read_text())} if path.exists() else {}


def table(records: Sequence[Record], device: str, group: str, others: dict[tuple[str, str, str], Record]) -> str:
    """A group, or the summary, as a Markdown table, one row per case and one column per provider; below it the
    versions and commits. A time with a * is from another run than this package's."""
    if group == "summary":
        return _summary_table(records, device)
    if group == "behind":
        return _behind_table(records, device)
    if group == "count":
        return _count(records, device)
    chosen = latest(records, device, group)
    if not chosen:
        return f"No records of {group} on {device} yet.\n"
    if group == "ceiling":
        return _ceiling_table(chosen) + _source(chosen)
    providers = _providers(chosen)
    by_case = _by_case(chosen)
    has_heads = any(case[1] for case in by_case)
    has_floor = any("floor_us" in record for record in chosen)
    known = {case: dict(others[case]) for case in by_case if case in others}
    for case, entry in known.items():
        if _peers(by_case[case]):  # which makes the times of earlier runs needless
            entry.pop("best other", None)
    extra = [name for name in ("best other", "target") if any(name in each for each in known.values())]
    header = ["heads"] * has_heads + ["case"] + ["floor"] * has_floor + providers + extra
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for case, row in by_case.items():
        cells = [case[1]] * has_heads + [case[2]]
        if has_floor:
            floors = (each["floor_us"] for each in (row.get(OURS, {}), *row.values()) if "floor_us" in each)
            cells.append(_number(next(floors, None)))
        cells += [_cell(row, name) for name in providers]
        cells += [str(known.get(case, {}).get(name, "")) for name in extra]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n" + _source(chosen)


def _ceiling_table(chosen: Sequence[Record]) -> str:
    lines = ["| ceiling | |", "|---|---|"]
    for record in chosen:
        speed = f"{record['gbps']:.0f} GB/s" if "gbps" in record else f"{record['tflops']:.0f} TFLOP/s"
        lines.append(f"| {record['case']} | {speed} |")
    return "\n".join(lines) + "\n"


def _by_case(chosen: Iterable[Record]) -> dict[tuple[str, str, str], dict[str, Record]]:
    by_case: dict[tuple[str, str, str], dict[str, Record]] = {}
    for record in chosen:
        by_case.setdefault(key(record), {})[record["provider"]] = record
    return by_case


def _in_same_run(record: Record, row: dict[str, Record]) -> bool:
    """Whether a record is of the run that measured this package."""
    return OURS not in row or record["commit"] == row[OURS]["commit"]


def _peers(row: dict[str, Record]) -> list[Record]:
    """Others that were measured in the run of this package, the fastest first."""
    peers = [each for name, each in row.items() if name not in (OURS, DENSE) and _in_same_run(each, row)]
    return sorted(peers, key=lambda record: record["us"])


def _summary_table(records: Sequence[Record], device: str) -> str:
    wanted = {(group, heads, case): words for words, group, heads, case in SUMMARY}
    groups = dict.fromkeys(case[0] for case in wanted)
    chosen = [each for group in groups for each in latest(records, device, group) if key(each) in wanted]
    chosen = [each for each in chosen if each["provider"] != DENSE]
    by_case = _by_case(chosen)
    rows = {words: by_case[case] for case, words in wanted.items() if OURS in by_case.get(case, {})}
    if not rows:
        return f"No records on {device} yet.\n"
    lines = ["|  | floor | paged_ops | fastest other |", "|---" * 4 + "|"]
    for words, row in rows.items():
        fastest = min((each for each in _peers(row) or _others(row)), key=lambda each: each["us"], default=None)
        said = "–" if fastest is None else f"{_us(fastest, row)} ({fastest['provider']})"
        lines.append(f"| {words} | {_number(row[OURS]['floor_us'])} | {_us(row[OURS], row)} | {said} |")
    return "\n".join(lines) + "\n" + _source(chosen)


def _others(row: dict[str, Record]) -> list[Record]:
    return [each for provider, each in row.items() if provider != OURS]


def _behind(
    records: Sequence[Record], device: str
) -> tuple[dict[tuple[str, str, str], tuple[Record, Record]], dict[tuple[str, str, str], float]]:
    """This package's and the fastest other record of each case with a peer in the same run; and by how much this
    package is behind, where that is more than 1%, the worst first."""
    groups = dict.fromkeys(record["group"] for record in records if record["device"] == device)
    by_case = _by_case(
        each for group in groups if group != "host" for each in latest(records, device, group) if "provider" in each
    )
    compared = {case: (row[OURS], _peers(row)[0]) for case, row in by_case.items() if OURS in row and _peers(row)}
    shares = {case: ours["us"] / peer["us"] - 1 for case, (ours, peer) in compared.items()}
    return compared, {case: shares[case] for case in sorted(shares, key=lambda c: -shares[c]) if shares[case] > BEHIND}


def _count(records: Sequence[Record], device: str) -> str:
    """How often this package is not behind, as a sentence."""
    compared, behind = _behind(records, device)
    if not compared:
        return f"No peer was measured in the same run as paged_ops on {device} yet.\n"
    good, most = len(compared) - len(behind), max(behind.values(), default=0.0)
    rest = f" In the others it is behind by at most {most:.0%}." if behind else ""
    words = "paged_ops is ahead of the fastest library measured in the same run, or within 1% of it,"
    return f"On one {device}, {words} in {good} of {len(compared)} cases.{rest}\n"


def _behind_table(records: Sequence[Record], device: str) -> str:
    """The cases that a peer won in the same run, the worst first."""
    compared, behind = _behind(records, device)
    if not compared:
        return f"No peer was measured in the same run as paged_ops on {device} yet.\n"
    good = len(compared) - len(behind)
    lines = [f"Cases with a peer in the same run: {len(compared)}. Not behind by more than 1%: {good}."]
    if behind:
        lines += ["", "| group | heads | case | paged_ops | fastest other | behind by |", "|---" * 6 + "|"]
    for case, share in behind.items():
        ours, peer = compared[case]
        cells = (*case, _number(ours["us"]), f"{_number(peer['us'])} ({peer['provider']})", f"{share:.0%}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n" + _source([each for pair in compared.values() for each in pair])


def _us(record: Record, row: dict[str, Record]) -> str:
    return _number(record["us"]) + "*" * (not _in_same_run(record, row))


def _number(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _cell(row: dict[str, Record], provider: str) -> str:
    if provider not in row:
        return "–"
    record = row[provider]
    if "percent" in record:
        return f"{_us(record, row)} ({record['percent']:.0f} %)"
    return _us(record, row) + (f" ({record['gbps']:.1f} GB/s)" if "gbps" in record else "")


def _source(chosen: Sequence[Record]) -> str:
    """Versions and commits of the numbers."""
    ours = [record for record in chosen if record.get("provider", OURS) == OURS] or chosen
    commits = ", ".join(dict.fromkeys(str(record["commit"]) for record in ours))
    dates = ", ".join(dict.fromkeys(record["date"][:10] for record in ours))
    versions = {record["provider"]: record["provider_version"] for record in chosen if record.get("provider_version")}
    peers = "".join(f", {name} {number}" for name, number in versions.items() if name in PEERS)
    last = ours[-1]
    triton = f", triton {last['triton']}" if last.get("triton") else ""
    rows = _by_case(record for record in chosen if "provider" in record).values()
    other_runs = [each["commit"] for row in rows for each in row.values() if not _in_same_run(each, row)]
    star = f" * In another run ({', '.join(dict.fromkeys(other_runs))})." if other_runs else ""
    return f"\n{last['device']}, torch {last['torch']}{triton}{peers}; commit {commits}; {dates}.{star}\n"


def rewrite(document: Path, records: Sequence[Record], data: Path) -> int:
    """Fills every marked table of a document; returns how many there are."""

    def fill(match: re.Match[str]) -> str:
        device, group = match["device"], match["group"]
        return match[1] + table(records, device, group, load_others(data, device)) + match[4]

    text, count = BLOCK.subn(fill, document.read_text())
    document.write_text(text)
    return count


def plots(records: Sequence[Record], data: Path, folder: Path) -> list[Path]:
    """Draws one plot per device: the share of the floor that each case reaches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        message = "matplotlib is not installed; it comes with the extra bench: pip install '.[bench]' in a checkout"
        raise ImportError(message) from None
    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "paged_ops", "svg.fonttype": "none", "font.size": 9}
    matplotlib.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
    written = []
    for device in dict.fromkeys(record["device"] for record in records):
        figure = _percent(records, device, load_others(data, device))
        if figure is not None:
            path = folder / f"bench_{file_name(device)}_percent.svg"
            figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
            written.append(path)
    return written


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()


def _providers(chosen: Iterable[Record]) -> list[str]:
    """This package, then its peers in the order of their colours."""
    order = list(COLOUR_OF)
    found = dict.fromkeys(record["provider"] for record in chosen)
    return sorted(found, key=lambda name: order.index(name) if name in order else len(order))


def _look(provider: str, in_same_run: bool) -> dict[str, Any]:
    return {"color": COLOUR_OF.get(provider, "black"), "alpha": 1.0 if in_same_run else 0.35}


def _label(provider: str, in_same_run: bool) -> str:
    return provider if in_same_run else f"{provider}, another run"


def _percent(records: Sequence[Record], device: str, others: dict[tuple[str, str, str], Record]) -> Any:
    """Bars: the share of the floor that each case reaches, by provider; pale if measured in another run. A line for the
    best of others where no peer was measured in the same run."""
    groups = ("decode", "fp8", "prefill")
    chosen = [r for group in groups for r in latest(records, device, group) if SHOWN.items() <= r.items()]
    if not chosen:
        return None
    providers, labels = _providers(chosen), list(dict.fromkeys(key(record) for record in chosen))
    figure, axes = _figure(7, 0.8 + 0.12 * len(labels) * max(2, len(providers)))
    by_case = _by_case(chosen)
    drawn: dict[tuple[str, bool], None] = {}
    for record in chosen:
        of_case = by_case[key(record)]
        there = [name for name in providers if name in of_case]
        height = min(0.8 / len(there), 0.3)
        row = labels.index(key(record)) + height * (there.index(record["provider"]) - (len(there) - 1) / 2)
        look = record["provider"], _in_same_run(record, of_case)
        drawn[look] = None
        axes.barh(row, record["percent"], height * 0.9, **_look(*look))
    best_us = {label: others.get(label, {}).get("best us") for label in labels if not _peers(by_case[label])}
    for n, label in enumerate(labels):
        best = best_us.get(label)
        if best:
            floor = next(record["floor_us"] for record in chosen if key(record) == label)
            axes.plot([100 * floor / best] * 2, [n - 0.4, n + 0.4], color="black", linewidth=1)
    for look in sorted(drawn, key=lambda look: (providers.index(look[0]), not look[1])):
        axes.barh(0, 0, label=_label(*look), **_look(*look))
    if any(best_us.values()):
        axes.plot([], [], color="black", linewidth=1, label="best of others, earlier")
    axes.set_yticks(range(len(labels)), [f"{group} {heads}  {case}" for group, heads, case in labels])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the floor (bytes at the read ceiling, or operations at the matmul ceiling)")
    axes.set_title(device, loc="left")
    figure.legend(loc="outside upper right", ncols=3, frameon=False, fontsize=8)
    return figure
