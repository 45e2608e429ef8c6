"""The frozen encoder that a run distills (`distill.teacher`)."""

from __future__ import annotations

import re
from pathlib import Path

from sop_faiss.config import DistillConfig
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec

__all__ = ["open_frozen_teacher"]

_ARGUMENT = re.compile(r"`(weights|arch|by_position|pooling)\b([^`]*)`")


def open_frozen_teacher(settings: DistillConfig, size: int) -> Encoder:
    """Open the teacher on the CPU, in evaluation mode and without gradients.

    Args:
        settings: say which.
        size: side of the views that it will see, in pixels.

    Raises:
        CheckpointError: its weights are missing, damaged, or of another model.
        ConfigError: it is unknown, does not take views of this size, or has random weights.
    """
    spec = EncoderSpec(
        settings.teacher,
        Path(settings.weights) if settings.weights else None,
        settings.arch or None,
        by_position=settings.by_position,
        pooling=settings.pooling or None,
        size=size,
        device="cpu",
    )
    named = f"distill.teacher = {settings.teacher}"
    if spec.kind == "config":
        raise ConfigError(f"{named} would be random weights, from which nothing can be learned: name a trained encoder")
    if spec.kind == "timm" and spec.weights is None:
        raise ConfigError(
            f"{named} comes without weights: give distill.weights=FILE (sop-train --teacher M --weights FILE)"
        )
    try:
        return encoder_of_spec(spec)
    except (CheckpointError, ConfigError) as error:
        said = _ARGUMENT.sub(r"distill.\1\2", str(error)).replace("`size`", "views.global_size")
        raise type(error)(f"{named}: {said}") from None
