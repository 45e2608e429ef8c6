"""A map over threads that keeps the order and a bounded number of results.

It uses threads, not processes: reading, decoding and resizing release Python's lock, nothing is copied between
processes, and Ctrl-C ends it at once.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

MAX_WORKERS = 1024
"""More threads than any machine can use; a larger number is taken for a typing error."""
_RESULTS_PER_WORKER = 4


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers() -> int:
    """Return `processors()`, 8 at most."""
    return min(processors(), 8)


def default_threads(processes: int, ranks: int) -> int:
    """Return the threads of each process: one per processor of this machine, 1 to 4.

    More than 4 gain little, since drawing the views holds Python's lock.

    Args:
        processes: that prepare images, per rank; 0: the training process prepares them itself.
        ranks: on this machine.
    """
    return max(1, min(processors() // (max(1, processes) * ranks), 4))


def map_ordered(function: Callable[[A], B], items: Iterable[A], workers: int) -> Iterator[B]:
    """Yield `function(item)` for each item, in order; up to four results per worker wait to be taken.

    Args:
        function: safe in threads; what it raises is raised at its place in the order.
        items: taken as the work is submitted.
        workers: threads; 1 or more.
    """
    waiting: deque[Future[B]] = deque()
    pool = ThreadPoolExecutor(max_workers=workers)
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= _RESULTS_PER_WORKER * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
