"""The networks for small images: their shapes and weights, masks, and that all of the package takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from sop_faiss.config import ModelConfig, load_config
from sop_faiss.errors import ConfigError
from sop_faiss.model.backbones.build import seeded_backbone
from sop_faiss.model.encoders.load import encoder_of_spec, load_encoder
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.model.networks import Student
from sop_faiss.verbs.finding.index_build import build
from sop_faiss.verbs.training.export import export_run
from sop_faiss.verbs.training.train import run_training
from tests.encoders import random_images
from tests.images import write_shards
from tests.messages import assert_one_line
from tests.runs import networks_of, tiny_config

RESNET = ("model.backbone=resnet_small", "model.embed_dim=32", "model.depth=1", "masks.kind=none", "sop.patch.weight=0")
RESNET += ("model.patch_size=null", "model.num_heads=null", "model.drop_path=0")
STEM = ("model.backbone=vit_tiny_convstem", "model.patch_size=4", "model.embed_dim=24")
BOTH = pytest.mark.parametrize("overrides", [RESNET, STEM], ids=["resnet_small", "vit_tiny_convstem"])


def small(name: str, **sizes: int) -> ModelConfig:
    return ModelConfig(backbone=name, drop_path=0.0, **sizes)


def weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_residual_network_keeps_the_size_then_halves_it_twice() -> None:
    backbone = seeded_backbone(small("resnet_small"), 32, 0).eval()
    network = backbone.trunk
    assert weights(network) == 307_360 and backbone.patch_size == 4
    maps = {}
    for name in ("act1", "layer1", "layer2", "layer3"):
        network.get_submodule(name).register_forward_hook(
            lambda _, __, made, name=name: maps.update({name: made.shape})
        )
    tokens = backbone(random_images(32, 2))
    assert list(maps.values()) == [(2, 32, 32, 32), (2, 32, 32, 32), (2, 64, 16, 16), (2, 128, 8, 8)]
    torch.testing.assert_close(tokens.patches.mean(1), tokens.cls)
    assert tokens.cls.shape == (2, 128) and tokens.grid == (8, 8)
    assert all(not block.bn2.weight.any() for stage in (1, 2, 3) for block in network.get_submodule(f"layer{stage}"))


def test_depth_and_width_of_the_residual_network_can_be_chosen() -> None:
    backbone = seeded_backbone(small("resnet_small", depth=2, embed_dim=48), 64, 0)
    assert backbone.feature_dim == 48 and [len(backbone.trunk.get_submodule(f"layer{n}")) for n in (1, 2, 3)] == [2] * 3
    assert backbone(random_images(64, 2)).grid == (16, 16)


def test_the_stem_makes_the_tokens_that_timms_own_forward_pass_has() -> None:
    backbone = seeded_backbone(small("vit_tiny_convstem"), 32, 0).eval()
    images = random_images(32)
    with torch.no_grad():
        tokens, expected = backbone(images), backbone.trunk.forward_features(images)
    torch.testing.assert_close(tokens.cls, expected[:, 0])
    torch.testing.assert_close(tokens.patches, expected[:, 1:])
    assert (backbone.patch_size, backbone.feature_dim, tokens.grid) == (8, 192, (4, 4))
    assert [layer.stride for layer in backbone.trunk.patch_embed.proj if isinstance(layer, nn.Conv2d)] == [
        *[(2, 2)] * 3,
        (1, 1),
    ]
    assert backbone(random_images(16, 1)).patches.shape == (1, 4, 192)


def test_a_masked_token_comes_after_the_stem() -> None:
    """What only masked patches see changes nothing: a pixel in the middle of nine masked ones."""
    backbone = seeded_backbone(small("vit_tiny_convstem", depth=1), 40, 0).eval()
    mask = torch.zeros(1, 25, dtype=torch.bool)
    mask[0, [6, 7, 8, 11, 12, 13, 16, 17, 18]] = True
    clean = random_images(40, 1)
    scribbled = clean.clone()
    scribbled[0, :, 20, 20] = 7.0
    with torch.no_grad():
        torch.testing.assert_close(backbone(clean, mask).patches, backbone(scribbled, mask).patches)
        assert not torch.allclose(backbone(clean).patches, backbone(scribbled).patches)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (small("resnet_small", patch_size=8), "model.patch_size does not apply to resnet_small"),
        (small("resnet_small", num_heads=8), "model.num_heads does not apply to resnet_small"),
        (ModelConfig(backbone="resnet_small", position_resize="dino"), "model.position_resize = dino"),
        (small("vit_tiny_convstem", patch_size=6), "model.backbone = vit_tiny_convstem with {'patch_size': 6}"),
        (small("vit_tiny_convstem", patch_size=1), "patches of 2, 4, 8"),
        (small("vit_tiny_convstem", patch_size=64), "exceeds views.global_size"),
        (small("vit_tiny_convstem", embed_dim=25), "model.backbone = vit_tiny_convstem"),
        (small("vit_tiny_convstem", window_size=7), "model.window_size does not apply"),
        (small("resnet_smal"), "did you mean resnet_small"),
    ],
)
def test_sizes_that_do_not_fit_are_one_line(config: ModelConfig, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        seeded_backbone(config, 32, 0)
    assert_one_line(error, named)


@BOTH
def test_batch_norms_want_the_batch_in_one_part(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        networks_of(tiny_config(tmp_path, *overrides, "train.accumulate=2"))
    assert_one_line(error, "train.accumulate = 2 with model.batchnorm = auto")
    student, _ = networks_of(tiny_config(tmp_path, *overrides, "train.accumulate=2", "model.batchnorm=frozen"))
    norms = [module for module in student.train().modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms and not any(norm.training for norm in norms)


def test_batch_norms_see_all_global_views_of_a_step_together(tmp_path: Path) -> None:
    student, _ = networks_of(tiny_config(tmp_path, *RESNET))
    seen: list[int] = []
    student.backbone.trunk.bn1.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    Student(student)(torch.rand(2, 3, 3, 16, 16), torch.rand(1, 3, 3, 8, 8), None, None, True)
    assert seen == [6, 3]


@BOTH
def test_it_trains_resumes_exports_and_indexes(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    shards = write_shards(tmp_path / "train", classes=2, per_class=6, size=20)
    settings = (f"data.train={shards}", "train.epochs=2", "views.local_count=0", *overrides)
    config = tiny_config(tmp_path, *settings)
    assert run_training(config, tmp_path / "straight").step == 4
    run_training(tiny_config(tmp_path, *settings, "train.stop_after_steps=3"), tmp_path / "run")
    assert run_training(config, tmp_path / "run", resume=True).step == 4
    straight, run = (EncoderSpec(str(tmp_path / name), device="cpu") for name in ("straight", "run"))
    fingerprint = encoder_of_spec(run).fingerprint
    assert encoder_of_spec(straight).fingerprint == fingerprint
    exported = export_run(tmp_path / "run", tmp_path / "export")
    assert exported.fingerprint == fingerprint == load_encoder(str(tmp_path / "export")).fingerprint
    card = (tmp_path / "export" / "README.md").read_text()
    assert "import sop_faiss.model.backbones" in card  # timm alone does not know the name
    network = timm.create_model(f"local-dir:{tmp_path / 'export'}", pretrained=True).eval()
    with torch.no_grad():
        features = encoder_of_spec(run)(random_images(16))
        torch.testing.assert_close(network(random_images(16)), features, rtol=1e-4, atol=1e-5)
    assert build(tmp_path / "index", encoder=run, data=str(shards)).count == 12


def test_the_packaged_configuration_is_that_of_the_small_vit_with_another_network() -> None:
    ours, vits = (load_config(name, ["data.train=x"]) for name in ("cifar10_resnet_small", "cifar10_vit_micro"))
    assert (ours.model.backbone, ours.model.batchnorm, ours.optim.base_lr) == ("resnet_small", "batch", 4e-3)
    assert (ours.views, ours.sop, ours.loss, ours.train) == (vits.views, vits.sop, vits.loss, vits.train)
    fresh = EncoderSpec("config:cifar10_resnet_small", random_weights=0, device="cpu")
    assert encoder_of_spec(fresh).feature_dim == 128
