"""Batches of training and test images, and draws that depend on a key alone: each batch is a pure function of it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch.utils.data import DataLoader

from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.source import ImageSource
from sop_faiss.distributed import derive_seed, on_all_ranks
from sop_faiss.errors import ConfigError, DataError, WorkerDiedError
from sop_faiss.features.ranks import share_of_rank

_CHECKED_AT_ONCE = 64

Plan = Sequence[Int64[np.ndarray, " _"]]
"""The images of each batch."""


@contextlib.contextmanager
def seeded(*key: int | str) -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch from a key, for the work inside; then put them back.

    timm draws from all three.
    """
    seed = derive_seed(*key)
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def plan_batches(rows: Int64[np.ndarray, " n"], batch_size: int, *key: int | str) -> Plan:
    """Shuffle images into full batches; what is left over is not used, as in the recipe.

    Fewer images than a batch are one batch.
    """
    order = np.random.default_rng(derive_seed(*key)).permutation(rows)
    size = min(batch_size, len(order))
    return [order[start : start + size] for start in range(0, len(order) - size + 1, size)]


def plan_in_order(count: int, batch_size: int) -> Plan:
    """Return all images, in batches."""
    return [np.arange(start, min(count, start + batch_size)) for start in range(0, count, batch_size)]


def check_readable(images: ImageSource, *, top_value: float, workers: int) -> None:
    """Decode all images, shared by the ranks: one that cannot be used is found before hours of training, not after.

    Args:
        images: to be tested on later.
        top_value: as of `load_batches`.
        workers: as of `load_batches`.

    Raises:
        DataError: an image cannot be used; it is named.
        WorkerDiedError: a process died.
    """
    own, nothing = np.array(share_of_rank(len(images)), dtype=np.int64), torch.zeros(3, 0, 0)
    plan = [own[batch] for batch in plan_in_order(len(own), _CHECKED_AT_ONCE)]

    def decode() -> None:
        for _ in load_batches(images, plan, lambda pixels, row: nothing, top_value=top_value, workers=workers):
            pass

    on_all_ranks(decode)


@dataclass(frozen=True)
class _Batches:
    """A batch, or why it cannot be made, by its number: exceptions of workers come with their traceback."""

    images: ImageSource
    plan: Plan
    make: Callable[[UInt8[np.ndarray, "h w 3"], int], Any]
    top_value: float
    join: Callable[[list[Any]], Any]

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, number: int) -> Any:
        made = []
        for row in self.plan[number].tolist():
            try:
                made.append(self.make(decode_image(self.images.read(row), top_value=self.top_value), row))
            except DataError as error:
                return f"image {self.images.keys[row]} of {self.images.description} cannot be used ({error})"
        return self.join(made)


def load_batches(
    images: ImageSource,
    plan: Plan,
    make: Callable[[UInt8[np.ndarray, "h w 3"], int], Any],
    *,
    top_value: float,
    workers: int,
    join: Callable[[list[Any]], Any] = torch.stack,
) -> Iterator[tuple[Any, Int64[np.ndarray, " _"]]]:
    """Yield batches and their rows in the order of the plan.

    Args:
        images: where the rows are.
        plan: the rows of each batch.
        make: of the pixels and row of an image, the network's input, perhaps with further channels.
        top_value: of the decoder.
        workers: processes that decode and augment; 0: this one. The batches do not depend on it.
        join: of what is made of the images of a batch, the batch.

    Raises:
        DataError: an image cannot be used; it is named.
        WorkerDiedError: a process died.
    """
    loader: Any = DataLoader(
        _Batches(images, plan, make, top_value, join),  # type: ignore[arg-type]
        batch_size=None,
        num_workers=min(workers, len(plan)),
        generator=torch.Generator(),  # so that the caller's stays as it is
    )
    batches = iter(loader)
    for rows in plan:
        try:
            made = next(batches)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise WorkerDiedError(f"a process that prepares images died: {str(error).splitlines()[0]}") from None
        if isinstance(made, str):
            raise DataError(f"{made}: remove it, or look with sop-data check")
        yield made, rows


def check_workers(workers: int) -> None:
    """Raise ConfigError unless this number of processes is possible."""
    if not 0 <= workers <= 1024:
        raise ConfigError(f"`workers={workers}`: wanted 0 to 1,024")
