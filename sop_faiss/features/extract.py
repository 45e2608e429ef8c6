"""Pictures to unit-norm features: decode in threads, run the encoder on batches, keep the order of the source."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from sop_faiss.data.decode import decode_image, drop_reason
from sop_faiss.data.parallel import MAX_WORKERS
from sop_faiss.data.source import ImageSource
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.features.store import FeatureStore
from sop_faiss.model.encoder import Encoder
from sop_faiss.model.preprocess import Preprocess
from sop_faiss.progress import ProgressCallback
from sop_faiss.unit_rows import require_unit_rows

__all__ = ["embed_images", "extract_features"]

MAX_BATCH_SIZE = 65_536
"""More pictures than any machine has use for; what is asked beyond is a slip of the keyboard."""
_LISTED_DROPS = 1000
"""Dropped pictures listed by name in the manifest; all are counted."""


def extract_features(
    encoder: Encoder,
    source: ImageSource,
    *,
    preprocess: Preprocess | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    max_bad_fraction: float = 0.01,
    progress: ProgressCallback | None = None,
) -> FeatureStore:
    """Features of every usable picture of a source, in its order, computed in float32.

    Rows do not depend on `batch_size` or `workers` beyond the last bits of float32.

    Args:
        encoder: runs on the device it is on.
        source: the pictures.
        preprocess: another than the encoder's own, such as `encoder.preprocess.keeping_aspect(512)`.
        batch_size: pictures per forward pass; pictures of different shapes go into different passes.
        workers: threads that read and decode; None: one per CPU, at most 8.
        max_bad_fraction: larger shares of unusable pictures are an error; smaller ones are dropped, counted by
            reason, and listed in the manifest's `dropped`.
        progress: called with the number of pictures read.

    Raises:
        DataError: too many pictures are unusable, or none is left.
        FeatureError: the encoder's features are not finite or zero.
        ConfigError: a number is out of range, or the encoder does not take images of this size.
    """
    _check_numbers(batch_size, workers, max_bad_fraction)
    preprocess = preprocess or encoder.preprocess
    encoder.check_preprocess(preprocess)
    drops = _Drops(source, max_bad_fraction)
    rows: dict[int, Float32[np.ndarray, " d"]] = {}
    pictures = _prepared(source, preprocess, workers or min(8, os.cpu_count() or 1), 2 * batch_size, drops, progress)
    with _exact_inference(encoder):
        for positions, batch in _batches(pictures, batch_size):
            features = _forward(encoder, preprocess, batch)
            _require_usable(features, [source.keys[position] for position in positions])
            rows.update(zip(positions, features, strict=True))
    if not rows:
        raise DataError(f"{source.description} has no usable picture{drops.summary()}")
    kept = sorted(rows)
    return FeatureStore(
        keys=[source.keys[position] for position in kept],
        labels=None if source.labels is None else source.labels[kept],
        sources=[source.source_of(position) for position in kept],
        members=[source.member_of(position) for position in kept],
        features=np.stack([rows[position] for position in kept]),
        manifest=_manifest(encoder, preprocess, source, len(kept), drops),
    )


def _check_numbers(batch_size: int, workers: int | None, max_bad_fraction: float) -> None:
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise ConfigError(f"batch_size = {batch_size}: wanted 1 to {MAX_BATCH_SIZE:,} pictures per forward pass")
    if workers is not None and not 1 <= workers <= MAX_WORKERS:
        raise ConfigError(f"workers = {workers}: wanted 1 to {MAX_WORKERS:,} threads")
    if not 0 <= max_bad_fraction <= 1:
        raise ConfigError(f"max_bad_fraction = {max_bad_fraction}: wanted a share between 0 and 1")


def embed_images(
    encoder: Encoder,
    images: Sequence[UInt8[np.ndarray, "_ _ 3"]],
    *,
    preprocess: Preprocess | None = None,
    batch_size: int = 64,
) -> Float32[np.ndarray, "n d"]:
    """Unit-norm features of decoded RGB pictures of any shapes, one row each, such as the queries of a search.

    Raises:
        DataError: a picture is too elongated to be resized.
        FeatureError: the encoder's features are not finite or zero.
        ConfigError: the encoder does not take images of this size.
    """
    preprocess = preprocess or encoder.preprocess
    encoder.check_preprocess(preprocess)
    features = np.empty((len(images), encoder.feature_dim), np.float32)
    pictures = ((position, preprocess.apply(image)) for position, image in enumerate(images))
    with _exact_inference(encoder):
        for positions, batch in _batches(pictures, batch_size):
            features[positions] = _forward(encoder, preprocess, batch)
    _require_usable(features, [f"picture {position}" for position in range(len(images))])
    return features


class _Drops:
    """Counts unusable pictures by reason and stops the extraction when there are too many."""

    def __init__(self, source: ImageSource, max_bad_fraction: float) -> None:
        self.source = source
        self.max_bad_fraction = max_bad_fraction
        self.reasons: Counter[str] = Counter()
        self.listed: list[dict[str, str]] = []

    def add(self, position: int, error: DataError) -> None:
        reason = drop_reason(error)
        self.reasons[reason] += 1
        if len(self.listed) < _LISTED_DROPS:
            source, member = self.source.source_of(position), self.source.member_of(position)
            key = self.source.keys[position]
            self.listed.append({"key": key, "source": source, "member": member, "reason": reason, "error": str(error)})
        total, bad = len(self.source), self.reasons.total()
        if bad > self.max_bad_fraction * total:
            if self.max_bad_fraction == 0:
                raise DataError(
                    f"{self.source.description}: {bad} of {total} pictures are unusable so far{self.summary()}, "
                    "and every one is needed: repair them or leave them out of the data"
                )
            raise DataError(
                f"{self.source.description}: {bad} of {total} pictures are unusable so far{self.summary()}, more than "
                f"max_bad_fraction = {self.max_bad_fraction}: repair or remove them, or raise it"
            )

    def summary(self) -> str:
        if not self.reasons:
            return ""
        counted = ", ".join(f"{reason} {count}" for reason, count in self.reasons.most_common())
        return f" ({counted}; first {self.listed[0]['key']})"

    def to_dict(self) -> dict[str, Any]:
        return {"count": self.reasons.total(), "reasons": dict(self.reasons), "pictures": self.listed}


def _prepared(
    source: ImageSource,
    preprocess: Preprocess,
    workers: int,
    ahead: int,
    drops: _Drops,
    progress: ProgressCallback | None,
) -> Iterator[tuple[int, np.ndarray]]:
    """Usable pictures in order, decoded and resized by threads that run at most `ahead` pictures ahead."""

    def prepare(position: int) -> np.ndarray:
        return preprocess.apply(decode_image(source.read(position)))

    total = len(source)
    with ThreadPoolExecutor(workers, thread_name_prefix="decode") as pool:
        pending: deque[Future[np.ndarray]] = deque()
        try:
            submitted = 0
            for position in range(total):
                while submitted < total and len(pending) < max(ahead, workers):
                    pending.append(pool.submit(prepare, submitted))
                    submitted += 1
                try:
                    picture = pending.popleft().result()
                except DataError as error:
                    drops.add(position, error)
                else:
                    yield position, picture
                if progress is not None:
                    progress(position + 1, total)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _batches(
    pictures: Iterator[tuple[int, np.ndarray]], batch_size: int
) -> Iterator[tuple[list[int], UInt8[Tensor, "b h w 3"]]]:
    """Group pictures of equal shape; when four batches' worth wait, the fullest group goes first."""
    groups: dict[tuple[int, ...], list[tuple[int, np.ndarray]]] = {}
    waiting = 0

    def release(shape: tuple[int, ...]) -> tuple[list[int], Tensor]:
        group = groups.pop(shape)
        return [position for position, _ in group], torch.from_numpy(np.stack([picture for _, picture in group]))

    for position, picture in pictures:
        group = groups.setdefault(picture.shape, [])
        group.append((position, picture))
        waiting += 1
        if len(group) == batch_size or waiting >= 4 * batch_size:
            fullest = picture.shape if len(group) == batch_size else max(groups, key=lambda shape: len(groups[shape]))
            waiting -= len(groups[fullest])
            yield release(fullest)
    for shape in list(groups):
        yield release(shape)


@contextlib.contextmanager
def _exact_inference(encoder: Encoder) -> Iterator[None]:
    """Evaluation mode (restored afterwards), no gradients, full float32: no autocast, no TF32, one choice of kernel."""
    were_training = [(module, module.training) for module in encoder.modules()]
    device = _device_of(encoder)
    encoder.eval()
    try:
        with (
            torch.no_grad(),
            _no_autocast(device.type),
            torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False),
        ):
            yield
    finally:
        for module, was_training in were_training:
            module.training = was_training


def _no_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast off. Where it is off already nothing is done: to leave it empties a cache that other threads share."""
    on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else contextlib.nullcontext()


def _device_of(encoder: Encoder) -> torch.device:
    return next(encoder.parameters()).device


def _forward(encoder: Encoder, preprocess: Preprocess, batch: UInt8[Tensor, "b h w 3"]) -> Float32[np.ndarray, "b d"]:
    """Unit-norm features of one batch; a zero feature stays zero and is refused by the caller."""
    features = encoder(preprocess.normalise(batch.to(_device_of(encoder)))).float()
    features = torch.nn.functional.normalize(features.double(), dim=1).float()
    array: Float32[np.ndarray, "b d"] = features.cpu().numpy()
    return array


def _require_usable(features: Float32[np.ndarray, "b d"], names: list[str]) -> None:
    remedy = "its weights or its preprocessing are wrong"
    require_unit_rows(features, "the encoder's features", names=names, remedy=remedy)


def _manifest(
    encoder: Encoder, preprocess: Preprocess, source: ImageSource, count: int, drops: _Drops
) -> dict[str, Any]:
    return {
        "encoder": {"name": encoder.name, "fingerprint": encoder.fingerprint},
        "preprocess": preprocess.to_dict(),
        "pooling": encoder.pooling,
        "dimension": encoder.feature_dim,
        "count": count,
        "normalised": True,
        "root": str(source.root),
        "sources": [source.description],
        "class_names": source.class_names,
        "dropped": drops.to_dict(),
    }
