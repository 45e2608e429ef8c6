"""Files of other libraries: which of two networks is taken, DINOv2's names, and messages where weights do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sop_faiss import load_encoder
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.model.backbones.build import seeded_backbone
from sop_faiss.model.encoders.layouts import timm_names
from sop_faiss.model.initial_weights import load_initial_weights, resolve_init
from tests.encoders import random_images, timm_features, timm_network, write_official
from tests.messages import assert_one_line
from tests.runs import conv_config

Tensors = dict[str, Tensor]
TOLERANCE = 1e-5
NAME = "test_resnet"
ONLINE, AVERAGED = timm_network(NAME, 5), timm_network(NAME, 6)


def named(prefix: str, network: Any) -> Tensors:
    tensors = network.state_dict().items()
    return {prefix + key: value for key, value in tensors if not key.startswith("fc.")}


def joined(online: str, averaged: str, **more: Tensor) -> Tensors:
    return named(online, ONLINE) | named(averaged, AVERAGED) | more


TWO_NETWORKS: dict[str, tuple[Any, str, str]] = {
    "solo-learn": (
        {
            "state_dict": joined("backbone.", "momentum_backbone.")
            | {"projector.0.weight": torch.zeros(3, 3), "momentum_projector.0.weight": torch.zeros(3, 3)},
            "epoch": 3,
        },
        "backbone",
        "momentum_backbone",
    ),
    "averaged first": (
        named("momentum_backbone.", AVERAGED) | named("backbone.", ONLINE),
        "backbone",
        "momentum_backbone",
    ),
    "lightly": (joined("backbone.", "backbone_momentum."), "backbone", "backbone_momentum"),
    "lightly DINO": (joined("student_backbone.", "teacher_backbone."), "student_backbone", "teacher_backbone"),
    "timm": (
        {"state_dict": named("", ONLINE), "state_dict_ema": named("module.", AVERAGED)},
        "state_dict",
        "state_dict_ema",
    ),
    "torchvision": (
        {"model": named("", ONLINE), "model_ema": named("module.", AVERAGED) | {"n_averaged": torch.tensor(7)}},
        "model",
        "model_ema",
    ),
    "MoCo": (
        {"state_dict": joined("module.encoder_q.", "module.encoder_k.", **{"module.queue": torch.zeros(128, 4)})},
        "encoder_q",
        "encoder_k",
    ),
    "MoCo v3": (joined("module.base_encoder.", "module.momentum_encoder."), "base_encoder", "momentum_encoder"),
}


@pytest.mark.parametrize("case", TWO_NETWORKS)
@pytest.mark.parametrize("student", [False, True])
def test_of_two_networks_the_average_is_taken_unless_the_student_is_asked_for(tmp_path, caplog, case, student):
    content, online, averaged = TWO_NETWORKS[case]
    torch.save(content, tmp_path / "w.pth")
    expected = timm_features(ONLINE if student else AVERAGED, random_images(64))
    taken, left = (online, averaged) if student else (averaged, online)
    for model, options in (
        (f"timm:{NAME}", {"weights": tmp_path / "w.pth"}),
        (f"dino:{tmp_path / 'w.pth'}", {"arch": NAME}),
    ):
        caplog.clear()
        encoder = load_encoder(model, **options, student=student)
        with torch.no_grad():
            torch.testing.assert_close(encoder(random_images(64)), expected, atol=TOLERANCE, rtol=TOLERANCE)
        assert f"{taken}," in caplog.text and f"and {left} is not" in caplog.text
        assert ("student" in encoder.name) == student


def test_a_run_starts_from_the_average(tmp_path, caplog):
    torch.save(TWO_NETWORKS["solo-learn"][0], tmp_path / "w.pth")
    init = ("model.backbone=vit_small_patch16_224", f"model.init=timm:{NAME}", f"model.weights={tmp_path / 'w.pth'}")
    config = resolve_init(conv_config(tmp_path, *init))
    backbone = seeded_backbone(config.model, config.views.global_size, seed=0)
    load_initial_weights(backbone, config.model)
    own, averaged = backbone.trunk.state_dict(), AVERAGED.state_dict()
    assert all(torch.equal(value, averaged[key]) for key, value in own.items())
    assert "momentum_backbone," in caplog.text


def test_one_network_is_read_without_a_word_and_has_no_student(tmp_path, caplog):
    contents = [{"state_dict": named("backbone.", ONLINE)}, named("module.encoder_q.", ONLINE), named("", ONLINE)]
    contents += [
        {"state_dict": named("", ONLINE), "state_dict_ema": None},
        {"model": named("momentum_encoder.", ONLINE)},
    ]
    for content in contents:
        torch.save(content, tmp_path / "w.pth")
        encoder = load_encoder(f"timm:{NAME}", weights=tmp_path / "w.pth")
        with torch.no_grad():
            expected = timm_features(ONLINE, random_images(64))
            torch.testing.assert_close(encoder(random_images(64)), expected, atol=TOLERANCE, rtol=TOLERANCE)
        with pytest.raises(CheckpointError) as caught:
            load_encoder(f"timm:{NAME}", weights=tmp_path / "w.pth", student=True)
        assert_one_line(caught, "`student`")
    assert not caplog.records
    with pytest.raises(ConfigError) as caught:
        load_encoder(f"timm:{NAME}", random_weights=0, student=True)
    assert_one_line(caught, "`student`")


@pytest.mark.parametrize("roles", [("teacher", "student"), ("teacher",), ("student",)])
@pytest.mark.parametrize("nested", [False, True])
def test_checkpoints_of_dinos_kind_are_not_read_as_timms_weights(tmp_path, roles, nested):
    path = write_official(tmp_path / "c.pth", dict.fromkeys(roles, timm_network("test_vit")))
    if nested:  # DINOv2's own checkpoints of training
        content = torch.load(path, weights_only=False)
        flat = {f"{role}.{key}": value for role in roles for key, value in content[role].items()}
        torch.save({"model": flat, "iteration": 3}, path)
    with pytest.raises(CheckpointError) as caught:
        load_encoder("timm:test_vit", weights=path)
    assert_one_line(caught, f"dino:{path}")
    assert load_encoder(f"dino:{path}", arch="test_vit", student=roles == ("student",)).feature_dim == 64


# DINOv2


REGISTERS = "vit_small_patch14_reg4_dinov2"


def dinov2_of(network: Any) -> Tensors:
    """The tensors of a timm network with registers as DINOv2 publishes them."""
    tensors = {key: value for key, value in network.state_dict().items() if not key.startswith("head.")}
    position = torch.full_like(tensors["cls_token"], 0.25)
    tensors["register_tokens"] = tensors.pop("reg_token")
    tensors["cls_token"] = tensors["cls_token"] - position
    tensors["pos_embed"] = torch.cat([position, tensors["pos_embed"]], dim=1)
    return tensors | {"mask_token": torch.zeros(1, position.shape[2])}


def chunked(tensors: Tensors) -> Tensors:
    """Blocks in chunks of 3, as DINOv2 trains with FSDP: blocks.CHUNK.BLOCK, where BLOCK counts all blocks."""
    renamed = {}
    for key, value in tensors.items():
        first, number, rest = (*key.split(".", 2), "", "")[:3]
        renamed[f"blocks.{int(number) // 3}.{number}.{rest}" if first == "blocks" else key] = value
    return renamed


@pytest.mark.parametrize("content", ["published", "chunked teacher"])
def test_dinov2_with_registers_loads(tmp_path, content):
    network = timm_network(REGISTERS, img_size=56)
    with torch.no_grad():
        network.cls_token.normal_()
    tensors = dinov2_of(network)
    if content == "chunked teacher":
        backbone = {f"backbone.{key}": value for key, value in chunked(tensors).items()}
        tensors = {"teacher": backbone | {"dino_head.mlp.0.weight": torch.zeros(2, 2)}}
    path = tmp_path / "dinov2.pth"
    torch.save(tensors, path)
    encoders = [load_encoder(f"dino:{path}", arch=REGISTERS)]
    if content == "published":
        encoders.append(load_encoder(f"timm:{REGISTERS}", weights=path))
    dynamic = timm_network(REGISTERS, img_size=56, dynamic_img_size=True)
    dynamic.load_state_dict(network.state_dict())
    for encoder in encoders:
        assert encoder.preprocess.crop == 56 and encoder.preprocess.mean == (0.485, 0.456, 0.406)
        for images in (random_images(56), random_images(42, width=70)):  # DINOv2 with registers resizes as timm does
            with torch.no_grad():
                expected = timm_features(dynamic, images)
                torch.testing.assert_close(encoder(images), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_gated_layers_and_other_networks_numbers():
    giant = {"cls_token": 0, "blocks.3.mlp.w12.weight": 1, "blocks.3.mlp.w3.bias": 2, "blocks.3.norm1.weight": 3}
    tensors = {key: torch.full((1,), value) for key, value in giant.items()}
    wanted = ["cls_token", "blocks.3.mlp.fc1.weight", "blocks.3.mlp.fc2.bias", "blocks.3.norm1.weight"]
    assert list(timm_names(tensors)) == wanted
    stages = {"blocks.0.1.conv.weight": torch.zeros(1), "blocks.1.0.mlp.w12.weight": torch.zeros(1)}
    assert timm_names(stages) == stages  # a convolutional network's stages are no chunks


# messages


def renamed(tensors: Tensors, rule: Callable[[str], str]) -> Tensors:
    return {rule(key): value for key, value in tensors.items()}


VIT = {key: value for key, value in timm_network("test_vit").state_dict().items() if not key.startswith("head.")}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({f"layer{i}.{key.rpartition('.')[2]}": value for i, (key, value) in enumerate(VIT.items())}, "`by_position`"),
        (renamed(VIT, lambda key: f"net.{key}") | {f"m{i}.x": torch.zeros(1) for i in range(5)}, "'net.'"),
        (VIT | {"register_tokens": torch.zeros(1, 4, 64)}, "register"),
        ({"encoder.layer.0.attention.attention.query.weight": torch.zeros(3)}, "Hugging Face"),
        (VIT | {"storage_tokens": torch.zeros(1, 4, 64), "rope_embed.periods": torch.zeros(4)}, "DINOv3"),
        ({"encoder.layers.encoder_layer_0.ln_1.weight": torch.zeros(3)}, "torchvision"),
        ({"visual.transformer.resblocks.0.ln_1.weight": torch.zeros(3)}, "CLIP"),
        ({key: VIT[key] for key in list(VIT)[:5]}, "name the model it was made for"),
    ],
)
def test_what_does_not_fit_says_whose_layout_it_is(tmp_path: Path, content: Tensors, message: str) -> None:
    torch.save(content, tmp_path / "w.pth")
    for model, options in (
        ("timm:test_vit", {"weights": tmp_path / "w.pth"}),
        (f"dino:{tmp_path / 'w.pth'}", {"arch": "test_vit"}),
    ):
        with pytest.raises(CheckpointError) as caught:
            load_encoder(model, **options)
        assert_one_line(caught, message)
        assert "does not fit" in str(caught.value)
    if message == "`by_position`":
        encoder = load_encoder("timm:test_vit", weights=tmp_path / "w.pth", by_position=True)
        assert torch.equal(encoder.model.backbone.norm.bias, VIT["norm.bias"])


def test_safetensors_and_hostile_names_are_one_line(tmp_path):
    save_file({f"backbone.{key}": value.contiguous() for key, value in VIT.items()}, tmp_path / "w.safetensors")
    assert load_encoder("timm:test_vit", weights=tmp_path / "w.safetensors").feature_dim == 64
    contents = (
        {"cls_token": torch.zeros(()), "pos_embed": torch.zeros(2, 3), "register_tokens": torch.zeros(1)},
        {"blocks.": torch.zeros(1), "cls_token": torch.zeros(1, 1, 3)},
        {"teacher": {}, "student": 3, "model": [1]},
        {"model": {"model": {"x": torch.zeros(1)}}},
        {"teacher.": torch.zeros(1), "": torch.zeros(1)},
    )
    for content in contents:
        torch.save(content, tmp_path / "w.pth")
        for model, options in (
            ("timm:test_vit", {"weights": tmp_path / "w.pth"}),
            (f"dino:{tmp_path / 'w.pth'}", {"arch": "test_vit"}),
        ):
            with pytest.raises(CheckpointError) as caught:
                load_encoder(model, **options)
            assert_one_line(caught, "w.pth")
