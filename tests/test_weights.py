from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sop_faiss import load_encoder
from sop_faiss.errors import CheckpointError
from sop_faiss.model.encoders.weights import read_recognized
from tests.encoders import random_images, timm_features, timm_network, write_official

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.nn.Module]]:
    networks = {"teacher": timm_network("test_vit", 5), "student": timm_network("test_vit", 6)}
    return write_official(tmp_path_factory.mktemp("dino") / "checkpoint.pth", networks), networks


@pytest.mark.parametrize("student", [False, True])
def test_official_checkpoint_gives_timms_features(
    official: tuple[Path, dict[str, torch.nn.Module]], student: bool
) -> None:
    path, networks = official
    encoder = load_encoder(f"dino:{path}", arch="test_vit", student=student)
    expected = timm_features(networks["student" if student else "teacher"], random_images(160))
    with torch.no_grad():
        torch.testing.assert_close(encoder(random_images(160)), expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert encoder.pooling == "cls"


def test_methods_backbone_alone_and_in_the_old_file_format(tmp_path: Path) -> None:
    network = timm_network("test_vit", 5)
    tensors = {key: value for key, value in network.state_dict().items() if not key.startswith("head.")}
    tensors["masked_embed"] = torch.zeros(1, 64)
    expected = timm_features(network, random_images(160))
    for number, content in enumerate((tensors, {"state_dict": {f"module.{key}": tensors[key] for key in tensors}})):
        path = tmp_path / f"{number}.pth"
        torch.save(content, path, _use_new_zipfile_serialization=bool(number))
        encoder = load_encoder(f"dino:{path}", arch="test_vit")
        with torch.no_grad():
            torch.testing.assert_close(encoder(random_images(160)), expected, atol=TOLERANCE, rtol=TOLERANCE)
        assert encoder.left_out == ("masked_embed",)


def test_official_swin_is_read_under_timms_names(tmp_path: Path) -> None:
    names = ["layers.0.downsample.reduction.weight", "layers.2.downsample.norm.bias", "layers.0.blocks.0.norm1.bias"]
    torch.save({"teacher": {f"backbone.{name}": torch.zeros(1) for name in names}}, tmp_path / "swin.pth")
    assert set(read_recognized(tmp_path / "swin.pth", student=False, official=True)[0]) == {
        "layers.1.downsample.reduction.weight",
        "layers.3.downsample.norm.bias",
        "layers.0.blocks.0.norm1.bias",
    }


def test_wrong_arch_names_what_does_not_fit(official: tuple[Path, dict[str, torch.nn.Module]]) -> None:
    with pytest.raises(CheckpointError, match=r"test_vit3: .* missing"):
        load_encoder(f"dino:{official[0]}", arch="test_vit3")
    with pytest.raises(CheckpointError, match=r"vit_tiny_patch16_224: .* shape"):
        load_encoder(f"dino:{official[0]}", arch="vit_tiny_patch16_224")


def test_checkpoint_without_the_asked_for_network(tmp_path: Path) -> None:
    network = timm_network("test_vit", 5)
    path = write_official(tmp_path / "c.pth", {"student": network})
    with pytest.raises(CheckpointError, match="holds a student but no teacher"):
        load_encoder(f"dino:{path}", arch="test_vit")
    torch.save(network.state_dict(), path)
    with pytest.raises(CheckpointError, match="no student"):
        load_encoder(f"dino:{path}", arch="test_vit", student=True)


class Hostile:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("whole", [True, False])
def test_hostile_pickle_is_refused_and_not_run(tmp_path: Path, whole: bool) -> None:
    marker, path = tmp_path / "was_run", tmp_path / "w.pth"
    if whole:
        path.write_bytes(pickle.dumps(Hostile(marker), protocol=2))
    else:
        write_official(path, {"teacher": timm_network("test_vit")}, extra=Hostile(marker))
    allowed = torch.serialization.get_safe_globals()
    with pytest.raises(CheckpointError) as caught:
        load_encoder(f"dino:{path}", arch="test_vit")
    assert not marker.exists()
    assert "system" in str(caught.value) and "\n" not in str(caught.value)
    assert set(torch.serialization.get_safe_globals()) == set(allowed)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x02", b"PK\x03\x04" + bytes(60)])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_files_that_are_no_weights_are_refused(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"w{suffix}"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged or not a") as caught:
        load_encoder("timm:test_vit", weights=path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.999])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_truncated_weights_are_refused(tmp_path: Path, vit_weights: Path, kept: float, suffix: str) -> None:
    path = tmp_path / f"w{suffix}"
    if suffix == ".pth":
        torch.save(load_file(vit_weights), path)
    else:
        path.write_bytes(vit_weights.read_bytes())
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(CheckpointError, match="damaged"):
        load_encoder("timm:test_vit", weights=path)


def test_missing_surplus_reshaped_and_broken_tensors_are_named(tmp_path: Path) -> None:
    good = timm_network("test_vit").state_dict()
    path = tmp_path / "w.pth"
    cases = [
        ({key: good[key] for key in good if key != "norm.weight"}, r"1 missing \(norm\.weight\)"),
        (good | {"extra.weight": torch.zeros(1)}, r"1 unexpected \(extra\.weight\)"),
        (good | {"norm.weight": torch.zeros(3)}, r"norm\.weight \(3,\) instead of \(64,\)"),
        (good | {"norm.weight": torch.full((64,), torch.nan)}, r"NaN or infinity in norm\.weight"),
        ({"epoch": torch.tensor(1)}, "missing"),
        ({"epoch": 3}, "holds no tensors"),
        ([1, 2], "holds no tensors"),
    ]
    for content, message in cases:
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=message):
            load_encoder("timm:test_vit", weights=path)
