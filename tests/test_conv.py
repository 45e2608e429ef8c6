"""Convolutional backbones against timm's own features, hidden pixels, batch norms, and what they lack."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from sop_faiss.config import ModelConfig
from sop_faiss.errors import ConfigError
from sop_faiss.model.backbones.build import build_backbone, seeded_backbone
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.verbs.finding.index_build import build
from sop_faiss.verbs.scoring.knn import KnnOptions, evaluate_knn
from sop_faiss.verbs.training.train import run_training
from tests.encoders import random_images, timm_features
from tests.images import write_shards
from tests.messages import assert_one_line
from tests.runs import conv_config, networks_of

NAMES = ("test_efficientnet", "test_resnet", "test_convnext", "mobilenetv3_small_050")


def conv(name: str, **model: object) -> ModelConfig:
    return ModelConfig(backbone=name, drop_path=0.0, **model)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_the_global_feature_is_what_timms_classifier_would_get(name: str) -> None:
    backbone = seeded_backbone(conv(name), 64, 0).eval()
    network = timm.create_model(name, num_classes=5).eval()
    network.load_state_dict({**network.state_dict(), **backbone.trunk.state_dict()})
    with torch.no_grad():
        tokens = backbone(random_images(64))
    torch.testing.assert_close(tokens.cls, timm_features(network, random_images(64)), rtol=1e-4, atol=1e-5)
    assert tokens.cls.shape == (3, backbone.feature_dim)
    assert tokens.patches.shape == (3, 4, backbone.feature_dim)
    assert backbone.patch_size == 32


@pytest.mark.parametrize("name", ["test_efficientnet", "test_resnet"])
def test_tokens_are_the_maps_positions_in_row_major_order(name: str) -> None:
    backbone = seeded_backbone(conv(name), 64, 0).eval()
    images = random_images(64, width=96)
    with torch.no_grad():
        tokens, last_map = backbone(images), backbone.trunk.forward_features(images)
    torch.testing.assert_close(tokens.patches, last_map.flatten(2).transpose(1, 2))
    torch.testing.assert_close(tokens.patches.mean(1), tokens.cls)


def test_a_mask_hides_exactly_its_pixels() -> None:
    backbone = seeded_backbone(conv("test_resnet"), 64, 0).eval()
    nn.init.normal_(backbone.mask_token)
    mask = torch.tensor([[False, False, True, False], [False] * 4])
    clean = random_images(64, 2)
    scribbled, filled = clean.clone(), clean.clone()
    scribbled[0, :, 32:, :32] = 7.0
    filled[0, :, 32:, :32] = backbone.mask_token.detach()[:, None, None]
    with torch.no_grad():
        torch.testing.assert_close(backbone(clean, mask).patches, backbone(scribbled, mask).patches)
        torch.testing.assert_close(backbone(clean, mask).patches, backbone(filled).patches)
        assert not torch.allclose(backbone(clean, mask).cls[0], backbone(clean).cls[0])
        torch.testing.assert_close(backbone(clean, mask).cls[1], backbone(clean).cls[1])


@pytest.mark.parametrize(
    ("batchnorm", "init", "frozen"),
    [
        ("auto", "", False),
        ("auto", "timm:any", True),
        ("frozen", "", True),
        ("batch", "timm:any", False),
    ],
)
def test_batch_norms_stand_still_or_follow_the_batch(batchnorm: str, init: str, frozen: bool) -> None:
    backbone = seeded_backbone(conv("test_resnet", batchnorm=batchnorm, init=init), 64, 0).train()
    before = {name: value.clone() for name, value in backbone.named_buffers()}
    backbone(random_images(64)).cls.sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in backbone.named_buffers()) == frozen
    norm = next(module for module in backbone.modules() if isinstance(module, nn.BatchNorm2d))
    assert norm.training != frozen and norm.weight.grad is not None  # scale and shift learn in any case
    assert backbone.trunk.training


def test_making_one_draws_as_timm_does() -> None:
    """The black image that shows its width and stride costs no random number and leaves the batch norms alone."""
    torch.manual_seed(3)
    expected = timm.create_model("test_resnet", num_classes=0).state_dict()
    after = torch.rand(1)
    torch.manual_seed(3)
    backbone = build_backbone(conv("test_resnet"), 64)
    assert torch.equal(torch.rand(1), after)
    assert all(torch.equal(value, expected[name]) for name, value in backbone.trunk.state_dict().items())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (conv("test_resnet", patch_size=8), "model.patch_size does not apply to test_resnet: remove it"),
        (conv("beit_base_patch16_224"), "model.backbone is a Beit"),
        (conv("test_vit2"), "model.backbone is a VisionTransformer"),
    ],
)
def test_networks_of_other_kinds_are_one_line(config: ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_backbone(config, 64)
    assert_one_line(error, message)


def test_a_network_without_drop_path_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*names: object, drop_path_rate: float | None = None, **options: object) -> None:
        raise TypeError(f"unexpected keyword argument, {drop_path_rate}")

    monkeypatch.setattr("timm.create_model", refuse)
    with pytest.raises(ConfigError) as error:
        build_backbone(conv("test_resnet"), 64, drop_path=0.1)
    assert_one_line(error, "test_resnet with no overrides: unexpected keyword argument, 0.1; set model.drop_path=0")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("masks.kind=block",), "test_resnet has no tokens to mask: set masks.kind=none, or hide pixels"),
        (("masks.kind=block", "sop.patch.weight=1"), "set masks.kind=none and sop.patch.weight=0, or hide pixels"),
        (("model.global_token=mean",), "model.global_token = mean does not apply to test_resnet"),
        (("train.accumulate=2",), "train.accumulate = 2 with model.batchnorm = auto"),
        (("train.checkpoint_activations=true",), "batch norms of test_resnet would count each batch twice"),
        (
            ("train.checkpoint_activations=true", "model.backbone=dla46x_c", "model.batchnorm=frozen"),
            "true, and DLA cannot do it: leave it out",
        ),
        (("views.local_size=40",), "views.local_size = 40 pixels is not divisible by the backbone's patch of 32"),
    ],
)
def test_what_a_convolutional_network_lacks_is_one_line(tmp_path: Path, overrides: tuple[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        networks_of(conv_config(tmp_path, *overrides))
    assert_one_line(error, message)


def test_hidden_pixels_are_for_convolutional_backbones(tmp_path: Path) -> None:
    vit = ("model.backbone=vit_tiny_patch16_224", "model.depth=1", "masks.kind=block", "masks.pixels=true")
    with pytest.raises(ConfigError) as error:
        networks_of(conv_config(tmp_path, *vit))
    assert_one_line(error, "masks.pixels is for convolutional backbones, and vit_tiny_patch16_224 has tokens to hide")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.batchnorm=frozen", "train.accumulate=2", "train.views_apart=true"),
        ("masks.kind=block", "masks.pixels=true", "masks.probability=1", "sop.patch.weight=1", "sop.fill=teacher"),
        ("masks.kind=block", "masks.pixels=true", "optim.projector_warmup_epochs=0.5", "optim.warmup_epochs=0"),
    ],
)
def test_runs_train_are_scored_and_indexed(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    shards, test = (write_shards(tmp_path / name, classes=2, per_class=12, size=40) for name in ("train", "test"))
    evaluate = (f"evaluate.train={shards}", f"evaluate.test={test}", "evaluate.every_steps=2", "evaluate.k=5")
    config = conv_config(tmp_path, f"data.train={shards}", "train.epochs=1", *evaluate, *overrides)
    assert run_training(config, tmp_path / "run").step == 4
    lines = read_metrics(tmp_path / "run")
    losses = [line for line in lines if "loss" in line]
    assert len(losses) == 4 and all(("loss_patch" in line) == (config.sop.patch.weight > 0) for line in losses)
    scores = [line["knn_top1_k5"] for line in lines if "knn_top1_k5" in line]
    spec = EncoderSpec(str(tmp_path / "run"), device="cpu")
    told = evaluate_knn(str(shards), str(test), spec, KnnOptions(ks=(5,)))
    assert told.metrics["top1_k5"] == pytest.approx(scores[-1])
    assert told.protocol["pooling"] == "pooled"
    manifest = build(tmp_path / "index", encoder=spec, data=str(shards))
    assert (manifest.count, manifest.pooling) == (24, "pooled")
