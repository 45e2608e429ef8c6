"""The training images of a configuration, and their stream without a network: to train on, to look at, to time."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Int64

from sop_faiss.config import Config
from sop_faiss.data.source import ImageSource, open_source
from sop_faiss.data.stream import Batches, split_holdout
from sop_faiss.errors import ConfigError
from sop_faiss.model.backbone import seeded_backbone

__all__ = ["mask_unit", "open_batches", "open_training_images"]


def open_training_images(
    config: Config,
) -> tuple[ImageSource, Int64[np.ndarray, " m"], Int64[np.ndarray, " h"]]:
    """All images of `data.train`, which of them are trained on, and which are held out.

    Raises:
        ConfigError: `data.train` is empty.
        DataError: the images cannot be opened.
    """
    if not config.data.train:
        raise ConfigError("data.train is empty: name the training images, for example data.train='photos-*.tar'")
    source = open_source(config.data.train)
    trained, held_out = split_holdout(len(source), config.data.holdout_share, config.train.seed)
    return source, trained, held_out


def open_batches(config: Config) -> Batches:
    """The stream that a run with this configuration trains on, in one process.

    Raises:
        ConfigError: settings are impossible.
        DataError: the images cannot be opened.
    """
    source, trained, _ = open_training_images(config)
    device = torch.device("cuda" if config.train.device != "cpu" and torch.cuda.is_available() else "cpu")
    return Batches(source, trained, config, mask_unit(config), device=device)


def mask_unit(config: Config) -> int:
    """Side of a mask's unit in pixels, which the backbone knows.

    Raises:
        ConfigError: the backbone is unknown, or a global view cannot be cut into such units.
    """
    backbone = seeded_backbone(config.model, config.views.global_size, config.train.seed)
    backbone.check_size("views.global_size", config.views.global_size)
    return backbone.patch_size
