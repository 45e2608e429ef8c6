from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from sop_faiss import load_encoder
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.model.encoders.load import _assemble
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.model.encoders.timm_encoder import TimmModel
from tests.encoders import random_images, timm_features, timm_network

TOLERANCE = 1e-5


@pytest.mark.parametrize("name", ["test_vit", "test_vit2", "test_resnet", "test_efficientnet"])
@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".bin"])
def test_timm_weights_give_timms_features(tmp_path: Path, name: str, suffix: str) -> None:
    network, path = timm_network(name), tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(network.state_dict(), path)
    else:
        torch.save({"state_dict": network.state_dict(), "epoch": 3}, path)
    encoder = load_encoder(f"timm:{name}", weights=path)
    with torch.no_grad():
        ours = encoder(random_images(160))
    expected = timm_features(network, random_images(160))
    assert encoder.feature_dim == expected.shape[1]
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert encoder.left_out and all(name.startswith(("head.", "fc.", "classifier.")) for name in encoder.left_out)


def test_timm_settings_come_from_its_record_and_can_be_overridden(vit_weights: Path) -> None:
    settings = timm.get_pretrained_cfg("test_vit")
    plain = load_encoder("timm:test_vit", weights=vit_weights).preprocess
    assert (plain.mean, plain.std, plain.crop, plain.multiple) == (settings.mean, settings.std, 160, 16)
    own = load_encoder(
        "timm:test_vit", weights=vit_weights, size=64, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)
    ).preprocess
    assert (own.mean, own.std, own.crop, own.resize) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 64, 64)


def test_timm_vit_poolings(vit_weights: Path) -> None:
    with torch.no_grad():
        network: Any = load_encoder("timm:test_vit", weights=vit_weights).model.backbone
        tokens = network.forward_features(random_images(64))
        for pooling, expected in (("cls", tokens[:, 0]), ("mean", tokens[:, 1:].mean(1))):
            encoder = load_encoder("timm:test_vit", weights=vit_weights, pooling=pooling)
            torch.testing.assert_close(encoder(random_images(64)), expected, atol=TOLERANCE, rtol=0)


def test_timm_convnet_has_its_own_pooling_only() -> None:
    with pytest.raises(ConfigError, match="pooling=cls"):
        load_encoder("timm:test_resnet", random_weights=0, pooling="cls")


def test_vit_takes_shapes_of_whole_patches(vit_weights: Path) -> None:
    with torch.no_grad():
        assert load_encoder("timm:test_vit", weights=vit_weights)(random_images(48, width=96)).shape == (3, 64)


def test_vit_of_another_grid_keeps_the_files_positions(tmp_path: Path) -> None:
    network = timm_network("test_vit", img_size=64)
    save_file(network.state_dict(), tmp_path / "small.safetensors")
    encoder = load_encoder("timm:test_vit", weights=tmp_path / "small.safetensors")
    assert encoder.preprocess.crop == 64
    with torch.no_grad():
        torch.testing.assert_close(
            encoder(random_images(64)), timm_features(network, random_images(64)), atol=TOLERANCE, rtol=0
        )


def test_network_of_one_size_only_says_so() -> None:
    model = TimmModel(timm.create_model("test_vit", num_classes=0), "test_vit", any_size=False)
    assert model.fixed
    encoder = _assemble(EncoderSpec("timm:test_vit"), model, "test_vit", [])
    with pytest.raises(ConfigError, match="only square images of 160"):
        encoder.check_preprocess(encoder.preprocess.keeping_aspect())


def test_weights_under_other_names_by_position(tmp_path: Path) -> None:
    network = timm_network("test_efficientnet")
    renamed = {
        f"net.{number}.{key.rpartition('.')[2]}": value
        for number, (key, value) in enumerate(network.state_dict().items())
    }
    torch.save(renamed, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="does not fit"):
        load_encoder("timm:test_efficientnet", weights=tmp_path / "w.pth")
    encoder = load_encoder("timm:test_efficientnet", weights=tmp_path / "w.pth", by_position=True)
    with torch.no_grad():
        torch.testing.assert_close(
            encoder(random_images(64)), timm_features(network, random_images(64)), atol=TOLERANCE, rtol=TOLERANCE
        )
    assert len(encoder.left_out) == 2


def test_by_position_refuses_other_shapes_kinds_and_unordered_files(tmp_path: Path, vit_weights: Path) -> None:
    with pytest.raises(CheckpointError, match="keeps no order"):
        load_encoder("timm:test_vit", weights=vit_weights, by_position=True)
    tensors = timm_network("test_resnet").state_dict()
    torch.save(tensors, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="by position"):
        load_encoder("timm:test_efficientnet", weights=tmp_path / "w.pth", by_position=True)
    swapped = {key.replace("weight", "scale"): value for key, value in tensors.items()}
    torch.save(swapped, tmp_path / "s.pth")
    with pytest.raises(CheckpointError, match="by position: conv1"):
        load_encoder("timm:test_resnet", weights=tmp_path / "s.pth", by_position=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_smal_patch16_224", "did you mean vit_small_patch16_224"),
        ("vit_small_patch16_224.dono", "it has .*dino"),
        ("hf-hub:someone/something", "timm has no model"),
        ("", "timm has no model"),
    ],
)
def test_unknown_timm_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_encoder(f"timm:{name}", random_weights=0)
