"""Two augmented views per image, the same ones each time: to score an encoder without labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from jaxtyping import Int64, UInt8

from sop_faiss.config import Config
from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.ordered_map import default_workers, map_ordered
from sop_faiss.data.views.crops import write_view
from sop_faiss.data.views.multicrop import MultiCrop
from sop_faiss.errors import DataError, UnreachableError

_SEED = 0
"""A constant, so that runs of any seed are scored on the same views."""
_EPOCH = 2**63
"""No run has this epoch, so these views were not trained on."""

Pair = UInt8[np.ndarray, "2 s s 3"]


class ViewPairs:
    """The first and second global view of images as the run makes them, even if the run has only the first.

    Args:
        source: the images.
        positions: of the images whose views are made.
        config: sections data and views, and whether the views have their colors changed (`evaluate.view_colors`).
        limit: the name of `data.max_bad_fraction` as the user sets it, for the message.
    """

    def __init__(
        self,
        source: ImageSource,
        positions: Int64[np.ndarray, " n"],
        config: Config,
        limit: str = "data.max_bad_fraction",
    ) -> None:
        self.source, self.positions, self._limit = source, positions, limit
        self._size = config.views.global_size
        self._max_bad_fraction, self._colored = config.data.max_bad_fraction, config.evaluate.view_colors
        views, train = replace(config.views, global_count=2, local_count=0), replace(config.train, seed=_SEED)
        self._multicrop = MultiCrop(replace(config, views=views, train=train), local_count=0)

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[Pair]:
        """Yield a pair of views of each image that can be read, in order.

        Raises:
            DataError: more than `data.max_bad_fraction` of the images cannot be read.
            UnreachableError: a shard cannot be fetched.
        """
        bad = 0
        for pair in map_ordered(self._pair, self.positions.tolist(), default_workers()):
            if not isinstance(pair, DataError):
                yield pair
                continue
            bad += 1
            if bad > self._max_bad_fraction * len(self):
                raise DataError(
                    f"{self.source.description}: {bad} of the {len(self)} images to be scored cannot be read so far "
                    f"(last: {pair}), more than {self._limit} of {self._max_bad_fraction} allows: repair the data "
                    "(sop-data check), or raise it"
                )

    def _pair(self, position: int) -> Pair | DataError:
        try:
            image, drawn = self._multicrop.load(position, _EPOCH, self.source.read(position))
        except UnreachableError:
            raise
        except DataError as error:
            return error
        pair = np.empty((2, self._size, self._size, 3), np.uint8)
        for out, (view, _) in zip(pair, drawn, strict=True):
            write_view(image, view, out, colored=self._colored)
        return pair
