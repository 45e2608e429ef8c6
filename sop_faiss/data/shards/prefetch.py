"""Prefetching of remote shards while training runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Int64

from sop_faiss.data.shards.shard_source import ShardSource
from sop_faiss.errors import SopError

_THREADS = 4  # they mostly wait for the network


def shards_by_need(source: ShardSource, positions: Int64[np.ndarray, " n"]) -> list[int]:
    """Return the numbers of the shards of these images, each once, in the order of the first image of each."""
    numbers, first = np.unique(source.shard_numbers[positions], return_index=True)
    return [int(number) for number in numbers[np.argsort(first)]]


@contextlib.contextmanager
def fetch_ahead(
    source: object, positions: Callable[[], Int64[np.ndarray, " n"]], *, threads: int = _THREADS
) -> Iterator[None]:
    """Fetch the shards of a source in threads while the context is open; nothing is done if all shards are local.

    A reader of an image fetches its shard if it is missing, or waits for the thread that is fetching it. So these
    threads affect only the time; if they cannot fetch a shard, the reader reports it. Threads and forks do not mix:
    open the context after all worker processes were started. If it is left without an error, the threads have ended.

    Args:
        positions: returns the images that will be read, in order; called only if shards may have to be fetched.
        threads: how many shards are fetched at a time.
    """
    if not isinstance(source, ShardSource) or source.fetch is None:
        yield
        return
    fetch, numbers = source.fetch, iter(shards_by_need(source, positions()))
    ended, taking = threading.Event(), threading.Lock()

    def work() -> None:
        with contextlib.suppress(SopError):
            while not ended.is_set():
                with taking:
                    number = next(numbers, None)
                if number is None:
                    return
                fetch(number)

    working = [threading.Thread(target=work, name="fetch ahead", daemon=True) for _ in range(threads)]
    for thread in working:
        thread.start()
    try:
        yield
    except BaseException:
        ended.set()  # after an error, do not wait for shards
        raise
    ended.set()
    for thread in working:
        thread.join()
