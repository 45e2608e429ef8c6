"""What the commands of sop-data share: an option, and how counts, notices and lists are printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from sop_faiss.cli.common import with_options
from sop_faiss.errors import one_line

SHOWN = 10
"""Lines of bad images; the rest is in the manifest or the JSON."""

top_value_option = click.option(
    "--top-value",
    default=0.0,
    show_default=False,
    metavar="VALUE",
    help="White in grayscale of 16 bits or floats, such as 4095.  [default: what the file states, else 65535]",
)


def print_notices(notices: Sequence[str]) -> None:
    """Print what a verb has to say beside its result, one line each."""
    for notice in notices:
        click.echo(f"notice: {with_options(notice)}")


def print_rest(count: int) -> None:
    """Print how many lines of a list are not shown."""
    if count > SHOWN:
        click.echo(f"  and {count - SHOWN:,} more")


def number(count: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun, as `1 shard` or `2 classes`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def counted(counts: Mapping[str, int]) -> str:
    """Return counts by name as `truncated 3, empty 1`, or `none`."""
    return one_line(", ".join(f"{what} {count:,}" for what, count in counts.items()) or "none")


def megabytes(count: int) -> str:
    """Return a number of bytes in MB."""
    return f"{count / 1e6:,.1f} MB"
