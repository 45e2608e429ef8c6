"""The frozen encoder that a run distills (`distill.teacher`)."""

from __future__ import annotations

import re
from pathlib import Path

from sop_faiss.config import Config
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import check_size, encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec

_ARGUMENT = re.compile(r"`(weights|arch|by_position|pooling)\b([^`]*)`")


def open_frozen_teacher(config: Config) -> Encoder:
    """Open the teacher of a run on the CPU, in evaluation mode and without gradients.

    Raises:
        CheckpointError: its weights are missing, damaged, or of another model.
        ConfigError: it is unknown, has random weights, does not take views of the size of a phase, or is a choice of
            `sop-index tune` with a whitening, several scales or mirrored images, which are not applied to views.
    """
    settings = config.distill
    spec = EncoderSpec(
        settings.teacher,
        Path(settings.weights) if settings.weights else None,
        settings.arch or None,
        by_position=settings.by_position,
        pooling=settings.pooling or None,
        size=config.views.global_size,
        device="cpu",
    )
    named = f"distill.teacher = {settings.teacher}"
    if spec.kind == "config":
        raise ConfigError(f"{named} would be random weights, from which nothing can be learned: name a trained encoder")
    if spec.kind == "timm" and spec.weights is None:
        raise ConfigError(
            f"{named} comes without weights: give distill.weights=FILE (sop-train --teacher M --weights FILE)"
        )
    size_of = "views.global_size"
    try:
        encoder = encoder_of_spec(spec)
        for place, phase in enumerate(config.train.phases):
            size_of = f"train.phases[{place}].global_size"
            check_size(encoder, phase.global_size)
    except (CheckpointError, ConfigError) as error:
        said = _ARGUMENT.sub(r"distill.\1\2", str(error)).replace("`size`", size_of).replace("image size", size_of)
        raise type(error)(f"{named}: {said}") from None
    if encoder.whitening is not None or encoder.preprocess.scales != (1.0,) or encoder.preprocess.mirrored:
        raise ConfigError(
            f"{named} has a whitening, several scales or mirrored images, which views do not get: name the encoder "
            "itself"
        )
    return encoder
