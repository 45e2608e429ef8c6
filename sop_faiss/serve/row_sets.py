"""The rows of an index by label, by folder and by condition."""

from __future__ import annotations

import logging
import threading
from array import array
from collections import OrderedDict
from pathlib import Path, PurePosixPath

import numpy as np
from jaxtyping import Int64

from sop_faiss.errors import ConfigError, DataError
from sop_faiss.index.rows_where import column_names, rows_where
from sop_faiss.index.search import FeatureIndex
from sop_faiss.serve.refused import Refused, refused_request

_log = logging.getLogger(__name__)
_KEPT_CONDITIONS = 8


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


class ConditionRows:
    """The rows that pass a condition; those of the last few conditions are kept. Safe in threads.

    Args:
        index: whose images.
        table: more columns, chosen when the server is started; read at each new condition.

    Raises:
        DataError: the table cannot be used.
    """

    def __init__(self, index: FeatureIndex, table: Path | None) -> None:
        self.names = column_names(index, table)
        self._index = index
        self._table = table
        self._keeping = threading.Lock()
        self._rows: OrderedDict[tuple[str, int], Int64[np.ndarray, " n"]] = OrderedDict()

    def rows(self, where: str) -> Int64[np.ndarray, " n"]:
        """Return the rows that pass, sorted.

        Raises:
            Refused: it is not a condition, or nothing passes (422), or the table cannot be read now (503).
        """
        try:
            known = (where, 0 if self._table is None else self._table.stat().st_mtime_ns)
            with self._keeping:
                if known in self._rows:
                    self._rows.move_to_end(known)
                    return self._rows[known]
            rows = rows_where(self._index, where, self._table)
        except ConfigError as error:
            raise refused_request(error) from None
        except (DataError, OSError) as error:
            _log.warning("the table cannot be used now: %s", error)
            raise Refused(503, "the table of the server cannot be read now: see its log") from None
        with self._keeping:
            self._rows[known] = rows
            while len(self._rows) > _KEPT_CONDITIONS:
                self._rows.popitem(last=False)
        return rows


def _above(member: str) -> str:
    above = str(PurePosixPath(member).parent)
    return "" if above == "." else above
