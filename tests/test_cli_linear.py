"""sop-linear as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from sop_faiss.cli.linear import main
from tests.images import write_folder
from tests.messages import command_fails
from tests.test_cli_knn import RESNET, write_store

QUICK = ("--epochs", 3, "--lr", 0.1, "--lr", 1.0)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def fails(*arguments: object) -> str:
    return command_fails(main, *arguments)


@pytest.fixture
def stores(tmp_path: Path) -> tuple[Path, Path]:
    labels = np.arange(30) % 3
    return write_store(tmp_path / "train", 1, labels, 30), write_store(tmp_path / "test", 2, labels, 30)


def test_two_feature_stores(stores: tuple[Path, Path], tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("l.json", "l.csv", "l.png")}
    outputs = ("--json", files["l.json"], "--per-class", files["l.csv"], "--confusion", files["l.png"])
    result = run("--train", stores[0], "--test", stores[1], *QUICK, *outputs)
    assert result.exit_code == 0, result.output
    assert "chosen" in result.stdout and "30 test and 30 training images, 3 classes" in result.stdout
    assert "is the first or last of those tried" in result.stderr
    content = json.loads(files["l.json"].read_text())
    assert content["command"] == "sop-linear" and content["metrics"] == {"top1": 100.0}
    protocol = content["protocol"]
    assert protocol["learning_rates"] == [0.1, 1.0] and set(protocol["held_out_top1"]) == {"0.1", "1.0"}
    assert (protocol["epochs"], protocol["held_out_images"], protocol["augmentation"]) == (3, 3, "none")
    assert content["per_class"]["2"] == {"images": 10, "right": 10, "top1": 100.0}
    assert files["l.csv"].read_text().startswith("class,images,right,top1\n0,10,10,100.0000")
    assert files["l.png"].read_bytes().startswith(b"\x89PNG")


def test_part_of_the_labels(stores: tuple[Path, Path]) -> None:
    result = run("--train", stores[0], "--test", stores[1], *QUICK, "--train-share", 0.4, "--json", "-")
    assert result.exit_code == 0, result.output
    protocol = json.loads(result.stdout)["protocol"]  # nothing else is printed there
    assert "is the first or last of those tried" in result.stderr
    assert (protocol["train_images"], protocol["train_images_per_class"]) == (12, [4, 4])


def test_images(tmp_path: Path) -> None:
    train, test = write_folder(tmp_path / "a", per_class=6, seed=1), write_folder(tmp_path / "b", per_class=2, seed=2)
    result = run(*RESNET, "--train", train, "--test", test, *QUICK)
    assert result.exit_code == 0, result.output
    assert "embedding" in result.stderr and "training" in result.stderr and "embedding" not in result.stdout


def test_what_a_user_gets_wrong(stores: tuple[Path, Path], tmp_path: Path) -> None:
    sets = ("--train", stores[0], "--test", stores[1])
    assert "--epochs 0" in fails(*sets, "--epochs", 0)
    assert "each above 0" in fails(*sets, "--lr", 0)
    assert "--held-out" in fails(*sets, "--held-out", 0.2, "--lr", 1)
    assert "--held-out 2.0" in fails(*sets, "--held-out", 2)
    assert "every image would find itself" in fails("--train", stores[0], "--test", stores[0])
    assert "a linear probe needs a label" in fails("--train", write_store(tmp_path / "n", 3, None), "--test", stores[1])
    assert "learning rate" in fails(*sets, "--images-per-class", 1)
    assert "encoder's options" in fails("--size", 32, *sets)
    assert run().exit_code == 2
    assert "--test SRC" in fails("--train", stores[0]) and "--train SRC" in fails("--test", stores[1])


def test_a_directory_of_both_sets(stores: tuple[Path, Path]) -> None:
    named, both = run("--train", stores[0], "--test", stores[1]), run("--data", stores[0].parent)
    assert both.exit_code == 0 and both.stdout == named.stdout
