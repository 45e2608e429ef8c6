"""Pack images into shards: every image is verified by decoding it; bad ones are dropped, counted and listed."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from sop_faiss.data.images.decode import MAX_PIXELS, drop_reason
from sop_faiss.data.images.deep_grayscale import DeepImage, DeepTally, require_top_value
from sop_faiss.data.images.keys import is_hidden
from sop_faiss.data.images.near_duplicates import Duplicates, Signature, image_signature
from sop_faiss.data.images.source import ImageSource, open_source
from sop_faiss.data.images.verified_image import image_name, read_whole
from sop_faiss.data.ordered_map import MAX_WORKERS, default_workers, map_ordered
from sop_faiss.data.shards.shard_writer import SHARD_BYTES, Sample, ShardEntry, ShardWriter, write_manifest
from sop_faiss.data.shards.sidecar import load_index
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.files import atomic_directory, write_json
from sop_faiss.progress import ProgressCallback

SAMPLES_PER_SHARD = 10_000
DUPLICATES_NAME = "duplicates.json"

_KEPT = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}  # stored byte for byte; MPO: a phone's JPEG
_LOSSY = ("JPEG", "MPO", "WEBP", "AVIF", "HEIF")  # re-encoded as JPEG, all others as PNG
_JPEG_QUALITY = 95


@dataclass(frozen=True)
class Dropped:
    """An image that was left out, and why; the first word of `reason` is the kind, which is counted."""

    image: str  # file, or member and shard
    reason: str


@dataclass(frozen=True)
class PackSummary:
    """What `pack` wrote."""

    out: Path
    shards: list[ShardEntry]
    samples: int
    labeled: int
    bytes: int
    resized: int
    classes: int
    dropped: list[Dropped]
    duplicates: dict[str, int | bool]
    """Numbers of exact and of near duplicates (`exact`, `near`), and whether exact ones are left out."""
    notices: list[str]
    """Notes on grayscale images of more than 8 bits."""

    @property
    def dropped_by_reason(self) -> dict[str, int]:
        """How many images were dropped for each reason, the most frequent first."""
        return _count_reasons(self.dropped)


@dataclass(frozen=True)
class _Encoded:
    """One image ready for a shard."""

    suffix: str
    encoded: bytes
    is_resized: bool
    signature: Signature
    deep: DeepImage | None


@dataclass
class _Packing:
    """Writes prepared images in order, and counts them."""

    source: ImageSource
    keys: Sequence[str]
    writer: ShardWriter
    drop_exact_duplicates: bool
    duplicates: Duplicates = field(default_factory=Duplicates)
    dropped: list[Dropped] = field(default_factory=list)
    labeled: int = 0
    resized: int = 0
    deep: DeepTally = field(default_factory=DeepTally)

    def take(self, position: int, result: _Encoded | DataError) -> None:
        """Write one image, or record why it is left out."""
        image = image_name(self.source, position)
        if isinstance(result, DataError):
            self.dropped.append(Dropped(image, str(result)))
            return
        self.deep.add(result.deep)
        label = -1 if self.source.labels is None else int(self.source.labels[position])
        if self.duplicates.add(image, label, result.signature) and self.drop_exact_duplicates:
            return
        self.writer.write(Sample(self.keys[position], result.suffix, result.encoded, label))
        self.labeled += label >= 0
        self.resized += result.is_resized

    def write_manifest(self, folder: Path, resize: int | None, top_value: float) -> dict[str, Any]:
        """Write `duplicates.json` and `manifest.json`, and return the latter."""
        report = self.duplicates.report()
        write_json(folder / DUPLICATES_NAME, {"exact_are_left_out": self.drop_exact_duplicates, **report})
        return write_manifest(
            folder,
            self.writer.entries,
            self.source.class_names,
            labeled=self.labeled,
            source=self.source.description,
            resize=resize,
            deep_grayscale={"top_value": top_value, **self.deep.to_dict()},
            duplicates={
                "exact": report["exact"]["images_beyond_the_first"],
                "exact_are_left_out": self.drop_exact_duplicates,
                "near": report["near"]["images_beyond_the_first"],
            },
            dropped={
                "count": len(self.dropped),
                "by_reason": _count_reasons(self.dropped),
                "images": [asdict(each) for each in self.dropped],
            },
        )


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
    top_value: float = 0.0,
    drop_exact_duplicates: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: ProgressCallback | None = None,
) -> PackSummary:
    """Write the images of a folder, list or CSV as webdataset shards with their sidecars and a `manifest.json`.

    JPEG, PNG and WebP files keep their bytes. Other formats, images that are made smaller, and with `top_value`
    grayscale of more than 8 bits are encoded again (as JPEG of quality 95 if the original was lossy, else as PNG of
    8 bits). Keys are those of the source, with dots replaced by `_`. The same images give the same shards and manifest
    for any number of workers: workers read, decode and encode; one thread writes. `duplicates.json` lists duplicates
    (see `Duplicates.report`). Either everything is written or nothing.

    Args:
        src: anything `open_source` takes.
        out: the folder to make; must be absent or empty.
        samples_per_shard: images per shard at most.
        resize: shorter side in pixels to which larger images are shrunk, at the same aspect; None: no resizing.
        name: first part of the names of the shards.
        workers: threads; None for one per processor, 8 at most.
        max_bad_fraction: packing fails if a larger fraction of the images is bad; 1: only if all are bad.
        max_pixels: images with more are bad.
        top_value: white in grayscale of more than 8 bits; 0: what the file states, else the largest value of its type.
        drop_exact_duplicates: keep only the first of images with the same bytes.
        shard_bytes: a shard also ends when its images reach this size.
        progress: called with the number of images packed and their total.

    Raises:
        DataError: the source is unusable, or too many images are bad.
        ConfigError: a number is out of range.
        SopError: `out` exists and is not empty.
    """
    _check_numbers(resize, max_bad_fraction, workers, top_value)
    with atomic_directory(out) as folder:
        source = open_source(src)
        with ShardWriter(folder, name, samples_per_shard, shard_bytes) as writer:
            packing = _Packing(source, _webdataset_keys(source.keys), writer, drop_exact_duplicates)
            prepare = partial(_prepare, source, resize, max_pixels, top_value)
            for position, result in enumerate(map_ordered(prepare, range(len(source)), workers or default_workers())):
                packing.take(position, result)
                if progress is not None:
                    progress(position + 1, len(source))
        _check_dropped(source, packing.dropped, max_bad_fraction)
        for entry in writer.entries:
            load_index(folder / entry.name)  # this writes the sidecar
        manifest = packing.write_manifest(folder, resize, top_value)
    return PackSummary(
        out=out,
        shards=writer.entries,
        samples=manifest["samples"],
        labeled=packing.labeled,
        bytes=manifest["bytes"],
        resized=packing.resized,
        classes=0 if source.labels is None else len(set(source.labels.tolist()) - {-1}),
        dropped=packing.dropped,
        duplicates=manifest["duplicates"],
        notices=packing.deep.notices(),
    )


def _check_numbers(resize: int | None, max_bad_fraction: float, workers: int | None, top_value: float) -> None:
    if resize is not None and resize < 1:
        raise ConfigError(f"resize is {resize} px, wanted 1 or more")
    if not 0 <= max_bad_fraction <= 1:
        raise ConfigError(f"max_bad_fraction is {max_bad_fraction}, wanted 0 to 1")
    if workers is not None and not 1 <= workers <= MAX_WORKERS:
        raise ConfigError(f"workers is {workers}, wanted 1 to {MAX_WORKERS:,}")
    require_top_value(top_value)


def _prepare(
    source: ImageSource, resize: int | None, max_pixels: int, top_value: float, position: int
) -> _Encoded | DataError:
    """Verify one image by decoding all of it, and encode it again where requested or necessary.

    For a bad image, return what is wrong; the first word is the reason.
    """
    whole = read_whole(source, position, max_pixels, top_value)
    if isinstance(whole, DataError):
        return whole
    encoded, kind, image, deep = whole
    signature = image_signature(encoded, image)
    shorter = min(image.size)
    shrink = resize is not None and shorter > resize
    has_new_white = deep is not None and top_value > 0  # applied here, so that reading the shards needs no `top_value`
    if not shrink and not has_new_white and kind is not None and kind in _KEPT:
        return _Encoded(_KEPT[kind], encoded, False, signature, deep)
    if resize is not None and shrink:
        width, height = (max(1, round(side * resize / shorter)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    stream = io.BytesIO()
    if kind in _LOSSY:
        image.save(stream, "JPEG", quality=_JPEG_QUALITY, subsampling=0)
        return _Encoded("jpg", stream.getvalue(), shrink, signature, deep)
    image.save(stream, "PNG")
    return _Encoded("png", stream.getvalue(), shrink, signature, deep)


def _webdataset_keys(keys: Sequence[str]) -> list[str]:
    """Make keys unique that are not hidden and have no dot in the basename, where webdataset would cut them."""
    taken = set(keys)
    made = []
    for key in keys:
        folder, slash, base = key.rpartition("/")
        if "." not in base and not is_hidden(key):
            made.append(key)
            continue
        seen = "/".join("_" + part.lstrip("._") if is_hidden(part) else part for part in folder.split("/"))
        wanted = candidate = f"{seen}{slash}{base.replace('.', '_')}"
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
            f"{len(dropped)} of the {len(source)} images of {source.description} are bad ({counts}), wanted at most "
            f"{max_bad_fraction:.1%} and not all; the first is {first.image}: {first.reason}"
        )


def _count_reasons(dropped: Sequence[Dropped]) -> dict[str, int]:
    return dict(Counter(drop_reason(DataError(item.reason)) for item in dropped).most_common())
