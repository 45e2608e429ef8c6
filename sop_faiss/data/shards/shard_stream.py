"""Images of shards read from front to back: no index, no random access, nothing kept.

The order is that of webdataset's shuffle buffer, but the tar is read here: webdataset gets images, never an address
(it would run a command to open one) and never a member to decode (it would unpickle some).
"""

from __future__ import annotations

import hashlib
import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from sop_faiss.data.images.keys import SHARD_SUFFIXES, is_hidden, split_name
from sop_faiss.data.shards.address import hide_secrets, name_of_address
from sop_faiss.data.shards.remote import RemoteStream
from sop_faiss.data.shards.shard_index import check_image, link_error
from sop_faiss.data.shards.tar import walk_tar
from sop_faiss.data.views.crops import view_generator
from sop_faiss.errors import DataError, UnreachableError

_LARGEST_IMAGE_BYTES = 256 << 20
_SHARD_ORDER = 2**63 + 3  # next to the keys of other draws in stream.py
_INITIAL = 100  # images in the shuffle buffer before the first leaves it


@dataclass(frozen=True)
class StreamedImage:
    """An encoded image."""

    key: str  # its shard's name and its own
    shard: str  # name of the file
    member: str
    offset: int  # in the shard, bytes
    encoded: bytes


@dataclass(frozen=True)
class Damage:
    """A part that could not be read: one image, or the rest of a shard."""

    key: str  # of the image, or the shard's name
    shard: str
    member: str  # "" for the rest of a shard
    offset: int  # in the shard, bytes; 0 where it is not known
    reason: str
    message: str


def stable_image_id(key: str) -> int:
    """Return the id of an image that has no position: 63 bits of its key's hash, the same in every run."""
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class ShardStream:
    """Shards that are read in sequence, repeatedly, by several consumers.

    Args:
        description: the source as the user named it, without secrets.
        addresses: of the shards, or their paths.
    """

    description: str
    addresses: list[str]

    def digest(self) -> str:
        """Digest the addresses of the shards, as 64 hex digits."""
        return hashlib.sha256("\n".join(map(hide_secrets, self.addresses)).encode()).hexdigest()

    def images(
        self, consumer: int, consumers: int, buffer: int, seed: int, start: int
    ) -> Iterator[StreamedImage | Damage]:
        """Yield one consumer's part, without end. A pass over its shards yields each of its images once.

        Args:
            consumer: 0 and up, below `consumers`. Shards are distributed, or images if there are too few shards.
            consumers: number of workers of all ranks.
            buffer: number of images in the shuffle buffer.
            seed: of the orders.
            start: the same for all consumers; another start gives other orders.

        Raises:
            DataError: as many shards in a row as there are hold no image.
            UnreachableError: a shard cannot be read.
        """
        from webdataset import DataPipeline, shuffle  # here, because it is slow to import

        empty = 0
        for number in itertools.count():
            counts: list[int] = []
            draws = random.Random(f"{seed} {start} {number} {consumer}")
            source = partial(self._one_pass, consumer, consumers, seed, start, number, counts)
            yield from DataPipeline(source, shuffle(buffer, initial=min(_INITIAL, buffer), rng=draws))
            trailing = len(list(itertools.takewhile(lambda count: count == 0, reversed(counts))))
            empty = trailing if trailing < len(counts) else empty + trailing
            if empty >= len(self.addresses):
                raise DataError(f"{empty} shards of {self.description} in a row have no image: name others")

    def _one_pass(
        self, consumer: int, consumers: int, seed: int, start: int, number: int, counts: list[int]
    ) -> Iterator[StreamedImage | Damage]:
        """Yield pass `number`; the number of images of each shard is added to `counts`."""
        order = view_generator(seed, number, start, _SHARD_ORDER).permutation(len(self.addresses))
        whole_shards = len(self.addresses) >= consumers
        turn = number  # so that even a few images eventually reach all consumers
        for shard in order[consumer::consumers] if whole_shards else order:
            counts.append(0)
            for item in _read_shard(self.addresses[shard]):
                counts[-1] += isinstance(item, StreamedImage)
                if whole_shards or turn % consumers == consumer:
                    yield item
                turn += 1


def _read_shard(address: str) -> Iterator[StreamedImage | Damage]:
    """Yield the images of one shard, in file order, or what cannot be read. A damaged header ends the shard."""
    shard = hide_secrets(address)
    file = name_of_address(address)
    name = file.removesuffix(".tar")
    stream = RemoteStream(address)
    forward = _ForwardReader(stream)
    seen: set[str] = set()
    try:
        for member in walk_tar(forward.read_at, sys.maxsize, shard):
            stem, suffix = split_name(member.name)
            if suffix.lower() not in SHARD_SUFFIXES or is_hidden(member.name):
                continue
            key = f"{name}/{stem.removeprefix('./')}"
            place = (key, file, member.name, member.offset)
            try:
                check_image(member, stem, seen, shard)
            except DataError as error:
                yield Damage(*place, "bad-member", str(error))
                continue
            if member.is_link:
                yield Damage(*place, "link", str(link_error(f"{member.name} in {file}")))
                continue
            if member.size > _LARGEST_IMAGE_BYTES:
                yield Damage(
                    *place, "too-large", f"too-large: {member.size} bytes, wanted {_LARGEST_IMAGE_BYTES} at most"
                )
                continue
            encoded = forward.read_at(member.size, member.offset)
            if len(encoded) < member.size:
                raise DataError(f"shard {shard} is cut off in {member.name}; copy or make it again")
            yield StreamedImage(*place, encoded)
    except UnreachableError:
        raise
    except DataError as error:
        yield Damage(name, file, "", 0, "bad-shard", str(error))
    finally:
        stream.close()


class _ForwardReader:
    """A reader by position of a stream that only goes forward; the last block read may be read again."""

    def __init__(self, stream: RemoteStream) -> None:
        self._stream = stream
        self._kept = bytearray()
        self._start = 0  # of what is kept, in the file

    def read_at(self, size: int, offset: int) -> bytes:
        """Read as `tar.ReadAt`, for offsets that do not decrease."""
        self._forget(offset)
        while len(self._kept) < size:
            chunk = self._stream.read(size - len(self._kept))
            if not chunk:
                break
            self._kept += chunk
        return bytes(self._kept[:size])

    def _forget(self, offset: int) -> None:
        """Drop everything before `offset`, which becomes the start."""
        if offset < self._start:
            raise ValueError(f"offset {offset} is before {self._start}, which was dropped")
        behind = offset - self._start - len(self._kept)
        del self._kept[: offset - self._start]
        while behind > 0:
            skipped = len(self._stream.read(min(behind, 1 << 20)))
            if not skipped:
                break
            behind -= skipped
        self._start = offset
