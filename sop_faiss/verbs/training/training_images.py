"""The training images of a configuration, and their stream without a network: to train, to preview, to profile."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from sop_faiss.config import Config
from sop_faiss.data.images.source import ImageSource, find_streams, open_source
from sop_faiss.data.images.verified_image import WholeImage, read_whole
from sop_faiss.data.sequential_stream import SequentialBatches, stand_in_positions
from sop_faiss.data.shards.address import hide_secrets
from sop_faiss.data.shards.prefetch import fetch_ahead
from sop_faiss.data.shards.shard_stream import ShardStream
from sop_faiss.data.stream import Batches, epoch_order, split_holdout
from sop_faiss.errors import ConfigError
from sop_faiss.model.backbones.build import seeded_backbone
from sop_faiss.model.encoders.preprocess import Preprocess
from sop_faiss.model.initial_weights import resolve_init

_CPU = torch.device("cpu")
_DRAWN = 512
"""Images whose patches are looked at: 64 of each are many more than the numbers of a patch of 16 px (768)."""


def open_training_images(
    config: Config,
) -> tuple[ImageSource | ShardStream, Int64[np.ndarray, " m"], Int64[np.ndarray, " h"]]:
    """Open the images of `data.train`; return them, the positions that are trained on, and those held out.

    Raises:
        ConfigError: `data.train` is empty.
        DataError: the images cannot be opened.
        UnreachableError: a server does not answer.
    """
    if not config.data.train:
        raise ConfigError("data.train is empty: name the training images, for example data.train='photos-*.tar'")
    if config.data.access == "sequential":
        stream = ShardStream(hide_secrets(config.data.train), find_streams(config.data.train))
        return stream, stand_in_positions(config), np.empty(0, np.int64)
    source = open_source(config.data.train, config.data)
    trained, held_out = split_holdout(len(source), config.data.holdout_share, config.train.seed)
    return source, trained, held_out


def open_indexed_images(config: Config, wanted_by: str) -> tuple[ImageSource, Int64[np.ndarray, " m"]]:
    """Open the images with random access; return them and the positions that are trained on.

    Args:
        wanted_by: what needs random access, for the message.

    Raises:
        ConfigError: as `open_training_images`, or the images are read in sequence.
        DataError: the images cannot be opened.
        UnreachableError: a server does not answer.
    """
    if config.data.access == "sequential":
        raise ConfigError(
            f"{wanted_by} reads single images, which data.access = sequential cannot do: add data.access=auto "
            "data.samples_per_epoch=0"
        )
    source, trained, _ = open_training_images(config)
    assert not isinstance(source, ShardStream)
    return source, trained


def draw_images(
    config: Config, source: ImageSource | ShardStream, trained: Int64[np.ndarray, " m"]
) -> Float32[Tensor, "n 3 s s"]:
    """Return up to 512 training images as the k-NN protocol shows them: a central square of `views.global_size`.

    They are the first of the first epoch, the same on every rank; bad ones are left out.

    Raises:
        ConfigError: the images are read in sequence.
    """
    if isinstance(source, ShardStream):
        raise ConfigError(
            f"model.first_layer = {config.model.first_layer} reads single images, which data.access = sequential "
            "cannot do: set data.access=auto data.samples_per_epoch=0, or model.first_layer=random"
        )
    views, data = config.views, config.data
    preprocess = Preprocess.square(views.global_size, mean=views.mean, std=views.std)
    first = trained[epoch_order(len(trained), config.train.seed, 0)[:_DRAWN]]
    with fetch_ahead(source, lambda: first):
        read = [read_whole(source, position, data.max_image_pixels, data.top_value) for position in first.tolist()]
    squares = [preprocess.apply(np.asarray(one.image)) for one in read if isinstance(one, WholeImage)]
    shape = (len(squares), views.global_size, views.global_size, 3)
    return preprocess.normalize(torch.from_numpy(np.array(squares, np.uint8).reshape(shape)))


def make_batches(
    config: Config,
    source: ImageSource | ShardStream,
    trained: Int64[np.ndarray, " m"],
    patch_size: int,
    ranks: tuple[int, int] = (0, 1),
    device: torch.device = _CPU,
) -> Batches:
    """Make the stream of one rank; `ranks` are rank and world size.

    Raises:
        ConfigError: the batch is larger than the data set, or cannot be split equally.
    """
    if isinstance(source, ShardStream):
        return SequentialBatches(source, config, patch_size, *ranks, device)
    return Batches(source, trained, config, patch_size, *ranks, device)


def open_batches(config: Config, wanted_by: str) -> Batches:
    """Open the stream of a run with this configuration, for one process; arguments as `open_indexed_images`.

    Raises:
        ConfigError: a setting is impossible.
        DataError: the images cannot be opened.
        UnreachableError: a server does not answer.
    """
    source, trained = open_indexed_images(config, wanted_by)
    return Batches(source, trained, config, mask_unit(config), device=training_device(config))


def training_device(config: Config) -> torch.device:
    """Return the kind of device that a run would use, which this machine need not have."""
    wants_cuda = config.train.device == "cuda" or (config.train.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if wants_cuda else "cpu")


def mask_unit(config: Config) -> int:
    """Return the side of a mask's unit in pixels, which depends on the backbone.

    Raises:
        ConfigError: the backbone is unknown, or a global view cannot be divided into such units.
    """
    config = resolve_init(config, weights_needed=False)
    backbone = seeded_backbone(config.model, config.views.global_size, config.train.seed)
    backbone.check_size("views.global_size", config.views.global_size)
    return backbone.patch_size
