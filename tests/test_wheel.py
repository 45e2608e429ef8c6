"""The built wheel, installed in another folder: every command runs there, from another folder, end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (
    *("sop-data", "sop-train", "sop-embed", "sop-index", "sop-knn", "sop-retrieve", "sop-linear", "sop-export"),
    "sop-report",
    "sop-doctor",
    "sop-study",
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)], check=True, capture_output=True
    )
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel without its dependencies, which the environment has, found before the checkout."""
    target = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)],
        check=True,
        capture_output=True,
    )
    return target


def run(installed: Path, folder: Path, *arguments: object, status: int = 0) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    words = [str(argument) for argument in arguments]
    done = subprocess.run(
        [sys.executable, str(installed / "bin" / words[0]), *words[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_wheel_holds_everything_and_no_more(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for ending in ("py", "html", "css", "js", "svg"):
        for module in (ROOT / "sop_faiss").rglob(f"*.{ending}"):
            assert str(module.relative_to(ROOT)) in names
    for module in (ROOT / "cli").glob("*.py"):
        assert f"sop_faiss/cli/{module.name}" in names
    for folder in ("configs", "studies"):
        for config in (ROOT / folder).rglob("*.yaml"):
            assert f"sop_faiss/{config.relative_to(ROOT)}" in names
    assert not [name for name in names if not name.startswith(("sop_faiss/", "sop_faiss-"))]


def test_the_code_that_runs_is_the_wheels(installed, tmp_path):
    code = "import sop_faiss, sop_faiss.cli.train as c; print(sop_faiss.__file__, c.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.count(str(installed)) == 2, done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(installed, tmp_path, command):
    assert "Usage" in run(installed, tmp_path, command, "--help")


def test_the_whole_path(installed, tmp_path):
    def sop(*arguments: object) -> str:
        return run(installed, tmp_path, *arguments)

    sop("sop-data", "demo", "digits")
    sop("sop-data", "check", "digits/train")
    sop("sop-data", "pack", "digits/retrieval/database", "packed")
    sop("sop-train", "digits_demo", "data.train=digits/train", "train.stop_after_steps=2", "--output", "run")
    sop("sop-embed", "--model", "run", "--data", "digits/train", "--out", "features")
    sop("sop-index", "build", "--features", "features", "--out", "index")
    assert "1397" in sop("sop-index", "info", "index").replace(",", "")
    query = next((tmp_path / "digits" / "retrieval" / "query").iterdir())
    sop("sop-index", "search", "index", query, "--model", "run", "--html", "page.html")
    assert (tmp_path / "page.html").stat().st_size > 1000
    sop("sop-knn", "--model", "run", "--train", "digits/train", "--test", "digits/test", "--json", "knn.json")
    assert 0 < json.loads((tmp_path / "knn.json").read_text())["metrics"]["top1_k20"] <= 100
    sop("sop-linear", "--model", "run", "--train", "digits/train", "--test", "digits/test", "--json", "linear.json")
    assert 0 < json.loads((tmp_path / "linear.json").read_text())["metrics"]["top1"] <= 100
    sop("sop-retrieve", "--model", "run", "--dataset", "digits/retrieval", "--json", "retrieval.json")
    assert 0 < json.loads((tmp_path / "retrieval.json").read_text())["metrics"]["mAP"] <= 100
    sop("sop-export", "run", "exported")
    found = sop("sop-index", "search", "index", query, "--model", "exported")
    assert found == sop("sop-index", "search", "index", query, "--model", "run")
    sop("sop-report", "run")
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    sop("sop-doctor")
