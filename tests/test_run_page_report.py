"""The page of a run: what stands in it, that it stands alone, and what it says when something is missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from sop_faiss.cli.report import main
from sop_faiss.config import load_config
from sop_faiss.model.checkpoint import find_checkpoint, read_state
from sop_faiss.train.log.prototype_log import PrototypeSample, SeenPrototype, read_prototypes
from sop_faiss.train.verdict import verdict_of
from sop_faiss.verbs.run_page.images import open_run_images
from sop_faiss.verbs.run_page.neighbors import choose_images
from sop_faiss.verbs.run_page.prototypes import early_sample, sample_of_checkpoint
from sop_faiss.verbs.training.train import run_training
from tests.images import write_folder, write_shards
from tests.messages import command_fails
from tests.pages import Page
from tests.rivals import KINDS
from tests.runs import tiny_config

NAMES = ('"><img src=x onerror=alert(1)>.jpg', "<script>alert(2)<script>.jpg", "{{ 7 * 7 }}{% raw %}.jpg")


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Two classes of twelve images, some with names that would like to be more than names."""
    folder = write_folder(tmp_path_factory.mktemp("data") / "photos", classes=2, per_class=12, size=20)
    for number, name in enumerate(NAMES):
        (folder / "class_0" / f"{number:04d}.jpg").rename(folder / "class_0" / name)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, photos) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    scored = ("data.holdout_share=0.34", "evaluate.test=holdout", "evaluate.every_steps=2", "evaluate.k=3")
    sizes = ("sop.cls.num_anchors=6", "sop.cls.capacity=16", "sop.patch.capacity=16", "train.stop_after_steps=5")
    run_training(tiny_config(folder, f"data.train={photos}", *scored, *sizes), folder / "run")
    return folder / "run"


@pytest.fixture
def no_curves(monkeypatch) -> None:
    """They take longest to draw."""
    monkeypatch.setattr("sop_faiss.report.panel_plot.plot_panel", lambda panel: "data:image/svg+xml;base64,")


@pytest.fixture
def run(trained, tmp_path, no_curves) -> Path:
    """A copy that a test may change."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def report(run: Path, *options: object) -> tuple[Page, str]:
    """The page, and what the command said."""
    result = CliRunner().invoke(main, [str(run), *map(str, options)])
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    return Page((run / "report.html").read_text(encoding="utf-8")), result.stderr


def test_the_page_shows_the_run(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    early = early_sample(read_prototypes(run)).step
    assert 1 < early < 5  # all rows are random at first
    page, said = report(run)
    verdict = verdict_of(read_state(find_checkpoint(run)), lambda _: "k-NN accuracy: top-1, k = 3")
    assert verdict is not None
    sentence = f"{verdict.text[0].upper()}{verdict.text[1:]}."
    assert said.endswith(f"{sentence}\npage: {run / 'report.html'}\n")
    for text in (
        sentence,
        *("Training run run", "Loss", "Health", "Schedules", "Speed", "Scores over time", "All numbers"),
        *("Prototypes now, drawn for step 6", f"Prototypes early in training, drawn for step {early}"),
        "Nearest neighbors",
        *(
            "k-NN accuracy: top-1, k = 3",
            "Gradient before clipping",
            "step 5",
            "optim.base_lr",
            "0.01",
            "0.0005",
            "anchor, gives 0.90",
        ),
    ):
        assert text in page.texts, text
    assert any("the teacher of step_00000005" in text for text in page.texts)
    strips = page.of("article", "strip")
    assert len(strips) == 6 + 6 + 8
    assert len(page.of("li", "hit")) == 2 * 6 * 3 + 8 * 8
    assert page.of("li", "right") and page.of("li", "wrong")  # the folders are classes
    sections = page.of("details")
    assert "open" in sections[0] and not any("open" in section for section in sections[1:]) and len(sections) >= 9
    assert page.texts.index("All numbers") < page.texts.index("step 5")  # the list of sections, above what they hold
    (verdict,) = page.of("p", "verdict")
    assert page.tags.index(("p", verdict)) < page.tags.index(("nav", {"aria-label": "Sections"}))
    charts = [img for img in page.of("img") if img["src"].startswith("data:image/svg+xml")]
    assert len(charts) >= 15 and all(" to " in chart["alt"] for chart in charts)


def test_the_page_stands_alone_whatever_files_are_called(run):
    page, _ = report(run)
    text = (run / "report.html").read_text(encoding="utf-8")
    assert (
        len(page.of("script")) == 1
        and page.of("link") == [{"rel": "icon", "href": "data:,"}]
        and not page.of("svg")
        and not page.of("iframe")
    )
    assert "http://" not in text and "https://" not in text
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        assert attributes.get("src", "data:image/").startswith("data:image/")
        assert attributes.get("href", "#").startswith(("#", "data:,"))
    assert any(name.removesuffix(".jpg") in "".join(page.texts) for name in NAMES)
    policy = next(meta for meta in page.of("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"].startswith("default-src 'none'")
    assert len(text) < 5 << 20


def test_prototypes_now_are_those_of_the_next_step(run, photos):
    config = load_config(run / "config.yaml")
    now = sample_of_checkpoint(config, find_checkpoint(run), 16)
    longer = tiny_config(run.parent, *_as_overrides(run), "train.stop_after_steps=6", "train.checkpoint_every_steps=1")
    run_training(longer, run, resume=True)
    assert read_prototypes(run)[-1] == now


def _as_overrides(run: Path) -> list[str]:
    config = load_config(run / "config.yaml")
    return [
        f"data.train={config.data.train}",
        *("data.holdout_share=0.34", "evaluate.test=holdout", "evaluate.every_steps=2", "evaluate.k=3"),
        *("sop.cls.num_anchors=6", "sop.cls.capacity=16", "sop.patch.capacity=16"),
    ]


def test_early_is_the_first_sample_that_is_mostly_of_images():
    def sample(step: int, *images: int) -> PrototypeSample:
        return PrototypeSample(step, "cls", [SeenPrototype(image, [], [], [1.0]) for image in images])

    rows = [sample(1, -1, -1), sample(2, -1, 3), sample(5, 2, 3)]
    assert early_sample(rows) == rows[1]
    assert early_sample(rows[:1]) == rows[0]
    assert early_sample([]) is None


def test_queries_are_held_out_where_there_are_some(run, photos):
    config = load_config(run / "config.yaml")
    images = open_run_images(config, None)
    queries, searched = choose_images(images, 10, 0)
    assert set(queries) <= set(images.held_out) and set(searched) <= set(images.trained)
    assert (len(queries), len(searched)) == (8, 10)
    assert [part.tolist() for part in choose_images(images, 10, 0)] == [queries.tolist(), searched.tolist()]
    without = ("data.holdout_share=0", "evaluate.test=''", "evaluate.every_steps=0")
    plain = open_run_images(load_config(run / "config.yaml", without), None)
    queries, searched = choose_images(plain, 2000, 0)
    assert (len(queries), len(searched)) == (8, 16) and not set(queries) & set(searched)


def test_images_that_are_gone_cost_the_images_alone(run, photos, tmp_path):
    moved = shutil.copytree(photos, tmp_path / "moved")
    config = (run / "config.yaml").read_text().replace(str(photos), str(tmp_path / "gone"))
    (run / "config.yaml").write_text(config)
    page, said = report(run)
    assert not page.of("article", "strip") and len(page.of("img")) >= 15
    (line,) = [text for text in page.texts if text.startswith("No images: ")]
    assert str(tmp_path / "gone") in line and line in said
    page, said = report(run, "--data", moved)
    assert len(page.of("article", "strip")) == 20 and "No images" not in said
    (moved / "class_1" / "0003.jpg").unlink()
    page, said = report(run, "--data", moved)
    assert str(moved) in said and not page.of("article", "strip")


def test_a_run_that_read_in_sequence_has_no_images(tmp_path, no_curves):
    shards = write_shards(tmp_path / "shards", classes=2, per_class=12, size=20)
    sequential = ("data.access=sequential", "data.samples_per_epoch=24", "train.stop_after_steps=2")
    run_training(tiny_config(tmp_path, f"data.train={shards}", *sequential), tmp_path / "run")
    page, said = report(tmp_path / "run")
    assert "data.access = sequential" in said and not page.of("article", "strip")


def test_a_rival_has_neighbors_and_no_prototypes(tmp_path, photos, no_curves):
    overrides = (f"data.train={photos}", "train.stop_after_steps=1", *KINDS["dino"])
    run_training(tiny_config(tmp_path, *overrides), tmp_path / "run")
    page, said = report(tmp_path / "run")
    assert "prototypes" not in said and page.of("article", "strip")


def test_unreadable_and_unlabeled_images(run, photos, tmp_path):
    moved = shutil.copytree(photos, tmp_path / "moved")
    for path in sorted((moved / "class_1").iterdir())[:4]:
        path.write_bytes(b"no image")
    page, _ = report(run, "--data", moved)
    assert page.of("div", "problem")
    for path in moved.rglob("*.jpg"):
        path.write_bytes(b"no image")
    page, said = report(run, "--data", moved)
    assert "No nearest neighbors: " in said and len(page.of("article", "strip")) == 12


def test_without_images_nothing_is_opened(run, monkeypatch):
    monkeypatch.setattr("sop_faiss.verbs.run_page.report.open_run_images", lambda *_: pytest.fail("opened"))
    page, _ = report(run, "--no-images")
    assert "Images were left out." in page.texts and not page.of("article")
    assert not [img for img in page.of("img") if "jpeg" in img["src"]]


def test_a_run_that_is_still_training(run):
    """A last line half written, no checkpoint yet, and no record of prototypes (an older run)."""
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 6, "lo')
    page, _ = report(run)
    assert len(page.of("article", "strip")) == 20
    shutil.rmtree(run / "checkpoints")
    page, _ = report(run)
    assert "Prototypes now, drawn for step 5" in page.texts and "none yet" in page.texts
    (run / "prototypes.jsonl").unlink()
    page, said = report(run)
    assert "prototypes.jsonl" in said and not page.of("article", "strip")


def test_what_went_wrong_is_told(run):
    (run / "stopped.json").write_text(
        json.dumps({"loss": "nan", "step": "5", "cause": "<b>bold</b>", "image_ids": [1]})
    )
    bad = [{"step": 1, "reason": "truncated", "key": "<i>one"}] * 3 + [{"step": 2, "reason": "empty", "key": "two"}]
    (run / "bad_samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in bad))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "knn_top1_k3" in line:
            line["knn_top1_k3"] = 50.0 - line["step"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page, _ = report(run, "--no-images")
    assert {"the run stopped itself", "nan", "<b>bold</b>", "truncated", "3", "<i>one"} <= set(page.texts)
    notice = "k-NN accuracy: top-1, k = 3: no later value is above that of step 0 (50.00); the best is 48.00."
    assert notice in page.texts
    (run / "stopped.json").write_text("{")
    assert any("cannot be read as JSON" in text for text in report(run, "--no-images")[0].texts)


def test_secrets_of_addresses_are_hidden(run):
    photos = load_config(run / "config.yaml").data.train
    config = (run / "config.yaml").read_text().replace(photos, "https://me:hunter2@host/a.tar?key=hunter2")
    assert "hunter2" in config
    (run / "config.yaml").write_text(config)
    report(run, "--no-images")
    text = (run / "report.html").read_text()
    assert "hunter2" not in text and "https://host/a.tar" in text


def test_damaged_records_are_left_out_and_counted(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], "{", *lines[1:], "\0" * 20, lines[-1]]) + "\n")
    told = "2 damaged lines of metrics.jsonl are left out, the first is line 2."
    assert told in report(run, "--no-images")[1].splitlines()
    assert told in (run / "report.html").read_text()


def test_mistakes_are_one_line(run, tmp_path):
    refused = command_fails(main, tmp_path / "nowhere")
    assert "does not exist" in refused and "`" not in refused  # no name that only the library has
    (tmp_path / "empty").mkdir()
    assert "has no config.yaml" in command_fails(main, tmp_path / "empty")
    assert "wanted 0 to 1,000,000" in command_fails(main, run, "--gallery", "-1")
    assert "read by this command" in command_fails(main, run, "--out", run / "metrics.jsonl")
    assert "would be stdout" in command_fails(main, run, "--out", "-")
    (run / "metrics.jsonl").write_text("")
    assert "has no line in metrics.jsonl yet" in command_fails(main, run)
    (run / "metrics.jsonl").write_text("{\n[\n")
    assert "has no complete line in metrics.jsonl yet" in command_fails(main, run)
    (run / "config.yaml").write_text("data: {traim: x}")
    assert "did you mean" in command_fails(main, run)
    assert not (run / "report.html").exists()
