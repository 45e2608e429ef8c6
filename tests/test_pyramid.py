"""Four maps of strides 4 to 32 of every kind of network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sop_faiss import load_encoder
from sop_faiss.errors import ConfigError
from sop_faiss.model.pyramid import STRIDES, Pyramid
from tests.encoders import random_images


@pytest.mark.parametrize("name", ["test_vit", "test_efficientnet", "test_convnext"])
def test_four_maps_of_any_size(name: str) -> None:
    encoder = load_encoder(f"timm:{name}", random_weights=0)
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    pyramid = Pyramid(encoder)
    maps = pyramid(random_images(64, 2, 96))
    assert [tuple(each.shape) for each in maps] == [
        (2, width, 64 // stride, 96 // stride) for width, stride in zip(pyramid.widths, STRIDES, strict=True)
    ]
    sum(each.square().sum() for each in maps).backward()  # type: ignore[union-attr]
    with torch.no_grad():
        for value in pyramid.parameters():
            value.add_(1.0)
    assert all(torch.equal(value, before[key]) for key, value in encoder.state_dict().items())
    assert all(value.grad is not None for value in pyramid.resize.parameters())
    assert next(iter(pyramid.trunk.parameters())).grad is not None


@pytest.mark.parametrize("norms", [True, False])
def test_maps_of_a_vit_are_its_tokens_after_four_blocks(norms: bool) -> None:
    encoder = load_encoder("timm:vit_tiny_patch16_224", random_weights=0)
    pyramid = Pyramid(encoder, norms=norms).eval()
    with torch.no_grad():
        encoder.model.backbone.norm.bias.fill_(0.5)  # type: ignore[union-attr, operator]
        pyramid.trunk.norm.bias.fill_(0.5)
    trunk, made = pyramid.trunk, []
    for number in (3, 5, 7, 11):
        trunk.blocks[number].register_forward_hook(lambda module, given, tokens: made.append(tokens))
    with torch.no_grad():
        maps = pyramid(random_images(64, 1, 96))
        normed = [trunk.norm(each) if norms else each for each in made]
        blocks = [each[:, 1:].transpose(1, 2).unflatten(2, (4, 6)) for each in normed]
        last = encoder.tokens(random_images(64, 1, 96))[1].patches.transpose(1, 2).unflatten(2, (4, 6))
    assert torch.allclose(maps[2], blocks[2], atol=1e-5) and torch.allclose(blocks[3], last, atol=1e-5) == norms
    assert torch.equal(maps[3], nn.functional.max_pool2d(blocks[3], 2))
    for place in (0, 1):
        assert torch.allclose(maps[place], pyramid.resize[place](blocks[place]), atol=1e-5)


def test_new_layers_follow_the_seed_and_batch_norms_can_stay() -> None:
    encoder = load_encoder("config:digits_demo", random_weights=0)
    first, same, other = (list(Pyramid(encoder, seed).resize.parameters()) for seed in (1, 1, 2))
    assert all(map(torch.equal, first, same)) and not all(map(torch.equal, first, other))
    network = load_encoder("timm:test_efficientnet", random_weights=0)
    for frozen in (True, False):
        trunk: Any = Pyramid(network, freezes_batchnorm=frozen).train().trunk
        modes = {module.training for module in trunk.modules() if isinstance(module, nn.BatchNorm2d)}
        assert modes == {not frozen} and trunk.training


def test_networks_without_such_maps_are_refused() -> None:
    encoder = load_encoder("timm:test_vit", random_weights=0)
    patches: Any = encoder.model.backbone.patch_embed
    patches.patch_size = (14, 14)
    with pytest.raises(ConfigError, match="14 pixels"):
        Pyramid(encoder)
    encoder.model.fixed = True
    with pytest.raises(ConfigError, match="any size"):
        Pyramid(encoder)
    network: Any = load_encoder("timm:test_efficientnet", random_weights=0)
    network.model.backbone.feature_info = network.model.backbone.feature_info[:2]
    with pytest.raises(ConfigError, match="strides 4 to 32"):
        Pyramid(network)
