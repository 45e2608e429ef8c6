"""Backbones against timm's own features, masking, and impossible settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sop_faiss.config import Config, MasksConfig, ModelConfig, SopConfig
from sop_faiss.errors import ConfigError
from sop_faiss.model.backbones.build import build_backbone, seeded_backbone

TINY_VIT = ModelConfig(backbone="vit_tiny_patch16_224", patch_size=8, embed_dim=24, depth=2, num_heads=2)
SWIN = ModelConfig(backbone="swin_tiny_patch4_window7_224", window_size=14)


def images(side: int, count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def swin():
    return seeded_backbone(SWIN, 224, 0).eval()


def test_vit_tokens_equal_timm(side=32):
    backbone = seeded_backbone(TINY_VIT, 32, 0).eval()
    tokens = backbone(images(32))
    expected = backbone.trunk.forward_features(images(32))
    torch.testing.assert_close(tokens.cls, expected[:, 0])
    torch.testing.assert_close(tokens.patches, expected[:, 1:])
    assert (backbone.feature_dim, backbone.patch_size) == (24, 8)


def test_vit_takes_views_of_other_sizes():
    backbone = seeded_backbone(TINY_VIT, 32, 0).eval()
    assert backbone(images(16)).patches.shape == (2, 4, 24)
    assert backbone(torch.zeros(1, 3, 16, 40)).patches.shape == (1, 10, 24)


def test_a_vit_mask_hides_exactly_its_patches():
    backbone = seeded_backbone(TINY_VIT, 32, 0).eval()
    torch.nn.init.normal_(backbone.mask_token)
    mask = torch.zeros(2, 16, dtype=torch.bool)
    mask[0, 5] = True
    clean = images(32)
    scribbled = clean.clone()
    scribbled[0, :, 8:16, 8:16] = 7.0  # patch 5 of a 4 x 4 grid: row 1, column 1
    torch.testing.assert_close(backbone(clean, mask).patches, backbone(scribbled, mask).patches)
    assert not torch.allclose(backbone(clean, mask).patches[0], backbone(clean).patches[0])
    torch.testing.assert_close(backbone(clean, mask).patches[1], backbone(clean).patches[1])


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_dropped_patches_are_those_that_the_blocks_never_see(name, checkpoints):
    """By hand: each view by itself, through timm's own parts, with its own patches."""
    backbone = seeded_backbone(replace(TINY_VIT, backbone=name), 32, 0)
    backbone.drop_hidden(Config())
    if checkpoints:
        backbone.checkpoint_activations()
    model, mask = backbone.trunk, torch.zeros(2, 16, dtype=torch.bool)
    mask[0, :8] = mask[1, ::2] = True
    prefix = model.num_prefix_tokens
    for view, hidden in zip(images(32), mask, strict=True):
        embedded = model._pos_embed(model.patch_embed(view[None]))
        kept = torch.cat([embedded[:, :prefix], embedded[:, prefix:][:, ~hidden]], 1)
        expected = model.norm(model.blocks(model.norm_pre(kept)))
        tokens = backbone(view[None], hidden[None])
        torch.testing.assert_close(tokens.cls, expected[:, 0])
        torch.testing.assert_close(tokens.patches, expected[:, prefix:])
        torch.testing.assert_close(backbone.read(view[None], hidden[None]), expected[:, 0])
    both = backbone.read(images(32), mask)
    torch.testing.assert_close(both, torch.cat([backbone.read(images(32)[[i]], mask[[i]]) for i in range(2)]))
    torch.testing.assert_close(backbone.read(images(32), mask & False), backbone.read(images(32)))
    both.sum().backward()
    assert backbone.mask_token.grad is None and model.pos_embed.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "test_resnet", "eva02_tiny_patch14_224"])
def test_other_backbones_drop_no_patches(name):
    with pytest.raises(ConfigError, match=rf"^masks\.drop = 0\.5 does not apply to {name}") as caught:
        config = Config(
            model=ModelConfig(backbone=name),
            masks=MasksConfig(kind="none", drop=0.5),
            sop=SopConfig(patch=replace(SopConfig().patch, weight=0.0)),
        )
        seeded_backbone(config.model, 224, 0).drop_hidden(config)
    assert "\n" not in str(caught.value)


def test_swin_tokens(swin):
    with torch.no_grad():
        tokens = swin(images(64, 1))
        expected = swin.trunk.forward_features(images(64, 1)).flatten(1, 2)
    torch.testing.assert_close(tokens.patches, expected)
    torch.testing.assert_close(tokens.cls, expected.mean(1))
    assert (swin.feature_dim, swin.patch_size) == (768, 32)
    assert swin.trunk.layers[0].blocks[0].window_size[0] == 14


def test_a_swin_mask_unit_is_32_pixels(swin):
    mask = torch.tensor([[False, False, True, False]])
    clean = images(64, 1)
    scribbled = clean.clone()
    scribbled[:, :, 32:, :32] = 7.0
    with torch.no_grad():
        torch.testing.assert_close(swin(clean, mask).patches, swin(scribbled, mask).patches)
        assert not torch.allclose(swin(clean).patches, swin(scribbled).patches)


def test_a_seed_determines_the_weights_and_leaves_the_global_generator():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = seeded_backbone(TINY_VIT, 32, 1)
    assert torch.equal(torch.rand(1), expected)
    same, other = seeded_backbone(TINY_VIT, 32, 1), seeded_backbone(TINY_VIT, 32, 2)
    key = "trunk.blocks.0.mlp.fc1.weight"
    assert torch.equal(first.state_dict()[key], same.state_dict()[key])
    assert not torch.equal(first.state_dict()[key], other.state_dict()[key])


def test_the_scale_of_the_first_class_token():
    plain, large = (
        seeded_backbone(replace(TINY_VIT, embed_dim=512, **scale), 32, 3).state_dict()
        for scale in ({}, {"cls_token_std": 0.02})
    )
    assert 0 < plain["trunk.cls_token"].std() < 2e-6
    assert large["trunk.cls_token"].std() == pytest.approx(0.02, rel=0.2)
    assert all(torch.equal(plain[name], large[name]) for name in plain if name != "trunk.cls_token")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(backbone="vit_smal_patch16_224"), "did you mean vit_small_patch16_224"),
        (ModelConfig(backbone="beit_base_patch16_224"), "model.backbone is a Beit"),
        (ModelConfig(backbone="swin_tiny_patch4_window7_224", embed_dim=12), "does not apply"),
        (ModelConfig(backbone="vit_tiny_patch16_224", window_size=7), "does not apply"),
        (ModelConfig(backbone="swin_tiny_patch4_window7_224", layer_scale=1e-5), "model.layer_scale does not apply"),
        (ModelConfig(backbone="resnet_small", registers=4), "model.registers does not apply"),
        (ModelConfig(backbone="vit_tiny_patch16_224", patch_size=64), "exceeds views.global_size"),
        (ModelConfig(backbone="vit_tiny_patch16_224", embed_dim=25), "model.backbone"),
        (ModelConfig(backbone="vit_medium_patch16_gap_240"), r"no \[CLS\] token"),
        (ModelConfig(backbone="vit_tiny_r_s16_p8_224"), "convolutional stem"),
    ],
)
def test_impossible_backbones_are_one_line(config, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build_backbone(config, 32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "said",
    [
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to ...",
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "Storage size calculation overflowed with sizes=[16384, 99999999]",
    ],
)
def test_a_backbone_too_large_for_the_memory_says_what_to_lower(monkeypatch, said):
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr("timm.create_model", refuse)
    with pytest.raises(ConfigError, match=r"model\.embed_dim or model\.depth$"):
        seeded_backbone(TINY_VIT, 32, seed=0)


def test_sizes_that_cannot_be_cut_into_patches():
    with pytest.raises(ConfigError, match=r"views\.local_size = 20 .*views\.local_size=16"):
        seeded_backbone(TINY_VIT, 32, 0).check_size("views.local_size", 20)
