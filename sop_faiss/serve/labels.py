"""The labels of an index by name, and the images of each."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from sop_faiss.index.search import FeatureIndex
from sop_faiss.serve.refused import Refused

__all__ = ["LabelRows"]


class LabelRows:
    """Rows by the name of their label; made once, then only read.

    Args:
        index: whose labels; one without has no names.
    """

    def __init__(self, index: FeatureIndex) -> None:
        labels = index.ids.labels
        self._rows: dict[str, Int64[np.ndarray, " n"]] = {}
        if labels is None:
            return
        order = np.argsort(labels, kind="stable")  # rows of a label stay in rising order
        starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
        for part in np.split(order, starts):
            name = index.class_name(int(labels[part[0]])) if len(part) else None
            if name is None:
                continue
            before = self._rows.get(name)  # two labels may have one name
            self._rows[name] = part if before is None else np.sort(np.concatenate([before, part]))

    def counts(self) -> dict[str, int]:
        """How many images each label has, sorted by name."""
        return {name: len(self._rows[name]) for name in sorted(self._rows)}

    def rows(self, name: str) -> Int64[np.ndarray, " n"]:
        """The rows of a label, rising.

        Raises:
            Refused: no image has it (404).
        """
        if name not in self._rows:
            raise Refused(404, "no image of the index has this label")
        return self._rows[name]
