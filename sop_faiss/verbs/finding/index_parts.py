"""The verb of `sop-index parts`, and of `sop-index build --parts`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sop_faiss.features.extract import ExtractionOptions
from sop_faiss.index.build import IndexOptions
from sop_faiss.index.images import index_images
from sop_faiss.index.own_encoder import encoder_of_index
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.write_parts import write_parts
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import Stage, silent_stage


def make_parts(
    directory: Path,
    encoder: EncoderSpec | None = None,
    grids: Sequence[int] | None = None,
    options: IndexOptions | None = None,
    *,
    images_root: Path | None = None,
    extraction: ExtractionOptions | None = None,
    stage: Stage = silent_stage,
) -> int:
    """Make the parts of an index's images that have none; return the number of these.

    Args:
        directory: of the index.
        encoder: another way to open the index's encoder; None: as the index remembers.
        grids: as of `write_parts`, and so are the others.
        images_root: where the images are now, if they moved.

    Raises:
        SopError: as `write_parts` and `encoder_of_index`.
    """
    index = FeatureIndex.open(directory)
    loaded = encoder_of_index(index, encoder)
    images = index_images(index, images_root)
    return write_parts(index, loaded, images, grids, options, extraction=extraction, stage=stage)
