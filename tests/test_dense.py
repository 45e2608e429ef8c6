"""Patch tokens of frames: which map, at which stride, of which sizes."""

from __future__ import annotations

import pytest
import torch

from sop_faiss import load_encoder
from sop_faiss.errors import ConfigError
from sop_faiss.model.encoders.dense import DenseEncoder
from sop_faiss.model.encoders.encoder import Encoder


def encoder_of(name: str) -> Encoder:
    return load_encoder(f"timm:{name}", random_weights=0)


def test_tokens_of_a_vit_are_its_own() -> None:
    encoder = encoder_of("test_vit")
    dense = DenseEncoder(encoder)
    assert dense.stride == dense.multiple == 16 and DenseEncoder(encoder, 16).stride == 16
    images = torch.randn(1, 3, 32, 64, generator=torch.Generator().manual_seed(0))
    tokens, grid = dense(images)
    assert grid == (2, 4) and torch.equal(tokens, encoder.tokens(images)[1].patches)
    with pytest.raises(ConfigError, match="stride"):
        DenseEncoder(encoder, 8)


def test_maps_of_a_convolutional_network() -> None:
    encoder = encoder_of("test_efficientnet")
    last = DenseEncoder(encoder)
    images = torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    assert last.stride == 32 and last(images)[1] == (2, 3)
    dense = DenseEncoder(encoder, 8)
    tokens, grid = dense(images)
    assert dense.stride == 8 and grid == (8, 12)
    maps = encoder.model.backbone.forward_intermediates(images, intermediates_only=True)  # type: ignore[operator]
    (expected,) = (each for each in maps if each.shape[2:] == grid)
    assert torch.equal(tokens[0], expected[0].flatten(1).T)
    for stride in (3, 64):
        with pytest.raises(ConfigError, match=f"stride={stride}"):
            DenseEncoder(encoder, stride)


def test_sizes_of_frames_are_those_of_dino() -> None:
    dense = DenseEncoder(encoder_of("test_vit"))
    assert dense.frame_size(480, 854, 480) == (480, 832)
    assert dense.frame_size(854, 480, 480) == (832, 480)
    assert dense.frame_size(480, 480, 480) == (480, 448)  # as DINO's: the width counts as the longer
    assert dense.frame_size(480, 910, 240) == (240, 448)
    assert dense.frame_size(64, 110, 32) == (32, 48)  # below 64 pixels: multiples of the patch
    with pytest.raises(ConfigError, match="size=8"):
        dense.frame_size(480, 854, 8)


def test_one_size_only_is_refused() -> None:
    encoder = encoder_of("test_vit")
    encoder.model.fixed = True
    with pytest.raises(ConfigError, match="whole frames"):
        DenseEncoder(encoder)
