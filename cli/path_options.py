"""What the options of all commands that name files share: no empty names, and `--force`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource


class NamedPath(click.Path):
    """A path, as `Path`; an empty one is refused, since it would silently be the current folder."""

    def __init__(self, *, allow_dash: bool = False) -> None:
        super().__init__(path_type=Path, allow_dash=allow_dash)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert a value; called by click."""
        if not os.fspath(value):
            self.fail("the path is empty: name one (the current folder is .)", param, ctx)
        return super().convert(value, param, ctx)


def refuse_empty(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse an empty value of an option or argument that names files as text; a click callback."""
    if value == "" and ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE:
        raise click.BadParameter("it is empty: name one (the current folder is .)", ctx, param)
    return value


force_option = click.option(
    "--force",
    is_flag=True,
    help="Overwrite files that no command of this package wrote, or that lie in a store, index, shard folder, run or "
    "export; never a file that is read.",
)
"""Give a click command `force: bool`, for `check_outputs`."""
