"""Results as tables on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sop_faiss.cli.common import one_line

if TYPE_CHECKING:
    from sop_faiss.evaluate.baselines import Baseline


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


def print_baselines(
    baselines: Sequence[Baseline], metrics: Mapping[str, float], columns: Mapping[str, str], unit: str
) -> None:
    """Print what baselines score next to the model, if there are any, and why one is left out.

    Args:
        baselines: in the order of the rows.
        metrics: of the model.
        columns: heading to metric.
        unit: of the metrics.
    """
    if not baselines:
        return
    measured = [(each.name, each.metrics) for each in baselines if not each.left_out]
    rows = [
        [name, *(f"{scores[metric]:.2f}" for metric in columns.values())]
        for name, scores in [*measured, ("model", metrics)]
    ]
    print_table(f"next to what needs no training, {unit}", ["features", *columns], rows)
    for each in baselines:
        if each.left_out:
            click.echo(one_line(f"{each.name}: left out, since {each.left_out}"))
