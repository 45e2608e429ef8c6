"""sop-eval finetune: results, a state that continues, labels by name, and mistakes in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from sop_faiss.cli.eval import main
from sop_faiss.evaluate.sets.labeled_part import LabeledPart
from sop_faiss.evaluate.sets.labeled_sets import open_labeled_images
from tests.images import write_folder
from tests.messages import command_fails
from tests.test_cli_knn import RESNET, write_store

SHORT = ("finetune", *RESNET, "--epochs", 2, "--batch-size", 4, "--lr", 1.0)


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def fails(*words: object) -> str:
    return command_fails(main, *words)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_folder(tmp_path / "data" / "train", classes=3, per_class=4, seed=1)
    write_folder(tmp_path / "data" / "val", classes=3, per_class=2, seed=2)
    return tmp_path / "data"


def test_it_is_trained_once(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    monkeypatch.chdir(tmp_path)
    out = Path("out")  # relative
    words = (*SHORT, "--data", data, "--lr", 0.1, "--held-out", 0.3, "--out", out)
    result = run(*words, "--json", first, "--per-class", tmp_path / "c.csv")
    assert result.exit_code == 0, result.output
    assert "chosen" in result.stdout and "6 test and 12 training images, 3 classes" in result.stdout
    again = run(*words, "--json", second)
    assert again.exit_code == 0 and "training:" not in again.stderr
    contents = [json.loads(file.read_text()) for file in (first, second)]
    for content in contents:
        content.pop("seconds"), content.pop("environment")
    assert contents[0] == contents[1] and contents[0]["command"] == "sop-eval finetune"
    protocol = contents[0]["protocol"]
    assert protocol["epochs"] == 2 and protocol["layer_decay"] == 0.75 and protocol["held_out_images"] == 3
    assert set(protocol["held_out_top1"]) == {"0.1", "1.0"} and protocol["preprocess"]["crop"] == 32
    assert "epochs" in fails(*words, "--epochs", 3)
    shutil.rmtree(data / "train" / "class_0")
    assert "training images" in fails(*words)
    whole = (out / "finetune.pt").read_bytes()
    kept = torch.load(out / "finetune.pt", weights_only=True)
    odd = [{"format": kept["format"]}, {**kept, "settings": {1: 2}}, {**kept, "held_out_top1": {"0.1": 5.0}}]
    odd.append({name: value for name, value in kept.items() if name != "training"})
    for number, content in enumerate(odd):
        torch.save(content, tmp_path / f"{number}.pt")
    files = [(tmp_path / f"{number}.pt").read_bytes() for number in range(len(odd))]
    for content in (b"", b"\x80\x02a.", whole[:1000], *files):
        (out / "finetune.pt").write_bytes(content)
        assert "damaged" in fails(*words)


def test_few_labels_and_quick(data: Path) -> None:
    result = run(
        "finetune",
        *RESNET,
        "--data",
        data,
        "--quick",
        "--epochs",
        2,
        "--min-crop",
        0.4,
        "--images-per-class",
        2,
        "--json",
        "-",
    )
    protocol = json.loads(result.stdout)["protocol"]
    assert protocol["train_images"] == 6 and protocol["train_part"]["images_per_class"] == 2
    assert protocol["epochs"] == 2 and protocol["preprocess"]["crop"] == 32  # as given
    assert protocol["erasing"] == 0 and protocol["min_crop"] == 0.4 and protocol["mixup"] == 0


def test_labels_are_compared_by_name(data: Path) -> None:
    shutil.rmtree(data / "val" / "class_0")
    sets = open_labeled_images(str(data / "train"), str(data / "val"), "a test", LabeledPart())
    assert np.unique(sets.test_labels).tolist() == [1, 2] and sets.choices["labels_compared_by"] == "name"
    assert np.unique(sets.train_labels).tolist() == [0, 1, 2] and len(sets.train_images) == 12
    write_folder(data / "val", classes=3, per_class=2, seed=2, prefix="class_")
    shutil.rmtree(data / "train" / "class_1")
    sets = open_labeled_images(str(data / "train"), str(data / "val"), "a test", LabeledPart())
    assert sets.choices["test_images_of_unseen_classes"] == 2 and set(sets.train_labels) == {0, 1}


def test_what_a_user_gets_wrong(data: Path, tmp_path: Path) -> None:
    both = ("--data", data)
    assert "--train SRC" in fails(*SHORT)
    assert "two" in fails(*SHORT, "--train", data / "train", "--test", data / "train")
    assert "--epochs" in fails(*SHORT, *both, "--epochs", 0)
    assert "--batch-size" in fails(*SHORT, *both, "--batch-size", 3)
    assert "--lr" in fails(*SHORT, *both, "--lr", "nan")
    assert "--workers" in fails(*SHORT, *both, "--workers", -1)
    for idle in ("--held-out", "--sweep-epochs"):  # nothing is chosen: there is one learning rate
        assert idle in fails(*SHORT, *both, idle, 1)
        assert idle in fails("finetune", *RESNET, *both, "--quick", idle, 1)
    assert "--scales" in fails(*SHORT, *both, "--scales", "1,0.5")
    assert "--mirrored" in fails(*SHORT, *both, "--mirrored")
    assert "--cache" in fails(*SHORT, *both, "--cache", tmp_path / "cache")
    assert "something else" in fails(*SHORT, *both, "--out", data / "train")
    assert not (data / "train" / "finetune.pt").exists()
    store = write_store(tmp_path / "store", 1, np.arange(6) % 3, 6)
    assert "feature store" in fails(*SHORT, "--train", tmp_path / "store", "--test", data / "val"), store
    for split in ("val", "train"):
        image = next((data / split / "class_1").iterdir())
        content = image.read_bytes()
        image.write_bytes(content[: len(content) // 2])
        line = fails(*SHORT, *both, "--out", tmp_path / "untrained")
        assert image.stem in line and not list((tmp_path).glob("untrained/*.pt"))
        image.write_bytes(content)
