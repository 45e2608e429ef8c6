"""The detector over a network: its parts are those of torchvision, and each layer has its learning rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models.detection import maskrcnn_resnet50_fpn
from torchvision.ops import MultiScaleRoIAlign

from sop_faiss import load_encoder
from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.trained.detect_choices import QUICK, DetectChoices
from sop_faiss.evaluate.trained.detect_model import filled_detect_choices, make_detector, make_optimizer
from tests.encoders import random_images

SMALL = DetectChoices(size=64, width=8, rois=8, layer_decay=0.5, drop_path=0.3)


def test_the_parts_are_those_of_torchvision() -> None:
    encoder = load_encoder("timm:test_efficientnet", random_weights=0)
    model: Any = make_detector(encoder, 90, filled_detect_choices(encoder, DetectChoices()))
    with torch.device("meta"):
        known: Any = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    for part in ("rpn", "roi_heads", "backbone.fpn.layer_blocks"):
        own, other = (each.get_submodule(part).state_dict() for each in (model, known))
        assert {key: value.shape for key, value in own.items()} == {key: value.shape for key, value in other.items()}
    assert model.rpn.anchor_generator.sizes == ((32,), (64,), (128,), (256,), (512,))
    assert model.transform.min_size == (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
    assert model.transform.max_size == 1333 and model.roi_heads.fg_bg_sampler.batch_size_per_image == 512


@pytest.mark.parametrize("name", ["test_vit", "test_efficientnet"])
def test_every_parameter_has_its_rate(name: str) -> None:
    encoder = load_encoder(f"timm:{name}", random_weights=0)
    choices = filled_detect_choices(encoder, SMALL)
    model: Any = make_detector(encoder, 2, choices)
    groups = make_optimizer(model, choices).param_groups
    scales = {id(value): (group["lr_scale"], group["weight_decay"]) for group in groups for value in group["params"]}
    named = dict(model.named_parameters())
    assert len(scales) == len(named) and all(value.requires_grad for value in named.values())
    assert scales[id(named["rpn.head.cls_logits.weight"])] == (1, 0.05)
    assert scales[id(named["rpn.head.cls_logits.bias"])] == (1, 0)
    first = next(iter(model.backbone.body.trunk.parameters()))
    assert scales[id(first)][0] < 0.5
    images = random_images(64, 1, 96)
    assert [tuple(each.shape[2:]) for each in model.backbone(images).values()] == [
        (16, 24),
        (8, 12),
        (4, 6),
        (2, 3),
        (1, 2),
    ]
    for frozen in (True, False):
        made: Any = make_detector(
            encoder, 2, DetectChoices(**{**vars(choices), "batchnorm": "frozen" if frozen else "batch"})
        )
        modes = {
            each.training for each in made.train().backbone.body.trunk.modules() if isinstance(each, nn.BatchNorm2d)
        }
        assert modes == (set() if name == "test_vit" else {not frozen})


@pytest.mark.parametrize("cascade", [False, True])
def test_strides_do_not_depend_on_the_first_batch(cascade: bool) -> None:
    encoder = load_encoder("timm:test_efficientnet", random_weights=0)
    model = make_detector(encoder, 2, DetectChoices(size=64, width=8, rois=8, cascade=cascade)).eval()
    pools = [each for each in model.modules() if isinstance(each, MultiScaleRoIAlign)]
    with torch.no_grad():
        model([torch.zeros(3, 33, 33)])  # nearly doubled by padding
    assert len(pools) == (6 if cascade else 2) and all(each.scales == [1 / 4, 1 / 8, 1 / 16, 1 / 32] for each in pools)


def test_a_recipe_of_the_size() -> None:
    vit, conv = (load_encoder(f"timm:{name}", random_weights=0) for name in ("test_vit", "test_efficientnet"))
    small, other = (filled_detect_choices(each, DetectChoices()) for each in (vit, conv))
    assert (small.layer_decay, small.drop_path, other.layer_decay, other.drop_path) == (0.8, 0.1, 1.0, 0.2)
    base = DetectChoices().filled("B", has_layers=True, has_drop_path=True)
    bare = DetectChoices().filled("L", has_layers=False, has_drop_path=False)
    assert (base.layer_decay, base.drop_path, bare.layer_decay, bare.drop_path) == (0.75, 0.2, 1.0, 0.0)
    DetectChoices(**QUICK).check()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size", 63),
        ("size", 10**6),
        ("epochs", 0),
        ("batch_size", 0),
        ("learning_rate", float("nan")),
        ("warmup_steps", -1),
        ("layer_decay", 0.0),
        ("drop_path", 1.0),
        ("weight_decay", -1.0),
        ("min_scale", 0.0),
        ("crop", 1.5),
        ("flip", float("inf")),
        ("width", 0),
        ("width", 10**9),
        ("anchor", 0.0),
        ("rois", 0),
        ("images", 0),
        ("seed", -1),
        ("batchnorm", "x"),
        ("precision", "fp16"),
    ],
)
def test_impossible_choices(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        DetectChoices(**{field: value}).check()
    assert field in error.value.arguments
