"""A few threads and a bounded queue before them: first come, first served; beyond the bound jobs are refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from sop_faiss.serve.refused import Refused

R = TypeVar("R")


class WorkQueue:
    """A queue that runs jobs in threads, in the order of arrival, so that no client waits much longer than another.

    Args:
        threads: jobs that run at once.
        max_waiting: jobs that may wait besides those.
    """

    def __init__(self, threads: int, max_waiting: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="serve")
        self._limit = threads + max_waiting
        self._unfinished = 0
        self._counting = threading.Lock()

    async def run(self, job: Callable[[], R]) -> R:
        """Run a job and return its result.

        Raises:
            Refused: too many jobs are waiting, or memory ran out in this one (503).
        """
        with self._counting:
            if self._unfinished >= self._limit:
                raise Refused(503, "too many searches are waiting: try again in a few seconds")
            self._unfinished += 1
        future = self._threads.submit(job)
        future.add_done_callback(self._count_finished)  # also for one canceled before it began
        try:
            return await asyncio.wrap_future(future)
        except MemoryError:
            raise Refused(503, "not enough memory for this image: try a smaller one") from None

    def close(self) -> None:
        """Finish running jobs, and drop waiting ones."""
        self._threads.shutdown(cancel_futures=True)

    def _count_finished(self, _: Future[Any]) -> None:
        with self._counting:
            self._unfinished -= 1
