"""sop-eval detect: scores, a state that continues, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sop_faiss.cli.eval import main
from tests.cocos import write_coco
from tests.messages import command_fails

NETWORK = ("--model", "timm:test_efficientnet", "--random-weights", 0)
SHORT = (*NETWORK, "--quick", "--size", 64, "--epochs", 1, "--width", 8, "--rois", 8, "--images", 3)


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["detect", *(str(word) for word in words)])


def fails(*words: object) -> str:
    return command_fails(main, "detect", *words)


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    return write_coco(tmp_path / "coco", 4, official=True)


def test_it_is_trained_once(coco: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = (*SHORT, "--data", "coco", "--out", "out")
    first = run(*words, "--json", "1.json")
    assert first.exit_code == 0, first.output
    assert "4 test images (val) and 2 training images, 1 epochs at 64 pixels" in first.stdout
    again = run(*words, "--json", "-")
    assert again.exit_code == 0 and "training:" not in again.stderr
    contents = [json.loads(Path("1.json").read_text()), json.loads(again.stdout)]
    for content in contents:
        content.pop("seconds"), content.pop("environment")
    assert contents[0] == contents[1] and contents[0]["command"] == "sop-eval detect"
    protocol, metrics = contents[0]["protocol"], contents[0]["metrics"]
    assert {"box_ap", "box_ap50", "box_ap75", "mask_ap", "mask_ap50", "mask_ap75"} <= set(metrics)
    assert (protocol["train_instances"], protocol["train_crowds"], protocol["test_images"]) == (2, 1, 4)
    assert protocol["learning_rate"] == 1e-3 and protocol["detector"] == "Mask R-CNN"
    assert "epochs" in fails(*words, "--epochs", 2)
    trained = run(*words, "--test-split", "train", "--json", "-")
    assert json.loads(trained.stdout)["protocol"]["test_images"] == 3
    cascade = run(*words[:-2], "--cascade", "--workers", 1, "--json", "-")
    assert json.loads(cascade.stdout)["protocol"]["detector"] == "Cascade Mask R-CNN"


def test_mistakes_are_one_line(coco: Path, tmp_path: Path) -> None:
    words = (*SHORT, "--data", coco)
    for option, value in (("--size", 1), ("--lr", 0), ("--images", 0), ("--workers", -1), ("--test-split", "x")):
        assert option in fails(*words, option, value)
    assert "--pooling" in fails(*words, "--pooling", "gem")
    assert "laid out as COCO" in fails(*SHORT, "--data", tmp_path / "none")
    assert "no instance to learn" in fails(*words, "--images", 1)
    vit = ("--model", "timm:test_vit", "--random-weights", 0)
    assert "layer_decay" not in fails(*vit, "--data", coco, "--layer-decay", 7)
    file = coco / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "annotations": []}))
    assert "no instance to find" in fails(*words)
    content["categories"][0]["name"] = "blue"
    file.write_text(json.dumps(content))
    assert "same categories" in fails(*words)
