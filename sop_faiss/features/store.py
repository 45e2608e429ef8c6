"""Features on disk: Parquet files that any reader can use, and a manifest."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float32, Int64

from sop_faiss.data.images.class_numbers import number_classes
from sop_faiss.errors import FeatureError
from sop_faiss.features.feature_space import FeatureSpace
from sop_faiss.features.file_states import FileStates
from sop_faiss.features.store_manifest import FORMAT, MANIFEST_NAME, read_store_manifest, require_dtype
from sop_faiss.files import atomic_directory, require_readable, sha256_file, write_json
from sop_faiss.model.encoders.whitening import WHITENING_FILE, Whitening
from sop_faiss.unit_rows import require_unit_rows

_BYTES_PER_FILE = 256 * 2**20
"""Of features per Parquet file, about."""
NORM_TOLERANCE = {"float32": 1e-4, "float16": 5e-3}
"""How far the norm of a stored row may be from 1; float16 rounds each number by up to 5e-4 of itself."""


@dataclass
class FeatureStore:
    """Unit-norm features of images, and where each image is. Row i of every column belongs to one image.

    Attributes:
        keys: unique names.
        labels: class numbers, -1 for an image without one; None if none has one.
        sources: the shard of each image relative to the manifest's `root`; "" for an image that is a file.
        members: the shard's member, or the file relative to `root`.
        features: unit-norm rows.
        manifest: `encoder` {name, fingerprint}, `preprocess`, `pooling`, `dimension`, `count`, `normalized`, `root`,
            `sources` (as the user named them), `folder` (if they are all
            images of one), `encoder_spec` (how the encoder is opened again), and what else the extraction noted; JSON
            values.
        whitening: how the features were whitened, written next to them; None also for a store that was read.
        states: what was read of each image, for an index that follows a folder; None also for a store that was read.
    """

    keys: list[str]
    labels: Int64[np.ndarray, " n"] | None
    sources: list[str]
    members: list[str]
    features: Float32[np.ndarray, "n d"]
    manifest: dict[str, Any] = field(default_factory=dict)
    whitening: Whitening | None = None
    states: FileStates | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def space(self, name: str = "the feature store") -> FeatureSpace:
        """Return what other features must share with these to be compared; `name` is for the message.

        Raises:
            FeatureError: the manifest does not say how the features were made.
        """
        return FeatureSpace.of_manifest(self.manifest, self.features.shape[1], name)

    def check(self) -> None:
        """Check that the columns belong together and the features are usable.

        Raises:
            FeatureError: columns of different lengths, a repeated key, or a row that is not finite or not of unit norm.
        """
        self._check_columns()
        _check_features(self.features, self.keys, "float32")

    def _check_columns(self) -> None:
        count = len(self.features)
        columns = (("key", self.keys), ("label", self.labels), ("source", self.sources), ("member", self.members))
        for name, column in columns:
            if column is not None and len(column) != count:
                raise FeatureError(f"features have {count} rows, but column {name} has {len(column)}")
        repeated = [key for key, times in Counter(self.keys).items() if times > 1]
        if repeated:
            raise FeatureError(
                f"{len(repeated)} keys are not unique (first {repeated[0]!r}): put the shard or folder before them"
            )

    def write(
        self, directory: Path, *, feature_dtype: str = "float32", bytes_per_file: int = _BYTES_PER_FILE
    ) -> dict[str, Any]:
        """Write the store; it appears complete or not at all.

        Args:
            directory: new or empty.
            feature_dtype: `float32` or `float16` (half the size; similarities change by about 1e-3).
            bytes_per_file: of features in one Parquet file, as float32.

        Returns:
            The manifest as written.

        Raises:
            FeatureError: the features are unusable (see `check`), or the dtype is unknown.
            SopError: the directory is not empty; nothing is touched.
        """
        require_dtype(feature_dtype)
        self.check()
        count, dimension = self.features.shape
        with atomic_directory(directory) as temporary:
            files = []
            for number, (start, stop) in enumerate(_parts(count, max(1, bytes_per_file // (4 * dimension)))):
                name = f"features-{number:05d}.parquet"
                pq.write_table(self._table(start, stop, feature_dtype), temporary / name)
                files.append({"name": name, "rows": stop - start, "sha256": sha256_file(temporary / name)})
            manifest = {
                **self.manifest,
                "format": FORMAT,
                "dimension": dimension,
                "count": count,
                "normalized": True,
                "feature_dtype": feature_dtype,
                "files": files,
            }
            if self.whitening is not None:
                self.whitening.write(temporary / WHITENING_FILE)
            write_json(temporary / MANIFEST_NAME, manifest)
        return manifest

    def _table(self, start: int, stop: int, feature_dtype: str) -> pa.Table:
        rows = np.ascontiguousarray(self.features[start:stop], dtype=feature_dtype)
        values = pa.array(rows.reshape(-1))
        labels = np.full(stop - start, -1, np.int64) if self.labels is None else self.labels[start:stop]
        return pa.table(
            {
                "key": pa.array(self.keys[start:stop], pa.string()),
                "label": pa.array(labels, pa.int64(), mask=labels < 0),
                "source": pa.array(self.sources[start:stop], pa.string()),
                "member": pa.array(self.members[start:stop], pa.string()),
                "feature": pa.FixedSizeListArray.from_arrays(values, self.features.shape[1]),
            }
        )

    @classmethod
    def read(cls, directory: Path) -> FeatureStore:
        """Read a store and check it. Features stored as float16 are made float32 and of unit norm again.

        Raises:
            FeatureError: there is no store, it is incomplete or damaged, or its features are unusable.
        """
        manifest = read_store_manifest(directory)
        return cls._of_parts(directory, manifest, manifest["files"])

    @classmethod
    def read_part(cls, directory: Path, number: int) -> FeatureStore:
        """Read one file of the store alone, as `read` does.

        Args:
            directory: of the store.
            number: of the file in the manifest's `files`, from 0.
        """
        manifest = read_store_manifest(directory)
        return cls._of_parts(directory, manifest, [manifest["files"][number]])

    @classmethod
    def _of_parts(cls, directory: Path, manifest: dict[str, Any], parts: Sequence[Mapping[str, Any]]) -> FeatureStore:
        features = np.empty((sum(part["rows"] for part in parts), manifest["dimension"]), np.float32)
        columns: list[pa.Table] = []
        row = 0
        for part in parts:
            rows = _read_part(directory / str(part["name"]), part, manifest)
            features[row : row + len(rows)] = feature_matrix(rows, manifest["dimension"])
            row += len(rows)
            columns.append(rows.drop_columns(["feature"]))
        store = _of_columns(pa.concat_tables(columns), features, manifest)
        _check_features(features, store.keys, manifest["feature_dtype"])
        if manifest["feature_dtype"] != "float32":
            features /= np.linalg.norm(features, axis=1, keepdims=True)
        return store


def read_names(directory: Path) -> FeatureStore:
    """Read a store without its features (they have no columns): keys, labels, sources, members and manifest.

    The files' bytes are not compared with their checksums: `FeatureStore.read_part` does that.

    Raises:
        FeatureError: there is no store, it is incomplete, or a key occurs twice.
    """
    manifest = read_store_manifest(directory)
    names = ["key", "label", "source", "member"]
    for part in manifest["files"]:
        require_readable(directory / part["name"])
    try:
        table = pa.concat_tables(pq.read_table(directory / part["name"], columns=names) for part in manifest["files"])
    except (pa.ArrowException, ValueError, OSError) as error:
        raise FeatureError(
            f"{directory} is damaged ({str(error).splitlines()[0]}): copy it again or embed again"
        ) from None
    return _of_columns(table, np.empty((len(table), 0), np.float32), manifest)


def _of_columns(table: pa.Table, features: Float32[np.ndarray, "n d"], manifest: dict[str, Any]) -> FeatureStore:
    """Return the store without class names that are integers: those are the labels."""
    stored = table["label"].fill_null(-1).to_numpy().astype(np.int64)
    names = manifest.get("class_names")
    names = [str(name) for name in names] if isinstance(names, list) else None
    labels, class_names = number_classes(stored if (stored >= 0).any() else None, names)
    if names is not None:
        manifest = {**manifest, "class_names": class_names}
    keys, sources, members = (table[name].to_pylist() for name in ("key", "source", "member"))
    store = FeatureStore(keys, labels, sources, members, features, manifest)
    store._check_columns()
    return store


def _parts(count: int, rows: int) -> Iterator[tuple[int, int]]:
    """First and last-plus-one row of each Parquet file."""
    for start in range(0, count, rows):
        yield start, min(start + rows, count)


def _check_features(features: Float32[np.ndarray, "n d"], keys: list[str], stored_as: str) -> None:
    if features.size == 0:
        raise FeatureError("there are no features: wanted at least one row")
    tolerance = NORM_TOLERANCE[stored_as]
    require_unit_rows(features, "features", tolerance=tolerance, names=keys, remedy="extract them again")


def _schema(manifest: Mapping[str, Any]) -> pa.Schema:
    number = pa.float32() if manifest["feature_dtype"] == "float32" else pa.float16()
    text = ("key", "source", "member")
    columns = {**dict.fromkeys(text, pa.string()), "label": pa.int64()}
    columns["feature"] = pa.list_(number, manifest["dimension"])
    return pa.schema([(name, columns[name]) for name in ("key", "label", "source", "member", "feature")])


def _read_part(path: Path, part: Mapping[str, Any], manifest: Mapping[str, Any]) -> pa.Table:
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != part["sha256"]:
        raise FeatureError(f"{path} differs from what was written (sha256): copy the store again or embed again")
    try:
        table = pq.read_table(pa.BufferReader(content))
        table = table.cast(_schema(manifest))
    except (pa.ArrowException, ValueError) as error:
        raise FeatureError(f"{path} is not a table of features: {str(error).splitlines()[0]}") from None
    missing = [name for name in ("key", "source", "member", "feature") if table[name].null_count]
    if len(table) != part["rows"] or missing:
        raise FeatureError(
            f"{path} has {len(table)} rows, nulls in {missing or 'none'}: wanted {part['rows']} and none"
        )
    return table


def feature_matrix(table: pa.Table, dimension: int) -> np.ndarray:
    """Return the rows of one file; chunks of a fixed-size list are flat arrays."""
    column = table["feature"].combine_chunks()
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False).reshape(-1, dimension) for chunk in chunks])
