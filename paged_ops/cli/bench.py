"""``paged-ops bench`` and ``paged-ops tune``."""

from __future__ import annotations

import itertools
import json as json_module
import re
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paged_ops.bench import cases, measure, report, run, tune
from paged_ops.bench.providers import PROVIDERS
from paged_ops.checks import expect
from paged_ops.cli.device import choose_device
from paged_ops.cli.table import table
from paged_ops.device import as_current

Lines = list[dict[str, Any]]


def bench(
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default cuda, else cpu.")] = None,
    groups: Annotated[str, typer.Option(help="Groups of cases, with commas between; by default all.")] = "",
    match: Annotated[str, typer.Option("--cases", help="A regular expression that selects cases.")] = "",
    providers: Annotated[str, typer.Option(help="With commas between; by default all that are installed.")] = "",
    repeats: Annotated[int, typer.Option(help="Measurements whose median is taken, twice.")] = 30,
    data: Annotated[Path | None, typer.Option(help="Append records to bench_<device>.jsonl in this folder.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit in the records; by default from git.")] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Time nothing: one call per case in an NVTX range, for a profiler.")
    ] = False,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the cases and who serves them.")] = False,
    write_report: Annotated[
        bool,
        typer.Option("--report", help="Measure nothing: rewrite the tables and the plot in docs/ from the records."),
    ] = False,
    docs: Annotated[Path | None, typer.Option(help="Where --report writes; by default docs.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")] = False,
) -> None:
    """Measure attention and cache operations against peers and the device's ceilings.

    Results are verified before they are timed. Exit code 1 if a result was wrong.
    """
    console = Console(stderr=json)
    modes = [mode for mode, asked in (("--report", write_report), ("--list", list_cases), ("--once", once)) if asked]
    unused: dict[str, dict[str, object]] = {
        "--report": {"--device": device, "--groups": groups, "--cases": match, "--providers": providers},
        "--list": {"--data": data},
        "--once": {"--data": data},
    }
    for mode in modes:
        expect(mode == modes[-1], mode, f"it or {modes[-1]}", "both")
        for option, given in (unused[mode] | {"--commit": commit, "--json": json}).items():
            expect(not given, option, f"it without {mode}, which does not use it", str(given))
    expect(docs is None or write_report, "--docs", "it with --report, which writes there", str(docs))
    if write_report:
        _report(console, data or Path("benchmarks/data"), docs or Path("docs"))
        return
    target = choose_device(device)
    known = cases.gpu_cases() if target.type == "cuda" else cases.cpu_cases()
    others = [] if target.type == "cpu" else ["host", "cache"]
    all_groups = [*dict.fromkeys(case.group for case in known), *others]
    wanted = groups.split(",") if groups else all_groups
    for group in wanted:
        expect(group in all_groups, "--groups", f"some of {', '.join(all_groups)}", group)
    expect(repeats >= 1, "--repeats", "at least 1", repeats)
    names = providers.split(",") if providers else list(PROVIDERS)
    for name in names:
        expect(name in PROVIDERS, "--providers", f"some of {', '.join(PROVIDERS)}", name)
    in_groups = {case.key: case for case in known if case.group in wanted}
    chosen = [in_groups[key] for key in _found("--cases", match, list(in_groups))]
    asked = [PROVIDERS[name] for name in names]
    if list_cases:
        for case in chosen:
            able = [each.name for each in asked if not each.reasons_against(case, target)]
            console.print(f"{case.key}: {', '.join(able)}", highlight=False, soft_wrap=True)
        return
    if once:
        for case in chosen:
            for each in asked:
                if not each.reasons_against(case, target):
                    with as_current(target):
                        run.run_once(case, each, target)
        return

    records: Lines = []
    about = run.about(target, commit)
    path = None if data is None else data / f"bench_{report.file_name(about['device'])}.jsonl"

    def keep(record: dict[str, Any]) -> None:
        records.append({**record, **about})
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json_module.dumps(records[-1]) + "\n")
        if "failed" in record:
            line = f"{record['provider']}, {record.get('heads', '')} {record['case']}: {record['failed']}"
            console.print(f"[red]failed:[/] {escape(line)}", highlight=False, soft_wrap=True)

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    progress = Progress(*columns, console=console, transient=True)
    with progress, torch.no_grad(), as_current(target):
        task = progress.add_task("ceilings", total=1 + len(chosen) + sum(each in wanted for each in others))
        ceilings = measure.measure_ceilings(target)
        for record in run.ceiling_records(ceilings):
            keep(record)
        progress.advance(task)
        for case in chosen:
            progress.update(task, description=case.key)
            for record in run.attention_records(case, asked, target, ceilings, repeats):
                keep(record)
            progress.advance(task)
        for group in others:
            if group in wanted:
                progress.update(task, description=group)
                made = run.host_records(asked, target) if group == "host" else run.cache_records(ceilings)
                for record in made:
                    keep(record)
                progress.advance(task)
    for group in dict.fromkeys(record["group"] for record in records):
        console.print(_table(group, [record for record in records if record["group"] == group]))
    if path is not None:
        console.print(f"{len(records)} records appended to {path}", highlight=False, soft_wrap=True)
    if json:
        print(json_module.dumps({**about, "records": records}))
    if any("failed" in record for record in records):
        raise typer.Exit(1)


def tune_tiles(
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, ...; by default cuda.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder to write to; by default the user's, whose tables are read before the package's:"
            " $PAGED_OPS_CONFIGS, else $XDG_CONFIG_HOME/paged_ops, else ~/.config/paged_ops."
        ),
    ] = None,
    only: Annotated[str, typer.Option(help="attention or cache; by default both.")] = "",
    match: Annotated[str, typer.Option("--workloads", help="A regular expression that selects workloads.")] = "",
    repeats: Annotated[int, typer.Option(help="Measurements whose median is taken.")] = 10,
) -> None:
    """Sweep the tiles of the GPU kernels on this device and write the best as its configuration.

    Needs an otherwise idle GPU and up to 5 GiB of its memory. Kernels are
    compiled in parallel: with 16 processors everything takes about ten minutes.
    Prints first how long it will take, and where it writes.

    Every result is verified. Starts from the device's own configuration, or its
    architecture's. Each improvement is written at once: Ctrl-C loses nothing.
    """
    console = Console()
    target = choose_device(device)
    expect(target.type == "cuda", "--device", "a GPU", str(target))
    expect(only in ("", "attention", "cache"), "--only", "attention or cache", only)
    expect(repeats >= 1, "--repeats", "at least 1", repeats)
    from paged_ops.lowerings.gpu.target import config_path, target_of, user_configs

    tuned, folder = target_of(target), (out or user_configs()).absolute()
    of_attention = tune.attention_workloads(target) if only != "cache" else []
    of_cache = list(itertools.chain(*tune.cache_workloads(target).values())) if only != "attention" else []
    names = _found("--workloads", match, [each.name for each in (*of_attention, *of_cache)])
    kinds = ["attention"] * (only != "cache") + ["cache"] * (only != "attention")
    files = " and ".join(str(config_path(folder, kind, tuned.name)) for kind in kinds)
    every = [each for each in (*of_attention, *of_cache) if each.name in names]
    for line in (f"{tuned.name}: {tune.forecast(every, target)}.", f"Writes {files} after each improvement."):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    with console.status("") as status, torch.no_grad():

        def show(line: str) -> None:
            status.update(escape(line))
            if not console.is_terminal:
                console.print(line, markup=False, highlight=False, soft_wrap=True)

        moves = table("number", "before", "after", "time saved")

        def descend(kind: str, tree: dict[str, Any], workloads: list[tune.Workload]) -> None:
            """Each improvement is written at once, so that Ctrl-C loses nothing."""
            chosen = [each for each in workloads if each.name in names]
            tune.write(folder, kind, tuned, tree)
            for step in tune.descend(tree, chosen, target, repeats, show):
                moves.add_row(".".join(step.place), str(step.before), str(step.after), f"{step.gain:.1%}")
                tune.write(folder, kind, tuned, tree)

        try:
            if only != "cache":
                descend("attention", tuned.tiles, of_attention)
            if only != "attention":
                descend("cache", tuned.numbers, of_cache)
        except KeyboardInterrupt:
            console.print("stopped early")
    console.print(moves if moves.row_count else "Nothing was faster than what is configured.")
    console.print(f"written to {folder}", highlight=False, soft_wrap=True)


def _found(option: str, pattern: str, names: list[str]) -> list[str]:
    """The names that a regular expression matches, all if it is empty. No match is an error."""
    try:
        found = [name for name in names if re.search(pattern, name)]
    except re.error as error:
        raise ValueError(f"{option}: expected a regular expression, got {pattern}: {error}") from None
    expect(bool(found) or not pattern, option, f"a regular expression that matches some of {'; '.join(names)}", pattern)
    return found


def _report(console: Console, data: Path, docs: Path) -> None:
    records = report.load(data)
    expect(bool(records), "--data", "a folder with bench_*.jsonl, which bench --data writes", str(data))
    for document in sorted([*docs.glob("*.md"), *docs.parent.glob("*.md")]):
        count = report.rewrite(document, records, data)
        if count:
            console.print(f"{document}: {count} tables", highlight=False)
    for path in report.plots(records, data, docs):
        console.print(str(path), highlight=False)


def _table(group: str, records: Lines) -> Table:
    """The records of a group as a table for people."""
    made = table("case", "provider", "µs", "% of floor", "GB/s", "TFLOP/s", "error", title=group)
    for record in records:
        words = [record.get("heads", ""), record["case"]]
        numbers = (record.get(name, "") for name in ("us", "percent", "gbps", "tflops", "error"))
        made.add_row(" ".join(filter(None, words)), record.get("provider", ""), *map(str, numbers))
    return made
