"""The files that a classifier on frozen features can write: options, and the writing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sop_faiss.cli.common import say_written
from sop_faiss.cli.json_output import json_option, put_json
from sop_faiss.cli.path_options import NamedPath
from sop_faiss.cli.tables import print_table
from sop_faiss.files import atomic_file

if TYPE_CHECKING:
    from sop_faiss.verbs.scoring.classifier_result import ClassifierResult
    from sop_faiss.verbs.scoring.task_result import TaskResult

__all__ = [
    "classifier_output_options",
    "max_bad_option",
    "print_trained",
    "say_dropped",
    "say_left_out",
    "say_more_values",
    "say_outputs",
    "say_unseen",
    "write_outputs",
]

F = TypeVar("F", bound=Callable[..., Any])
_FILE = NamedPath()

max_bad_option = click.option(
    "--max-bad-fraction",
    type=float,
    default=0.01,
    show_default=True,
    help="Unusable images up to this share are dropped and counted; more is an error.",
)


def classifier_output_options(per_class: str) -> Callable[[F], F]:
    """Give a click command `json_file`, `csv_file` and `png_file`; `per_class` is the help of the second."""
    options = (
        json_option,
        click.option("--per-class", "csv_file", type=_FILE, metavar="FILE.csv", help=per_class),
        click.option(
            "--confusion", "png_file", type=_FILE, metavar="FILE.png", help="Draw which class was taken for which."
        ),
    )

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def write_outputs(
    result: ClassifierResult, title: str, json_file: Path | None, csv_file: Path | None, png_file: Path | None
) -> None:
    """Write the files that are asked for; `title` is above the image."""
    if json_file is not None:
        put_json(json_file, result.content())
    if csv_file is not None:
        result.write_per_class(csv_file)
    if png_file is not None:
        from sop_faiss.report.confusion_figure import draw_confusion

        image = draw_confusion(result.confusion, title)
        with atomic_file(png_file) as temporary:
            temporary.write_bytes(image)


def print_trained(result: ClassifierResult, classifier: str, setting: str, settings: str, note: str = "") -> None:
    """Print what held-out images said of each value of a setting, and the scores.

    Args:
        result: of a trained classifier.
        classifier: its name.
        setting: what was chosen, as `learning rate`; the protocol has it with `_` for spaces.
        settings: the plural, as a title.
        note: before the chosen value.
    """
    protocol, metrics = result.protocol, result.metrics
    chosen = protocol[setting.replace(" ", "_")]
    if held_out := protocol["held_out_top1"]:
        print_table(
            f"{settings} on {protocol['held_out_images']:,} held-out training images",
            [setting, "top-1 %", ""],
            [[each, f"{value:.2f}", "chosen" if each == str(chosen) else ""] for each, value in held_out.items()],
        )
    print_table(
        f"{result.encoder['name']}: {protocol['test_images']:,} test and {protocol['train_images']:,} training "
        f"images, {protocol['classes']:,} classes",
        [classifier, *(f"top-{name.removeprefix('top')} %" for name in metrics)],
        [[f"{note}{setting} {chosen:g}", *(f"{value:.2f}" for value in metrics.values())]],
    )


def say_more_values(result: ClassifierResult | TaskResult, setting: str, plural: str, option: str) -> None:
    """Suggest more values of a setting where the best may be beyond those tried; names as in `print_trained`."""
    tried = result.protocol[plural]
    if len(tried) > 1 and result.protocol[setting.replace(" ", "_")] in (min(tried), max(tried)):
        click.echo(f"the chosen {setting} is the first or last of those tried: try more ({option})", err=True)


def say_outputs(json_file: Path | None, csv_file: Path | None, png_file: Path | None) -> None:
    """Report which files were written."""
    for what, file in (("JSON", json_file), ("CSV", csv_file), ("image", png_file)):
        say_written(what, file)


def say_dropped(protocol: Mapping[str, Any]) -> None:
    """Report images of both sets that could not be used."""
    if dropped := protocol["train_dropped"] + protocol["test_dropped"]:
        click.echo(f"{dropped:,} unusable images were dropped", err=True)


def say_left_out(result: ClassifierResult) -> None:
    """Report images that were dropped, or that no classifier could get right."""
    say_dropped(result.protocol)
    say_unseen(result.protocol)


def say_unseen(protocol: Mapping[str, Any]) -> None:
    """Report test images that no classifier could get right."""
    if unseen := protocol["test_images_of_unseen_classes"]:
        click.echo(f"{unseen:,} test images are of classes without training images, and count as wrong", err=True)
