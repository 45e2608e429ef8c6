"""Features of several sources in one go, with one count of progress over all of them."""

from __future__ import annotations

from collections.abc import Sequence

from sop_faiss.data.images.source import ImageSource
from sop_faiss.features.extract import extract_features
from sop_faiss.features.store import FeatureStore
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.preprocess import Preprocess
from sop_faiss.progress import ProgressCallback

__all__ = ["extract_each"]


def extract_each(
    encoder: Encoder,
    sources: Sequence[ImageSource],
    *,
    preprocess: Preprocess | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    max_bad_fraction: float = 0.01,
    progress: ProgressCallback | None = None,
) -> list[FeatureStore]:
    """Extract one source after the other, all ranks together; arguments and errors as of `extract_features`."""
    total = sum(len(source) for source in sources)
    stores: list[FeatureStore] = []
    before = 0
    for source in sources:
        stores.append(
            extract_features(
                encoder,
                source,
                preprocess=preprocess,
                batch_size=batch_size,
                workers=workers,
                max_bad_fraction=max_bad_fraction,
                progress=None if progress is None else _after(progress, before, total),
                across_ranks=True,
            )
        )
        before += len(source)
    return stores


def _after(progress: ProgressCallback, before: int, total: int) -> ProgressCallback:
    """Report the progress of a part that comes after `before` images of `total`."""
    return lambda done, _: progress(before + done, total)
