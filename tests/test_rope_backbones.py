"""timm's ViTs with registers, RoPE and SwiGLU as backbones, against timm's own forward pass; trained and exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.eva import Eva
from torch import nn

from sop_faiss import load_encoder
from sop_faiss.config import ModelConfig
from sop_faiss.errors import ConfigError
from sop_faiss.model.backbones.backbone import VitBackbone
from sop_faiss.model.backbones.build import build_backbone, seeded_backbone, shape_of
from sop_faiss.model.initial_weights import load_initial_weights
from sop_faiss.verbs.training.export import export_run
from sop_faiss.verbs.training.train import run_training
from tests.encoders import random_images
from tests.images import write_shards
from tests.messages import assert_one_line
from tests.runs import tiny_config

READS_ROWS = {
    "vit_small_patch14_reg4_dinov2": True,
    "vit_small_patch16_dinov3": True,
    "vit_small_plus_patch16_dinov3": True,  # SwiGLU
    "vit_small_patch16_dinov3_qkvb": True,
    "eva02_tiny_patch14_224": True,  # absolute positions too, norm after pooling, queries with a bias and keys without
    "eva02_base_patch16_clip_224": True,  # queries, keys and values apart, norm within attention
    "eva02_enormous_patch14_clip_224": False,  # norms after the branches
    "vit_small_patch16_rope_mixed_ape_224": True,  # learned rotations of each block
    "vit_pe_core_tiny_patch16_384": True,  # attention pooling in timm
}


PLAIN = ("vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2")
"""Of timm's `VisionTransformer`, not its `Eva`."""


def backbone_of(name: str, depth: int = 2) -> VitBackbone:
    """A tiny one whose weights, scales and biases are far from their initial values."""
    config = ModelConfig(backbone=name, patch_size=8, embed_dim=32, depth=depth, num_heads=2)
    backbone = seeded_backbone(config, 32, 0).eval()
    torch.manual_seed(1)
    for parameter in backbone.parameters():
        nn.init.normal_(parameter, std=0.3)
    assert isinstance(backbone, VitBackbone)
    return backbone


@pytest.mark.parametrize("name", READS_ROWS)
@pytest.mark.parametrize("size", [(32, 32), (16, 40)])
def test_tokens_are_timms_own(name: str, size: tuple[int, int]) -> None:
    backbone = backbone_of(name)
    images = random_images(size[0], width=size[1])
    with torch.no_grad():
        tokens, expected = backbone(images), backbone.trunk.forward_features(images)
    assert torch.equal(tokens.cls, expected[:, 0])
    assert torch.equal(tokens.patches, expected[:, backbone.trunk.num_prefix_tokens :])
    assert tokens.grid == (size[0] // 8, size[1] // 8)


@pytest.mark.parametrize("name", READS_ROWS)
def test_a_mask_hides_exactly_its_patches(name: str) -> None:
    backbone = backbone_of(name)
    mask = torch.zeros(3, 16, dtype=torch.bool)
    mask[0, 5] = True
    clean, scribbled = random_images(), random_images()
    scribbled[0, :, 8:16, 8:16] = 7.0  # patch 5 of a 4 x 4 grid: row 1, column 1
    with torch.no_grad():
        masked, plain = backbone(clean, mask), backbone(clean)
        torch.testing.assert_close(masked.patches, backbone(scribbled, mask).patches)
    assert not torch.allclose(masked.patches[0], plain.patches[0])
    torch.testing.assert_close(masked.patches[1:], plain.patches[1:])


@pytest.mark.parametrize(("name", "reads_rows"), READS_ROWS.items())
@pytest.mark.parametrize("checkpoints", [False, True])
def test_what_is_read_and_its_gradients_are_those_of_all_tokens(name: str, reads_rows: bool, checkpoints: bool) -> None:
    ours, whole = backbone_of(name), backbone_of(name)
    if checkpoints:
        ours.checkpoint_activations()
    sizes: list[int] = []
    ours.trunk.blocks[-1].norm2.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].numel() // 32))
    images, mask, patches = random_images(16, width=40), torch.rand(3, 10) < 0.4, torch.tensor([0, 9, 10, 29, 28, 0])
    read, tokens = ours.read(images, mask, patches), whole(images, mask)
    expected = torch.cat([tokens.cls, tokens.patches.flatten(0, 1)[patches]])
    torch.testing.assert_close(read, expected, rtol=1e-5, atol=1e-5)
    count = 10 + ours.trunk.num_prefix_tokens
    assert sizes[0] == (len(read) if reads_rows else 3 * count)
    slopes = torch.randn(read.shape)
    read.backward(slopes)
    expected.backward(slopes)
    for (name_of, one), two in zip(ours.named_parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name_of
        if one.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-4 * max(1.0, float(two.grad.abs().max())))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("vit_medium_patch16_rope_reg1_gap_256", "no [CLS] token"),
        ("vit_so150m_patch16_reg4_gap_256", "no [CLS] token"),
        ("vit_5b_patch16_sapiens2", "model.backbone = vit_5b_patch16_sapiens2"),  # keys shared by 40 named blocks
    ],
)
def test_what_cannot_be_a_backbone_is_one_line(name: str, what: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_backbone(ModelConfig(backbone=name, depth=2, embed_dim=32, num_heads=2), 32)
    assert_one_line(error, what)


def test_positions_that_rotate_are_not_resized_by_dinos_rule() -> None:
    with pytest.raises(ConfigError) as error:
        build_backbone(ModelConfig(backbone="vit_small_patch16_dinov3", depth=1, position_resize="dino"), 32)
    assert_one_line(error, "position_resize")


def test_timms_norm_after_pooling_becomes_the_final_norm(tmp_path: Path) -> None:
    options = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = timm.create_model("eva02_tiny_patch14_224", num_classes=0, img_size=64, **options)
    nn.init.normal_(model.fc_norm.weight)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    config = ModelConfig(
        "eva02_tiny_patch14_224", "timm:eva02_tiny_patch14_224", str(tmp_path / "w.safetensors"), **options
    )
    backbone = seeded_backbone(config, 32, 0)
    load_initial_weights(backbone, config)
    assert torch.equal(backbone.trunk.norm.weight, model.fc_norm.weight)
    assert torch.equal(backbone.trunk.blocks[1].attn.qkv.weight, model.blocks[1].attn.qkv.weight)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_plus_patch16_dinov3"])
def test_registers_and_layer_scale_are_timms(name: str) -> None:
    plain = ModelConfig(name, patch_size=8, embed_dim=32, depth=2, num_heads=2)
    config = replace(plain, layer_scale=0.01, registers=3)
    backbone, own = seeded_backbone(config, 32, 0), seeded_backbone(plain, 32, 0)
    assert backbone.trunk.num_prefix_tokens == 4 and backbone.trunk.reg_token.shape == (1, 3, 32)
    scales = [value for key, value in backbone.named_parameters() if "gamma" in key]
    assert len(scales) == 4 and all((scale == 0.01).all() for scale in scales)
    # Fields that are not set change neither the network nor what identifies an encoder.
    assert set(own.state_dict()) - set(backbone.state_dict()) == set()
    assert shape_of(config) == shape_of(plain) | {"layer_scale": 0.01, "registers": 3}
    assert [*shape_of(plain)] == ["backbone", "patch_size", "embed_dim", "depth", "num_heads", "window_size"]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("vit_tiny_patch16_224", ("model.layer_scale=1e-5", "model.registers=2")),
        ("vit_small_plus_patch16_dinov3", ()),
        ("vit_small_patch14_reg4_dinov2", ("train.checkpoint_activations=true",)),
        ("eva02_tiny_patch14_224", ("model.global_token=mean",)),
        ("vit_small_patch16_rope_mixed_224", ("optim.layer_decay=0.75",)),
    ],
)
def test_runs_train_and_are_exported(tmp_path: Path, name: str, overrides: tuple[str, ...]) -> None:
    shards = write_shards(tmp_path / "train", classes=2, per_class=6, size=20)
    config = tiny_config(tmp_path, f"model.backbone={name}", f"data.train={shards}", "train.epochs=1", *overrides)
    assert run_training(config, tmp_path / "run").step == 2
    assert export_run(tmp_path / "run", tmp_path / "out").cosine > 0.9999
    run, exported = load_encoder(str(tmp_path / "run")), load_encoder(str(tmp_path / "out"))
    assert isinstance(run.model.backbone.trunk, Eva) == (name not in PLAIN)
    assert run.fingerprint == exported.fingerprint
    with torch.no_grad():
        (feature, tokens), again = run.tokens(random_images(16)), exported.tokens(random_images(16))
    assert torch.equal(feature, again[0]) and torch.equal(tokens.patches, again[1].patches)
    assert tokens.grid == again[1].grid == (4, 4)
