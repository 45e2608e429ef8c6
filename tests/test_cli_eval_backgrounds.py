"""sop-eval backgrounds: accuracy on each set, the gap, and mistakes in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from sop_faiss.cli.eval import main
from tests.images import write_folder
from tests.messages import command_fails
from tests.test_cli_knn import RESNET, write_store

LOGISTIC = ("--penalty", 0.0001)


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["backgrounds", *(str(word) for word in words)])


def fails(*words: object) -> str:
    return command_fails(main, "backgrounds", *words)


@pytest.fixture(scope="module")
def challenge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sets of three classes; in the last the folders of the classes are exchanged."""
    folder = tmp_path_factory.mktemp("in9")
    write_folder(folder / "original" / "train", per_class=6, seed=1, prefix="0_")
    for seed, name in enumerate(("original", "mixed_same", "mixed_rand"), start=2):
        write_folder(folder / name / "val", per_class=4, seed=seed, prefix="0_")
    last = folder / "mixed_rand" / "val"
    for old, new in (("0_0", "kept"), ("0_1", "0_0"), ("0_2", "0_1"), ("kept", "0_2")):
        (last / old).rename(last / new)
    return folder


def test_accuracy_of_each_set_and_the_gap(challenge: Path, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    result = run(*RESNET, *LOGISTIC, "--data", challenge, "--json", file)
    assert result.exit_code == 0 and "mixed_same - mixed_rand" in result.stdout, result.output
    assert "try more (--penalty)" not in result.stderr  # one was asked for
    content = json.loads(file.read_text())
    metrics = content["metrics"]
    assert list(metrics) == ["original", "mixed_same", "mixed_rand", "bg_gap"]
    assert metrics["original"] > 90 and metrics["mixed_rand"] < 10
    assert metrics["bg_gap"] == pytest.approx(metrics["mixed_same"] - metrics["mixed_rand"])
    for name, (low, high) in content["intervals"].items():
        assert low <= metrics[name] <= high and low < high
    protocol = content["protocol"]
    assert protocol["test_images"] == {"original": 12, "mixed_same": 12, "mixed_rand": 12}
    assert (protocol["train_images"], protocol["classes"]) == (18, 3)
    words = (*RESNET, "--train", challenge / "original" / "train", "--test", challenge / "mixed_same" / "val")
    own = CliRunner().invoke(main, [str(each) for each in ("logistic", *words, *LOGISTIC, "--json", "-")])
    assert json.loads(own.stdout)["metrics"]["top1"] == pytest.approx(metrics["mixed_same"])


def test_classes_without_training_images_are_said(challenge: Path, tmp_path: Path) -> None:
    train = tmp_path / "train"
    shutil.copytree(challenge / "original" / "train", train)
    shutil.rmtree(train / "0_1")
    result = run(*RESNET, *LOGISTIC, "--data", challenge, "--train", train, "--json", tmp_path / "b.json")
    assert result.exit_code == 0 and "12 test images are of classes without" in result.stderr, result.output
    protocol = json.loads((tmp_path / "b.json").read_text())["protocol"]
    assert protocol["test_images_of_unseen_classes"] == 3 * 4  # of three sets


def test_what_a_user_gets_wrong(challenge: Path, tmp_path: Path) -> None:
    data = ("--data", challenge)
    assert "SET/val/CLASS" in fails(*RESNET, "--data", tmp_path)
    assert "nowhere" in fails(*RESNET, "--data", tmp_path / "nowhere")
    assert "--penalty" in fails(*RESNET, *data, "--penalty", -1)
    assert "is read by this command" in fails(*RESNET, *data, "--json", challenge / "x.json")
    other = write_folder(tmp_path / "other", per_class=3, prefix="z_")
    assert "no class in common" in fails(*RESNET, *data, "--train", other)
    store = write_store(tmp_path / "s", 1, np.arange(15) % 3, 15)
    assert "cannot be compared" in fails(*RESNET, *data, "--train", store)
    copy = tmp_path / "copy"
    shutil.copytree(challenge, copy)
    shutil.rmtree(copy / "original" / "train")
    assert "--train" in fails(*RESNET, "--data", copy)
    shutil.rmtree(copy / "mixed_same" / "val")
    (copy / "mixed_same" / "val").mkdir()
    assert "empty" in fails(*RESNET, "--data", copy, "--train", challenge / "original" / "train")
