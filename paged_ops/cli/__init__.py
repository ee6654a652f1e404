"""``paged-ops demo | generate | support | explain | bench | tune``: see it work, run a model, ask what runs where, by
which kernel, and how fast.

Output for people is on stdout, the statistics of ``generate`` on stderr. With ``--json`` all of it is on stderr, and
stdout has one line, a JSON object.
"""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

import paged_ops
from paged_ops.cli import bench, demo, explain, support

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"paged-ops {paged_ops.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the versions, and exit.")
    ] = False,
) -> None:
    """Paged attention and its cache operations as PyTorch operators."""


app.command()(demo.demo)
app.command()(demo.generate)
app.command()(support.support)
app.command()(explain.explain)
app.command()(bench.bench)
app.command("tune")(bench.tune_tiles)


def main() -> None:
    """The entry point: an error is one line on stderr and exit code 1; a wrong option is code 2."""
    warnings.filterwarnings("ignore", module=r"(torch|transformers)\.")  # they would disturb the live display
    try:
        app()
    except (ValueError, OSError, ImportError, RuntimeError) as error:  # NotImplementedError and out of memory too
        Console(stderr=True, soft_wrap=True).print(
            f"[red]paged-ops:[/] {escape(demo.one_line(error))}", highlight=False
        )
        sys.exit(1)
