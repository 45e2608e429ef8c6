"""The files that a classifier on frozen features can write: options, and the writing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sop_faiss.cli.common import say_written
from sop_faiss.cli.json_output import json_option, put_json
from sop_faiss.cli.path_options import NamedPath, force_option
from sop_faiss.cli.tables import print_table
from sop_faiss.files import write_file
from sop_faiss.verbs.output_paths import STDOUT, check_outputs, encoder_files, source_files

if TYPE_CHECKING:
    from sop_faiss.evaluate.sets.labeled_part import LabeledPart
    from sop_faiss.model.encoders.spec import EncoderSpec
    from sop_faiss.verbs.scoring.classifier_result import ClassifierResult
    from sop_faiss.verbs.scoring.task_result import TaskResult

R = TypeVar("R")
_FILE = NamedPath()

max_bad_option = click.option(
    "--max-bad-fraction",
    default=0.01,
    help="Unusable images up to this share are dropped and counted; more is an error.",
)


@dataclass(frozen=True)
class ClassifierOutputs:
    """The files that are asked for."""

    json_file: Path | None
    csv_file: Path | None
    png_file: Path | None
    force: bool

    @property
    def prints(self) -> bool:
        """Return whether the result is printed; JSON on stdout takes its place."""
        return self.json_file != STDOUT

    def check(self, train: str, test: str, encoder: EncoderSpec | None, part: LabeledPart) -> None:
        """Check that they can be written, and replace nothing that is read; arguments are what is read."""
        read = [*source_files(train), *source_files(test), *encoder_files(encoder)]
        read += [part.train_list] if part.train_list is not None else []
        outputs = {"--json": self.json_file, "--per-class": self.csv_file, "--confusion": self.png_file}
        check_outputs(outputs, read, to_stdout=["--json"], figures=["--confusion"], force=self.force)

    def write(self, result: ClassifierResult, title: str) -> None:
        """Write them; `title` is above the image."""
        put_json(self.json_file, result.content())
        if self.csv_file is not None:
            result.write_per_class(self.csv_file)
        if self.png_file is not None:
            from sop_faiss.report.confusion_figure import draw_confusion

            image = draw_confusion(result.confusion, title)
            write_file(self.png_file, image)

    def say(self) -> None:
        """Report which were written."""
        for what, file in (("JSON", self.json_file), ("CSV", self.csv_file), ("image", self.png_file)):
            say_written(what, file)


def classifier_output_options(per_class: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a click command these options and --force, as one `outputs: ClassifierOutputs`.

    Args:
        per_class: help of --per-class.
    """
    options = (
        json_option,
        click.option("--per-class", "csv_file", type=_FILE, metavar="FILE.csv", help=per_class),
        click.option(
            "--confusion", "png_file", type=_FILE, metavar="FILE.png", help="Draw which class was taken for which."
        ),
        force_option,
    )

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(command)
        def with_outputs(*args: Any, **given: Any) -> R:
            names = ("json_file", "csv_file", "png_file", "force")
            return command(*args, outputs=ClassifierOutputs(*(given.pop(name) for name in names)), **given)

        decorated: Callable[..., R] = with_outputs
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


@dataclass(frozen=True)
class Trained:
    """Words for a classifier with a setting that held-out images chose."""

    classifier: str
    setting: str
    """As `learning rate`; the protocol has it with `_` for spaces."""
    plural: str
    """Of the setting; the protocol has the values that were tried."""
    option: str
    note: str = ""
    """Before the chosen value."""


def report_trained(result: ClassifierResult, words: Trained, outputs: ClassifierOutputs) -> None:
    """Write the files that are asked for, print the scores, and say what is notable about them."""
    outputs.write(result, f"{words.classifier.capitalize()}: {result.metrics['top1']:.2f} % top-1")
    if outputs.prints:
        _print_trained(result, words)
    say_more_values(result, words.setting, words.plural, words.option)
    say_left_out(result.protocol)
    outputs.say()


def _print_trained(result: ClassifierResult, words: Trained) -> None:
    """Print what held-out images said of each value of the setting, and the scores."""
    protocol, metrics = result.protocol, result.metrics
    chosen = protocol[words.setting.replace(" ", "_")]
    interval = result.intervals()["top1"]
    between = f"{interval.low:.2f} to {interval.high:.2f}"
    if held_out := protocol["held_out_top1"]:
        print_table(
            f"{words.plural.capitalize()} on {protocol['held_out_images']:,} held-out training images",
            [words.setting, "top-1 %", ""],
            [[each, f"{value:.2f}", "chosen" if each == str(chosen) else ""] for each, value in held_out.items()],
        )
    print_table(
        f"{result.encoder['name']}: {protocol['test_images']:,} test and {protocol['train_images']:,} training "
        f"images, {protocol['classes']:,} classes",
        [words.classifier, *(f"top-{name.removeprefix('top')} %" for name in metrics), "95 % interval of top-1"],
        [[f"{words.note}{words.setting} {chosen:g}", *(f"{value:.2f}" for value in metrics.values()), between]],
    )


def say_more_values(result: ClassifierResult | TaskResult, setting: str, plural: str, option: str) -> None:
    """Suggest more values of a setting where the best may be beyond those tried; words as of `Trained`."""
    tried, chosen = (result.protocol[name.replace(" ", "_")] for name in (plural, setting))
    if len(tried) > 1 and chosen in (min(tried), max(tried)):
        click.echo(f"the chosen {setting} is the first or last of those tried: try more ({option})", err=True)


def say_dropped(protocol: Mapping[str, Any]) -> None:
    """Report images of both sets that could not be used."""
    if dropped := protocol.get("train_dropped", 0) + protocol.get("test_dropped", 0):
        click.echo(f"{dropped:,} unusable images were dropped", err=True)


def say_left_out(protocol: Mapping[str, Any]) -> None:
    """Report images that were dropped, or that no classifier could get right."""
    say_dropped(protocol)
    if unseen := protocol["test_images_of_unseen_classes"]:
        click.echo(f"{unseen:,} test images are of classes without training images, and count as wrong", err=True)
