"""Tables for people that keep every character on a narrow terminal: long cells continue on the next line."""

from __future__ import annotations

from rich import box
from rich.table import Table


def table(*columns: str, title: str | None = None) -> Table:
    """A table with these columns, or one of two columns without names."""
    made = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left", show_header=bool(columns)
    )
    for name in columns or ("", ""):
        made.add_column(name, overflow="fold")
    return made
