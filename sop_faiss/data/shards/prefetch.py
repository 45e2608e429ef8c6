"""Shards from elsewhere, fetched before they are needed, while training runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Int64

from sop_faiss.data.shards.shard_source import ShardSource
from sop_faiss.errors import SopError

__all__ = ["fetch_ahead", "shards_by_need"]

_THREADS = 4  # waiting for the network


def shards_by_need(source: ShardSource, positions: Int64[np.ndarray, " n"]) -> list[int]:
    """The numbers of the shards that hold these images, each once, in the order of the first image of each."""
    numbers, first = np.unique(source.shard_numbers[positions], return_index=True)
    return [int(number) for number in numbers[np.argsort(first)]]


@contextlib.contextmanager
def fetch_ahead(source: object, positions: Callable[[], Int64[np.ndarray, " n"]]) -> Iterator[None]:
    """Fetch the shards of a source beside what goes on inside; nothing is done where all of them are here.

    Whoever reads an image fetches its shard if it is not here yet, or waits for the one who is at it. So nothing
    depends on these threads but time; what they cannot fetch, the reader will tell. Threads and forks do not mix: enter
    it when all worker processes have been started. When it is left without an error, the threads have ended.

    Args:
        source: the images.
        positions: those that will be read, in this order; asked for only where something may be fetched.
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

    threads = [threading.Thread(target=work, name="fetch ahead", daemon=True) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    try:
        yield
    except BaseException:
        ended.set()  # whoever is in a hurry waits for no shard
        raise
    ended.set()
    for thread in threads:
        thread.join()
