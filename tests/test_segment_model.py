"""Segmenters: what is trained, at which rate, and what a network lacks."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.trained.segment_choices import SegmentChoices
from sop_faiss.evaluate.trained.segment_model import (
    LinearSegmenter,
    UperNet,
    filled_segment_choices,
    make_segmenter,
    make_segmenter_optimizer,
)
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import load_encoder
from tests.messages import assert_one_line

LINEAR = SegmentChoices(size=64)
UPERNET = SegmentChoices("upernet", size=64, channels=8)


def encoder_of(name: str) -> Encoder:
    return load_encoder(f"timm:{name}", random_weights=0).eval()


def test_the_linear_head_is_all_that_is_trained() -> None:
    encoder = encoder_of("test_efficientnet")
    choices = filled_segment_choices(encoder, replace(LINEAR, stride=8))
    model = make_segmenter(encoder, 5, choices)
    assert isinstance(model, LinearSegmenter) and model.multiple == 8
    assert {name.partition(".")[0] for name in model.state_dict()} == {"head"}
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    (scores,) = model.train()(images)
    tokens, grid = model.dense(images)
    assert scores.shape == (2, 5, 8, 8) and grid == (8, 8)
    flat = tokens.flatten(0, 1)
    normalized = (flat - flat.mean(0)) / (flat.var(0, unbiased=False) + 1e-5).sqrt()
    weight, bias = model.head[1].weight[:, :, 0, 0], model.head[1].bias  # type: ignore[index, union-attr]
    slow = (normalized @ weight.T + bias).reshape(2, 8, 8, 5).permute(0, 3, 1, 2)
    torch.testing.assert_close(scores, slow, rtol=1e-4, atol=1e-5)
    groups = make_segmenter_optimizer(model, choices).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.05), (3, 0.0)]
    assert (choices.learning_rate, choices.warmup_steps, choices.layer_decay) == (8e-4, 1500, None)


def test_four_blocks_are_joined() -> None:
    encoder = encoder_of("test_vit")
    model = make_segmenter(encoder, 5, filled_segment_choices(encoder, replace(LINEAR, blocks=4))).eval()
    assert isinstance(model, LinearSegmenter) and model.head[0].num_features == 4 * encoder.token_dimension
    images = torch.randn(2, 3, 64, 64)
    joined = []
    tokens = encoder.model.backbone.patch_embed(images)
    trunk = encoder.model.backbone
    with torch.no_grad():
        tokens = trunk.norm_pre(trunk._pos_embed(tokens))
        for number, block in enumerate(trunk.blocks, 1):  # type: ignore[union-attr, arg-type]
            tokens = block(tokens)
            if number in (2, 3, 4, 6):
                joined.append(trunk.norm(tokens)[:, trunk.num_prefix_tokens :].transpose(1, 2).unflatten(2, (4, 4)))
        torch.testing.assert_close(model(images)[0], model.head(torch.cat(joined, 1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_upernet_trains_the_network_layer_by_layer(name: str) -> None:
    encoder = encoder_of(name)
    choices = filled_segment_choices(encoder, UPERNET)
    assert (choices.learning_rate, choices.layer_decay) == (3e-5, 0.9)
    model = make_segmenter(encoder, 5, choices)
    assert isinstance(model, UperNet)
    scores, auxiliary = model.train()(torch.randn(2, 3, 64, 64))
    assert scores.shape == (2, 5, 16, 16) and auxiliary.shape == (2, 5, 4, 4)
    assert len(model.eval()(torch.randn(1, 3, 64, 64))) == 1
    groups = make_segmenter_optimizer(model, choices).param_groups
    grouped = [parameter for group in groups for parameter in group["params"]]
    assert len(grouped) == len(set(grouped)) and set(grouped) == set(model.parameters())
    scales = sorted({group["lr_scale"] for group in groups})
    assert scales[-1] == 1.0 and scales[0] < 0.8 and len(scales) > 3
    again = make_segmenter(encoder, 5, choices)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("size", "recipe"), [("S", (3e-5, 0.9, 0.1)), ("B", (8e-5, 0.65, 0.1)), ("L", (2e-5, 0.95, 0.2))]
)
def test_recipes_are_those_of_ibot(size: str, recipe: tuple[float, float, float]) -> None:
    filled = SegmentChoices("upernet").filled(size, 768, has_layers=True, has_drop_path=True)
    assert (filled.learning_rate, filled.layer_decay, filled.drop_path) == recipe and filled.channels == 768
    given = SegmentChoices("upernet", drop_path=0.0, steps=1600).filled(
        size, None, has_layers=False, has_drop_path=True
    )
    assert (given.drop_path, given.layer_decay, given.channels, given.warmup_steps) == (0.0, 1.0, 512, 15)


def test_what_a_network_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    vit, resnet = encoder_of("test_vit"), encoder_of("test_resnet")
    for encoder, choices, part in (
        (vit, replace(LINEAR, size=40), "size=40"),
        (resnet, replace(UPERNET, size=48), "size=48"),
        (vit, replace(LINEAR, stride=8), "stride=8"),
        (encoder_of("test_vit2"), replace(UPERNET, size=40), "size=40"),
    ):
        with pytest.raises(ConfigError) as error:
            make_segmenter(encoder, 3, filled_segment_choices(encoder, choices))
        assert_one_line(error, part)
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch.decoders.upernet.decoder", None)
    with pytest.raises(ConfigError) as error:
        make_segmenter(vit, 3, filled_segment_choices(vit, UPERNET))
    assert_one_line(error, "pip install")
