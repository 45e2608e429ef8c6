"""What all commands share: errors as one line with an exit status, and what they say on stderr."""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import gc
import importlib.metadata
import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, ParamSpec, TextIO, TypeVar

import click

from sop_faiss.errors import (
    NO_MEMORY,
    RunStoppedError,
    SavedError,
    SopError,
    WorkerDiedError,
    is_out_of_memory,
    one_line,
    spell_arguments,
)
from sop_faiss.files import DISK_FULL

__all__ = [
    "CONTEXT_SETTINGS",
    "EXIT_REQUEUE",
    "EXIT_STOPPED",
    "EXIT_USER",
    "log_to_stderr",
    "one_line",
    "page_footer",
    "run_command",
    "say_written",
    "with_options",
]

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}
"""Settings of every command."""

EXIT_USER = 1
"""A user's mistake, a full disk, too little memory."""
EXIT_STOPPED = 3
"""The run stopped itself."""
EXIT_REQUEUE = 75
"""Training was saved on a signal; a scheduler may start the same command again."""
EXIT_INTERRUPTED = 130
"""Ctrl-C (128 + SIGINT, as shells say it)."""

_SAID_LENGTH = 160  # of a library's own message about memory; the rest is details
_LOWER = (
    "lower the batch size, the image size or the memories, choose a smaller model, or use another device "
    "(training: raise train.accumulate)"
)

P = ParamSpec("P")
R = TypeVar("R")


def run_command(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a click command's function: errors of users become `error: ...` on stderr and an exit status.

    Mistakes, full disks, missing permissions and too little memory exit with 1, a run that stopped itself with 3.
    Ctrl-C exits with 130, SIGTERM with 143 and SIGHUP with 129, with a line that is not an error, and half-written
    files are removed. A closed pipe (`| head`) ends quietly. Everything else is a bug and keeps its traceback. Of the
    processes that `torchrun` starts, only the first prints the line.
    """

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        _shorten_reports()
        try:
            with _signals_raised():
                return function(*args, **kwargs)
        except BrokenPipeError:
            _leave_closed_pipe()
        except (SopError, OSError, KeyboardInterrupt, Ended) as error:
            failure = *_failure(error), _prints_errors(error)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = f"error: {_memory_message(error)}", EXIT_USER, _prints_errors(error)
        _fail(*failure)  # outside of `except`, so that the error's frames are freed

    return guarded


class Ended(BaseException):
    """A signal has asked this process to end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"ended by {number.name}")
        self.number = number


@contextlib.contextmanager
def _signals_raised() -> Iterator[None]:
    """Raise the signals that would end this process silently, so that half-written files are removed."""

    def end(number: int, _: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # only once: removing files must not be interrupted
        raise Ended(signal.Signals(number))

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


def _failure(error: SopError | OSError | KeyboardInterrupt | Ended) -> tuple[str, int]:
    """Return the line to print, and the exit status."""
    if isinstance(error, SavedError):
        return str(error), EXIT_REQUEUE
    if isinstance(error, SopError):
        return f"error: {error}", EXIT_STOPPED if isinstance(error, RunStoppedError) else EXIT_USER
    if isinstance(error, OSError):
        return f"error: {_os_message(error)}", EXIT_USER
    if isinstance(error, Ended):
        return str(error), 128 + error.number
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
        is_option = isinstance(parameter, click.Option)
        longs = "/".join(each for each in parameter.opts if each.startswith("--"))  # which was typed is not known
        shown = (longs or parameter.opts[0]) if is_option else parameter.make_metavar(context)
        own |= {option.lstrip("-").replace("-", "_"): shown for option in parameter.opts}
        own[parameter.name or ""] = shown
    return spell_arguments(message, own.get, between=" ")


def _fail(line: str, status: int, prints: bool) -> NoReturn:
    if "WORLD_SIZE" in os.environ:
        gc.collect()  # else cycles keep the process group until the interpreter ends, where its threads may abort
    if prints:
        click.echo(one_line(with_options(line)), err=True)
    sys.exit(status)


def _prints_errors(error: BaseException) -> bool:
    """Return whether this process prints an error: of `torchrun`'s only the first, if all have the error."""
    try:
        return isinstance(error, WorkerDiedError) or int(os.environ.get("RANK", "0")) <= 0
    except ValueError:
        return True


class _OneLine(logging.Formatter):
    """A log message as one line without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return one_line(with_options(record.getMessage()))


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to the current stderr: while a progress bar is shown, that is rich's, which prints above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; called by logging."""
        self.stream = sys.stderr
        super().emit(record)


def log_to_stderr(level: int) -> None:
    """Show this package's log messages from this level on, and other packages' warnings."""
    handler = _CurrentStderr()
    handler.setFormatter(_OneLine())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("sop_faiss").setLevel(level)


def _one_line_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a package's warning, without its place in the code."""
    return f"warning: {one_line(str(message))}\n"


def _shorten_reports() -> None:
    """Show other packages' messages and warnings in one line, and a full disk once instead of once per thread."""
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
    """Return how much memory was asked for, if the error says so, and what to do."""
    sentences = [sentence.strip() for sentence in re.split(r"[.;]\s|\n", str(error))]
    first = sentences[0] if isinstance(error, MemoryError) else ""
    said = next((sentence for sentence in sentences if NO_MEMORY.search(sentence)), first).rstrip(".")[:_SAID_LENGTH]
    return f"out of memory{f' ({said})' if said else ''}: {_LOWER}"


def say_written(what: str, file: Path | None) -> None:
    """Print on stderr that a file was written, as in `page: found.html`; nothing for None and stdout."""
    of_suite = (".partial", ".state")  # which renames what a task writes, and removes its state
    if file is not None and str(file) != "-" and file.suffix not in of_suite:
        click.echo(f"{what}: {one_line(str(file))}", err=True)


def page_footer(command: str) -> str:
    """Return the last line of a page: what made it, and when."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{command}, sop-faiss {importlib.metadata.version('sop-faiss')}, {date}"
