"""Weights & Biases, by a module that stands in for the package."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sop_faiss.cli.train import main
from sop_faiss.train.log.monitor import read_metrics
from tests.images import write_shards
from tests.runs import tiny_config_file

FAKE = """
import json, os
from pathlib import Path

def note(what, content):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps([what, content]) + "\\n")

class Run:
    def define_metric(self, name, step_metric=None):
        note("define", [name, step_metric])
    def log(self, line):
        note("log", line)
    def finish(self):
        note("finish", None)

def init(**settings):
    if os.environ.get("FAILS"):
        raise RuntimeError("no API key\\nat all")
    assert Path(settings["dir"]).is_dir()
    note("init", settings)
    return Run()
"""


@pytest.fixture
def shards(tmp_path) -> Path:
    return write_shards(tmp_path / "shards", classes=2, per_class=6, size=20)


@pytest.fixture
def notes(tmp_path, monkeypatch) -> Path:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes.jsonl"))
    yield tmp_path / "notes.jsonl"
    sys.modules.pop("wandb", None)


def run(tmp_path: Path, shards: Path, *more: str):
    arguments = [str(tiny_config_file(tmp_path)), f"data.train={shards}", "train.epochs=2", *more]
    return CliRunner().invoke(main, [*arguments, "--output", str(tmp_path / "run")])


def test_every_line_goes_there_and_a_resumed_run_goes_on(tmp_path, shards, notes):
    settings = ("train.wandb_project=photos", "evaluate.every_steps=2", "masks.probability=1e-9")
    assert run(tmp_path, shards, *settings, "train.stop_after_steps=2").exit_code == 0
    assert run(tmp_path, shards, *settings, "--resume").exit_code == 0
    said = [json.loads(line) for line in notes.read_text().splitlines()]
    logged = [content for what, content in said if what == "log"]
    lines = read_metrics(tmp_path / "run")
    assert logged == [{key: value for key, value in line.items() if value is not None} for line in lines]
    assert [line["step"] for line in logged if "view_recall_at_1" in line] == [0, 2, 4]
    assert any(None in line.values() for line in lines)
    assert [what for what, _ in said if what != "log"] == ["init", "define", "define", "finish"] * 2
    one, two = (content for what, content in said if what == "init")
    assert one["id"] == two["id"] and len(one["id"]) == 32
    assert (one["project"], one["name"], one["resume"]) == ("photos", "run", "allow")
    assert one["config"]["train"]["epochs"] == 2.0
    assert ["define", ["*", "step"]] in said


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="the package is here")
def test_without_the_package_it_is_one_line_and_nothing_is_written(tmp_path, shards, monkeypatch):
    (tmp_path / "left" / "wandb").mkdir(parents=True)  # what the package leaves where it ran
    monkeypatch.syspath_prepend(tmp_path / "left")
    result = run(tmp_path, shards, "train.wandb_project=photos")
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr == (
        "error: train.wandb_project = photos needs the package wandb: pip install 'sop-faiss[wandb]', or set "
        "train.wandb_project=''\n"
    )
    assert not (tmp_path / "run").exists()


def test_what_it_cannot_do_is_one_line(tmp_path, shards, notes, monkeypatch):
    monkeypatch.setenv("FAILS", "1")
    result = run(tmp_path, shards, "train.wandb_project=photos")
    assert result.exit_code == 1
    assert "cannot be started (no API key): wandb login, or WANDB_MODE=offline" in result.stderr.splitlines()[-1]
    monkeypatch.delenv("FAILS")
    assert run(tmp_path, shards, "train.wandb_project=photos", "--resume").exit_code == 0


def test_it_is_not_imported_unless_asked_for(tmp_path, shards, notes):
    assert run(tmp_path, shards).exit_code == 0
    assert "wandb" not in sys.modules and not notes.exists()
