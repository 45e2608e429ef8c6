"""The verb of `sop-index sync`: an index made equal to a folder of images."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sop_faiss import distributed
from sop_faiss.data.images.heif import HEIF_REMEDY, HEIF_SUFFIXES, READS_HEIF
from sop_faiss.data.images.listing import FileSource, open_folder
from sop_faiss.data.images.source import find_shards
from sop_faiss.data.images.subset import Subset
from sop_faiss.errors import ConfigError, DataError, NothingUsableError
from sop_faiss.features.cache import forget_unfinished, kept_until_whole
from sop_faiss.features.extract import ExtractionOptions, extract_features
from sop_faiss.features.store import FeatureStore
from sop_faiss.index.change import follow_folder, followed
from sop_faiss.index.contents import IndexContents
from sop_faiss.index.folder_changes import FolderChanges, find_changes
from sop_faiss.index.left_out import REMOVED, LeftOut, count_unusable, dropped_images
from sop_faiss.index.own_encoder import encoder_of_index
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.store import read_left_out, read_states
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.remembered import without_relative_places
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.paths import path_state
from sop_faiss.progress import ProgressCallback

_MOST_REMOVED = 0.5
"""Share of an index's images above which their absence is taken for a missing disk or the wrong folder."""


_NAMED = 3
"""Images named in an error."""


@dataclass(frozen=True)
class Synced:
    """What `sync` did, or with `dry_run` would do: files relative to the folder, sorted."""

    folder: Path
    added: list[str]
    changed: list[str]
    removed: list[str]
    unchanged: int
    elsewhere: int
    """Images that were added from elsewhere, which stay as they are."""
    left_out: list[LeftOut]
    """Images of the folder that cannot be used, or that the user removed; of a dry run those that are known."""

    @property
    def dropped(self) -> dict[str, int]:
        """Return how many images cannot be used, by reason."""
        return count_unusable(self.left_out)


def sync(
    index: Path,
    folder: Path | None = None,
    *,
    encoder: EncoderSpec | None = None,
    dry_run: bool = False,
    force: bool = False,
    again: bool = False,
    extraction: ExtractionOptions | None = None,
    progress: ProgressCallback | None = None,
) -> Synced:
    """Make an index equal to a folder: add new images, replace changed ones, and remove those that are gone.

    Files of equal size and time are not read; those that are known to be unusable, or that the user removed from the
    index, are left out while they are as they were. Images that were added from elsewhere stay. After a kill the index
    is as it was before, or complete; features that were computed are kept for the next call.

    Args:
        folder: the images; None: the folder that the index was built of. It is recorded.
        encoder: another way to open the index's encoder, which is recorded; None: as the index remembers.
        dry_run: find what is to be done, and change nothing.
        force: remove also more than half of the index's images.
        again: try images again that are left out.
        extraction: how features are extracted; `max_bad_fraction` is of all images of the folder. None: all that cannot
            be used are left out.
        progress: called with files read for comparison, then with images encoded, and their total.

    Raises:
        ConfigError: the index is not of a folder, too many images are gone, or nothing would be left.
        DataError: the folder is missing, has no image, or too many that cannot be used.
        SopError: as `encoder_of_index` and `follow_folder`.
    """
    if distributed.announced_world_size() > 1:
        raise ConfigError("sync runs in one process, not under torchrun: start it without")
    opened = FeatureIndex.open(index)
    manifest = opened.manifest
    source = _open_folder(opened, folder)
    contents = IndexContents(manifest, opened.ids, None, read_states(index, manifest), read_left_out(index, manifest))
    changes = find_changes(contents, source, again=again, progress=progress)
    _require_possible(opened, changes, force=force or dry_run)
    if dry_run:
        return _synced(opened, changes, {*changes.added, *changes.changed}, [])
    needed = bool(changes.to_embed) or encoder is not None
    loaded = encoder_of_index(opened, encoder) if needed else None
    with kept_until_whole(loaded, index) if loaded is not None else contextlib.nullcontext():
        embedded = _embed(loaded, changes, extraction or ExtractionOptions(max_bad_fraction=1.0), progress)
        spec = manifest.encoder_spec if loaded is None else loaded.spec
        if not _is_equal(contents, changes, embedded, spec):
            follow_folder(index, manifest, changes, embedded.store, dropped=embedded.dropped, encoder_spec=spec)
    if loaded is None:
        forget_unfinished(index)  # of a call that was killed after it had changed the index
    return _synced(opened, changes, embedded.positions, embedded.dropped)


class _Embedded(NamedTuple):
    store: FeatureStore | None
    positions: set[int]
    """Of its images in the folder."""
    dropped: list[LeftOut]
    """Images that turned out to be unusable."""


def _embed(
    encoder: Encoder | None, changes: FolderChanges, extraction: ExtractionOptions, progress: ProgressCallback | None
) -> _Embedded:
    """Extract the features of the images that were added or changed, as far as they can be used."""
    store, dropped = None, []
    source = Subset(changes.source, np.array(changes.to_embed, np.int64))
    if encoder is not None and changes.to_embed:
        try:
            store = extract_features(encoder, source, replace(extraction, max_bad_fraction=1.0), progress=progress)
            dropped = dropped_images(store.manifest["dropped"])
        except NothingUsableError as error:
            dropped = dropped_images(error.dropped)
    bad = [each for each in [*dropped, *changes.left_out] if each.reason != REMOVED]
    if len(bad) > extraction.max_bad_fraction * len(changes.source):
        first = "; ".join(f"{each.member}: {each.error}" for each in bad[:_NAMED])
        raise DataError(
            f"{len(bad)} of the {len(changes.source)} images of {source.description} are unusable (first {first}), "
            f"more than `max_bad_fraction={extraction.max_bad_fraction}`: repair or remove them, or raise it"
        )
    numbers = dict(zip(source.keys, changes.to_embed, strict=True))
    return _Embedded(store, {numbers[key] for key in store.keys} if store is not None else set(), dropped)


def _is_equal(index: IndexContents, changes: FolderChanges, embedded: _Embedded, spec: dict[str, Any] | None) -> bool:
    """Return whether the index, and all that it says, is as it would be written."""
    if embedded.store is not None or changes.removed or changes.changed:
        return False
    wanted = followed(index, changes, None, dropped=embedded.dropped, encoder_spec=spec)
    ours, theirs = (
        (
            replace(each.manifest, encoder_spec=without_relative_places(each.manifest.encoder_spec or {})),
            replace(each.ids, labels=None),
            None if each.ids.labels is None else each.ids.labels.tolist(),
            each.states,
            sorted(each.left_out, key=lambda image: (image.source, image.member)),
        )
        for each in (index, wanted)
    )
    return ours == theirs


def _synced(index: FeatureIndex, changes: FolderChanges, embedded: set[int], dropped: Sequence[LeftOut]) -> Synced:
    member_of = changes.source.member_of
    gone = [index.ids.members[row] for row in changes.removed]
    return Synced(
        folder=changes.source.root,
        added=sorted(member_of(at) for at in changes.added if at in embedded),
        changed=sorted(member_of(at) for at in changes.changed if at in embedded),
        removed=sorted(gone + [member_of(at) for at in changes.changed if at not in embedded]),
        unchanged=len(changes.kept_positions),
        elsewhere=len(changes.elsewhere),
        left_out=sorted([*changes.left_out, *dropped], key=lambda each: each.member),
    )


def _require_possible(index: FeatureIndex, changes: FolderChanges, *, force: bool) -> None:
    """Refuse what would lose most of the index or photos that cannot be read here, or what its kind cannot do."""
    gone, count, folder = len(changes.removed), len(index) - len(changes.elsewhere), changes.source.description
    heic = [name for row in changes.removed if (name := index.ids.members[row]).lower().endswith(HEIF_SUFFIXES)]
    if heic and not READS_HEIF and any((changes.source.root / name).exists() for name in heic):
        raise ConfigError(
            f"{index.directory} has HEIC photos, as {heic[0]}, which cannot be read here: {HEIF_REMEDY}; nothing was "
            "changed"
        )
    if gone > _MOST_REMOVED * count and not force:
        raise ConfigError(
            f"{gone} of the {count} images of {index.directory} are not in {folder}: is a disk missing, or this "
            "another folder? Nothing was changed; give `force` to remove them"
        )
    if (changes.removed or changes.changed) and not index.loses_rows:
        raise ConfigError(
            f"{gone} images are gone and {len(changes.changed)} have changed, and an index {index.manifest.factory} "
            "cannot lose rows: build it again"
        )


def _open_folder(index: FeatureIndex, folder: Path | None) -> FileSource:
    """Open the folder to follow, which must have images: an empty one may be that of a missing disk."""
    manifest = index.manifest
    shard = next((source for source in index.ids.sources if source), None)
    if shard is not None and manifest.folder is None:
        raise ConfigError(
            f"{index.directory} holds images of shards ({shard}), which sync does not follow: use `sop-index add` and "
            "`remove`, or build it again"
        )
    if folder is None and manifest.folder is None:
        raise ConfigError(
            f"{index.directory} does not say which folder it follows: it was built of a list or of single files, "
            "merged, or added to by an earlier version. Type the folder behind the index, as `folder`: what is not in "
            "it is removed from the index. Or change it by `sop-index add` and `sop-index remove`"
        )
    path = Path(manifest.folder or "") if folder is None else folder
    unchanged = f"{index.directory} stays as it is; name where the images are as `folder`, or delete the index"
    if not path.is_dir():
        raise DataError(f"folder {path} {path_state(path)}: is its disk missing? {unchanged}")
    if find_shards(path):
        raise DataError(f"folder {path} holds shards, which sync does not follow: use `sop-index add` and `remove`")
    try:
        return open_folder(str(path), path)
    except DataError as error:
        raise DataError(f"{error}; {unchanged}") from None
