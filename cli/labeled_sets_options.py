"""The options that name a labeled training and a test set: both, or a directory that holds both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sop_faiss.cli.common import run_command
from sop_faiss.cli.path_options import NamedPath, refuse_empty
from sop_faiss.errors import ConfigError

R = TypeVar("R")

_IMAGES = "labeled images (.tar shards, a folder with class sub-folders, a .csv list)"
_TEST_NAMES = ("val", "test")


def labeled_sets_options(command: Callable[..., R], stores: bool = True) -> Callable[..., R]:
    """Give a click command `--train` and `--test`, or `--data`: it receives `train: str` and `test: str`.

    Args:
        command: the function to decorate.
        stores: whether it takes feature stores, too; for the help.
    """
    src = _IMAGES + (", or a feature store of sop-embed." if stores else ".")

    @functools.wraps(command)
    def with_sets(*args: Any, data: Path | None, train: str | None, test: str | None, **options: Any) -> R:
        if data is None and (train is None or test is None):
            raise ConfigError("the images are not named: give --train SRC and --test SRC, or --data DIR with both")
        if data is not None:
            found = _sets_in(data)
            train, test = train or found[0], test or found[1]
        return command(*args, train=train, test=test, **options)

    decorated = run_command(with_sets)
    for option in (
        click.option("--test", metavar="SRC", callback=refuse_empty, help=f"The images to test on: {src}"),
        click.option("--train", metavar="SRC", callback=refuse_empty, help=f"The images to learn from: {src}"),
        click.option(
            "--data", type=NamedPath(), metavar="DIR", help="A directory with train/ and val/ (or test/), as ImageNet."
        ),
    ):
        decorated = option(decorated)
    return decorated


def _sets_in(directory: Path) -> tuple[str, str]:
    tests = [directory / name for name in _TEST_NAMES if (directory / name).is_dir()]
    if not (directory / "train").is_dir() or not tests:
        raise ConfigError(
            f"--data {directory}: wanted a directory with train/ and val/ or test/; else name --train and --test"
        )
    return str(directory / "train"), str(tests[0])
