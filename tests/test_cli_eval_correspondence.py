"""sop-eval correspondence: figures, shares, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sop_faiss.cli.eval import main
from tests.images import write_folder
from tests.messages import command_fails

NETWORK = ("--model", "timm:test_efficientnet", "--random-weights", 0, "--size", 64)


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["correspondence", *(str(word) for word in words)])


def fails(*words: object) -> str:
    return command_fails(main, "correspondence", *words)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("photos"), classes=0, per_class=6, size=(80, 100))


def test_two_images(photos: Path, tmp_path: Path) -> None:
    pair = (photos / "0000.jpg", photos / "0001.jpg")
    result = run(*pair, *NETWORK, "--stride", 8, "--out", tmp_path / "m.png", "--json", tmp_path / "m.json")
    assert result.exit_code == 0 and "mutual matches" in result.stdout, result.output
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads((tmp_path / "m.json").read_text())
    assert content["protocol"]["grids"] == [[6, 8], [6, 8]] and content["metrics"]["matches"] >= 1
    itself = run(pair[0], pair[0], *NETWORK, "--stride", 8, "--out", tmp_path / "i.png", "--json", "-")
    assert json.loads(itself.stdout)["metrics"]["mean_cosine"] == pytest.approx(1)


def test_views_of_images(photos: Path, tmp_path: Path) -> None:
    words = (photos, *NETWORK, "--stride", 8, "--limit", 5, "--json", "-")
    result = run(*words, "--out", tmp_path / "v.png")
    content = json.loads(result.stdout)
    metrics, (low, high) = content["metrics"], content["right_interval"]
    assert content["protocol"]["images"] == 5 and low <= metrics["right"] <= high
    assert metrics["right"] > 2 * metrics["chance"]  # even random filters see what is alike in two crops
    again = run(*words, "--out", tmp_path / "w.png")
    assert json.loads(again.stdout)["metrics"] == metrics
    assert (tmp_path / "v.png").read_bytes() == (tmp_path / "w.png").read_bytes()
    other = run(*words, "--seed", 1, "--out", tmp_path / "w.png")
    assert json.loads(other.stdout)["metrics"] != metrics


def test_one_image_has_no_interval(photos: Path, tmp_path: Path) -> None:
    result = run(photos / "0000.jpg", *NETWORK, "--stride", 8, "--out", tmp_path / "v.png")
    assert result.exit_code == 0 and "guessing" in result.stdout and "interval" not in result.stdout, result.output


def test_what_a_user_gets_wrong(photos: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "x.png")
    for words, named in (
        (("--top", 0), "--top"),
        (("--stride", 7), "--stride"),
        (("--limit", 0), "--limit"),
        (("--seed", -1), "--seed"),
        (("--pooling", "gem"), "--pooling"),
        (("--mirrored",), "--mirrored"),
        (("--size", 8), "--size"),
    ):
        assert named in fails(photos, *NETWORK, *words, *out)
    assert ".png" in fails(photos, *NETWORK, "--out", tmp_path / "x.jpg")
    assert "folder" in fails(photos, photos, *NETWORK, *out)
    assert "missing.jpg" in fails(photos / "0000.jpg", photos / "missing.jpg", *NETWORK, *out)
    (tmp_path / "bad").mkdir()
    assert "empty" in fails(tmp_path / "bad", *NETWORK, *out)
    (tmp_path / "bad" / "a.jpg").write_bytes(b"nothing")
    assert "can be read" in fails(tmp_path / "bad", *NETWORK, *out)
    assert not (tmp_path / "x.png").exists()
