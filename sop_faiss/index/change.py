"""Add to, remove from, merge indices on disk. Each is done completely or not at all; until then the old index stays."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sop_faiss.errors import ConfigError, DataError, IndexMismatchError
from sop_faiss.features.feature_space import FeatureSpace
from sop_faiss.features.file_states import FileState, FileStates
from sop_faiss.features.store import FeatureStore
from sop_faiss.files import atomic_directory, locked_directory, restore_directory
from sop_faiss.index.beside import carry_beside
from sop_faiss.index.build import store_as_index
from sop_faiss.index.closest_key import closest_key
from sop_faiss.index.contents import IndexContents, join_contents
from sop_faiss.index.folder_changes import FolderChanges
from sop_faiss.index.images import IndexImages
from sop_faiss.index.left_out import REMOVED, LeftOut, count_unusable, dropped_images
from sop_faiss.index.store import IdTable, IndexManifest
from sop_faiss.model.encoders.remembered import without_relative_places
from sop_faiss.neighbors.disk.factories import append
from sop_faiss.output_checks import refuse_occupied


def add_to_index(directory: Path, store: FeatureStore, *, encoder_spec: dict[str, Any] | None = None) -> IndexManifest:
    """Add the images of a feature store to an index.

    Lists and codes stay as they were trained: after many additions of another kind build the index again.

    Args:
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
        index = IndexContents.read(directory)
        added = store_as_index(store, index.manifest.factory)
        states = store.states or FileStates.unknown(len(store))
        ids = IdTable(store.keys, store.sources, store.members, store.labels)
        other = IndexContents(added, ids, None, states, dropped_images(store.manifest.get("dropped")))
        require_same_space(index.manifest.space, added.space, "the index", "the store")
        joined = join_contents([index, other], [str(directory), "the store"])
        assert index.vectors is not None
        index.vectors.add(store.features)
        search = _counted(index.manifest.search, "added", len(store))
        with atomic_directory(directory, overwrite=True) as temporary:
            carry_beside(directory, temporary)
            spec = encoder_spec or index.manifest.encoder_spec or added.encoder_spec
            # a sync goes on following that folder, and leaves alone what is added from elsewhere
            described = replace(joined.manifest, search=search, encoder_spec=spec, folder=index.manifest.folder)
            changed = IndexContents(described, joined.ids, index.vectors, joined.states, joined.left_out)
            return changed.write(temporary)


def remove_from_index(directory: Path, keys: Sequence[str]) -> IndexManifest:
    """Remove images from an index; the rows of the others move up.

    The index remembers which files they were, so that a sync does not add them again.

    Args:
        keys: of the images.

    Raises:
        IndexMismatchError: the index is damaged.
        ConfigError: a key is not in the index, nothing would be left, this kind of index cannot lose rows, or another
            process is changing it.
    """
    restore_directory(directory)
    with locked_directory(directory):
        index = IndexContents.read(directory)
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
        ids, states = index.ids.take(kept_rows), index.states.take(kept_rows)
        left_out = index.left_out + _removed(index, np.flatnonzero(~rows).tolist())
        with atomic_directory(directory, overwrite=True) as temporary:
            carry_beside(directory, temporary)
            described = replace(index.manifest, search=search)
            return IndexContents(described, ids, index.vectors, states, left_out).write(temporary)


def _removed(index: IndexContents, rows: Sequence[int]) -> list[LeftOut]:
    """Remember the files of rows that the user removes, by their bytes; of one that is gone there is no need to."""
    images = IndexImages(index.ids, Path(index.manifest.root))
    made = []
    for row in rows:
        source, member, state = index.ids.sources[row], index.ids.members[row], index.states[row]
        if not state.digest:
            try:
                state = FileState(-1, -1, hashlib.sha256(images.read(row)).digest())
            except DataError:
                continue
        made.append(LeftOut(source, member, REMOVED, "removed by its key", *state[:2], state.digest.hex()))
    return made


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
    indices = [IndexContents.read(directory) for directory in directories]
    first = indices[0]
    for directory, other in zip(directories[1:], indices[1:], strict=True):
        require_same_space(first.manifest.space, other.manifest.space, str(directories[0]), str(directory))
    joined = join_contents(indices, [str(directory) for directory in directories])
    assert first.vectors is not None
    for other in indices[1:]:
        assert other.vectors is not None
        append(first.vectors, other.vectors)
    search = _counted(first.manifest.search, "added", len(joined.ids.keys) - first.manifest.count)
    with atomic_directory(out) as temporary:
        specs = [index.manifest.encoder_spec for index in indices if index.manifest.encoder_spec is not None]
        spec = without_relative_places(specs[0]) if specs else None
        described = replace(joined.manifest, search=search, encoder_spec=spec)
        merged = IndexContents(described, joined.ids, first.vectors, joined.states, joined.left_out)
        return merged.write(temporary)


def follow_folder(
    directory: Path,
    seen: IndexManifest,
    changes: FolderChanges,
    store: FeatureStore | None,
    *,
    dropped: Sequence[LeftOut],
    encoder_spec: dict[str, Any] | None = None,
) -> IndexManifest:
    """Make an index equal to a folder: one exchange removes what is gone and adds what is new.

    Images keep the order of their rows, new ones come last; keys and classes are those of a new index of the folder.
    Images that are not of the folder stay as they are.

    Args:
        seen: its manifest when the changes were found.
        changes: of the folder.
        store: features of the images that were added or changed, without those that cannot be used; None: of none.
        dropped: those that cannot be used.
        encoder_spec: how the encoder is opened from now on; None: as the index remembers.

    Raises:
        IndexMismatchError: the index is damaged, or of another encoder.
        ConfigError: nothing would be left, this kind of index cannot lose rows, or another process is changing it.
    """
    if store is not None:
        require_same_space(seen.space, store.space(), "the index", "the folder")
    removed = len(changes.removed) + len(changes.changed)
    added = 0 if store is None else len(store)
    if not seen.count - removed + added:
        raise ConfigError(f"no image would be left in {directory}: delete the directory instead")
    restore_directory(directory)
    with locked_directory(directory):
        index = IndexContents.read(directory)
        assert index.vectors is not None
        if index.manifest != seen:
            raise ConfigError(f"{directory} was changed meanwhile: try again")
        wanted = followed(index, changes, store, dropped=dropped, encoder_spec=encoder_spec)
        if store is not None:
            index.vectors.add(store.features)
        if removed:
            stays = np.ones(seen.count + added, bool)
            stays[: seen.count] = np.isin(np.arange(seen.count), changes.rows_that_stay)
            index.vectors.keep(stays)
        if added or removed:
            search = _counted(_counted(seen.search, "added", added), "removed", removed)
            wanted.manifest = replace(wanted.manifest, search=search)
        wanted.vectors = index.vectors
        with atomic_directory(directory, overwrite=True) as temporary:
            carry_beside(directory, temporary)
            return wanted.write(temporary)


def followed(
    index: IndexContents,
    changes: FolderChanges,
    store: FeatureStore | None,
    *,
    dropped: Sequence[LeftOut],
    encoder_spec: dict[str, Any] | None = None,
) -> IndexContents:
    """Return what an index is after it has followed a folder, without its vectors; arguments as of `follow_folder`."""
    source, positions, elsewhere = changes.source, changes.kept_positions, changes.elsewhere
    taken = {index.ids.keys[row] for row in elsewhere}  # by images from elsewhere: then the key is the file's name
    names = {key: source.member_of(at) if key in taken else key for at, key in enumerate(source.keys)}
    keys, members = [names[source.keys[at]] for at in positions], [source.member_of(at) for at in positions]
    labels, states = None if source.labels is None else source.labels[positions], changes.kept_states
    if store is not None:
        keys, members = keys + [names[key] for key in store.keys], members + store.members
        labels = None if labels is None or store.labels is None else np.concatenate([labels, store.labels])
        states += store.states or FileStates.unknown(len(store))
    left_out = [*changes.left_out, *dropped]
    described = replace(
        index.manifest,
        root=str(source.root),
        folder=str(source.root),
        class_names=source.class_names,
        dropped=count_unusable(left_out),
        encoder_spec=encoder_spec or index.manifest.encoder_spec,
    )
    folder = IndexContents(described, IdTable(keys, [""] * len(keys), members, labels), None, states, left_out)
    if not len(elsewhere) and not changes.left_out_elsewhere:
        return folder
    others = IndexContents(
        replace(index.manifest, dropped=count_unusable(changes.left_out_elsewhere)),
        index.ids.take(elsewhere),
        None,
        index.states.take(elsewhere),
        changes.left_out_elsewhere,
    )
    joined = join_contents([folder, others], [source.description, "the images from elsewhere"])
    rows = np.concatenate([changes.kept_rows, np.full(len(keys) - len(positions), index.manifest.count), elsewhere])
    order = np.argsort(rows, kind="stable")
    manifest = replace(joined.manifest, folder=described.folder)
    return IndexContents(manifest, joined.ids.take(order), None, joined.states.take(order), joined.left_out)


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
