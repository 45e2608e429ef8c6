"""sop-index tune as a user types it, and the choice that sop-index build takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from sop_faiss.cli.index import main
from sop_faiss.evaluate.encoder_settings import Setting
from sop_faiss.index.search import FeatureIndex
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs.finding import index_tune
from sop_faiss.verbs.finding.index_tune import Candidate, choose
from tests.images import write_folder
from tests.messages import command_fails

RESNET = ("--model", "timm:test_resnet", "--random-weights", "0", "--size", "32")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["tune", *map(str, arguments)])


def fails(*arguments: object) -> str:
    return command_fails(main, "tune", *arguments)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "photos", classes=5, per_class=8, prefix="")


def test_by_labels_and_the_index_takes_the_choice(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_tune, "_FEWEST_FOR_WHITENING", 40)
    monkeypatch.setattr(index_tune, "choose", lambda candidates: (candidates[-1], choose(candidates)[1]))
    out = tmp_path / "choice.json"
    result = run(photos, *RESNET, "--out", out)
    assert result.exit_code == 0, result.output
    assert "classes: 0, 1, 2, 3, 4;" in result.stderr and "--no-labels" in result.stderr
    assert "40 images, 40 queries" in result.stdout and "mAP" in result.stdout and "own" in result.stdout
    content = json.loads(out.read_text())
    measured = content["measured"]
    assert (measured["by"], measured["images"]) == ("labels", 40) and len(measured["settings"]) == 24
    assert "whitened to 5" in measured["chosen"]
    built = CliRunner().invoke(main, ["build", str(photos), "--model", str(out), "--out", str(tmp_path / "index")])
    assert built.exit_code == 0, built.output
    manifest = FeatureIndex.open(tmp_path / "index").manifest
    opened = encoder_of_spec(EncoderSpec(str(out)))
    assert (manifest.dimension, manifest.encoder["fingerprint"]) == (5, content["fingerprint"])
    assert manifest.encoder_spec is not None and manifest.encoder_spec["size"] == opened.preprocess.crop
    searched = CliRunner().invoke(main, ["search", str(tmp_path / "index"), str(next(photos.rglob("*.jpg")))])
    assert searched.exit_code == 0, searched.output
    assert run(photos, *RESNET, "--out", out).exit_code == 0  # its own file is replaced


def test_without_labels_by_crops_and_the_table_says_so(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", classes=1, per_class=35, prefix="")
    for image in (photos / "0").iterdir():
        image.rename(photos / image.name)
    (photos / "0").rmdir()
    (photos / "broken.jpg").write_bytes(b"no image")
    result = run(photos, *RESNET, "--out", tmp_path / "choice.json")
    assert result.exit_code == 0, result.output
    assert "35 images, 70 queries" in result.stdout and "proxy" in result.stdout
    assert "1 images cannot be used" in result.stderr
    assert "white" not in result.stdout  # too few images
    assert json.loads((tmp_path / "choice.json").read_text())["measured"]["by"] == "views"


def test_folders_can_be_left_out_of_it(photos: Path, tmp_path: Path) -> None:
    result = run(photos, *RESNET, "--no-labels", "--out", tmp_path / "choice.json")
    assert result.exit_code == 0 and "40 images, 80 queries" in result.stdout, result.output
    assert "classes" not in result.stderr


def test_labels_that_nobody_shares_are_none(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", classes=40, per_class=1, prefix="")
    result = run(photos, *RESNET, "--out", tmp_path / "choice.json")
    assert result.exit_code == 0 and "proxy" in result.stdout, result.output


def candidate(scores: np.ndarray) -> Candidate:
    return Candidate(Setting(32, (1.0,), "pooled"), 0, scores, 1.0)


def test_the_own_setting_is_kept_unless_the_gain_is_clear() -> None:
    rng = np.random.default_rng(0)
    own = candidate(rng.uniform(0, 100, 60))
    lucky = candidate(own.scores + rng.normal(2, 30, 60))
    better = candidate(own.scores + rng.normal(20, 5, 60))
    worse = candidate(own.scores - 1)
    assert choose([own, worse]) == (own, None)
    chosen, difference = choose([own, lucky, worse])
    assert chosen is own and difference is not None and difference.difference.low < 0
    assert choose([own, worse, lucky, better])[0] is better


@pytest.mark.parametrize("given", [0, 29, 100_001, -5])
def test_impossible_numbers_of_images(photos: Path, tmp_path: Path, given: int) -> None:
    assert "--images" in fails(photos, *RESNET, "--images", given, "--out", tmp_path / "choice.json")


def test_bad_input_is_refused_before_the_work(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "choice.json"
    few = write_folder(tmp_path / "few", classes=2, per_class=3, prefix="")
    assert "wanted 30" in fails(few, *RESNET, "--out", out)
    monkeypatch.setattr(index_tune, "setting_features", lambda *_, **__: pytest.fail("images were encoded first"))
    assert "--out" in fails(photos, *RESNET, "--out", tmp_path / "choice")
    assert "SRC" in fails(*RESNET, "--out", out)
    assert "--mirrored" in fails(photos, *RESNET, "--mirrored", "--out", out)
    assert "--whitening" in fails(photos, *RESNET, "--whitening", tmp_path, "--out", out)
    assert "missing" in fails(tmp_path / "missing", *RESNET, "--out", out)
    out.write_text('{"another": "file"}')
    assert "--force" in fails(photos, *RESNET, "--out", out)
    assert "already" in fails(photos, "--model", out, "--out", tmp_path / "b.json")
