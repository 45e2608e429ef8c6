"""What an index remembers of its encoder, and what it does not believe."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from sop_faiss.errors import CheckpointError
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.remembered import recalled_spec, remembered_spec, with_relative_places
from sop_faiss.model.encoders.spec import EncoderSpec
from tests.encoders import timm_network, write_official, write_run

NOTHING = EncoderSpec("")


def written(remembered: dict[str, Any], directory: Path) -> dict[str, Any]:
    """As it is read from a manifest."""
    content: dict[str, Any] = json.loads(json.dumps(with_relative_places(remembered, directory)))
    return content


def test_every_kind_of_encoder_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run")
    network = timm_network("test_vit")
    torch.save(network.state_dict(), tmp_path / "w.pth")
    write_official(tmp_path / "dino.pth", {"student": network, "teacher": network})
    monkeypatch.chdir(tmp_path)
    specs = [
        EncoderSpec("run", student=True, size=48, scales=(1.0, 0.5), pooling="mean"),
        EncoderSpec("run/checkpoints/step_00000010", top_value=4095.0),
        EncoderSpec(
            "timm:test_vit", weights=Path("w.pth"), by_position=True, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2)
        ),
        EncoderSpec("dino:dino.pth", arch="test_vit", position_resize="timm", last_blocks=2),
        EncoderSpec("config:digits_demo", random_weights=3, device="cpu", cache=Path("cache")),
    ]
    for spec in specs:
        encoder = encoder_of_spec(spec)
        assert encoder.spec is not None
        remembered = written(encoder.spec, tmp_path / "index")
        assert not {"device", "cache"} & remembered.keys()
        with monkeypatch.context() as elsewhere:
            elsewhere.chdir("/")
            again = encoder_of_spec(recalled_spec(remembered, tmp_path / "index", NOTHING))
        assert (again.fingerprint, again.pooling) == (encoder.fingerprint, encoder.pooling)
        assert again.preprocess == encoder.preprocess


def test_a_run_is_remembered_by_its_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    encoder = encoder_of_spec(EncoderSpec(str(tmp_path / "run")))
    assert encoder.spec is not None
    assert encoder.spec["model"] == str(tmp_path / "run" / "checkpoints" / "step_00000010")


def test_defaults_are_remembered(tmp_path: Path) -> None:
    """A later version may have others."""
    encoder = encoder_of_spec(EncoderSpec("timm:test_vit", random_weights=0))
    assert encoder.spec is not None
    remembered = written(encoder.spec, tmp_path)
    assert remembered["size"] == encoder.preprocess.crop and remembered["pooling"] == encoder.token_pooling
    assert tuple(remembered["mean"]) == encoder.preprocess.mean and remembered["position_resize"] == "timm"


def test_places_move_with_the_index(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "w.pth").write_bytes(b"")
    spec = EncoderSpec("timm:resnet18", weights=tmp_path / "a" / "w.pth")
    remembered = written(remembered_spec(spec), tmp_path / "a" / "index")
    (tmp_path / "a").rename(tmp_path / "b")
    recalled = recalled_spec(remembered, tmp_path / "b" / "index", NOTHING)
    assert recalled.weights == tmp_path / "b" / "w.pth"
    (tmp_path / "b" / "w.pth").unlink()
    with pytest.raises(CheckpointError, match=r"a/w\.pth, which does not exist") as gone:
        recalled_spec(remembered, tmp_path / "b" / "index", NOTHING)
    assert "model" in gone.value.arguments
    given = EncoderSpec("", weights=tmp_path / "elsewhere.pth", device="cpu")
    assert recalled_spec(remembered, tmp_path / "b" / "index", given) == EncoderSpec(
        "timm:resnet18", weights=tmp_path / "elsewhere.pth", device="cpu"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"model": None},
        {"model": ""},
        {"model": ["run"]},
        {"model": "a\0b"},
        {"model": 3},
        {"weights": {"x": 1}},
        {"weights": True},
        {"size": "large"},
        {"size": -1},
        {"size": 10**40},
        {"size": True},
        {"mean": [0.5]},
        {"mean": "0.5"},
        {"scales": [1.0] * 100_000},
        {"scales": [1e9]},
        {"scales": [float("nan")]},
        {"student": "yes"},
        {"device": "cuda"},
        {"cache": "/somewhere"},
        {"from_the_future": 1},
        {"__class__": "x"},
    ],
    ids=lambda change: str(change)[:40],
)
def test_what_a_hostile_manifest_says_is_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    remembered = {"model": "timm:test_vit", "random_weights": 0} | change
    with pytest.raises(CheckpointError) as refused:
        recalled_spec(remembered, tmp_path, NOTHING)
    assert refused.value.arguments == ("model",)
    assert with_relative_places(remembered, tmp_path) == remembered or change == {"scales": [float("nan")]}


@pytest.mark.parametrize("relative", [None, 3, [], {"weights": 7}, {"weights": "x\0"}, {"other": "x"}])
def test_odd_relative_places_are_not_followed(tmp_path: Path, relative: Any) -> None:
    remembered = {"model": "timm:test_vit", "weights": "/no/such/file", "relative": relative}
    with pytest.raises(CheckpointError, match="does not exist"):
        recalled_spec(remembered, tmp_path, NOTHING)


def test_devices_pipes_and_huge_files_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(17 * 2**30)
    for place in (tmp_path / "pipe", tmp_path / "huge", "/dev/zero", tmp_path):
        remembered = {"model": "timm:test_vit", "weights": str(place)}
        with pytest.raises(CheckpointError):
            encoder_of_spec(recalled_spec(remembered, tmp_path, NOTHING))


@pytest.mark.parametrize("model", ["https://example.org/run", "run", "dino:run", "config:/no/such.yaml"])
def test_places_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckpointError):
        recalled_spec({"model": model}, tmp_path, NOTHING)
