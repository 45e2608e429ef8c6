"""Which labeled training images a classifier may use: all, a list of names, a share, or some of each class.

The 1 % and 10 % lists of semi-supervised learning (SimCLR's, of ImageNet) are files of names. Where there is no such
list, a share is drawn: the same part of each class, from a seed. Shares of one seed are nested, and do not depend on
the order or the shards the images came in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import Int64

from sop_faiss.errors import ConfigError, DataError


@dataclass(frozen=True)
class LabeledPart:
    """A choice of training images; at most one of the first three is given, none means all."""

    train_list: Path | None = None
    """A text file with one image a line: its key, its file, or its file's name with or without ending."""
    train_share: float | None = None
    """Share of each class's images, above 0 and at most 1; at least one image of each class."""
    images_per_class: int | None = None
    """Images of each class, 1 or more; every class must have that many."""
    seed: int = 0
    """Seed of the draw."""

    def check(self) -> None:
        """Check the choice, before any work.

        Raises:
            ConfigError: two ways are named at once, or a number is out of range.
        """
        given = [name for name in ("train_list", "train_share", "images_per_class") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(f'`{name}`' for name in given)} are given: choose the training images in one way"
            )
        if self.train_share is not None and not 0 < self.train_share <= 1:
            raise ConfigError(f"`train_share={self.train_share}`: wanted a share above 0 and at most 1, such as 0.01")
        if self.images_per_class is not None and self.images_per_class < 1:
            raise ConfigError(f"`images_per_class={self.images_per_class}`: wanted 1 or more")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"`seed={self.seed}`: wanted 0 or more and below 2^63")

    def rows(
        self, labels: Int64[np.ndarray, " n"], keys: Sequence[str], members: Sequence[str]
    ) -> Int64[np.ndarray, " m"]:
        """Return the chosen rows, in rising order.

        Args:
            labels: class of each training image.
            keys: unique name of each.
            members: file of each, relative to its source.

        Raises:
            DataError: the list is unreadable, names an image twice or one that is not there, or a class is too small.
        """
        if self.train_list is not None:
            return np.sort(_listed(self.train_list, keys, members))
        if self.train_share is None and self.images_per_class is None:
            return np.arange(len(labels))
        by_name = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
        chosen = [
            np.random.Generator(np.random.Philox(key=[self.seed, int(label) & 2**63 - 1])).permutation(rows)[
                : self._count(len(rows), int(label))
            ]
            for label in np.unique(labels)
            if len(rows := by_name[labels[by_name] == label])
        ]
        return np.sort(np.concatenate(chosen))

    def _count(self, in_class: int, label: int) -> int:
        if self.train_share is not None:
            return max(1, round(self.train_share * in_class))
        wanted = self.images_per_class or 0
        if wanted > in_class:
            raise DataError(f"class {label} has {in_class} training images, `images_per_class={wanted}`: lower it")
        return wanted

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as JSON values, for a result's protocol."""
        if self.train_list is not None:
            return {"train_list": self.train_list.name}
        if self.train_share is not None:
            return {"train_share": self.train_share, "seed": self.seed}
        if self.images_per_class is not None:
            return {"images_per_class": self.images_per_class, "seed": self.seed}
        return {}


def held_out_rows(targets: Int64[np.ndarray, " n"], share: float, seed: int, setting: str) -> Int64[np.ndarray, " h"]:
    """Return the training rows that choose a setting, in rising order: the same share of each class.

    A class of one image is not held out.

    Args:
        targets: class of each row, counted from 0.
        share: above 0 and at most 1.
        seed: of the draw.
        setting: what is chosen, for the message.

    Raises:
        DataError: every class has one image.
    """
    names = [f"{row:012d}" for row in range(len(targets))]
    drawn = LabeledPart(train_share=share, seed=seed).rows(targets, names, names)
    held_out = drawn[np.bincount(targets)[targets[drawn]] > 1]
    if not len(held_out):
        raise DataError(
            f"every class has one training image, so none can be held out to choose the {setting}: name one {setting}"
        )
    return held_out


def _listed(file: Path, keys: Sequence[str], members: Sequence[str]) -> Int64[np.ndarray, " m"]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise DataError(f"training list {file} cannot be read ({reason}): wanted text, one name a line") from None
    names = [line.strip() for line in text.splitlines() if line.strip()]
    if not names:
        raise DataError(f"training list {file} is empty: wanted one name of a training image a line")
    known = _rows_by_name(keys, members)
    missing = [name for name in names if name not in known]
    if missing:
        raise DataError(
            f"training list {file}: {len(missing)} of {len(names)} names are not among the {len(keys)} usable training "
            f"images (first: {missing[0]}); wanted keys or files as in {keys[0]} or {members[0]}"
        )
    doubtful = [name for name in names if known[name] is None]
    if doubtful:
        raise DataError(f"training list {file}: {doubtful[0]} means several training images: write its folder, too")
    rows = [row for name in names if (row := known[name]) is not None]
    if len(set(rows)) < len(rows):
        twice = keys[Counter(rows).most_common(1)[0][0]]
        raise DataError(f"training list {file} names {twice} twice: name each image once")
    return np.array(rows, dtype=np.int64)


def _rows_by_name(keys: Sequence[str], members: Sequence[str]) -> dict[str, int | None]:
    """Map each name to its row, or to None where it means several; complete names go before parts of names."""
    rows: dict[str, int | None] = {}
    for row, member in enumerate(members):
        path = PurePosixPath(member)
        for name in {path.name, path.stem}:
            rows[name] = None if name in rows else row
    for names in (members, keys):
        own: dict[str, int | None] = {}
        for row, name in enumerate(names):
            own[name] = None if name in own else row
        rows |= own
    return rows
