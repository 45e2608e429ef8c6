"""sop-eval suite: a list of tasks on a model, and one table that grows by a column a model."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sop_faiss.cli import (
    eval_backgrounds,
    eval_detect,
    eval_finetune,
    eval_label_free,
    eval_logistic,
    eval_robustness,
    eval_segment,
    eval_transfer,
    eval_unsupervised,
    eval_video,
    knn,
    linear,
    retrieve,
)
from sop_faiss.cli.common import EXIT_STOPPED, EXIT_USER, page_footer, run_command, say_written
from sop_faiss.cli.path_options import NamedPath
from sop_faiss.cli.tables import print_table
from sop_faiss.config.config_files import config_summary, find_file, packaged_suites, read_mapping
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.model.encoders.spec import OF_FROZEN_FEATURES, OF_ONE_FEATURE
from sop_faiss.paths import path_state

if TYPE_CHECKING:
    from sop_faiss.verbs.scoring.eval_suite import Leaderboard

_COMMANDS: dict[str, tuple[str, click.Command]] = {
    "knn": ("sop-knn", knn.main),
    "linear": ("sop-linear", linear.main),
    "retrieve": ("sop-retrieve", retrieve.main),
    "detect": ("sop-eval detect", eval_detect.detect_command),
    "finetune": ("sop-eval finetune", eval_finetune.finetune_command),
    "logistic": ("sop-eval logistic", eval_logistic.logistic_command),
    "transfer": ("sop-eval transfer", eval_transfer.transfer_command),
    "unsupervised": ("sop-eval unsupervised", eval_unsupervised.unsupervised_command),
    "backgrounds": ("sop-eval backgrounds", eval_backgrounds.backgrounds_command),
    "robustness": ("sop-eval robustness", eval_robustness.robustness_command),
    "segment": ("sop-eval segment", eval_segment.segment_command),
    "label-free": ("sop-eval label-free", eval_label_free.label_free_command),
    "video": ("sop-eval video", eval_video.video_command),
}
"""By the name in a suite: how it is typed, and the command."""
_LEFT_OUT = {
    **dict.fromkeys(("detect", "segment", "video"), (*OF_ONE_FEATURE, "top_value")),
    **dict.fromkeys(("finetune", "transfer"), OF_FROZEN_FEATURES),
}
"""Options of an encoder that do not apply to a task: given for all tasks, they are left out of it."""
_TRAINED = ("detect", "finetune", "segment", "transfer")
"""Tasks that keep the state of a training."""
_NAME = re.compile(r"[A-Za-z0-9][\w.,=+-]{0,99}", re.ASCII)
"""Of a task or a model: the name of a file."""
_OPTION = re.compile(r"[A-Za-z][A-Za-z_-]*", re.ASCII)
_PATHS = ("data", "train", "test", "dataset", "data_root", "train_list")
"""Options whose values are paths, or names of sets."""
_RESERVED = ("model", "json", "help", "version")
"""Options that a task does not get: the suite gives them itself, or they print something else."""


class _Command(click.Command):
    """A command whose help lists the packaged suites with the first sentences of their opening comments."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list; called by click."""
        with formatter.section("Packaged suites"):
            formatter.write_dl([(name, config_summary(path)) for name, path in sorted(packaged_suites().items())])


@click.command(
    "suite",
    cls=_Command,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True},
    short_help="A list of tasks on a model, added to one table.",
)
@click.argument("suite", metavar="SUITE")
@click.argument("encoder_options", nargs=-1, type=click.UNPROCESSED, metavar="[ENCODER OPTIONS]")
@click.option("--model", required=True, metavar="M", help="The encoder, as in the commands of the tasks.")
@click.option("--out", required=True, type=NamedPath(), metavar="DIR", help="New, or where earlier models are.")
@click.option(
    "--root", type=NamedPath(), metavar="DIR", help="Where relative paths of the suite's data are.  [default: here]"
)
@click.option("--name", metavar="NAME", help="Name of the column.  [default: from M]")
@click.option("--again", is_flag=True, help="Measure again what is already there.")
@run_command
def suite_command(
    suite: str,
    encoder_options: tuple[str, ...],
    model: str,
    out: Path,
    root: Path | None,
    name: str | None,
    again: bool,
) -> None:
    """Run the tasks of a suite on a model; write leaderboard.json, .md and .html with all models measured so far.

    Options that are not listed here, as --size, go to every task. Those that say how a feature is made, as --pooling,
    are left out of tasks on patch tokens. A task that was measured by the same command is not measured again; one that
    fails is reported, and the others continue. A column is of one model and its options: others need another --name.

    \b
    SUITE is a file, else the name of a packaged suite, listed below. A file has a name for each task, which command
    it is, and that command's options.
      tasks:
        imagenette-knn: {task: knn, train: imagenette/train, test: imagenette/val, k: 20}
        groceries: {task: retrieve, dataset: retrieval_grocery/, protocol: plain, square: true}

    \b
    Example:
      sop-eval suite leaderboard.yaml --model runs/photos --out board
      sop-eval suite paper --model runs/photos --root data/ --out board
    """
    from sop_faiss.verbs.scoring.eval_suite import Leaderboard

    column = _column(model) if name is None else name
    _check_words(column, encoder_options)
    if root is not None and not root.is_dir():
        raise ConfigError(f"--root {root} {path_state(root)}: wanted the folder that holds the suite's data")
    shared = ["--model", model, *encoder_options]
    board = Leaderboard(out)
    board.check_column(column, shared)
    file = find_file("suite", suite, packaged_suites())
    planned = _tasks(file, root)
    own = {kind: _applicable(kind, shared) for kind, _ in planned.values()}
    for task, (kind, argv) in planned.items():
        _check(file, task, _COMMANDS[kind][1], [*argv, *own[kind]])
    failed = []
    for task, (kind, argv) in planned.items():
        typed, command = _COMMANDS[kind]
        asked = {"task": [typed, *argv], "encoder": shared}
        if not again and board.is_done(column, task, asked):
            click.echo(f"{task}: already measured (--again measures it again)", err=True)
            continue
        click.echo(f"{task}: {' '.join([typed, *argv, *own[kind]])}", err=True)
        partial = board.result_file(column, task).with_suffix(".partial")
        state = board.new_state(column, task, again) if kind in _TRAINED and "--out" not in argv else None
        _measure(command, [*argv, *own[kind], *(("--out", str(state)) if state else ())], partial)
        if partial.exists():
            board.accept(column, task, asked, partial)
            board.write("Leaderboard", list(planned), page_footer("sop-eval suite"))
        else:
            failed.append(task)
    _print_table(board, list(planned), failed)


def _check_words(column: str, encoder_options: tuple[str, ...]) -> None:
    """Check the name of the column, and that no option for all tasks is one that the suite gives itself."""
    if not _NAME.fullmatch(column):
        raise ConfigError(f"--name {column!r}: wanted letters, digits and .,=+-_, starting with a letter or digit")
    for reserved in (f"--{each}" for each in _RESERVED):
        if any(word == reserved or word.startswith(f"{reserved}=") for word in encoder_options):
            raise ConfigError(f"{reserved} cannot be an option of all tasks: leave it out")


def _print_table(board: Leaderboard, tasks: list[str], failed: list[str]) -> None:
    """Write and print the table, and raise DataError if something is missing in it."""
    table = board.write("Leaderboard", tasks, page_footer("sop-eval suite"))
    print_table(table.caption, table.columns, table.rows)
    for what, ending in (("page", "html"), ("Markdown", "md"), ("JSON", "json")):
        say_written(what, board.directory / f"leaderboard.{ending}")
    problems = []
    if failed:
        others = "; the others are in the table" if len(failed) < len(tasks) else ""
        problems += [f"{len(failed)} of {len(tasks)} tasks failed: {', '.join(failed)}{others}"]
    if damaged := board.damaged():
        named = ", ".join(map(str, damaged))
        problems += [f"not a result of a task, and so not in the table: {named}; remove it, or measure it again"]
    if problems:
        raise DataError("; ".join(problems))


def _measure(command: click.Command, argv: list[str], out: Path) -> None:
    """Run a command, which writes its result to `out` unless it fails."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    try:
        command.main([*argv, "--json", str(out)], standalone_mode=False)
    except SystemExit as ended:
        if ended.code not in (0, EXIT_USER, EXIT_STOPPED):  # a signal
            raise


def _applicable(kind: str, shared: list[str]) -> list[str]:
    """Return the options for all tasks without those that do not apply to a kind of task."""
    idle = {f"--{name.replace('_', '-')}" for name in _LEFT_OUT.get(kind, ())}
    takes_value = {option: not each.is_flag for each in _options(kind) for option in each.opts}
    kept, words = [], iter(shared)
    for word in words:
        option, equals, _ = word.partition("=")
        with_value = [word] if equals or not takes_value.get(option) else [word, *itertools.islice(words, 1)]
        kept += with_value if option not in idle else []
    return kept


def _options(kind: str) -> list[click.Option]:
    return [each for each in _COMMANDS[kind][1].params if isinstance(each, click.Option)]


def _column(model: str) -> str:
    """Name a column after a model: without what a file's name cannot hold."""
    return re.sub(r"[^\w.,=+-]+", "_", model, flags=re.ASCII).strip("_.,=+-")[:100] or "model"


def _tasks(file: Path, root: Path | None) -> dict[str, tuple[str, list[str]]]:
    """Read which command each task of a suite is, and its options."""
    content = read_mapping(file, "suite")
    tasks = content.get("tasks")
    if set(content) != {"tasks"} or not isinstance(tasks, dict) or not tasks:
        raise ConfigError(f"suite {file}: wanted one section, tasks, with a name for each task")
    found: dict[str, tuple[str, list[str]]] = {}
    for name, options in tasks.items():
        place = f"suite {file}, task {name}"
        if not _NAME.fullmatch(str(name)):
            raise ConfigError(f"{place}: wanted a name of letters, digits and .,=+-_, starting with a letter or digit")
        if not isinstance(options, dict) or str(options.get("task")) not in _COMMANDS:
            raise ConfigError(f"{place}: wanted task: {', '.join(_COMMANDS)}, and that command's options")
        for key in options:
            if key in _RESERVED or not _OPTION.fullmatch(str(key)):
                raise ConfigError(f"{place}: {key!r} cannot be an option of a task in a suite: remove it")
        argv: list[str] = []
        for key, value in options.items():
            if key != "task":
                argv += _as_options(place, str(key), _below(root, str(key), value))
        found[str(name)] = (options["task"], argv)
    return found


def _below(root: Path | None, key: str, value: Any) -> Any:
    """Return a path below a folder; an address, and what may be the name of a set, stay as they are."""
    if root is None or not isinstance(value, str) or "://" in value or key not in _PATHS:
        return value
    return value if key == "dataset" and not (root / value).exists() else str(root / value)


def _as_options(place: str, key: str, value: Any) -> list[str]:
    option = f"--{key.replace('_', '-')}" if len(key) > 1 else f"-{key}"
    if isinstance(value, bool):
        return [option] if value else []
    if isinstance(value, list):
        return [word for each in value for word in _as_options(place, key, each)]
    if not isinstance(value, str | int | float):
        raise ConfigError(f"{place}: {key} = {value}: wanted a text, a number, true, or a list of these")
    return [option, str(value)]


def _check(file: Path, task: str, command: click.Command, argv: list[str]) -> None:
    """Parse a task's options, so that a wrong one is reported before any work."""
    try:
        with command.make_context(task, list(argv)):
            pass
    except click.ClickException as error:
        raise ConfigError(f"suite {file}, task {task}: {error.format_message()}") from None
