"""The encoder of an index: the one that a user names, or the one that the index remembers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sop_faiss.errors import ConfigError, IndexMismatchError, SopError
from sop_faiss.features.feature_space import FeatureSpace
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.remembered import recalled_spec
from sop_faiss.model.encoders.spec import EncoderSpec

if TYPE_CHECKING:
    from sop_faiss.index.search import FeatureIndex
    from sop_faiss.model.encoders.encoder import Encoder


def encoder_of_index(index: FeatureIndex, given: EncoderSpec | None = None) -> Encoder:
    """Open the encoder of an index, and check that it is still the one that the index was built with.

    Args:
        index: remembers how its encoder is opened, unless an earlier version built it.
        given: an encoder to open instead; with an empty `model`, options in place of those that are remembered.

    Raises:
        ConfigError: no encoder is given or remembered, or an option does not apply to it.
        CheckpointError: weights have moved, or are damaged.
        IndexMismatchError: the encoder, its preprocessing or its pooling is not the index's.
    """
    if given is not None and given.model:
        encoder = encoder_of_spec(given)
        index.check_encoder(encoder)
        return encoder
    remembered, name = index.manifest.encoder_spec, index.manifest.encoder["name"]
    if remembered is None:
        raise ConfigError(f"{index.directory} does not say how its encoder is opened: give `model`, which was {name}")
    given = given or EncoderSpec("")
    spec = recalled_spec(remembered, index.directory, given)
    try:
        encoder = encoder_of_spec(spec)
    except SopError as error:
        raise type(error)(f"{error}; {index.directory} remembers this encoder: give `model` to name a copy") from None
    difference = index.manifest.space.difference(FeatureSpace.of_encoder(encoder))
    as_remembered = replace(given, device="auto", cache=None) == EncoderSpec("")
    if difference is not None and difference.what == "encoder" and as_remembered:
        raise IndexMismatchError(
            f"{spec.weights or spec.model} has changed since {index.directory} was built with it "
            f"({difference.values}): restore it, name a copy of what it was by `model`, or build the index again"
        )
    index.check_encoder(encoder)
    return encoder
