"""The options that choose which training images a classifier uses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from sop_faiss.cli.path_options import NamedPath
from sop_faiss.evaluate.sets.labeled_part import LabeledPart

R = TypeVar("R")


def _share(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Parse a share, or a percentage."""
    if value is None:
        return None
    try:
        return float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        raise click.BadParameter(f"{value!r}: wanted a share such as 0.01, or 1%") from None


_OPTIONS = (
    click.option(
        "--train-list",
        type=NamedPath(),
        metavar="FILE",
        help="Use only the training images named in this text file, one per line (the 1 % and 10 % lists).",
    ),
    click.option(
        "--train-share",
        "--labels",
        callback=_share,
        metavar="SHARE",
        help="Use only this share of each class's training images, drawn from --seed, as in 0.01 or 10%.",
    ),
    click.option("--images-per-class", type=int, metavar="N", help="Use only N training images of each class."),
    click.option("--seed", default=0, help="Seed of all that is drawn at random."),
)


def labeled_part_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give a click command these options; its function receives them as one `part: LabeledPart`."""

    @functools.wraps(command)
    def with_part(*args: Any, **options: Any) -> R:
        names = ("train_list", "train_share", "images_per_class", "seed")
        return command(*args, part=LabeledPart(**{name: options.pop(name) for name in names}), **options)

    decorated: Callable[..., R] = with_part
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
