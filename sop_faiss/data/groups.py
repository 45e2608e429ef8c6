"""Photos of one thing as views of each other: which image of a group gives an image's other views."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.views.crops import view_generator
from sop_faiss.errors import ConfigError

_PARTNER = 2**63 + 4  # a number that no view has, next to the keys of other draws in stream.py and shard_stream.py


class Groups:
    """The training images by group.

    Args:
        positions: the images that are trained on.
        labels: the group of each image of the source; -1 for one that belongs to none.
    """

    def __init__(self, positions: Int64[np.ndarray, " m"], labels: Int64[np.ndarray, " n"]) -> None:
        groups = labels[positions]
        order = np.argsort(groups, kind="stable")
        numbers, starts = np.unique(groups[order], return_index=True)
        parts = [np.sort(part) for part in np.split(positions[order], starts[1:])]
        self.members = {int(number): part for number, part in zip(numbers, parts, strict=True) if number >= 0}
        self.labels = labels

    def partner(self, image_id: int, seed: int, epoch: int) -> int:
        """Draw another image of an image's group; one without a group or alone in it is its own partner."""
        members = self.members.get(int(self.labels[image_id]))
        if members is None or len(members) == 1:
            return image_id
        drawn = int(view_generator(seed, epoch, image_id, _PARTNER).integers(len(members) - 1))
        own = int(np.searchsorted(members, image_id))
        return int(members[drawn + (drawn >= own)])


def open_groups(source: ImageSource, positions: Int64[np.ndarray, " m"]) -> Groups:
    """Take the labels of a source as the groups of its images.

    Raises:
        ConfigError: the source has no labels, or no group has two of the images that are trained on.
    """
    if source.labels is None:
        raise ConfigError(
            f"data.groups = labels: {source.description} has no labels: put the photos of each thing into a folder of "
            "their own, or set data.groups=none"
        )
    groups = Groups(positions, source.labels)
    if all(len(members) == 1 for members in groups.members.values()):
        raise ConfigError(
            f"data.groups = labels: no two of the {len(positions)} training images of {source.description} have the "
            "same label: set data.groups=none"
        )
    return groups
