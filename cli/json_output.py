"""JSON of a command in a file or, for `-`, on stdout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from sop_faiss.cli.path_options import NamedPath
from sop_faiss.files import write_json
from sop_faiss.verbs.output_paths import STDOUT

json_option = click.option(
    "--json",
    "json_file",
    type=NamedPath(allow_dash=True),
    metavar="FILE",
    help="Write the result as JSON, too; - is stdout, in place of the text.",
)
"""Give a click command `json_file: Path | None`."""


def put_json(file: Path | None, content: Any) -> None:
    """Write JSON to a file, to stdout for `-`, or nowhere for None."""
    if file == STDOUT:
        click.echo(json.dumps(content, indent=1, allow_nan=False))
    elif file is not None:
        write_json(file, content)
