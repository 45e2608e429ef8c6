"""Features that were computed before, by the content of the image: nothing is encoded twice, nothing stale is read.

A directory of caches, one for each way to make features:

    KEY/key.json                  encoder fingerprint, pooling, preprocessing; KEY is their sha256
    KEY/part-SHA256.safetensors   `images` (n, 32): sha256 of each image's encoded bytes; `features` (n, d)

A part's name has the checksum of its bytes, and a part appears complete or not at all, so that after a kill an
extraction continues from the parts that are there. Whitening is applied after the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32
from safetensors import SafetensorError
from safetensors.numpy import load, save

from sop_faiss import distributed
from sop_faiss.errors import FeatureError, SopError
from sop_faiss.files import read_json, write_file, write_json
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.preprocess import Preprocess
from sop_faiss.output_checks import require_replaceable
from sop_faiss.paths import path_state

_log = logging.getLogger(__name__)
FORMAT = "sop_faiss feature cache 1"
KEY_FILE = "key.json"
_PART = re.compile(r"part-([0-9a-f]{64})\.safetensors")
_FOLDER = re.compile(r"[0-9a-f]{64}")
_OF_OTHERS = {
    "features-*.parquet": "a feature store",
    "index.faiss": "an index",
    "config.yaml": "a run",
    "state.json": "a checkpoint",
    "step_*": "the checkpoints of a run",
    "config.json": "an export",
    "*.tar": "a folder of shards",
    "manifest.json": "a feature store, an index or a folder of shards",
    KEY_FILE: "one part of a cache",
}
"""Files that show what else a directory is."""
PART_ROWS = 4096
"""A part is written after this many new features ..."""
PART_SECONDS = 30.0
"""... or after this time, whichever comes first: what a kill costs at most."""


class FeatureCache:
    """The cache of one way to make features.

    Args:
        folder: where its parts are; made when the first is written.
        key: what determines a feature besides the image, as JSON values.
        dimension: d.
    """

    def __init__(self, folder: Path, key: dict[str, Any], dimension: int) -> None:
        self.folder = folder
        self._key = key
        self._dimension = dimension
        self._parts: list[Float32[np.ndarray, "n d"]] = []
        self._place: dict[bytes, tuple[int, int]] = {}
        self._new: list[tuple[bytes, Float32[np.ndarray, " d"]]] = []
        self._written_at = time.monotonic()
        self._read()

    def __len__(self) -> int:
        return len(self._place)

    def find(self, image: bytes) -> Float32[np.ndarray, " d"] | None:
        """Return the feature of the image with this sha256, None if it is not in the cache."""
        place = self._place.get(image)
        return None if place is None else self._parts[place[0]][place[1]]

    def add(self, images: Iterable[bytes], features: Float32[np.ndarray, "n d"]) -> None:
        """Keep features by the sha256 of their images; written now and then, and by `flush`."""
        self._new.extend(zip(images, features, strict=True))
        if len(self._new) >= PART_ROWS or time.monotonic() - self._written_at >= PART_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what is not written yet.

        Raises:
            OSError: the disk is full, or the place cannot be written.
        """
        self._written_at = time.monotonic()
        if not self._new:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / KEY_FILE).exists():
            write_json(self.folder / KEY_FILE, self._key)
        images = np.stack([np.frombuffer(image, np.uint8) for image, _ in self._new])
        content = save({"images": images, "features": np.stack([feature for _, feature in self._new])})
        write_file(self.folder / f"part-{hashlib.sha256(content).hexdigest()}.safetensors", content)
        self._new.clear()

    def _read(self) -> None:
        if not self.folder.is_dir():
            return
        if (self.folder / KEY_FILE).exists() and _key_in(self.folder) != self._key:
            raise FeatureError(
                f"cache {self.folder} is of another encoder, although its name says otherwise: remove that folder"
            )
        for file in sorted(self.folder.glob("part-*.safetensors")):
            self._read_part(file)

    def _read_part(self, file: Path) -> None:
        """Take a part if every byte of it is as it was written."""
        content, named = file.read_bytes(), _PART.fullmatch(file.name)
        try:
            intact = named is not None and hashlib.sha256(content).hexdigest() == named[1]
            tensors = load(content) if intact else {}
        except SafetensorError:
            tensors = {}
        images = tensors.get("images", tensors.get("pictures"))  # the name up to version 0.1
        features = tensors.get("features")
        if images is None or features is None or features.shape != (len(images), self._dimension):
            _log.warning("cache part %s is damaged and left out: its images are encoded again", file)
            return
        for row, image in enumerate(images):
            self._place[image.tobytes()] = (len(self._parts), row)
        self._parts.append(features)


def _key_in(folder: Path) -> Any:
    try:
        return read_json(folder / KEY_FILE)
    except SopError as error:
        raise FeatureError(
            f"cache: {error}; once the folder {folder} is removed, its images are encoded again"
        ) from None


def open_cache(encoder: Encoder, preprocess: Preprocess) -> FeatureCache | None:
    """Open the cache of an encoder's features of images prepared in this way; None if the encoder has no `cache`.

    Raises:
        FeatureError: something else is in that directory.
    """
    if encoder.cache is None:
        return None
    key = {
        "format": FORMAT,
        "fingerprint": encoder.fingerprint,
        "pooling": encoder.token_pooling,
        "preprocess": preprocess.to_dict(),
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    _require_place(encoder.cache)
    return FeatureCache(encoder.cache / name, key, encoder.token_dimension)


@contextlib.contextmanager
def kept_until_whole(encoder: Encoder, out: Path) -> Iterator[None]:
    """Keep features in `OUT.partial/` while `out` is made of them: after a kill the same call continues from there.

    Where the encoder has a cache of its own, its features are kept there instead.

    Args:
        encoder: makes the features inside.
        out: what is made; once that has worked, the features are removed.

    Raises:
        SopError: `out` is `.` or `..`, or cannot be written.
    """
    require_replaceable(out)
    unfinished = _unfinished(out) if encoder.cache is None else None
    if unfinished is not None:
        if os.path.lexists(unfinished) and not unfinished.is_dir():
            raise FeatureError(
                f"{unfinished} is needed for features until {out} is complete, but it is a file: move it away"
            )
        encoder.cache = unfinished
    try:
        cache = open_cache(encoder, encoder.preprocess)
        if cache and distributed.is_main():
            _log.warning(
                "%s holds %d features of this encoder: its images are not encoded again", cache.folder, len(cache)
            )
        yield
    finally:
        if unfinished is not None:
            encoder.cache = None
    if unfinished is not None:
        remove_cache(unfinished)


def _unfinished(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def forget_unfinished(out: Path) -> None:
    """Remove what a killed call has kept for `out`, which is complete now."""
    remove_cache(_unfinished(out))


def _require_place(directory: Path) -> None:
    """Refuse to keep features in a file, or among the files of something else."""
    if os.path.lexists(directory) and not directory.is_dir():
        raise FeatureError(f"cache {directory} {path_state(directory)}: name a directory")
    what = next((what for pattern, what in _OF_OTHERS.items() if any(directory.glob(pattern))), None)
    if what is not None:
        raise FeatureError(f"cache {directory} is {what}, so features are not written into it: name another directory")


def remove_cache(directory: Path) -> None:
    """Remove a cache directory; files in it that are not a cache's stay."""
    if not directory.is_dir():
        return
    for folder in [path for path in directory.iterdir() if path.is_dir() and _FOLDER.fullmatch(path.name)]:
        for file in folder.iterdir():
            if file.name == KEY_FILE or file.name.startswith(("part-", ".part-", f".{KEY_FILE}.")):
                file.unlink(missing_ok=True)
        _remove_empty(folder)
    _remove_empty(directory)


def _remove_empty(directory: Path) -> None:
    """Remove a directory if nothing is in it."""
    try:
        directory.rmdir()
    except OSError:
        return
