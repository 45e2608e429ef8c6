"""Images to unit-norm features: decode in threads, run the encoder on batches, keep the order of the source.

Ranks share the images where `torchrun` started several; what an earlier extraction left in the cache is used.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8

from sop_faiss import distributed
from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.ordered_map import MAX_WORKERS, default_workers
from sop_faiss.errors import ConfigError, DataError, NothingUsableError
from sop_faiss.features.cache import FeatureCache, open_cache
from sop_faiss.features.drops import Drops
from sop_faiss.features.file_states import FileState, FileStates, file_status
from sop_faiss.features.ranks import gather_extracted, share_of_rank
from sop_faiss.features.store import FeatureStore
from sop_faiss.model.encoders.encode import require_batch_size
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.forward import (
    batches_of_equal_shape,
    exact_inference,
    features_of_batch,
    finished_features,
    require_usable,
)
from sop_faiss.model.encoders.preprocess import Preprocess
from sop_faiss.paths import plain_path
from sop_faiss.progress import ProgressCallback
from sop_faiss.train.allocator import keep_freed_memory


@dataclass(frozen=True)
class ExtractionOptions:
    """How images become features.

    The features do not depend on it beyond the last bits of float32.

    Raises:
        ConfigError: a number is out of range.
    """

    batch_size: int = 64
    """Images per forward pass on a GPU; on a CPU at most 8 at a time. Images of different shapes go into different
    passes."""
    workers: int | None = None
    """Threads that read and decode; None: one per CPU, at most 8."""
    max_bad_fraction: float = 0.01
    """A larger share of unusable images is an error; of a smaller one each is dropped, counted by reason, and listed
    in the manifest's `dropped`."""
    across_ranks: bool = False
    """Every rank extracts its share, and each gets all features; otherwise a rank acts alone."""

    def __post_init__(self) -> None:
        require_batch_size(self.batch_size)
        if self.workers is not None and not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"`workers={self.workers}`: wanted 1 to {MAX_WORKERS:,} threads")
        if not 0 <= self.max_bad_fraction <= 1:
            raise ConfigError(f"`max_bad_fraction={self.max_bad_fraction}`: wanted a share between 0 and 1")


def extract_features(
    encoder: Encoder,
    source: ImageSource,
    options: ExtractionOptions | None = None,
    *,
    preprocess: Preprocess | None = None,
    progress: ProgressCallback | None = None,
) -> FeatureStore:
    """Return the features of every usable image of a source, in its order, computed in float32.

    Args:
        encoder: runs on the device it is on; its `cache` and `whitening` are used.
        preprocess: another than the encoder's own, such as `encoder.preprocess.keeping_aspect(512)`.

    Raises:
        DataError: too many images are unusable, or none is left (`NothingUsableError`).
        FeatureError: the encoder's features are not finite or zero.
        ConfigError: the encoder does not take images of this size.
    """
    options = options or ExtractionOptions()
    seen = preprocess or encoder.preprocess
    encoder.check_preprocess(seen)
    drops = Drops(source, options.max_bad_fraction)
    threads = options.workers or default_workers()
    if next(encoder.parameters()).device.type == "cpu":
        keep_freed_memory()
    states: dict[int, FileState] = {}

    def own_rows() -> dict[int, Float32[np.ndarray, " d"]]:
        cache = open_cache(encoder, seen)
        positions = share_of_rank(len(source)) if options.across_ranks else range(len(source))
        images = _prepared(source, positions, seen, threads, 2 * options.batch_size, drops, progress, cache, states)
        return _encode(encoder, seen, source, images, options.batch_size, cache)

    rows = gather_extracted(own_rows, drops.listed, drops.reasons) if options.across_ranks else own_rows()
    drops.check()
    if not rows:
        raise NothingUsableError(f"{source.description} has no usable image{drops.summary()}", drops.to_dict())
    if options.across_ranks and distributed.world_size() > 1:
        states = {position: state for part in distributed.gather_objects(states) for position, state in part.items()}
    kept = sorted(rows)
    keys = [source.keys[position] for position in kept]
    return FeatureStore(
        keys=keys,
        labels=None if source.labels is None else source.labels[kept],
        sources=[source.source_of(position) for position in kept],
        members=[source.member_of(position) for position in kept],
        features=finished_features(encoder, np.stack([rows[position] for position in kept]), keys),
        manifest=_manifest(encoder, seen, source, len(kept), drops),
        whitening=encoder.whitening,
        states=FileStates.of([states[position] for position in kept]) if states else None,
    )


def extract_each(
    encoder: Encoder,
    sources: Sequence[ImageSource],
    options: ExtractionOptions | None = None,
    *,
    preprocess: Preprocess | None = None,
    progress: ProgressCallback | None = None,
) -> list[FeatureStore]:
    """Extract one source after the other, with one count of progress; arguments and errors as of `extract_features`."""
    total = sum(len(source) for source in sources)
    stores: list[FeatureStore] = []
    before = 0
    for source in sources:
        own = None if progress is None else _after(progress, before, total)
        stores.append(extract_features(encoder, source, options, preprocess=preprocess, progress=own))
        before += len(source)
    return stores


def _after(progress: ProgressCallback, before: int, total: int) -> ProgressCallback:
    """Report the progress of a part that comes after `before` images of `total`."""
    return lambda done, _: progress(before + done, total)


def _encode(
    encoder: Encoder,
    preprocess: Preprocess,
    source: ImageSource,
    images: Iterator[_Pixels],
    batch_size: int,
    cache: FeatureCache | None,
) -> dict[int, Float32[np.ndarray, " d"]]:
    """Features by position: from the cache where it has them, else computed and added to it."""
    rows: dict[int, Float32[np.ndarray, " d"]] = {}
    digests: dict[int, bytes] = {}

    def to_compute() -> Iterator[tuple[int, np.ndarray]]:
        for image in images:
            if image.feature is not None:
                rows[image.position] = image.feature
            elif image.pixels is not None:
                digests[image.position] = image.digest
                yield image.position, image.pixels

    try:
        with exact_inference(encoder):
            for positions, batch in batches_of_equal_shape(to_compute(), batch_size):
                features = features_of_batch(encoder, preprocess, batch)
                require_usable(features, [source.keys[position] for position in positions])
                rows.update(zip(positions, features, strict=True))
                if cache is not None:
                    cache.add([digests.pop(position) for position in positions], features)
    finally:
        if cache is not None:
            cache.flush()
    return rows


class _Pixels(NamedTuple):
    """One image on its way to the encoder, or past it."""

    position: int
    digest: bytes
    """sha256 of its encoded bytes; empty without a cache."""
    pixels: UInt8[np.ndarray, "h w 3"] | None
    """Ready for the encoder; None if the cache has its feature."""
    feature: Float32[np.ndarray, " d"] | None


def _prepared(
    source: ImageSource,
    positions: Sequence[int],
    preprocess: Preprocess,
    workers: int,
    ahead: int,
    drops: Drops,
    progress: ProgressCallback | None,
    cache: FeatureCache | None,
    states: dict[int, FileState],
) -> Iterator[_Pixels]:
    """Usable images in order, decoded and resized by threads that run at most `ahead` images ahead.

    With a cache, `states` gets what was read of each, also of one that cannot be used.
    """

    def prepare(position: int) -> _Pixels:
        status = file_status(source, position) if cache is not None else (-1, -1)  # before reading: see a later change
        if cache is not None:
            states[position] = FileState(*status, b"")  # of one that cannot be read
        encoded = source.read(position)
        digest = b"" if cache is None else hashlib.sha256(encoded).digest()
        feature = None if cache is None else cache.find(digest)
        if cache is not None:
            states[position] = FileState(len(encoded), status[1], digest)
        pixels = preprocess.apply(decode_image(encoded, top_value=preprocess.top_value)) if feature is None else None
        return _Pixels(position, digest, pixels, feature)

    waiting, total = iter(positions), len(source)
    with ThreadPoolExecutor(workers, thread_name_prefix="decode") as pool:
        pending: deque[Future[_Pixels]] = deque()
        try:
            for done, position in enumerate(positions, start=1):
                for upcoming in itertools.islice(waiting, max(0, max(ahead, workers) - len(pending))):
                    pending.append(pool.submit(prepare, upcoming))
                try:
                    image = pending.popleft().result()
                except DataError as error:
                    drops.add(position, error, states.get(position))
                else:
                    yield image
                if progress is not None:
                    progress(done * total // len(positions), total)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _manifest(
    encoder: Encoder, preprocess: Preprocess, source: ImageSource, count: int, drops: Drops
) -> dict[str, Any]:
    return {
        "encoder": {"name": encoder.name, "fingerprint": encoder.fingerprint},
        "scores": encoder.scores,
        "preprocess": preprocess.to_dict(),
        "pooling": encoder.pooling,
        "whitening": None if encoder.whitening is None else encoder.whitening.facts(),
        "dimension": encoder.feature_dim,
        "count": count,
        "normalized": True,
        "encoder_spec": encoder.spec if preprocess == encoder.preprocess else None,
        "root": str(source.root),
        "folder": str(source.root) if _is_folder(source) else None,
        "sources": [source.description],
        "class_names": source.class_names,
        "dropped": drops.to_dict(),
    }


def _is_folder(source: ImageSource) -> bool:
    """Return whether the source is all images below a folder, not a list, shards or single images."""
    return source.source_of(0) == "" and plain_path(source.description) == source.root
