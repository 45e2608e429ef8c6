"""A feature store read in blocks, for stores that are larger than the memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float32

from sop_faiss.errors import FeatureError
from sop_faiss.features.store import NORM_TOLERANCE, feature_matrix
from sop_faiss.features.store_manifest import read_store_manifest
from sop_faiss.files import sha256_file
from sop_faiss.unit_rows import require_unit_rows

BLOCK_ROWS = 16_384
"""Rows read together."""


class FeatureBlocks:
    """The rows of a feature store in order, a block at a time; every file's checksum is verified first.

    Args:
        directory: of the store.

    Raises:
        FeatureError: there is no store, it is incomplete, or a file differs from what was written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: dict[str, Any] = read_store_manifest(directory)
        for part in self.manifest["files"]:
            path = directory / str(part["name"])
            if sha256_file(path) != part["sha256"]:
                raise FeatureError(f"{path} differs from what was written (sha256): copy the store or embed again")

    def __len__(self) -> int:
        return int(self.manifest["count"])

    def __iter__(self) -> Iterator[Float32[np.ndarray, "_ d"]]:
        """Yield blocks of unit rows; those stored as float16 are made unit rows again.

        Raises:
            FeatureError: a file is not a table of features, or rows are not finite unit vectors.
        """
        dimension, stored_as = self.manifest["dimension"], self.manifest["feature_dtype"]
        for part in self.manifest["files"]:
            path = self.directory / str(part["name"])
            try:
                for batch in pq.ParquetFile(path).iter_batches(BLOCK_ROWS, columns=["feature"]):
                    rows = feature_matrix(pa.table(batch), dimension).astype(np.float32, copy=False)
                    require_unit_rows(rows, f"features in {path}", tolerance=NORM_TOLERANCE[stored_as])
                    if stored_as != "float32":
                        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
                    yield rows
            except (pa.ArrowException, ValueError, KeyError) as error:
                raise FeatureError(f"{path} is not a table of features: {str(error).splitlines()[0]}") from None
