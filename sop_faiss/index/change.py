"""Add to, remove from, merge indices on disk. Each is done completely or not at all; until then the old index stays."""

from __future__ import annotations

import functools
import operator
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import Int64

from sop_faiss.errors import ConfigError, IndexMismatchError
from sop_faiss.features.feature_space import FeatureSpace
from sop_faiss.features.file_states import FileStates
from sop_faiss.features.store import FeatureStore
from sop_faiss.files import atomic_directory, locked_directory, refuse_occupied, restore_directory
from sop_faiss.index.build import store_as_index
from sop_faiss.index.encoder_doubts import random_pairs_cosine
from sop_faiss.index.folder_changes import FolderChanges
from sop_faiss.index.search import closest_key, read_vectors
from sop_faiss.index.store import IdTable, IndexManifest, read_states, read_verified, write_index
from sop_faiss.model.encoders.remembered import without_relative_places
from sop_faiss.neighbors.disk.factories import VectorIndex, append

__all__ = ["add_to_index", "follow_folder", "merge_indices", "remove_from_index", "require_same_space"]


@dataclass
class _Index:
    """An index in memory, to be changed."""

    manifest: IndexManifest
    ids: IdTable
    vectors: VectorIndex | None
    states: FileStates

    @classmethod
    def read(cls, directory: Path) -> _Index:
        manifest, ids = read_verified(directory)
        vectors = read_vectors(directory, manifest, mapped=False)
        return cls(manifest, ids, vectors, read_states(directory, manifest))

    def write(self, directory: Path) -> IndexManifest:
        """Write the files; the manifest has the new count, checksums, and mean cosine of random pairs.

        An approximate index keeps the cosine it has: reading its rows needs a map, which would be written too.
        """
        assert self.vectors is not None
        count, search = len(self.ids.keys), self.manifest.search
        if self.manifest.exact:
            search = search | {"mean_cosine": random_pairs_cosine(count, self.vectors.features)}
        described = replace(self.manifest, count=count, search=search)
        states = self.states if any(self.states.digests) else None
        return write_index(directory, described, self.vectors.write, self.ids, states)


def add_to_index(directory: Path, store: FeatureStore, *, encoder_spec: dict[str, Any] | None = None) -> IndexManifest:
    """Add the images of a feature store to an index.

    Lists and codes stay as they were trained: after many additions of another kind build the index again.

    Args:
        directory: of the index.
        store: features of the same encoder, prepared and pooled in the same way.
        encoder_spec: how the encoder is opened from now on; None: as the index remembers, or else the store.

    Raises:
        IndexMismatchError: the index is damaged, or of another encoder, preprocessing or pooling.
        ConfigError: a key is in the index already, or another process is changing it.
        FeatureError: the store is unusable.
    """
    store.check()
    restore_directory(directory)
    with locked_directory(directory):
        index = _Index.read(directory)
        added = store_as_index(store, index.manifest.factory)
        states = store.states or FileStates.unknown(len(store))
        other = _Index(added, IdTable(store.keys, store.sources, store.members, store.labels), None, states)
        require_same_space(index.manifest.space, added.space, "the index", "the store")
        joined = _join_names([index, other], [str(directory), "the store"])
        assert index.vectors is not None
        index.vectors.add(store.features)
        search = _counted(index.manifest.search, "added", len(store))
        with atomic_directory(directory, overwrite=True) as temporary:
            spec = encoder_spec or index.manifest.encoder_spec or added.encoder_spec
            described = replace(joined.manifest, search=search, encoder_spec=spec)
            return _Index(described, joined.ids, index.vectors, joined.states).write(temporary)


def remove_from_index(directory: Path, keys: Sequence[str]) -> IndexManifest:
    """Remove images from an index; the rows of the others move up.

    Args:
        directory: of the index.
        keys: of the images.

    Raises:
        IndexMismatchError: the index is damaged.
        ConfigError: a key is not in the index, nothing would be left, this kind of index cannot lose rows, or another
            process is changing it.
    """
    restore_directory(directory)
    with locked_directory(directory):
        index = _Index.read(directory)
        assert index.vectors is not None
        wanted = set(keys)
        unknown = sorted(wanted - set(index.ids.keys))
        if unknown:
            hint = closest_key(unknown[0], index.ids.keys)
            if len(unknown) == 1:
                raise ConfigError(f"key {unknown[0]!r} is not in {directory}: nothing was removed{hint}")
            raise ConfigError(
                f"{len(unknown)} keys are not in {directory} (first {unknown[0]!r}): nothing was removed{hint}"
            )
        rows = np.array([key not in wanted for key in index.ids.keys])
        if not rows.any():
            raise ConfigError(f"all {len(rows)} images of {directory} would be removed: delete the directory instead")
        index.vectors.keep(rows)
        search = _counted(index.manifest.search, "removed", len(wanted))
        kept_rows = np.flatnonzero(rows)
        ids = index.ids.take(kept_rows)
        with atomic_directory(directory, overwrite=True) as temporary:
            kept = _Index(replace(index.manifest, search=search), ids, index.vectors, index.states.take(kept_rows))
            return kept.write(temporary)


def merge_indices(directories: Sequence[Path], out: Path) -> IndexManifest:
    """Join indices of one encoder into a new one, of the first one's kind.

    Rows keep their order, index after index. Codes are taken over as they are where both indices were trained alike;
    else they are computed again from what the index keeps of its vectors.

    Args:
        directories: of the indices, two or more.
        out: new or empty.

    Raises:
        IndexMismatchError: an index is damaged, or of another encoder, preprocessing or pooling than the first.
        ConfigError: a key occurs twice, or some indices have class names and others only numbers.
        SopError: `out` is not empty.
    """
    if len(directories) < 2:
        raise ConfigError(f"{len(directories)} index to merge: wanted two or more")
    refuse_occupied(out)
    indices = [_Index.read(directory) for directory in directories]
    first = indices[0]
    for directory, other in zip(directories[1:], indices[1:], strict=True):
        require_same_space(first.manifest.space, other.manifest.space, str(directories[0]), str(directory))
    joined = _join_names(indices, [str(directory) for directory in directories])
    assert first.vectors is not None
    for other in indices[1:]:
        assert other.vectors is not None
        append(first.vectors, other.vectors)
    search = _counted(first.manifest.search, "added", len(joined.ids.keys) - first.manifest.count)
    with atomic_directory(out) as temporary:
        specs = [index.manifest.encoder_spec for index in indices if index.manifest.encoder_spec is not None]
        spec = without_relative_places(specs[0]) if specs else None
        described = replace(joined.manifest, search=search, encoder_spec=spec)
        return _Index(described, joined.ids, first.vectors, joined.states).write(temporary)


def follow_folder(
    directory: Path,
    seen: IndexManifest,
    changes: FolderChanges,
    store: FeatureStore | None,
    *,
    dropped: dict[str, int],
    encoder_spec: dict[str, Any] | None = None,
) -> IndexManifest:
    """Make an index equal to a folder: one exchange removes what is gone and adds what is new.

    Images keep the order of their rows, new ones come last; keys and classes are those of a new index of the folder.

    Args:
        directory: of the index.
        seen: its manifest when the changes were found.
        changes: of the folder.
        store: features of the images that were added or changed, without those that cannot be used; None: of none.
        dropped: how many cannot be used, by reason.
        encoder_spec: how the encoder is opened from now on; None: as the index remembers.

    Raises:
        IndexMismatchError: the index is damaged, or of another encoder.
        ConfigError: nothing would be left, this kind of index cannot lose rows, or another process is changing it.
    """
    source, rows, positions = changes.source, changes.kept_rows, changes.kept_positions
    keys, members = [source.keys[at] for at in positions], [source.member_of(at) for at in positions]
    labels, states = None if source.labels is None else source.labels[positions], changes.kept_states
    if store is not None:
        require_same_space(seen.space, store.space(), "the index", "the folder")
        keys, members = keys + store.keys, members + store.members
        labels = None if labels is None or store.labels is None else np.concatenate([labels, store.labels])
        states += store.states or FileStates.unknown(len(store))
    if not keys:
        raise ConfigError(f"no image would be left in {directory}: delete the directory instead")
    restore_directory(directory)
    with locked_directory(directory):
        index = _Index.read(directory)
        assert index.vectors is not None
        if index.manifest != seen:
            raise ConfigError(f"{directory} was changed meanwhile: try again")
        removed, added = seen.count - len(rows), 0 if store is None else len(store)
        if store is not None:
            index.vectors.add(store.features)
        if removed:
            stays = np.ones(seen.count + added, bool)
            stays[: seen.count] = np.isin(np.arange(seen.count), rows)
            index.vectors.keep(stays)
        search = (
            _counted(_counted(seen.search, "added", added), "removed", removed) if added or removed else seen.search
        )
        described = replace(
            seen,
            root=str(source.root),
            folder=str(source.root),
            class_names=source.class_names,
            dropped=dropped,
            search=search,
            encoder_spec=encoder_spec or seen.encoder_spec,
        )
        ids = IdTable(keys, [""] * len(keys), members, labels)
        with atomic_directory(directory, overwrite=True) as temporary:
            return _Index(described, ids, index.vectors, states).write(temporary)


def require_same_space(ours: FeatureSpace, theirs: FeatureSpace, our_name: str, their_name: str) -> None:
    """Refuse features that cannot be compared.

    Raises:
        IndexMismatchError: encoder, preprocessing, pooling or dimension differ.
    """
    difference = ours.difference(theirs)
    if difference is not None:
        raise IndexMismatchError(
            f"{their_name} is of another {difference.what} than {our_name} ({difference.values}): "
            "use the same one for both"
        )


def _counted(search: dict[str, Any], what: str, number: int) -> dict[str, Any]:
    """Return the manifest's `search` with rows counted that were added or removed since recall was measured."""
    return search | {what: int(search.get(what, 0)) + number}


def _join_names(indices: list[_Index], names: list[str]) -> _Index:
    """Join ids and manifests of several indices; all else is from the first one's manifest."""
    keys = [key for index in indices for key in index.ids.keys]
    repeated = [key for key, times in Counter(keys).items() if times > 1]
    if repeated:
        raise ConfigError(
            f"{len(repeated)} keys are in more than one of {', '.join(names)} (first {repeated[0]!r}): remove them "
            "from all but one"
        )
    root = os.path.commonpath([index.manifest.root for index in indices])
    sources, members = [], []
    for index in indices:
        below = PurePosixPath(os.path.relpath(index.manifest.root, root))
        for source, member in zip(index.ids.sources, index.ids.members, strict=True):
            sources.append(str(below / source) if source else "")
            members.append(member if source else str(below / member))
    class_names, labels = _join_classes(indices, names)
    dropped: Counter[str] = Counter()
    for index in indices:
        dropped.update(index.manifest.dropped)
    first = indices[0].manifest
    folder = first.folder if first.folder == root else None  # else some are not below it
    states = functools.reduce(operator.add, [index.states for index in indices])
    manifest = replace(first, root=root, folder=folder, class_names=class_names, dropped=dict(dropped))
    return _Index(manifest, IdTable(keys, sources, members, labels), None, states)


def _join_classes(indices: list[_Index], names: list[str]) -> tuple[list[str] | None, Int64[np.ndarray, " n"] | None]:
    """Join the names of the classes, the first index's first, and number each image's label among them."""
    labeled = [index for index in indices if index.ids.labels is not None]
    if not labeled:
        return None, None
    named = [index.manifest.class_names is not None for index in labeled]
    if any(named) != all(named):
        raise ConfigError(f"of {', '.join(names)} some have names of their classes and others numbers: name all")
    classes: dict[str, int] = {}
    parts = []
    for index in indices:
        if index.ids.labels is None:
            parts.append(np.full(len(index.ids.keys), -1, np.int64))
        elif index.manifest.class_names is None:
            parts.append(index.ids.labels)
        else:
            numbers = [classes.setdefault(name, len(classes)) for name in index.manifest.class_names]
            parts.append(np.array([*numbers, -1], np.int64)[index.ids.labels])
    return (list(classes) if any(named) else None), np.concatenate(parts)
