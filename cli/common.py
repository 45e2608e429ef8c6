"""What all commands share: errors as one line with an exit status, and progress on stderr."""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import gc
import importlib.metadata
import logging
import math
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, ParamSpec, TextIO, TypeVar

import click

from sop_faiss.errors import (
    NO_MEMORY,
    RunStoppedError,
    SopError,
    WorkerDiedError,
    is_out_of_memory,
    one_line,
    spell_arguments,
)
from sop_faiss.files import DISK_FULL
from sop_faiss.progress import ProgressCallback

__all__ = [
    "CONTEXT_SETTINGS",
    "EXIT_INTERRUPTED",
    "EXIT_STOPPED",
    "EXIT_USER",
    "log_to_stderr",
    "one_line",
    "page_footer",
    "progress_reporter",
    "run_command",
    "say_written",
    "with_options",
]

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}
"""Of every command."""

EXIT_USER = 1
"""A user's mistake, a full disk, too little memory."""
EXIT_STOPPED = 3
"""The run stopped itself."""
EXIT_INTERRUPTED = 130
"""Ctrl-C (128 + SIGINT, as shells say it)."""

PLAIN_INTERVAL_SECONDS = 10.0

_SAID_LENGTH = 160
_LOWER = (
    "lower the batch size, the image size or the memories, choose a smaller model, or use another device "
    "(training: raise train.accumulate)"
)

P = ParamSpec("P")
R = TypeVar("R")


def run_command(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a click command's body: what a user can cause becomes `error: ...` on stderr and an exit status.

    Mistakes, full disks, missing permissions and too little memory exit with 1, a run that stopped itself with 3.
    Ctrl-C exits with 130, SIGTERM with 143 and SIGHUP with 129, in a line that is no error, and what is half-written is
    removed. A closed pipe (`| head`) ends quietly. Everything else is a bug of ours and keeps its traceback. Of the
    processes that `torchrun` starts, only the first prints the line.
    """

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        _tame_reports()
        try:
            with _signals_raised():
                return function(*args, **kwargs)
        except BrokenPipeError:
            _leave_closed_pipe()
        except (SopError, OSError, KeyboardInterrupt, _Ended) as error:
            failure = *_failure(error), _speaks(error)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = f"error: {_memory_message(error)}", EXIT_USER, _speaks(error)
        _fail(*failure)  # here no error is alive any more, nor what its frames held

    return guarded


class _Ended(BaseException):
    """A signal has asked this process to end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"ended by {number.name}")
        self.status = 128 + number


@contextlib.contextmanager
def _signals_raised() -> Iterator[None]:
    """Raise the signals that would end this process without a word, so that what is half-written is removed."""

    def end(number: int, _: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # once: what is removed meanwhile is removed whole
        raise _Ended(signal.Signals(number))

    numbers: list[int] = []
    if threading.current_thread() is threading.main_thread():
        numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _failure(error: SopError | OSError | KeyboardInterrupt | _Ended) -> tuple[str, int]:
    """The line that is told, and the exit status."""
    if isinstance(error, SopError):
        return f"error: {error}", EXIT_STOPPED if isinstance(error, RunStoppedError) else EXIT_USER
    if isinstance(error, OSError):
        return f"error: {_os_message(error)}", EXIT_USER
    if isinstance(error, _Ended):
        return str(error), error.status
    return str(error) or "interrupted", EXIT_INTERRUPTED


def with_options(message: str) -> str:
    """Return a message of the library with arguments written as the command's own: `name=value` as `--name value`.

    What the command has no option for stays as the library wrote it: it is a word, or belongs to another command.
    """
    context = click.get_current_context(silent=True)
    if context is None:
        return message
    own: dict[str, str] = {}
    for parameter in context.command.params:
        shown = max(parameter.opts, key=len) if isinstance(parameter, click.Option) else parameter.make_metavar(context)
        own |= {option.lstrip("-").replace("-", "_"): shown for option in parameter.opts}
        own[parameter.name or ""] = shown
    return spell_arguments(message, own.get, between=" ")


def _fail(line: str, status: int, speaks: bool) -> NoReturn:
    if "WORLD_SIZE" in os.environ:
        gc.collect()  # a process group that cycles keep would end with the interpreter, which its threads may abort
    if speaks:
        click.echo(one_line(with_options(line)), err=True)
    sys.exit(status)


def _speaks(error: BaseException) -> bool:
    """Whether this process reports an error: of those that `torchrun` starts only the first, if all meet the error."""
    try:
        return isinstance(error, WorkerDiedError) or int(os.environ.get("RANK", "0")) <= 0
    except ValueError:
        return True


class _OneLine(logging.Formatter):
    """A log message as one line that terminals do not obey."""

    def format(self, record: logging.LogRecord) -> str:
        return one_line(with_options(record.getMessage()))


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to what stands for stderr at the time: under a bar that is rich, which puts the lines above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging."""
        self.stream = sys.stderr
        super().emit(record)


def log_to_stderr(level: int) -> None:
    """Show our log messages from this level on; of other packages, and without it, warnings are shown."""
    handler = _CurrentStderr()
    handler.setFormatter(_OneLine())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("sop_faiss").setLevel(level)


def _one_line_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """What a package warns of, without where in its code it does."""
    return f"warning: {one_line(str(message))}\n"


def _tame_reports() -> None:
    """Other packages' messages and warnings are one line too; a full disk is told once, not also by each thread."""
    warnings.formatwarning = _one_line_warning
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_OneLine())
    report = threading.excepthook
    if getattr(report, "leaves_out_full_disks", False):
        return

    def report_others(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if not isinstance(error, OSError) or error.errno not in DISK_FULL:
            report(args)

    report_others.leaves_out_full_disks = True  # type: ignore[attr-defined]
    threading.excepthook = report_others


def _leave_closed_pipe() -> NoReturn:
    """Exit without the interpreter's own complaint when it flushes stdout into the closed pipe."""
    with contextlib.suppress(OSError, ValueError):  # a captured stdout has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(EXIT_USER)


def _os_message(error: OSError) -> str:
    if error.errno == errno.ENOMEM:
        return _memory_message(error)
    what = error.strerror or str(error)
    named = f"{what}: {error.filename}" if error.filename is not None else what
    return "; ".join([named, *getattr(error, "__notes__", [])])


def _memory_message(error: Exception) -> str:
    """What was asked for, where the error says so, and what to do."""
    sentences = [sentence.strip() for sentence in re.split(r"[.;]\s|\n", str(error))]
    first = sentences[0] if isinstance(error, MemoryError) else ""
    said = next((sentence for sentence in sentences if NO_MEMORY.search(sentence)), first).rstrip(".")[:_SAID_LENGTH]
    return f"out of memory{f' ({said})' if said else ''}: {_LOWER}"


def say_written(what: str, file: Path | None) -> None:
    """Say on stderr that a file was written, as in `page: found.html`; of None, nothing."""
    if file is not None:
        click.echo(f"{what}: {one_line(str(file))}", err=True)


def page_footer(command: str) -> str:
    """The last line of a page: what made it, and when."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{command}, sop-faiss {importlib.metadata.version('sop-faiss')}, {date}"


@contextlib.contextmanager
def progress_reporter(label: str, unit: str) -> Iterator[ProgressCallback]:
    """Show how far long work is, on stderr: a bar on a terminal, elsewhere a line every 10 seconds and one at the end.

    Both estimate the time that is left.

    Args:
        label: what is going on, as in "packing".
        unit: what is counted, in the plural, as in "images".

    Yields:
        The callback to hand to a library verb as `progress`.
    """
    reporter = _bar(label, unit) if sys.stderr.isatty() else _plain_lines(label, unit)
    with reporter as callback:
        yield callback


@contextlib.contextmanager
def _bar(label: str, unit: str) -> Iterator[ProgressCallback]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def _plain_lines(label: str, unit: str) -> Iterator[ProgressCallback]:
    started = time.monotonic()
    printed_at = started
    printed = last = (0, 0)
    first: tuple[int, float] | None = None  # done and when: the speed is of this run alone, without its start-up

    def show(done: int, total: int) -> None:
        nonlocal printed, printed_at
        now = time.monotonic()
        left = ""
        if first is not None and first[0] < done < total:
            left = f", {_about((now - first[1]) / (done - first[0]) * (total - done))} left"
        click.echo(f"{label}: {done:,} of {total:,} {unit}, {now - started:.0f} s{left}", err=True)
        printed, printed_at = (done, total), now

    def callback(done: int, total: int) -> None:
        nonlocal first, last
        last = (done, total)
        if first is None:
            first = (done, time.monotonic())
        if time.monotonic() - printed_at >= PLAIN_INTERVAL_SECONDS:
            show(done, total)

    yield callback
    if last != printed:
        show(*last)


def _about(seconds: float) -> str:
    """A guessed time, no finer than the guess."""
    if seconds < 90:
        return f"about {math.ceil(seconds / 10) * 10} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 90 else f"about {seconds / 3600:.1f} h"
