"""The verb of `sop-index tokens`, and of `sop-index build --tokens`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sop_faiss.index.images import index_images
from sop_faiss.index.own_encoder import encoder_of_index
from sop_faiss.index.rerank.settings import TokenSettings
from sop_faiss.index.rerank.token_files import has_tokens
from sop_faiss.index.rerank.token_store import TokenStore, write_tokens
from sop_faiss.index.search import FeatureIndex
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import Stage, silent_stage


def make_tokens(
    directory: Path,
    encoder: EncoderSpec | None = None,
    changes: Mapping[str, Any] | None = None,
    *,
    images_root: Path | None = None,
    stage: Stage = silent_stage,
) -> int:
    """Make the tokens of an index's images that have none; return the number of these.

    Args:
        directory: of the index.
        encoder: another way to open the index's encoder; None: as the index remembers.
        changes: settings of `TokenSettings` that differ from those of the tokens that are there, or from the defaults.
        images_root: where the images are now, if they moved.
        stage: announces the work.

    Raises:
        SopError: as `write_tokens` and `encoder_of_index`, or a setting is out of range.
    """
    index = FeatureIndex.open(directory)
    loaded = encoder_of_index(index, encoder)
    settings = None
    if changes:
        settings = replace(TokenStore.open(index).settings if has_tokens(directory) else TokenSettings(), **changes)
    return write_tokens(index, loaded, index_images(index, images_root), settings, stage)
