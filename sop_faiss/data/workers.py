"""Processes that make values by number; if one is killed, that is an error at once, whatever it was doing.

Each process has its own pipe: it holds no lock that another one waits for, and the pipe ends with the process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Generic, TypeVar

import torch

from sop_faiss.data.ordered_map import map_ordered
from sop_faiss.errors import SopError, WorkerDiedError

T = TypeVar("T")

_AHEAD = 2  # values requested of each process before the first of them is taken
_PATIENCE_SECONDS = 2.0  # a process that does not end by itself in this time is killed

_this_worker: tuple[int, int] | None = None


def this_worker() -> tuple[int, int] | None:
    """Return the number of this process among the workers and their count; None in any other process."""
    return _this_worker


class Workers(Generic[T]):
    """Forked processes that make values; the n-th of `map`'s numbers goes to process n modulo `count`.

    They ignore the signals that request a stop, since the process that started them handles these, and they end with
    it, however it ends. Tensors are passed in shared memory.

    Args:
        function: makes a value from a number; what it raises is raised by `map`.
        count: number of processes.
    """

    def __init__(self, function: Callable[[int], T], count: int) -> None:
        context = multiprocessing.get_context("fork")
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        # also runs at exit, before multiprocessing waits for its processes
        self.close = Finalize(self, _end, (self._processes, self._pipes), exitpriority=0)
        for number in range(count):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            arguments = (function, (number, count), theirs, self._pipes)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)
            theirs.close()

    def map(self, numbers: Sequence[int], finish: Callable[[T], T] | None = None) -> Iterator[T]:
        """Yield the value of each number, in order; at most two per process are made ahead.

        Args:
            numbers: the numbers; the processes end after the last.
            finish: applied to each value in a separate thread, while the caller works.

        Raises:
            WorkerDiedError: a process died.
        """
        count = len(self._pipes)
        ahead = _AHEAD * count

        def take(place: int) -> T:
            value = self._receive(place % count)
            return value if finish is None else finish(value)

        try:
            for place, number in enumerate(numbers[:ahead]):
                self._ask(place % count, number)
            places = range(len(numbers))
            taken = map(take, places) if finish is None else map_ordered(take, places, 1)
            for place, value in zip(places, taken, strict=True):
                for number in numbers[place + ahead : place + ahead + 1]:
                    self._ask(place % count, number)
                yield value
        finally:
            self.close()  # this also ends a thread that waits for a value

    def _ask(self, worker: int, number: int) -> None:
        with self._deaths_reported():
            self._pipes[worker].send(number)

    def _receive(self, worker: int) -> T:
        pipe = self._pipes[worker]
        with self._deaths_reported():
            wait([pipe, *self._sentinels()])
            if wait(self._sentinels(), 0):
                raise EOFError
            value = pipe.recv()
        if isinstance(value, Exception):
            raise value
        result: T = value
        return result

    def _sentinels(self) -> list[int]:
        return [process.sentinel for process in self._processes]

    @contextlib.contextmanager
    def _deaths_reported(self) -> Iterator[None]:
        """Raise WorkerDiedError for errors of pipes and shared memory that a process's death causes."""
        try:
            yield
        except (EOFError, OSError):
            ended = wait(self._sentinels(), _PATIENCE_SECONDS)
            if not ended:
                raise
            dead = next(process for process in self._processes if process.sentinel in ended)
            dead.join()  # its files are closed shortly before it ends
            raise WorkerDiedError(_death_message(dead.exitcode)) from None


def _death_message(status: int | None) -> str:
    """Say how a process ended, and what to do."""
    if status is None or status >= 0:
        return f"a process that prepares images ended (status {status}): see its messages above, or set data.workers=0"
    name = signal.Signals(-status).name
    cause = "shared memory (/dev/shm) may be full: enlarge it" if name == "SIGBUS" else "memory may be short: free some"
    return f"a process that prepares images died ({name}); {cause}, or lower data.workers"


def _work(
    function: Callable[[int], object], place: tuple[int, int], pipe: Connection, inherited: list[Connection]
) -> None:
    """Run in a new process: make the values requested, until None is requested or the pipe ends."""
    global _this_worker
    _this_worker = place
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    for other in inherited:  # otherwise these processes would keep each other's pipes open
        other.close()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while (asked := pipe.recv()) is not None:
            pipe.send(_value_or_error(function, asked))


def _value_or_error(function: Callable[[int], object], number: int) -> object:
    """Return the value, or the error instead of it."""
    try:
        return function(number)
    except Exception as error:
        if not isinstance(error, SopError | OSError | MemoryError):  # a bug, for which the traceback is needed
            error.add_note(traceback.format_exc())
        return error


def _end(processes: list[BaseProcess], pipes: list[Connection]) -> None:
    """Ask the processes to end, and kill those that do not."""
    for pipe in pipes:
        with contextlib.suppress(OSError):
            pipe.send(None)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    for pipe in pipes:
        pipe.close()
