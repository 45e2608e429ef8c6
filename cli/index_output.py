"""What the commands of sop-index share: JSON and text on stdout or in a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from sop_faiss.cli.common import one_line
from sop_faiss.files import write_json
from sop_faiss.verbs.output_paths import STDOUT

__all__ = ["counted", "for_stdout", "named", "put_json"]


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


def put_json(file: Path, content: Any) -> None:
    """Write JSON to a file, or to stdout for `-`."""
    if file == STDOUT:
        click.echo(json.dumps(content, indent=1, allow_nan=False))
    else:
        write_json(file, content)
