"""Pictures to shards: every picture verified by decoding it, the bad ones dropped, counted and listed."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from sop_faiss.data.decode import MAX_PIXELS, decode_pillow, drop_reason, open_picture
from sop_faiss.data.parallel import default_workers, map_ordered
from sop_faiss.data.shard_writer import SHARD_BYTES, Sample, ShardEntry, ShardWriter, write_manifest
from sop_faiss.data.sidecar import load_index
from sop_faiss.data.source import ImageSource, open_source
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.files import atomic_directory
from sop_faiss.progress import ProgressCallback

__all__ = ["SAMPLES_PER_SHARD", "Dropped", "PackSummary", "pack"]

SAMPLES_PER_SHARD = 10_000

_KEPT = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}  # stored byte for byte; MPO: a phone's JPEG
_LOSSY = ("JPEG", "MPO", "WEBP", "AVIF")  # re-encoded as JPEG, all others as PNG
_JPEG_QUALITY = 95


@dataclass(frozen=True)
class Dropped:
    """A picture that was left out, and why: the first word of `reason` is what to count by."""

    picture: str  # file, or member and shard
    reason: str


@dataclass(frozen=True)
class PackSummary:
    """What `pack` wrote."""

    out: Path
    shards: list[ShardEntry]
    samples: int
    labelled: int
    bytes: int
    resized: int
    classes: list[str] | None
    dropped: list[Dropped]

    @property
    def dropped_by_reason(self) -> dict[str, int]:
        """How many pictures were dropped for each reason, the most frequent first."""
        return _count_reasons(self.dropped)


@dataclass(frozen=True)
class _Encoded:
    """One picture ready for a shard."""

    suffix: str
    encoded: bytes
    is_resized: bool


def pack(
    src: str | Path,
    out: Path,
    *,
    samples_per_shard: int = SAMPLES_PER_SHARD,
    resize: int | None = None,
    name: str = "photos",
    workers: int | None = None,
    max_bad_fraction: float = 1.0,
    max_pixels: int = MAX_PIXELS,
    shard_bytes: int = SHARD_BYTES,
    progress: ProgressCallback | None = None,
) -> PackSummary:
    """Write the pictures of a folder, list or CSV as webdataset shards with their sidecars and a `manifest.json`.

    A JPEG, PNG or WebP keeps its bytes; other formats, and pictures that are made smaller, are encoded anew (JPEG of
    quality 95 where the original was lossy, else PNG). Keys are those of the source, with dots made `_`. The same
    pictures give the same shards and manifest, whatever the number of workers. All or nothing is written.

    Args:
        src: anything `open_source` takes.
        out: the folder to make; must be absent or empty.
        samples_per_shard: pictures per shard at most.
        resize: shorter side in pixels to shrink larger pictures to, the aspect kept; None leaves all as they are.
        name: first part of the names of the shards.
        workers: threads; None for one per processor, 8 at most.
        max_bad_fraction: fail when a larger share of the pictures is bad; 1 fails only when all are.
        max_pixels: pictures with more are bad.
        shard_bytes: a shard also ends when its pictures reach this size.
        progress: called with the pictures done and their total.

    Raises:
        DataError: the source is unusable, or too many pictures are bad.
        ConfigError: a number is out of range.
        SopError: `out` exists and is not empty.
    """
    if resize is not None and resize < 1:
        raise ConfigError(f"resize is {resize} px, wanted 1 or more")
    if not 0 <= max_bad_fraction <= 1:
        raise ConfigError(f"max_bad_fraction is {max_bad_fraction}, wanted 0 to 1")
    if workers is not None and workers < 1:
        raise ConfigError(f"workers is {workers}, wanted 1 or more")
    with atomic_directory(out) as folder:
        source = open_source(src)
        with ShardWriter(folder, name, samples_per_shard, shard_bytes) as writer:
            dropped, labelled, resized = _write_samples(
                source, writer, resize, max_pixels, workers or default_workers(), progress
            )
        _check_dropped(source, dropped, max_bad_fraction)
        for entry in writer.entries:
            load_index(folder / entry.name)  # writes the sidecar
        manifest = write_manifest(
            folder,
            writer.entries,
            source.class_names,
            labelled=labelled,
            source=source.description,
            resize=resize,
            dropped={
                "count": len(dropped),
                "by_reason": _count_reasons(dropped),
                "pictures": [{"picture": item.picture, "reason": item.reason} for item in dropped],
            },
        )
    return PackSummary(
        out=out,
        shards=writer.entries,
        samples=manifest["samples"],
        labelled=labelled,
        bytes=manifest["bytes"],
        resized=resized,
        classes=source.class_names,
        dropped=dropped,
    )


def _write_samples(
    source: ImageSource,
    writer: ShardWriter,
    resize: int | None,
    max_pixels: int,
    workers: int,
    progress: ProgressCallback | None,
) -> tuple[list[Dropped], int, int]:
    """Write all good pictures in order; the bad ones, and how many were labelled and resized."""
    keys = _webdataset_keys(source.keys)
    dropped: list[Dropped] = []
    labelled = resized = 0

    def prepare(position: int) -> _Encoded | DataError:
        try:
            return _prepare(source.read(position), resize, max_pixels)
        except DataError as error:
            return error

    for position, result in enumerate(map_ordered(prepare, range(len(source)), workers)):
        if isinstance(result, DataError):
            shard = source.source_of(position)
            picture = source.member_of(position) + (f" in {shard}" if shard else "")
            dropped.append(Dropped(picture, str(result)))
        else:
            label = -1 if source.labels is None else int(source.labels[position])
            writer.write(Sample(keys[position], result.suffix, result.encoded, label))
            labelled += label >= 0
            resized += result.is_resized
        if progress is not None:
            progress(position + 1, len(source))
    return dropped, labelled, resized


def _prepare(encoded: bytes, resize: int | None, max_pixels: int) -> _Encoded:
    """Verify one picture by decoding it whole, and encode it anew where that is asked or needed.

    Raises:
        DataError: the picture is bad; the first word is the reason.
    """
    kind = open_picture(encoded, max_pixels).format or ""
    picture = decode_pillow(encoded, max_pixels)
    shorter = min(picture.size)
    shrink = resize is not None and shorter > resize
    if not shrink and kind in _KEPT:
        return _Encoded(_KEPT[kind], encoded, False)
    if resize is not None and shrink:
        width, height = (max(1, round(side * resize / shorter)) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    stream = io.BytesIO()
    if kind in _LOSSY:
        picture.save(stream, "JPEG", quality=_JPEG_QUALITY, subsampling=0)
        return _Encoded("jpg", stream.getvalue(), shrink)
    picture.save(stream, "PNG")
    return _Encoded("png", stream.getvalue(), shrink)


def _webdataset_keys(keys: Sequence[str]) -> list[str]:
    """Keys without a dot in the basename, where webdataset would cut them and so merge samples; still unique."""
    taken = set(keys)
    made = []
    for key in keys:
        folder, slash, base = key.rpartition("/")
        if "." not in base:
            made.append(key)
            continue
        wanted = candidate = f"{folder}{slash}{base.replace('.', '_')}"
        number = 2
        while candidate in taken:
            candidate, number = f"{wanted}_{number}", number + 1
        taken.add(candidate)
        made.append(candidate)
    return made


def _check_dropped(source: ImageSource, dropped: Sequence[Dropped], max_bad_fraction: float) -> None:
    share = len(dropped) / len(source)
    if dropped and (len(dropped) == len(source) or share > max_bad_fraction):
        first = dropped[0]
        counts = ", ".join(f"{reason} {count}" for reason, count in _count_reasons(dropped).items())
        raise DataError(
            f"{len(dropped)} of the {len(source)} pictures of {source.description} are bad ({counts}), wanted at most "
            f"{max_bad_fraction:.1%} and not all; the first is {first.picture}: {first.reason}"
        )


def _count_reasons(dropped: Sequence[Dropped]) -> dict[str, int]:
    return dict(Counter(drop_reason(DataError(item.reason)) for item in dropped).most_common())
