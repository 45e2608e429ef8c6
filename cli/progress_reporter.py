"""Progress on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from sop_faiss.progress import ProgressCallback

if TYPE_CHECKING:
    from rich.progress import Progress

PLAIN_INTERVAL_SECONDS = 10.0
"""Time between two lines of progress where stderr is not a terminal."""

_bars: list[Progress] = []
"""What rich shows now, if anything."""
_inner_seconds = [0.0]
"""Time of all stages within other ones, which the speed of the outer ones does not count."""


@contextlib.contextmanager
def progress_reporter(label: str, unit: str) -> Iterator[ProgressCallback]:
    """Show progress on stderr: a bar on a terminal, else a line every 10 seconds and one at the end.

    Both estimate the time that is left.

    Args:
        label: the work, as in "packing".
        unit: what is counted, in the plural, as in "images".

    Yields:
        The callback to pass to a library verb as `progress`.
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
        TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    if _bars:  # a stage within another: one more bar under its own, until it ends
        task = _bars[0].add_task(label, total=None, unit=unit)
        try:
            yield lambda done, total: _bars[0].update(task, completed=done, total=total)
        finally:
            _bars[0].remove_task(task)
        return
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=None, unit=unit)
        _bars.append(bar)
        try:
            yield lambda done, total: bar.update(task, completed=done, total=total)
        finally:
            _bars.clear()


@contextlib.contextmanager
def _plain_lines(label: str, unit: str) -> Iterator[ProgressCallback]:
    started = time.monotonic()
    printed_at = started
    printed = last = (0, 0)
    first: tuple[int, float] | None = None  # images done, and when: speed is measured from here, without the start-up
    inner_before = _inner_seconds[0]

    def show(done: int, total: int) -> None:
        nonlocal printed, printed_at
        now = time.monotonic()
        left = ""
        if first is not None and first[0] < done < total:
            spent = now - _inner_seconds[0] - first[1]
            left = f", {_about(spent / (done - first[0]) * (total - done))} left"
        click.echo(f"{label}: {done:,} of {total:,} {unit}, {now - started:.0f} s{left}", err=True)
        printed, printed_at = (done, total), now

    def callback(done: int, total: int) -> None:
        nonlocal first, last
        last = (done, total)
        if first is None or done <= first[0]:
            first = (done, time.monotonic() - _inner_seconds[0])
        if time.monotonic() - printed_at >= PLAIN_INTERVAL_SECONDS:
            show(done, total)

    yield callback
    if last != printed:
        show(*last)
    _inner_seconds[0] = inner_before + time.monotonic() - started


def _about(seconds: float) -> str:
    """Return an estimated time, rounded as the estimate deserves."""
    if seconds < 90:
        return f"about {math.ceil(seconds / 10) * 10} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 90 else f"about {seconds / 3600:.1f} h"
