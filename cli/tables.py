"""Results as tables on stdout."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sop_faiss.cli.common import one_line

__all__ = ["print_table"]


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to stdout: the first column to the left, the others to the right, without markup and line
    breaks."""
    table = Table(box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(Text(one_line(column)), justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    # A table wider than the terminal, or than the 80 columns of a pipe, is printed in full: no number is cut.
    needed = Console(width=10_000).measure(table).maximum
    console = Console(highlight=False, soft_wrap=True, width=max(Console().width, needed))
    console.print(Text(one_line(title)))
    console.print(table)
