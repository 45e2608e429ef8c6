"""Nearest-neighbor sheet of a run: some images, and the training images nearest to them by the teacher's features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Int64

from sop_faiss.config import Config
from sop_faiss.data.images.subset import Subset
from sop_faiss.errors import DataError
from sop_faiss.features.extract import ExtractionOptions, extract_features
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.neighbors.exact import nearest_rows
from sop_faiss.progress import ProgressCallback
from sop_faiss.report.contact_sheet import SheetHit, Strip
from sop_faiss.report.run_report import ImageSection
from sop_faiss.verbs.run_page.images import RunImages

_QUERIES = 8
_SHOWN = 8


def choose_images(
    images: RunImages, gallery: int, seed: int
) -> tuple[Int64[np.ndarray, " q"], Int64[np.ndarray, " g"]]:
    """Draw queries and the training images that are searched, with a seed; no image is both.

    Queries are held-out images if the run has enough of them, else training images.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    trained = generator.permutation(images.trained)
    if len(images.held_out) >= _QUERIES:
        return generator.permutation(images.held_out)[:_QUERIES], trained[:gallery]
    queries = min(_QUERIES, len(trained) // 2)
    return trained[:queries], trained[queries : queries + gallery]


def neighbor_section(
    config: Config, checkpoint: Path, images: RunImages, gallery: int, progress: ProgressCallback | None
) -> ImageSection:
    """Find the nearest of a sample of the training images, by the checkpoint's teacher.

    Args:
        images: of the run.
        gallery: largest number of images that are searched.
        progress: called with the number of images read and their total.

    Raises:
        DataError: too few images can be read.
        SopError: the teacher cannot be loaded.
    """
    queries, searched = choose_images(images, gallery, config.train.seed)
    if len(queries) == 0 or len(searched) == 0:
        raise DataError(f"{images.source.description} has too few images for a search")
    encoder = encoder_of_spec(EncoderSpec(str(checkpoint)))
    chosen = Subset(images.source, np.concatenate([queries, searched]))
    store = extract_features(
        encoder, chosen, ExtractionOptions(max_bad_fraction=1.0), progress=progress
    )  # bad ones are left out
    place = {key: number for number, key in enumerate(chosen.keys)}
    usable = np.array([place[key] for key in store.keys])
    is_query = usable < len(queries)
    if is_query.all() or not is_query.any():
        raise DataError(f"{images.source.description}: too few of the images drawn can be read")
    ids = chosen.positions[usable]
    found = nearest_rows(store.features[is_query], store.features[~is_query], min(_SHOWN, int((~is_query).sum())))
    strips = [
        Strip(
            images.image(query),
            [
                SheetHit(images.image(image), similarity, images.same_class(query, image))
                for image, similarity in zip(ids[~is_query][rows].tolist(), similarities.tolist(), strict=True)
            ],
        )
        for query, rows, similarities in zip(ids[is_query].tolist(), found.rows, found.similarities, strict=True)
    ]
    kind = "Held-out" if len(images.held_out) >= _QUERIES else "Training"
    text = (
        f"{kind} images (left) and the nearest of {int((~is_query).sum()):,} other training images, by the features of "
        f"the teacher of {checkpoint.name}; the number is the cosine similarity."
    )
    if images.source.labels is not None:
        text += " Marks say whether the class is the same; training knew no class."
    return ImageSection("Nearest neighbors", text, strips)
