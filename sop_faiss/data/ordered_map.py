"""A map over threads that keeps the order and holds only a bounded number of results.

Threads, not processes: reading, decoding and resizing all leave Python's lock, nothing has to be copied between
processes, and Ctrl-C ends it at once.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["MAX_WORKERS", "default_threads", "default_workers", "map_ordered"]

A = TypeVar("A")
B = TypeVar("B")

MAX_WORKERS = 1024
"""More threads than any machine has use for; what is asked beyond is a slip of the keyboard."""
_RESULTS_PER_WORKER = 4


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers() -> int:
    """The number of processors this process may use, 8 at most."""
    return min(_processors(), 8)


def default_threads(processes: int, ranks: int) -> int:
    """Threads in each of `processes` (0: in the training process itself) of each rank here: one a processor, 1 to 4.

    More than 4 gain little, as drawing the views holds Python's lock.
    """
    return max(1, min(_processors() // (max(1, processes) * ranks), 4))


def map_ordered(function: Callable[[A], B], items: Iterable[A], workers: int) -> Iterator[B]:
    """Yield `function(item)` for each item, in order; up to four results per worker wait to be taken.

    Args:
        function: must be safe in threads; what it raises is raised at its place in the order.
        items: consumed as far as the work has been handed out.
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
