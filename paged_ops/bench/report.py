"""Tables and plots of the records. One command regenerates them from data, so that documents stay true.

A document marks the place of a table by ``<!-- bench: GROUP, DEVICE -->`` before and ``<!-- /bench -->`` after it.
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
PEERS = ("FlashAttention-3", "FlashInfer", "FlashMLA")  # whose versions are told: the others are torch's
SHOWN = {"heads": "32/8", "block_size": 16}  # the cases of the plot that has all providers
COLOURS = ("#d1495b", "#3d7ea6", "#6a994e", "#b08ea2", "#e3a857", "#5c677d")


def file_name(device: str) -> str:
    """A device's name as a part of a file name."""
    return re.sub(r"\W+", "_", device.lower()).strip("_")


def load(data: Path) -> list[Record]:
    """All records of a folder's ``bench_*.jsonl``, in the order in which they were measured."""
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
    """The key by which a case is found."""
    return record["group"], record.get("heads", ""), record["case"]


def load_others(data: Path, device: str) -> dict[tuple[str, str, str], Record]:
    """The times of others and the targets, from ``targets_<device>.json`` if it exists."""
    path = data / f"targets_{file_name(device)}.json"
    return {key(entry): entry for entry in json.loads(path.read_text())} if path.exists() else {}


def table(records: Sequence[Record], device: str, group: str, others: dict[tuple[str, str, str], Record]) -> str:
    """A group as a Markdown table, one row per case and one column per provider; below it the versions and commits."""
    chosen = latest(records, device, group)
    if not chosen:
        return f"No records of {group} on {device} yet.\n"
    if group == "ceiling":
        return _ceiling_table(chosen) + _source(chosen)
    providers = list(dict.fromkeys(record["provider"] for record in chosen))
    providers.sort(key=lambda name: name != OURS)
    by_case: dict[tuple[str, str, str], dict[str, Record]] = {}
    for record in chosen:
        by_case.setdefault(key(record), {})[record["provider"]] = record
    has_heads = any(case[1] for case in by_case)
    has_floor = any("floor_us" in record for record in chosen)
    known = [others[case] for case in by_case if case in others]
    extra = [name for name in ("best other", "target") if any(name in each for each in known)]
    header = ["heads"] * has_heads + ["case"] + ["floor"] * has_floor + providers + extra
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for case, row in by_case.items():
        cells = [case[1]] * has_heads + [case[2]]
        if has_floor:
            cells.append(_number(next((each["floor_us"] for each in row.values() if "floor_us" in each), None)))
        cells += [_cell(row.get(name)) for name in providers]
        cells += [str(others.get(case, {}).get(name, "")) for name in extra]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n" + _source(chosen)


def _ceiling_table(chosen: Sequence[Record]) -> str:
    lines = ["| ceiling | |", "|---|---|"]
    for record in chosen:
        speed = f"{record['gbps']:.0f} GB/s" if "gbps" in record else f"{record['tflops']:.0f} TFLOP/s"
        lines.append(f"| {record['case']} | {speed} |")
    return "\n".join(lines) + "\n"


def _number(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _cell(record: Record | None) -> str:
    if record is None:
        return "–"
    if "percent" in record:
        return f"{_number(record['us'])} ({record['percent']:.0f} %)"
    return _number(record["us"]) + (f" ({record['gbps']:.1f} GB/s)" if "gbps" in record else "")


def _source(chosen: Sequence[Record]) -> str:
    """Versions and commits of the numbers."""
    ours = [record for record in chosen if record.get("provider", OURS) == OURS] or chosen
    commits = ", ".join(dict.fromkeys(str(record["commit"]) for record in ours))
    dates = ", ".join(dict.fromkeys(record["date"][:10] for record in ours))
    versions = {record["provider"]: record["provider_version"] for record in chosen if record.get("provider_version")}
    peers = "".join(f", {name} {number}" for name, number in versions.items() if name in PEERS)
    last = ours[-1]
    triton = f", triton {last['triton']}" if last.get("triton") else ""
    return f"\n{last['device']}, torch {last['torch']}{triton}{peers}; commit {commits}; {dates}.\n"


def rewrite(document: Path, records: Sequence[Record], data: Path) -> int:
    """Fills every marked table of a document; returns how many there are."""

    def fill(match: re.Match[str]) -> str:
        device, group = match["device"], match["group"]
        return match[1] + table(records, device, group, load_others(data, device)) + match[4]

    text, count = BLOCK.subn(fill, document.read_text())
    document.write_text(text)
    return count


def plots(records: Sequence[Record], data: Path, folder: Path) -> list[Path]:
    """Draws what each device's records allow: percent of the floor, time by context and by batch, the roofline.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        message = "matplotlib is not installed: it comes with the extra bench, pip install 'paged-ops[bench]'"
        raise ImportError(message) from None
    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "paged_ops", "svg.fonttype": "none", "font.size": 9}
    matplotlib.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
    kinds = {"percent": _percent, "context": _by_context, "batch": _by_batch, "roofline": _roofline}
    written = []
    for device in dict.fromkeys(record["device"] for record in records):
        for name, draw in kinds.items():
            figure = draw(records, device, load_others(data, device))
            if figure is not None:
                path = folder / f"bench_{file_name(device)}_{name}.svg"
                figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
                written.append(path)
    return written


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()


def _colour(provider: str, providers: Sequence[str]) -> str:
    return COLOURS[providers.index(provider) % len(COLOURS)]


def _providers(chosen: Sequence[Record]) -> list[str]:
    return sorted(dict.fromkeys(record["provider"] for record in chosen), key=lambda name: name != OURS)


def _percent(records: Sequence[Record], device: str, others: dict[tuple[str, str, str], Record]) -> Any:
    """Bars: the share of the floor that each case reaches, by provider, and a line for the best of others."""
    groups = ("decode", "fp8", "prefill")
    chosen = [r for group in groups for r in latest(records, device, group) if SHOWN.items() <= r.items()]
    if not chosen:
        return None
    providers, labels = _providers(chosen), list(dict.fromkeys(key(record) for record in chosen))
    figure, axes = _figure(7, 0.8 + 0.12 * len(labels) * max(2, len(providers)))
    height = 0.8 / len(providers)
    for record in chosen:
        row = labels.index(key(record)) + height * (providers.index(record["provider"]) - (len(providers) - 1) / 2)
        axes.barh(row, record["percent"], height * 0.9, color=_colour(record["provider"], providers))
    for n, label in enumerate(labels):
        best = others.get(label, {}).get("best us")
        if best:
            floor = next(record["floor_us"] for record in chosen if key(record) == label)
            axes.plot([100 * floor / best] * 2, [n - 0.4, n + 0.4], color="black", linewidth=1)
    for provider in providers:
        axes.barh(0, 0, color=_colour(provider, providers), label=provider)
    if any("best us" in others.get(label, {}) for label in labels):
        axes.plot([], [], color="black", linewidth=1, label="best of others")
    axes.set_yticks(range(len(labels)), [f"{group} {heads}  {case}" for group, heads, case in labels])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the floor (bytes at the read ceiling, or operations at the matmul ceiling)")
    axes.set_title(device, loc="left")
    figure.legend(loc="outside upper right", ncols=len(providers) + 1, frameon=False, fontsize=8)
    return figure


def _lines(records: Sequence[Record], device: str, group: str, x: str, label: str) -> Any:
    chosen = latest(records, device, group)
    if not chosen:
        return None
    providers = _providers(chosen)
    figure, axes = _figure(5, 3.2)
    for provider in providers:
        points = sorted((r[x], r["us"]) for r in chosen if r["provider"] == provider)
        colour = _colour(provider, providers)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, label=provider)
    floor = sorted({(r[x], r["floor_us"]) for r in chosen})
    axes.plot(*zip(*floor, strict=True), color="black", linestyle=":", label="floor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel("µs")
    axes.set_title(f"{device}: decode, 32/8 heads, bf16", loc="left")
    axes.legend(frameon=False)
    return figure


def _by_context(records: Sequence[Record], device: str, others: dict[tuple[str, str, str], Record]) -> Any:
    return _lines(records, device, "context", "context", "context of each of 8 sequences")


def _by_batch(records: Sequence[Record], device: str, others: dict[tuple[str, str, str], Record]) -> Any:
    return _lines(records, device, "batch", "batch", "sequences of 4096 tokens")


def _roofline(records: Sequence[Record], device: str, others: dict[tuple[str, str, str], Record]) -> Any:
    """Operations per second by operations per byte, under the two ceilings."""
    groups = ("decode", "fp8", "prefill", "sizes")
    chosen = [r for group in groups for r in latest(records, device, group) if r["provider"] == OURS]
    ceiling = {record["case"]: record for record in latest(records, device, "ceiling")}
    if not chosen or not {"read", "matmul"} <= set(ceiling):
        return None
    read, matmul = ceiling["read"]["gbps"] / 1e3, ceiling["matmul"]["tflops"]
    figure, axes = _figure(5, 3.4)
    knee = matmul / read
    intensities = [record["flops"] / record["bytes"] for record in chosen]
    xs = [min(intensities) / 2, knee, 2 * max(knee, *intensities)]
    axes.plot(xs, [min(x * read, matmul) for x in xs], color="black", linewidth=1)
    names = list(dict.fromkeys(record["group"] for record in chosen))
    for n, name in enumerate(names):
        points = [(r["flops"] / r["bytes"], r["tflops"]) for r in chosen if r["group"] == name]
        axes.scatter(*zip(*points, strict=True), s=14, color=COLOURS[n % len(COLOURS)], label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations a byte")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{device}: paged_ops under the ceilings", loc="left")
    axes.legend(frameon=False)
    return figure
