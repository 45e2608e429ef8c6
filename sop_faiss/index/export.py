"""An index as one Parquet file, for a vector database."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sop_faiss.files import atomic_file
from sop_faiss.index.search import FeatureIndex
from sop_faiss.progress import ProgressCallback

_BLOCK_ROWS = 16_384
"""Of a row group: 25 MB at dimension 384."""


def export_parquet(
    index: FeatureIndex, path: Path, *, block_rows: int = _BLOCK_ROWS, progress: ProgressCallback | None = None
) -> None:
    """Write ids, names, classes and vectors, one row per image in the index's order; complete or not at all.

    Columns: `id` (int64, the row), `key`, `source`, `member` (strings), `label` (int64, null without), `label_name`
    (string, null without), `vector` (fixed-size list of float32, of unit norm). The file's metadata `sop_faiss` is
    JSON: encoder, preprocessing, pooling, metric, factory and root. Vectors of an index with shortened codes are
    reconstructed from the codes.

    Args:
        index: what to write; `FeatureIndex.open`.
        path: the Parquet file; it replaces one that is there.
        block_rows: rows in memory at a time, and of a row group of the file.

    Raises:
        OSError: the disk is full or the place cannot be written.
    """
    schema = _schema(index)
    with atomic_file(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for start in range(0, len(index), block_rows):
            stop = min(start + block_rows, len(index))
            writer.write_table(_block(index, range(start, stop), schema))
            if progress is not None:
                progress(stop, len(index))


def _schema(index: FeatureIndex) -> pa.Schema:
    made_by = index.manifest
    described = {
        "encoder": made_by.encoder,
        "preprocess": made_by.preprocess,
        "pooling": made_by.pooling,
        "metric": made_by.metric,
        "factory": made_by.factory,
        "root": made_by.root,
    }
    text = [pa.field(name, pa.string(), nullable=False) for name in ("key", "source", "member")]
    vector = pa.list_(pa.field("item", pa.float32(), nullable=False), index.dimension)
    return pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            *text,
            pa.field("label", pa.int64()),
            pa.field("label_name", pa.string()),
            pa.field("vector", vector, nullable=False),
        ],
        metadata={"sop_faiss": json.dumps(described)},
    )


def _block(index: FeatureIndex, rows: range, schema: pa.Schema) -> pa.Table:
    part = slice(rows.start, rows.stop)
    vectors = index.features(rows)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = np.where(np.abs(norms - 1) > 1e-5, vectors / norms, vectors)  # codes do not keep norms
    labels = np.full(len(rows), -1, np.int64) if index.ids.labels is None else index.ids.labels[part]
    names = [index.class_name(label) for label in labels.tolist()]
    flat = pa.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
    columns = {
        "id": pa.array(np.arange(rows.start, rows.stop)),
        "key": pa.array(index.ids.keys[part], pa.string()),
        "source": pa.array(index.ids.sources[part], pa.string()),
        "member": pa.array(index.ids.members[part], pa.string()),
        "label": pa.array(labels, pa.int64(), mask=labels == -1),
        "label_name": pa.array(names, pa.string()),
        "vector": pa.FixedSizeListArray.from_arrays(flat, type=schema.field("vector").type),
    }
    return pa.table([columns[name] for name in schema.names], schema=schema)
