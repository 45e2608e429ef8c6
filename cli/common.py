"""What all commands share: errors as one line with an exit status, and progress on stderr."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn, ParamSpec, TypeVar

import click

from sop_faiss.errors import RunStoppedError, SopError
from sop_faiss.progress import ProgressCallback

__all__ = ["EXIT_INTERRUPTED", "EXIT_STOPPED", "EXIT_USER", "one_line", "progress_reporter", "run_command"]

EXIT_USER = 1
"""A user's mistake, a full disk, too little memory."""
EXIT_STOPPED = 3
"""The run stopped itself."""
EXIT_INTERRUPTED = 130
"""Ctrl-C (128 + SIGINT, as shells say it)."""

PLAIN_INTERVAL_SECONDS = 10.0

P = ParamSpec("P")
R = TypeVar("R")


def run_command(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a click command's body: what a user can cause becomes `error: ...` on stderr and an exit status.

    Mistakes, full disks, missing permissions and too little memory exit with 1, a run that stopped itself with 3,
    Ctrl-C with 130. A closed pipe (`| head`) ends quietly. Everything else is a bug of ours and keeps its traceback.
    """

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except RunStoppedError as error:
            _fail(str(error), EXIT_STOPPED)
        except SopError as error:
            _fail(str(error), EXIT_USER)
        except BrokenPipeError:
            _leave_closed_pipe()
        except OSError as error:
            _fail(_os_message(error), EXIT_USER)
        except KeyboardInterrupt:
            _fail("interrupted", EXIT_INTERRUPTED)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            _fail(_memory_message(error), EXIT_USER)

    return guarded


def _fail(message: str, status: int) -> NoReturn:
    click.echo(f"error: {one_line(message)}", err=True)
    sys.exit(status)


def one_line(message: str) -> str:
    """The message without line breaks or control characters: names of files may hold them, and terminals obey them."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(message.split()))


def _leave_closed_pipe() -> NoReturn:
    """Exit without the interpreter's own complaint when it flushes stdout into the closed pipe."""
    with contextlib.suppress(OSError, ValueError):  # a captured stdout has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(EXIT_USER)


def _os_message(error: OSError) -> str:
    what = error.strerror or str(error)
    return f"{what}: {error.filename}" if error.filename is not None else what


def _is_out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")  # a command that never imported torch need not import it to fail
    return isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError))


def _memory_message(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "out of memory: lower the batch size, the image size or the number of workers"
    first = str(error).partition(".")[0]
    return f"out of GPU memory ({first}): lower the batch size or the image size, or use --device cpu"


@contextlib.contextmanager
def progress_reporter(label: str, unit: str) -> Iterator[ProgressCallback]:
    """Show how far long work is, on stderr: a bar on a terminal, elsewhere a line every 10 seconds and one at the end.

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

    def show(done: int, total: int) -> None:
        nonlocal printed, printed_at
        seconds = time.monotonic() - started
        click.echo(f"{label}: {done:,} of {total:,} {unit}, {seconds:.0f} s", err=True)
        printed, printed_at = (done, total), time.monotonic()

    def callback(done: int, total: int) -> None:
        nonlocal last
        last = (done, total)
        if time.monotonic() - printed_at >= PLAIN_INTERVAL_SECONDS:
            show(done, total)

    yield callback
    if last != printed:
        show(*last)
