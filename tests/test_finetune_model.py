"""The network that is fine-tuned: layers, stochastic depth, and what a recipe fills in."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from timm.layers import DropPath

from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.trained.finetune_choices import FinetuneChoices
from sop_faiss.evaluate.trained.finetune_model import filled_choices, first_layer_of, make_classifier, make_optimizer
from sop_faiss.model.encoders.load import encoder_of_spec, load_encoder
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs.training.export import export_run
from tests.encoders import timm_network, write_official, write_run
from tests.messages import assert_one_line

CHOICES = FinetuneChoices(layer_decay=0.5, drop_path=0.3)


@pytest.mark.parametrize("name", ["timm:test_vit", "config:digits_demo"])
def test_a_layer_learns_slower_than_the_one_above(name: str) -> None:
    encoder = load_encoder(name, random_weights=0)
    model = make_classifier(encoder, 3, filled_choices(encoder, CHOICES))
    names = {id(value): key for key, value in model.named_parameters()}
    scales, decays = {}, {}
    for group in make_optimizer(model, filled_choices(encoder, CHOICES)).param_groups:
        for value in group["params"]:
            key = names[id(value)].removeprefix("encoder.model.backbone.").removeprefix("trunk.")
            scales[key], decays[key] = group["lr_scale"], group["weight_decay"]
    trunk = getattr(model.encoder.model.backbone, "trunk", model.encoder.model.backbone)
    assert {key for key, _ in trunk.named_parameters()} | {"head.weight", "head.bias"} == set(scales)
    assert scales["head.weight"] == 1 and decays["head.weight"] == 0.05 and decays["head.bias"] == 0
    if name == "timm:test_vit":
        depth = len(trunk.blocks)
        for number in range(depth):
            assert scales[f"blocks.{number}.attn.qkv.weight"] == 0.5 ** (depth - number)
        assert scales["patch_embed.proj.weight"] == 0.5 ** (depth + 1)
        assert decays["pos_embed"] == decays["blocks.0.norm1.weight"] == 0 < decays["blocks.0.attn.qkv.weight"]


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_efficientnet"])
def test_stochastic_depth_is_set(name: str) -> None:
    encoder = load_encoder(f"timm:{name}", random_weights=0, size=32)
    model = make_classifier(encoder, 3, filled_choices(encoder, CHOICES))
    rates = [each.drop_prob for each in model.encoder.model.backbone.modules() if isinstance(each, DropPath)]
    assert max(rates) == 0.3 and rates == sorted(rates)
    if name == "test_vit":
        made = timm.create_model(name, num_classes=0, drop_path_rate=0.3)
        assert rates == pytest.approx([each.drop_prob for each in made.modules() if isinstance(each, DropPath)])
    none = make_classifier(encoder, 3, filled_choices(encoder, FinetuneChoices(drop_path=0.0)))
    assert not [each for each in none.modules() if isinstance(each, DropPath)]


def test_a_recipe_of_the_size() -> None:
    small = filled_choices(load_encoder("timm:test_vit", random_weights=0, size=32), FinetuneChoices())
    assert (small.epochs, small.warmup_epochs, small.sweep_epochs) == (200, 20, 20)
    assert (small.layer_decay, small.drop_path) == (0.75, 0.1)
    base = FinetuneChoices(epochs=10).filled("B", has_layers=True, has_drop_path=True)
    assert (base.warmup_epochs, base.layer_decay, base.drop_path) == (2, 0.65, 0.2)
    bare = FinetuneChoices().filled("L", has_layers=False, has_drop_path=False)
    assert (bare.epochs, bare.layer_decay, bare.drop_path) == (50, 1.0, 0.0)


def test_a_network_without_residual_blocks() -> None:
    encoder = load_encoder("timm:test_resnet", random_weights=0, size=32)
    for module in encoder.modules():
        if hasattr(module, "drop_path"):
            del module.drop_path
    assert filled_choices(encoder, FinetuneChoices()).drop_path == 0
    with pytest.raises(ConfigError) as error:
        filled_choices(encoder, FinetuneChoices(drop_path=0.1))
    assert "drop_path" in error.value.arguments


@pytest.mark.parametrize("student", [False, True])
def test_the_first_layer_of_a_runs_projection_head(student: bool, tmp_path: Path) -> None:
    spec = EncoderSpec(str(write_run(tmp_path / "run")), student=student, device="cpu")
    encoder = encoder_of_spec(spec)
    layer = first_layer_of(spec, encoder)
    model = make_classifier(encoder, 3, filled_choices(encoder, CHOICES), layer).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        hidden = (0.01 if student else 0.02) * encoder(images).sum(1, keepdim=True) + torch.arange(16.0)
        torch.testing.assert_close(model(images), model.head(torch.nn.functional.gelu(hidden)))
    groups = make_optimizer(model, filled_choices(encoder, CHOICES)).param_groups
    of_layer = [model.first_layer[0].weight, model.first_layer[0].bias]  # type: ignore[index]
    own = [each for each in groups if any(value is given for given in each["params"] for value in of_layer)]
    assert [(each["lr_scale"], each["weight_decay"]) for each in own] == [(1.0, 0.05), (1.0, 0.0)]
    assert all(value.requires_grad and value not in set(layer.parameters()) for value in of_layer)


def test_encoders_without_a_projection_head(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    export_run(run, tmp_path / "export")
    official = write_official(
        tmp_path / "o.pth", {"teacher": timm_network("test_vit"), "student": timm_network("test_vit")}
    )
    for spec in (
        EncoderSpec("timm:test_vit", random_weights=0, device="cpu"),
        EncoderSpec(str(tmp_path / "export"), device="cpu"),
        EncoderSpec(f"dino:{official}", arch="test_vit", device="cpu"),
        EncoderSpec(str(run), pooling="cls_mean", device="cpu"),
    ):
        with pytest.raises(ConfigError) as error:
            first_layer_of(spec, encoder_of_spec(spec))
        assert_one_line(error, "head_layer")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rates", ()),
        ("learning_rates", (0.1, 0.1)),
        ("learning_rates", (float("nan"),)),
        ("epochs", 0),
        ("sweep_epochs", 10**9),
        ("warmup_epochs", 201.0),
        ("batch_size", 7),
        ("layer_decay", 0.0),
        ("drop_path", 1.0),
        ("weight_decay", -1.0),
        ("mixup", float("inf")),
        ("cutmix", -0.1),
        ("smoothing", 1.0),
        ("randaugment", 11),
        ("erasing", 2.0),
        ("min_crop", 0.0),
        ("flip", -1.0),
        ("ema", 1.0),
        ("repeats", 0),
        ("end_rate", -1.0),
        ("head_layer", "second"),
        ("held_out", 1.0),
        ("precision", "fp8"),
        ("seed", -1),
    ],
)
def test_impossible_choices(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        FinetuneChoices(**{field: value}).filled("S", has_layers=True, has_drop_path=True)  # type: ignore[arg-type]
    assert field in error.value.arguments
