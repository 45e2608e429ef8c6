"""sop-eval transfer: the recipe of each set, results, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sop_faiss.cli.eval import main
from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.sets.transfer_sets import _LAYOUTS
from sop_faiss.evaluate.trained.transfer_choices import SETS, recipe_of_set
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs.scoring.eval_transfer import TransferOptions, evaluate_transfer
from tests.messages import command_fails
from tests.test_cli_knn import RESNET
from tests.transfers import write_cifar, write_flowers


def test_a_set_is_learned(tmp_path: Path) -> None:
    data = write_cifar(tmp_path / "cifar-10-batches-py")
    words = ("transfer", *RESNET, "--data", data, "--quick", "--epochs", 6, "--batch-size", 6, "--lr", 1, "--mixup", 0)
    words = (*words, "--cutmix", 0, "--repeats", 2, "--json", "-")
    result = CliRunner().invoke(main, [*map(str, words)])
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    protocol = content["protocol"]
    assert content["command"] == "sop-eval transfer" and content["metrics"]["top1"] > 90
    assert (protocol["set"], protocol["train_images"], protocol["test_images"]) == ("cifar10", 30, 6)
    assert (protocol["epochs"], protocol["repeats"], protocol["steps"]) == (6, 2, 30)
    assert set(content["per_class"]) == {"red", "green", "blue"}


def test_the_recipe_of_each_set() -> None:
    assert SETS.keys() == _LAYOUTS.keys()
    for name in SETS:
        for size in "SBL":
            recipe = recipe_of_set(name, size)
            assert recipe["epochs"] == (360 if name.startswith("inat") else 1000) and recipe["layer_decay"] == 1
    assert recipe_of_set("inat18", "S")["learning_rates"] == (1e-4,) != recipe_of_set("inat18", "B")["learning_rates"]


def test_a_first_layer_is_not_ignored(tmp_path: Path) -> None:
    options = TransferOptions(given={"head_layer": "first", "epochs": 1})
    with pytest.raises(ConfigError, match="head_layer=first"):
        evaluate_transfer(
            write_cifar(tmp_path / "cifar"), EncoderSpec("timm:test_resnet", size=32, random_weights=0), options
        )


def test_what_a_user_gets_wrong(tmp_path: Path) -> None:
    data = write_flowers(tmp_path / "flowers")
    both = ("transfer", *RESNET, "--data", data)
    for option, value in (("--epochs", 0), ("--lr", "nan"), ("--repeats", 0), ("--set", "mnist"), ("--set", "cars")):
        assert option in command_fails(main, *both, option, value) or option == "--set"
    assert "--data" in command_fails(main, "transfer", *RESNET, "--data", tmp_path / "none")
    assert "--workers" in command_fails(main, *both, "--workers", -1)
    for words in ((), ("--quick",), ("--lr", 1)):
        assert "--sweep-epochs" in command_fails(main, *both, *words, "--sweep-epochs", 1)
    (data / "jpg" / "image_00008.jpg").unlink()
    assert "image_00008" in command_fails(main, *both, "--quick")
    with pytest.raises(FileNotFoundError):
        (data / "transfer.pt").stat()
