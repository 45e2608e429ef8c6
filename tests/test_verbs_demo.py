"""`make demo` at a small size; the promised gains themselves are a slow test."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from sop_faiss.cli.demo import main
from sop_faiss.config import load_config
from sop_faiss.verbs import demo
from sop_faiss.verbs.training.train import TrainingResult
from tests.images import write_folder


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def few_steps(monkeypatch):
    """The demo's configurations with three steps."""
    monkeypatch.setattr(
        demo, "load_config", lambda name, overrides: load_config(name, [*overrides, "train.stop_after_steps=3"])
    )


def test_digits_demo_scores_indexes_and_writes_the_page(tmp_path, few_steps):
    result = run("--out", tmp_path / "demo")
    assert result.exit_code == 3, result.output  # three steps do not reach the promise, and it says so
    for name in ("raw pixels", "before (random weights)", "after (trained)"):
        assert name in result.stdout
    assert "gains over random weights" in result.stderr
    page = (tmp_path / "demo" / "results.html").read_text()
    assert "before (random weights)" in page
    assert page.count("data:image/") > 100
    assert (tmp_path / "demo" / "index" / "manifest.json").is_file()
    again = run("--out", tmp_path / "demo")  # its own folder is made anew
    assert again.exit_code == 3


def test_own_photos_without_labels(tmp_path, few_steps):
    photos = write_folder(tmp_path / "photos", classes=0, per_class=20, size=(60, 80))
    (photos / "broken.jpg").write_bytes(b"no image")
    result = run("--images", photos, "--out", tmp_path / "demo")
    assert result.exit_code == 0, result.output + result.stderr
    assert (tmp_path / "demo" / "results.html").is_file()
    assert "k-NN" not in result.stdout


def test_a_stopped_demo_says_that_it_starts_over(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "run_training", lambda *_, **__: TrainingResult(False, 3, 850, {}))
    result = run("--out", tmp_path / "demo")
    assert result.exit_code == 3
    assert result.stderr.endswith("stopped by a signal: run it again; it starts from the beginning\n")


def test_too_few_photos_and_foreign_folders(tmp_path):
    photos = write_folder(tmp_path / "photos", classes=0, per_class=3)
    result = run("--images", photos, "--out", tmp_path / "demo")
    assert result.exit_code == 1
    assert "has 3 images" in result.stderr
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    result = run("--out", mine)
    assert result.exit_code == 1
    assert "was not made by the demo" in result.stderr
    assert (mine / "thesis.txt").read_text() == "precious"


@pytest.mark.slow
def test_the_demo_keeps_its_promise(tmp_path):
    result = run("--out", tmp_path / "demo")
    assert result.exit_code == 0, result.output + result.stderr
