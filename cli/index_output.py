"""What the commands of sop-index share: text on stdout."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sop_faiss.cli.common import one_line

if TYPE_CHECKING:
    from sop_faiss.index.left_out import LeftOut

__all__ = ["counted", "for_stdout", "max_bad_option", "named", "say_left_out"]

_SHOWN = 5
max_bad_option = click.option(
    "--max-bad-fraction",
    default=1.0,
    metavar="SHARE",
    help="Fail above this share of unusable images (0 to 1); those up to it are left out and listed.",
)
"""Of the commands that index images."""


def counted(dropped: dict[str, int]) -> str:
    """Write counts by reason as `truncated 3, empty 1`."""
    return one_line(", ".join(f"{reason} {count}" for reason, count in dropped.items()))


def named(key: str, label: str | None) -> str:
    """Name an image by its key, and its class where it has one."""
    return one_line(key) + (f"  [{one_line(label)}]" if label is not None else "")


def for_stdout(text: str) -> bytes:
    """Encode text for stdout; without control characters where that is a terminal, which would obey them."""
    if sys.stdout.isatty():
        text = "".join(letter if letter.isprintable() or letter in "\r\n" else "?" for letter in text)
    return text.encode()


def say_left_out(left_out: Sequence[LeftOut], index: Path) -> None:
    """Name the first images that cannot be used on stderr, and say where the others are named."""
    for each in left_out[:_SHOWN]:
        click.echo(
            one_line(f"left out: {each.source + ': ' if each.source else ''}{each.member}: {each.error}"), err=True
        )
    if len(left_out) > _SHOWN:
        rest = f"left out: {len(left_out) - _SHOWN:,} more, see sop-index info --left-out {shlex.quote(str(index))}"
        click.echo(one_line(rest), err=True)
