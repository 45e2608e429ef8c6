"""The files of an index directory, which appear together and are used only after every byte was compared.

index.faiss     the vectors, a FAISS file
ids.parquet     row -> key, source, member, label
states.parquet  row -> size, time and sha256 of the image when it was read; not of an index of a feature store
left_out.json   images that cannot be used or were removed, with reasons; only if there are any
manifest.json   how it was made, the checksums of the others, and one of itself (its seal)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int64

from sop_faiss.data.images.class_numbers import number_classes
from sop_faiss.errors import FeatureError, IndexMismatchError
from sop_faiss.features.feature_space import FeatureSpace
from sop_faiss.features.file_states import FileStates
from sop_faiss.files import not_json, restore_directory, sha256_file
from sop_faiss.index.left_out import LEFT_OUT_FILE, LeftOut, parse_left_out, write_left_out
from sop_faiss.index.packed_texts import PackedTexts
from sop_faiss.model.encoders.remembered import with_relative_places
from sop_faiss.paths import path_state

INDEX_FILE = "index.faiss"
IDS_FILE = "ids.parquet"
STATES_FILE = "states.parquet"
MANIFEST_FILE = "manifest.json"

_FEW_ROWS = 1000

FORMAT = "sop_faiss.index"
FORMAT_VERSIONS = (2, 3)
_SINCE_VERSION_3 = ("encoder_spec", "folder")
"""Entries of the manifest that an index of version 2 lacks; one that has none of them is written as version 2."""

_COLUMNS = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("member", pa.string(), nullable=False),
        pa.field("label", pa.int64()),
    ]
)


@dataclass(frozen=True)
class IdTable:
    """What each row of the index is; all columns have one entry per row."""

    keys: Sequence[str]
    """Unique names of the images."""
    sources: Sequence[str]
    """The shard of each image, relative to the manifest's `root`; empty for an image file."""
    members: Sequence[str]
    """The tar member, or the image file relative to `root`."""
    labels: Int64[np.ndarray, " n"] | None
    """Class of each image, -1 where it has none; None if no image has one."""

    def take(self, rows: Int64[np.ndarray, " m"]) -> IdTable:
        """Return some rows, in this order."""
        columns = (self.keys, self.sources, self.members)
        if len(rows) > _FEW_ROWS:  # packed texts are unpacked once
            columns = (list(self.keys), list(self.sources), list(self.members))
        keys, sources, members = ([column[row] for row in rows.tolist()] for column in columns)
        return IdTable(keys, sources, members, None if self.labels is None else self.labels[rows])

    def write(self, path: Path) -> None:
        """Write the Parquet file. Not atomic: see `IndexManifest.write`.

        Raises:
            FeatureError: a name is not valid Unicode.
        """
        labels = np.full(len(self.keys), -1, np.int64) if self.labels is None else self.labels
        columns = {
            "row": pa.array(np.arange(len(self.keys), dtype=np.int64)),
            "label": pa.array(labels, mask=labels == -1),
        }
        for name, values in (("key", self.keys), ("source", self.sources), ("member", self.members)):
            try:
                columns[name] = pa.array(values, pa.string())
            except UnicodeEncodeError as error:
                raise FeatureError(f"{name} {error.object!r} is not valid Unicode: rename the file") from None
        pq.write_table(pa.table([columns[name] for name in _COLUMNS.names], schema=_COLUMNS), path)

    @classmethod
    def read(cls, path: Path) -> IdTable:
        """Read the Parquet file.

        Raises:
            IndexMismatchError: it is damaged, has other columns, or its rows are not 0, 1, 2, ...
        """
        try:
            table = pq.read_table(path).select(_COLUMNS.names).cast(_COLUMNS)
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            raise IndexMismatchError(f"{path} is damaged or not the ids of an index ({_first_line(error)})") from None
        if any(table[field.name].null_count for field in _COLUMNS if not field.nullable):
            raise IndexMismatchError(f"{path} has rows without a name: build the index again")
        if not np.array_equal(table["row"].to_numpy(), np.arange(len(table))):
            raise IndexMismatchError(f"{path} has rows out of order: build the index again")
        labels = table["label"].fill_null(-1).to_numpy()
        return cls(
            keys=PackedTexts(table["key"]),
            sources=PackedTexts(table["source"]),
            members=PackedTexts(table["member"]),
            labels=None if table["label"].null_count == len(table) else labels,
        )


@dataclass(frozen=True)
class IndexManifest:
    """How an index was made, and the checksums of its files."""

    factory: str
    """FAISS factory string."""
    metric: str
    """`inner_product`, which is the cosine of unit vectors."""
    dimension: int
    count: int
    encoder: dict[str, str]
    """`name` and `fingerprint` of the encoder of every row; a query's must have the same fingerprint."""
    preprocess: dict[str, Any]
    """How images were prepared; a query's must be prepared the same way."""
    pooling: str
    """How tokens were pooled to one feature; a query's must be the same."""
    class_names: list[str] | None
    """Name of label 0, 1, ... if known."""
    root: str
    """The folder that sources and members are relative to."""
    dropped: dict[str, int]
    """How many images could not be used when the features were extracted, by reason."""
    search: dict[str, Any]
    """`effort`: the search setting (FAISS's nprobe or efSearch), null where a search looks at all of the index.
    `recall`, `k`, `queries`, `target`: the share of the k nearest rows that is found, as measured on queries that were
    not in the index yet; null where nothing was measured. `why`: how the factory was chosen. `mean_cosine`: of random
    pairs of rows, null for fewer than 20; `scores`: of the encoder's run, `best_by`, `first_score` (of step 0) and
    `best_score` (of later steps) in percent and `difference` (mean, low, high), null where there are none. Older
    indices lack these two, or the difference."""
    files: dict[str, dict[str, Any]]
    """Per file: `sha256` and `bytes`."""
    encoder_spec: dict[str, Any] | None = None
    """How the encoder is opened again, as of `remembered_spec`; None: not known."""
    folder: str | None = None
    """The folder that a sync follows, `root` or, where images were added from elsewhere, below it; None: the index is
    of shards, a list or several places."""

    def write(self, directory: Path) -> None:
        """Write `manifest.json` as the last file of a directory that is renamed when complete."""
        (directory / MANIFEST_FILE).write_bytes(self._sealed())

    def _sealed(self) -> bytes:
        """Return the exact bytes of `manifest.json`: the content and a sha256 of it."""
        content = asdict(self)
        content = {name: value for name, value in content.items() if value is not None or name not in _SINCE_VERSION_3}
        version = FORMAT_VERSIONS[any(name in content for name in _SINCE_VERSION_3)]
        content = {"format": FORMAT, "format_version": version} | content
        seal = hashlib.sha256(json.dumps(content, allow_nan=False).encode()).hexdigest()
        return (json.dumps(content | {"seal": seal}, indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def read(cls, directory: Path) -> IndexManifest:
        """Read `manifest.json` and check its seal.

        Raises:
            IndexMismatchError: the directory is not an index, is of another version, or the manifest was changed.
        """
        path = directory / MANIFEST_FILE
        if not path.is_file():
            wrong = (
                f"is not an index directory (no {MANIFEST_FILE})"
                if directory.is_dir()
                else f"{path_state(directory)}, wanted an index directory"
            )
            raise IndexMismatchError(f"{directory} {wrong}: make one with `sop-index build`")
        encoded = path.read_bytes()
        try:
            content = json.loads(encoded)
        except (ValueError, RecursionError) as error:
            raise IndexMismatchError(
                f"{path} is damaged ({not_json(error)}): restore it or build the index again"
            ) from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise IndexMismatchError(f"{path} is not the manifest of an index: make one with `sop-index build`")
        version = content.get("format_version")
        if version not in FORMAT_VERSIONS:
            raise IndexMismatchError(
                f"{path} has format version {version!r}, this program reads {' and '.join(map(str, FORMAT_VERSIONS))}: "
                "build the index again, or use the program that made it"
            )
        try:
            optional: dict[str, Any] = {name: content.get(name) for name in _SINCE_VERSION_3}
            manifest = cls(**optional, **{name: content[name] for name in _FIELDS})
            intact = manifest._sealed() == encoded and manifest._is_sound()
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            intact = False
        if not intact:
            raise IndexMismatchError(f"{path} was changed after it was written: restore it or build the index again")
        return manifest

    def _is_sound(self) -> bool:
        """Return whether the entries are of their types: anyone can make a seal."""
        texts = (self.factory, self.metric, self.pooling, self.root)
        counts = (self.dimension, self.count, *self.dropped.values())
        sizes = [file["bytes"] for file in self.files.values()]
        return (
            all(isinstance(each, str) for each in texts)
            and all(type(each) is int and each >= 0 for each in (*counts, *sizes))
            and all(isinstance(self.encoder[name], str) for name in ("name", "fingerprint"))
            and all(isinstance(file["sha256"], str) for file in self.files.values())
            and {INDEX_FILE, IDS_FILE} <= self.files.keys()
            and isinstance(self.preprocess, dict)
            and isinstance(self.search, dict)
            and (self.class_names is None or _are_texts(self.class_names))
            and isinstance(self.encoder_spec, dict | None)
            and isinstance(self.folder, str | None)
        )

    @property
    def space(self) -> FeatureSpace:
        """What a query's features must share with those of the index."""
        return FeatureSpace(self.encoder["fingerprint"], self.preprocess, self.pooling, self.dimension)

    @property
    def exact(self) -> bool:
        """Whether every search finds what brute force does."""
        return self.factory == "Flat"

    def check_file(self, directory: Path, name: str, *, checksum: bool = True) -> None:
        """Compare one of the other files with the manifest: its length, and with `checksum` every byte.

        Raises:
            IndexMismatchError: the file is missing, cut, changed, or belongs to another index.
        """
        path = directory / name
        if not path.is_file():
            raise IndexMismatchError(f"{path} is missing: restore it or build the index again")
        wanted, size = self.files[name], path.stat().st_size
        if size != wanted["bytes"]:
            raise IndexMismatchError(
                f"{path} has {size} bytes, wanted {wanted['bytes']}: it was cut or belongs to another index"
            )
        if checksum and sha256_file(path) != wanted["sha256"]:
            raise IndexMismatchError(f"{path} fails its checksum: it was damaged or belongs to another index")


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, str) for each in values)


_FIELDS = [field.name for field in fields(IndexManifest) if field.name not in _SINCE_VERSION_3]


def read_verified(directory: Path, *, vectors: bool = True) -> tuple[IndexManifest, IdTable]:
    """Check an index's files against its manifest, and read all but the vectors; needs neither torch nor FAISS.

    Args:
        directory: made by `build_index`; it may have been moved or copied since.
        vectors: compare every byte of the vectors with its checksum, not only their length.

    Raises:
        IndexMismatchError: a file is missing, damaged, of a foreign version, or belongs to another index.
    """
    restore_directory(directory)
    manifest = IndexManifest.read(directory)
    manifest.check_file(directory, IDS_FILE)
    manifest.check_file(directory, INDEX_FILE, checksum=vectors)
    for name in (STATES_FILE, LEFT_OUT_FILE):
        if name in manifest.files:
            manifest.check_file(directory, name, checksum=vectors)
    ids = IdTable.read(directory / IDS_FILE)
    if len(ids.keys) != manifest.count:
        raise IndexMismatchError(
            f"{directory / IDS_FILE} names {len(ids.keys)} images, the manifest {manifest.count}: "
            "files of different indices were mixed"
        )
    labels, class_names = number_classes(ids.labels, manifest.class_names)
    return replace(manifest, class_names=class_names), replace(ids, labels=labels)


def read_states(directory: Path, manifest: IndexManifest) -> FileStates:
    """Read what was read of each image of a verified index, unknown where the index does not say.

    Raises:
        IndexMismatchError: the file is not what the manifest says.
    """
    if STATES_FILE not in manifest.files:
        return FileStates.unknown(manifest.count)
    return FileStates.read(directory / STATES_FILE, manifest.count)


def read_left_out(directory: Path, manifest: IndexManifest) -> list[LeftOut]:
    """Read which images a verified index leaves out, as far as it says.

    Raises:
        IndexMismatchError: the file is not what the manifest says.
    """
    return parse_left_out(directory / LEFT_OUT_FILE) if LEFT_OUT_FILE in manifest.files else []


def write_index(
    directory: Path,
    described: IndexManifest,
    write_vectors: Callable[[Path], None],
    ids: IdTable,
    states: FileStates | None = None,
    left_out: Sequence[LeftOut] = (),
) -> IndexManifest:
    """Write the files into a directory that is renamed when complete, and return the manifest with checksums."""
    write_vectors(directory / INDEX_FILE)
    ids.write(directory / IDS_FILE)
    paths = [directory / name for name in (INDEX_FILE, IDS_FILE)]
    if states is not None:
        paths.append(directory / STATES_FILE)
        states.write(paths[-1])
    if left_out:
        paths.append(directory / LEFT_OUT_FILE)
        write_left_out(paths[-1], left_out)
    files = {path.name: {"sha256": sha256_file(path), "bytes": path.stat().st_size} for path in paths}
    spec = described.encoder_spec
    spec = None if spec is None else with_relative_places(spec, directory)  # which has its name's parent already
    manifest = replace(described, files=files, encoder_spec=spec)
    manifest.write(directory)
    return manifest


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
