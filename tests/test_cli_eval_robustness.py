"""sop-eval robustness: curves with intervals, a figure, and mistakes in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from sop_faiss.cli.eval import main
from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.robustness_choices import RobustnessChoices
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.model.encoders.timm_encoder import TimmModel
from sop_faiss.verbs.scoring.eval_robustness import RobustnessOptions, evaluate_robustness
from tests.images import write_folder
from tests.messages import command_fails
from tests.test_cli_knn import RESNET, write_store

FEW = ("--share", 0.5, "--grid", 4, "--k", 3)


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["robustness", *(str(word) for word in words)])


def fails(*words: object) -> str:
    return command_fails(main, "robustness", *words)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    folder = tmp_path_factory.mktemp("sets")
    write_folder(folder / "train", per_class=4, seed=1)
    write_folder(folder / "val", per_class=2, seed=2)
    return ("--data", folder)


def test_curves_of_an_encoder(sets: tuple[object, ...], tmp_path: Path) -> None:
    file, figure = tmp_path / "r.json", tmp_path / "r.png"
    result = run(*RESNET, *sets, *FEW, "--json", file, "--out", figure)
    assert result.exit_code == 0, result.output
    assert "non salient 0.5" in result.stdout and "norm of patch tokens" in result.stdout
    content = json.loads(file.read_text())
    assert list(content["metrics"]) == ["clean", "random_0.5", "salient_0.5", "non_salient_0.5", "shuffled_4"]
    for name, (low, high) in content["intervals"].items():
        assert 0 <= low <= content["metrics"][name] <= high <= 100 and low < high
    protocol = content["protocol"]
    assert (protocol["patches"], protocol["grids"], protocol["train_images"], protocol["test_images"]) == (
        8,
        [4],
        12,
        6,
    )
    assert figure.read_bytes().startswith(b"\x89PNG")
    again = run(*RESNET, *sets, *FEW, "--json", "-")
    assert json.loads(again.stdout)["metrics"] == content["metrics"]


def test_another_encoder_can_say_what_is_salient(sets: tuple[object, ...]) -> None:
    folder = Path(str(sets[1]))
    judge = EncoderSpec("timm:test_vit", random_weights=0)
    options = RobustnessOptions(RobustnessChoices((0.5,), (4,), k=3), salient_by=judge)
    spec = EncoderSpec("timm:test_resnet", random_weights=0, size=32)
    result, figure = evaluate_robustness(str(folder / "train"), str(folder / "val"), spec, options)
    assert figure is None and "attention of [CLS]" in result.protocol["salient_by"]
    assert "neither a checkpoint nor a run" in fails(*RESNET, *sets, "--k", 3, "--salient-by", folder)


def test_unchanged_images_score_as_k_nn(sets: tuple[object, ...]) -> None:
    from sop_faiss.cli.knn import main as knn

    content = json.loads(run(*RESNET, *sets, "--share", 0, "--grid", 1, "--k", 3, "--json", "-").stdout)
    folder = Path(str(sets[1]))
    words = [*RESNET, "--train", folder / "train", "--test", folder / "val", "-k", 3, "--json", "-"]
    clean = json.loads(CliRunner().invoke(knn, [str(word) for word in words]).stdout)["metrics"]["top1_k3"]
    assert set(content["metrics"].values()) == {clean}


def test_classes_without_training_images_are_said(sets: tuple[object, ...], tmp_path: Path) -> None:
    shutil.copytree(Path(str(sets[1])), tmp_path / "few")
    shutil.rmtree(min((tmp_path / "few" / "train").iterdir()))
    result = run(*RESNET, "--data", tmp_path / "few", *FEW)
    assert result.exit_code == 0 and "2 test images are of classes without" in result.stderr, result.output


def test_what_a_user_gets_wrong(sets: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, named in (
        (("--share", 1.5), "--share"),
        (("--share", -0.1), "--share"),
        (("--share", "nan"), "--share"),
        (("--grid", 5), "--grid"),
        (("--grid", 0), "--grid"),
        (("--grid", 4, "--grid", 4), "--grid"),
        (("--patches", 10**9), "--patches"),
        (("--patches", 7), "--patches"),
        (("--k", 0), "--k"),
        (("--k", 13), "--k"),
        (("--seed", -1), "--seed"),
        (("--out", tmp_path / "x.jpg"), ".png"),
    ):
        assert named in fails(*RESNET, *sets, "--k", 3, *words)
    folder = Path(str(sets[1]))
    store = write_store(tmp_path / "s", 1, np.arange(30) % 3, 30)
    assert "feature store" in fails(*RESNET, "--train", folder / "train", "--test", store)
    assert "name two" in fails(*RESNET, "--train", folder / "val", "--test", folder / "val")
    (tmp_path / "empty").mkdir()
    assert "empty" in fails(*RESNET, "--train", folder / "train", "--test", tmp_path / "empty")
    one = next((folder / "val").rglob("*.jpg"))
    assert "label" in fails(*RESNET, "--train", folder / "train", "--test", one)

    def without_tokens(*_: object) -> None:
        raise ConfigError("it makes no tokens")

    monkeypatch.setattr(TimmModel, "features_and_tokens", without_tokens)
    assert "no tokens" in fails(*RESNET, *sets, "--k", 3)


def test_defaults_fit_the_side() -> None:
    choices = RobustnessChoices()
    assert choices.for_side(224) == (14, (1, 2, 4, 8, 14, 16))
    assert choices.for_side(32) == (8, (1, 2, 4, 8, 16))
    assert choices.for_side(97) == (1, (1,))
