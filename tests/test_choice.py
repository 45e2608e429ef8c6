"""A choice of an encoder in a file: read as written, and refused in one line when it is anything else."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
from safetensors.torch import save_file

from sop_faiss.errors import CheckpointError
from sop_faiss.model.encoders.choice import is_choice, read_choice, write_choice
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec

RESNET = EncoderSpec("timm:test_resnet", random_weights=0, size=32)


@pytest.fixture
def choice(tmp_path: Path) -> Path:
    encoder = encoder_of_spec(replace(RESNET, pooling="gem", scales=(1.0, 0.5)))
    assert encoder.spec is not None
    write_choice(tmp_path / "choice.json", encoder.spec, encoder.fingerprint, {"by": "labels"})
    return tmp_path / "choice.json"


def test_it_opens_the_encoder_that_was_chosen(choice: Path) -> None:
    opened = encoder_of_spec(EncoderSpec(str(choice)))
    assert (opened.preprocess.scales, opened.pooling, opened.preprocess.crop) == ((1.0, 0.5), "gem", 32)
    assert opened.spec is not None and opened.spec["model"] == "timm:test_resnet"  # not the file
    image = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    wanted = encoder_of_spec(replace(RESNET, pooling="gem", scales=(1.0, 0.5)))
    np.testing.assert_array_equal(opened.encode(image), wanted.encode(image))
    assert encoder_of_spec(EncoderSpec(str(choice), size=48)).preprocess.crop == 48


def test_it_moves_with_its_weights_and_knows_when_they_change(tmp_path: Path) -> None:
    place = tmp_path / "a"
    place.mkdir()
    model = timm.create_model("test_resnet", pretrained=False, num_classes=0)
    save_file(model.state_dict(), place / "resnet.safetensors")
    encoder = encoder_of_spec(EncoderSpec("timm:test_resnet", weights=place / "resnet.safetensors", size=32))
    assert encoder.spec is not None
    write_choice(place / "choice.json", encoder.spec, encoder.fingerprint, {})
    shutil.move(place, tmp_path / "b")
    moved = tmp_path / "b" / "choice.json"
    assert encoder_of_spec(EncoderSpec(str(moved))).fingerprint == encoder.fingerprint
    other = timm.create_model("test_resnet", pretrained=False, num_classes=0)
    save_file(other.state_dict(), tmp_path / "b" / "resnet.safetensors")
    with pytest.raises(CheckpointError, match="has changed"):
        encoder_of_spec(EncoderSpec(str(moved)))
    (tmp_path / "b" / "resnet.safetensors").unlink()
    with pytest.raises(CheckpointError, match="resnet"):
        encoder_of_spec(EncoderSpec(str(moved)))


def _broken(content: dict[str, Any], **changed: Any) -> str:
    return json.dumps({name: value for name, value in (content | changed).items() if value is not None})


@pytest.mark.parametrize(
    "change",
    [
        {"format": "sop_faiss encoder choice 9"},
        {"format": None},
        {"encoder": None},
        {"encoder": []},
        {"encoder": {"model": 3}},
        {"encoder": {"model": "lite0", "unknown": 1}},
        {"encoder": {"model": "lite0", "size": -1}},
        {"encoder": {"model": "/no/such/run"}},
        {"encoder": {"model": "choice.json"}},
        {"fingerprint": None},
        {"fingerprint": "00"},
        {"fingerprint": 5},
    ],
    ids=str,
)
def test_broken_fields_are_refused(choice: Path, change: dict[str, Any]) -> None:
    choice.write_text(_broken(json.loads(choice.read_text()), **change))
    with pytest.raises(CheckpointError, match=r"choice\.json") as refused:
        read_choice(choice, EncoderSpec(str(choice)))
    assert "\n" not in str(refused.value) and "sop-index tune" in str(refused.value)
    assert "`" not in str(refused.value.args[0].replace("`encoder` or `fingerprint`", ""))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000], ids=range(6))
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "choice.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"choice\.json"):
        encoder_of_spec(EncoderSpec(str(tmp_path / "choice.json")))


def test_huge_files_and_choices_of_choices_are_refused(choice: Path, tmp_path: Path) -> None:
    content = json.loads(choice.read_text())
    choice.write_text(_broken(content, encoder={"model": str(choice)}))
    with pytest.raises(CheckpointError, match="another choice"):
        encoder_of_spec(EncoderSpec(str(choice)))
    choice.write_text(json.dumps(content) + " " * 2**21)
    with pytest.raises(CheckpointError, match="too large"):
        encoder_of_spec(EncoderSpec(str(choice)))
    assert not is_choice(str(tmp_path / "missing.json"))
