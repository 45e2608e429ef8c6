"""The images that an index's rows were made from, wherever they are now."""

from __future__ import annotations

import functools
import hashlib
import threading
from pathlib import Path, PurePosixPath

from sop_faiss.data.images.listing import FileSource
from sop_faiss.data.images.source import Place, place_below
from sop_faiss.data.shards.shard_source import ShardSource, open_shards
from sop_faiss.errors import DataError
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.store import IdTable


class IndexImages:
    """Encoded images by row; thread-safe. Nothing is opened before it is needed.

    Args:
        ids: the index's rows.
        root: the folder that sources and members are relative to: the manifest's, or where they were moved to.
    """

    def __init__(self, ids: IdTable, root: Path) -> None:
        self._ids = ids
        self.root = root
        self._files = FileSource(str(root), [], None, None, root, ids.members)
        self._opening = threading.Lock()
        self._open_shard = functools.cache(self._walk_shard)

    def read(self, row: int) -> bytes:
        """Read the encoded bytes of one row's image.

        Raises:
            DataError: it is missing, empty, unreadable, or outside `root`; the first word of the message is the reason.
        """
        source, member = self._ids.sources[row], self._ids.members[row]
        for name in (source, member):
            if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
                raise DataError(f"outside: {name} is not below the images' folder")
        if not source:
            return self._files.read(row)
        with self._opening:
            shard, positions = self._open_shard(source)
        if member not in positions:
            raise DataError(f"missing: {member} is not in {source}")
        return shard.read(positions[member])

    def read_unchanged(self, row: int, digest: bytes) -> tuple[bytes, bytes]:
        """Read the encoded bytes of one row's image, and return them and their sha256.

        Args:
            digest: sha256 of the image that the index has; empty if not known.

        Raises:
            DataError: as `read`, or the image has changed since (first word `changed`).
        """
        encoded = self.read(row)
        found = hashlib.sha256(encoded).digest()
        if digest not in (b"", found):
            place = ": ".join(filter(None, self.place(row)))
            raise DataError(
                f"changed: {place} is no longer the image that was indexed; `sop-index sync` follows its folder, or "
                "remove the image from the index and add it again"
            )
        return encoded, found

    def place(self, row: int) -> Place:
        """Return where one row's image is; it may be missing."""
        return place_below(self.root, self._ids.sources[row], self._ids.members[row])

    def _walk_shard(self, source: str) -> tuple[ShardSource, dict[str, int]]:
        """Open one shard, and find the position of each of its members; done once."""
        shard = open_shards(source, [self.root / source])
        return shard, {shard.member_of(position): position for position in range(len(shard))}


def data_name(index: FeatureIndex) -> str:
    """Return the name of an index's data set: that of the folder of its images, without the folders above."""
    return Path(index.manifest.root).name or index.directory.absolute().name


def index_images(index: FeatureIndex, images_root: Path | None = None) -> IndexImages:
    """Open the images of an index, below `images_root`, or where they were when it was built.

    Raises:
        DataError: `images_root` is not a folder.
    """
    if images_root is not None and not images_root.is_dir():
        raise DataError(f"`images_root={images_root}` is not a folder: wanted the one that holds the index's images")
    return IndexImages(index.ids, Path(index.manifest.root) if images_root is None else images_root)
