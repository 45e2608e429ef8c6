"""Links are not duplicates of their targets, and a page never proposes to remove the only file of an image."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from sop_faiss.cli.index import main
from sop_faiss.index.duplicates import find_duplicates
from sop_faiss.index.search import FeatureIndex
from tests.encoders import write_run
from tests.images import encode, make_image
from tests.pages import Page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("same") / "run")


def built(run: Path, root: Path) -> FeatureIndex:
    words = ("build", str(root / "photos"), "--model", str(run), "--out", str(root / "index"))
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return FeatureIndex.open(root / "index")


def write(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(make_image(np.random.default_rng(seed))))
    return path


def keys(index: FeatureIndex) -> list[list[str]]:
    return [[index.ids.members[row] for row in group.rows] for group in find_duplicates(index, 0.9999)]


def test_a_link_is_no_duplicate_of_its_target(run: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    real = write(photos / "z" / "real.jpg", 1)
    (photos / "a_link.jpg").symlink_to(real)
    os.link(real, photos / "hard.jpg")
    (photos / "album").symlink_to(photos / "z")  # all that is in it is reached twice
    write(photos / "other.jpg", 2)
    index = built(run, tmp_path)
    assert len(index) == 5 and keys(index) == []
    write(photos / "copy.jpg", 1)
    CliRunner().invoke(main, ["sync", str(tmp_path / "index")])
    assert [sorted(each) for each in keys(FeatureIndex.open(tmp_path / "index"))] == [["copy.jpg", "hard.jpg"]]
    (photos / "hard.jpg").unlink()
    CliRunner().invoke(main, ["sync", str(tmp_path / "index")])
    assert [sorted(each) for each in keys(FeatureIndex.open(tmp_path / "index"))] == [["copy.jpg", "z/real.jpg"]]


def test_a_link_to_elsewhere_is_neither_kept_for_a_file_nor_marked(run: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a_link.jpg").symlink_to(write(tmp_path / "elsewhere.jpg", 1))
    write(tmp_path / "photos" / "copy.jpg", 1)
    write(tmp_path / "photos" / "twin.jpg", 1)
    built(run, tmp_path)
    words = ("--html", tmp_path / "page.html", "--json", tmp_path / "found.json")
    result = CliRunner().invoke(main, ["duplicates", str(tmp_path / "index"), *map(str, words)])
    assert result.exit_code == 0 and "exact" in result.stdout
    page = Page((tmp_path / "page.html").read_text())
    marks = {each["data-key"]: each["data-mark"] for each in (*page.of("div", "query"), *page.of("li", "hit"))}
    assert marks == {"a_link": "", "copy": "", "twin": "on"}
    (group,) = json.loads((tmp_path / "found.json").read_text())["groups"]
    assert group["kind"] == "exact" and {each["key"]: each["link"] for each in group["images"]} == {
        "a_link": True,
        "copy": False,
        "twin": False,
    }


def test_only_similar_images_are_not_marked(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (1, 2):
        write(tmp_path / "photos" / f"{seed}.jpg", seed)
    write(tmp_path / "photos" / "copy.jpg", 2)
    built(run, tmp_path)
    monkeypatch.setattr("sop_faiss.verbs.finding.index_duplicates.SAME_IMAGE", 1.5)
    words = ("--threshold", -1, "--html", tmp_path / "page.html")
    result = CliRunner().invoke(main, ["duplicates", str(tmp_path / "index"), *map(str, words)])
    assert "partly" in result.stdout, result.output
    page = Page((tmp_path / "page.html").read_text())
    marks = {each["data-key"]: each["data-mark"] for each in (*page.of("div", "query"), *page.of("li", "hit"))}
    assert marks == {"1": "", "2": "", "copy": "on"}
    monkeypatch.setattr("sop_faiss.verbs.finding.index_duplicates.SAME_IMAGE", -1.0)
    CliRunner().invoke(main, ["duplicates", str(tmp_path / "index"), *map(str, words), "--force"])
    page = Page((tmp_path / "page.html").read_text())
    assert sum(each["data-mark"] == "on" for each in (*page.of("div", "query"), *page.of("li", "hit"))) == 2
