"""The rows of an index by label and by folder."""

from __future__ import annotations

import threading
from array import array
from pathlib import PurePosixPath

import numpy as np
from jaxtyping import Int64

from sop_faiss.index.search import FeatureIndex
from sop_faiss.serve.refused import Refused


class LabelRows:
    """The rows of each label, by name; made once, then only read.

    Args:
        index: whose labels; one without labels has no names.
    """

    def __init__(self, index: FeatureIndex) -> None:
        labels = index.ids.labels
        self._rows: dict[str, Int64[np.ndarray, " n"]] = {}
        if labels is None:
            return
        order = np.argsort(labels, kind="stable")  # rows of a label stay sorted
        starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
        for part in np.split(order, starts):
            name = index.class_name(int(labels[part[0]])) if len(part) else None
            if name is None:
                continue
            before = self._rows.get(name)  # two labels may have one name
            self._rows[name] = part if before is None else np.sort(np.concatenate([before, part]))

    def counts(self) -> dict[str, int]:
        """Count the images of each label, sorted by name."""
        return {name: len(self._rows[name]) for name in sorted(self._rows)}

    def rows(self, name: str) -> Int64[np.ndarray, " n"]:
        """Return the rows of a label, sorted.

        Raises:
            Refused: no image has it (404).
        """
        if name not in self._rows:
            raise Refused(404, "no image of the index has this label")
        return self._rows[name]


class FolderRows:
    """The rows of each folder, or shard, below the folder of the images; made at first use, safe in threads.

    Args:
        index: whose images.
    """

    def __init__(self, index: FeatureIndex) -> None:
        self._index = index
        self._making = threading.Lock()
        self._rows: dict[str, array[int]] = {}  # 8 bytes a row

    def folder_of(self, row: int) -> str:
        """Return the folder of a row's image; "" for the folder of the images itself."""
        return self._index.ids.sources[row] or _above(self._index.ids.members[row])

    def rows(self, folder: str) -> Int64[np.ndarray, " n"]:
        """Return the rows of a folder, without those of folders in it, sorted.

        Raises:
            Refused: no image is in it (404).
        """
        with self._making:
            if not self._rows:
                for row in range(len(self._index)):
                    self._rows.setdefault(self.folder_of(row), array("q")).append(row)
        if folder not in self._rows:
            raise Refused(404, "no image of the index is in this folder")
        return np.array(self._rows[folder], np.int64)


def _above(member: str) -> str:
    above = str(PurePosixPath(member).parent)
    return "" if above == "." else above
