"""A picture of what an encoder looks at in some images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sop_faiss.data.images.source import open_source
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.attention import components_as_colors, look
from sop_faiss.model.encoders.image_input import pixels_of
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import ProgressCallback
from sop_faiss.report.attention_figure import AttentionRow, draw_attention

MOST_IMAGES = 64
"""More rows would not be looked at, and their tokens are all in memory."""


@dataclass(frozen=True)
class Looks:
    """A figure as PNG, and what it shows."""

    figure: bytes
    has_attention: bool
    """Convolutional networks and networks without [CLS] have none."""
    unreadable: list[str]
    """Why each of the drawn images that could not be read was left out."""


def draw_looks(source: str, spec: EncoderSpec, *, limit: int = 8, progress: ProgressCallback | None = None) -> Looks:
    """Draw images, their patch tokens as colors, and the attention of [CLS] by head, as a PNG.

    Args:
        source: SRC of images; those shown are spread evenly over it.
        limit: the most images.

    Raises:
        ConfigError: the limit is impossible, or the encoder makes no tokens.
        DataError: the source is unusable, or none of its images can be read.
    """
    if not 1 <= limit <= MOST_IMAGES:
        raise ConfigError(f"`limit={limit}`: wanted 1 to {MOST_IMAGES}")
    images = open_source(source)
    encoder = encoder_of_spec(spec)
    places = np.unique(np.linspace(0, len(images) - 1, min(limit, len(images))).round().astype(int)).tolist()
    names, pixels, looked, unreadable = [], [], [], []
    for done, place in enumerate(places):
        if progress is not None:
            progress(done, len(places))
        try:
            decoded = pixels_of(images.read(place), images.keys[place], encoder.preprocess.top_value)
        except DataError as error:
            unreadable.append(str(error))
            continue
        seen = encoder.preprocess.apply(decoded)
        looked.append(look(encoder, encoder.preprocess.normalize(torch.from_numpy(seen).unsqueeze(0))[0]))
        names.append(images.keys[place])
        pixels.append(seen)
    if progress is not None:
        progress(len(places), len(places))
    if not looked:
        raise DataError(f"none of the {len(places)} images drawn from {source} can be read: {unreadable[-1]}")
    colors = components_as_colors([each.patches for each in looked])
    rows = [
        AttentionRow(name, shown, color, each.heads)
        for name, shown, color, each in zip(names, pixels, colors, looked, strict=True)
    ]
    has_attention = any(each.heads is not None for each in looked)
    return Looks(draw_attention(rows, encoder.name), has_attention, unreadable)
