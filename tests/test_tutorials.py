"""The `bash` blocks of docs/tutorials/ and the notebooks of examples/notebooks/ run, made smaller by SMALLER alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.images import write_folder

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
TINY_RUN = "views.global_size=64 views.local_count=0 sop.cls.num_anchors=8 train.batch_size=8 train.stop_after_steps=2"
TINY_STUDY = "budget.steps=2 evaluate.every_steps=2 sop.fill=random optim.warmup_epochs=0"
SMALLER = {
    "own_photos": {
        "views.global_size=128 views.local_size=64 views.local_count=2 train.stop_after_steps=600": (
            f"{TINY_RUN} evaluate.every_steps=2"
        ),
    },
    "study": {
        "seeds: [0, 1]": "seeds: [0]",
        "seeds=[0, 1, 2]": "seeds=[0]",
        "sop-study momentum.yaml": f"sop-study momentum.yaml {TINY_STUDY}",
    },
}
MADE = {
    "own_photos": ("shards/manifest.json", "mine.html", "photos.index/manifest.json"),
    "study": ("momentum/study.html", "momentum/study.parquet"),
    "tasks": ("knn.json", "confusion.png"),
    "index": ("found.json", "photos.parquet"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Photos, and an environment in which `python` and the commands are those that run the tests."""
    write_folder(tmp_path / "photos", classes=3, per_class=16, size=64)
    write_folder(tmp_path / "more", classes=1, per_class=4, size=64, seed=5)
    write_folder(tmp_path / "sorted" / "train", classes=3, per_class=8, size=64)
    write_folder(tmp_path / "sorted" / "val", classes=3, per_class=4, size=64, seed=1)
    shutil.copy(tmp_path / "photos" / "class_0" / "0000.jpg", tmp_path / "query.jpg")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def _smaller(name: str, text: str) -> str:
    for written, tiny in SMALLER.get(name, {}).items():
        text = text.replace(written, tiny)
    return text


def test_each_tutorial_and_notebook_is_known_here() -> None:
    assert {page.stem for page in PAGES} == set(MADE)
    assert {notebook.stem for notebook in NOTEBOOKS} == set(SMALLER)
    for name, parts in SMALLER.items():
        text = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text()
        assert all(part in text for part in parts), f"{name}.md has not what a test makes smaller"
    for notebook in NOTEBOOKS:
        cells = json.loads(notebook.read_text())["cells"]
        source = "".join("".join(cell["source"]) for cell in cells)
        kept = _smaller(notebook.stem, source)
        assert TINY_RUN in kept or TINY_STUDY in kept, notebook.name
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), notebook.name


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs(page: Path, folder: Path) -> None:
    script = _smaller(page.stem, "\n".join(re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)))
    made = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=folder, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert all((folder / name).exists() for name in MADE[page.stem])


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = import_module("nbformat"), import_module("nbclient")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    read = nbformat.read(path, 4)
    for cell in read.cells:
        cell["source"] = _smaller(path.stem, cell["source"])
    nbclient.NotebookClient(read, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    drawn = [out for cell in read.cells for out in cell.get("outputs", ()) if "image/png" in out.get("data", {})]
    assert drawn
