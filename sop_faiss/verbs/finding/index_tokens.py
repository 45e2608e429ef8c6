"""The verb of `sop-index tokens`, and of `sop-index build --tokens`."""

from __future__ import annotations

from pathlib import Path

from sop_faiss.index.images import index_images
from sop_faiss.index.own_encoder import encoder_of_index
from sop_faiss.index.rerank.settings import TokenSettings
from sop_faiss.index.rerank.token_store import write_tokens
from sop_faiss.index.search import FeatureIndex
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import Stage, silent_stage


def make_tokens(
    directory: Path,
    encoder: EncoderSpec | None = None,
    settings: TokenSettings | None = None,
    *,
    images_root: Path | None = None,
    stage: Stage = silent_stage,
) -> int:
    """Make the tokens of an index's images that have none; return the number of these.

    Args:
        directory: of the index.
        encoder: another way to open the index's encoder; None: as the index remembers.
        settings: how tokens are made; None: as before, or the defaults.
        images_root: where the images are now, if they moved.
        stage: announces the work.

    Raises:
        SopError: as `write_tokens` and `encoder_of_index`.
    """
    index = FeatureIndex.open(directory)
    loaded = encoder_of_index(index, None if encoder is None or encoder == EncoderSpec("") else encoder)
    return write_tokens(index, loaded, index_images(index, images_root), settings, stage)
