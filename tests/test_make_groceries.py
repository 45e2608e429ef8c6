"""The set that `benchmarks/make_groceries.py` makes of a small stand-in for the Grocery Store Dataset."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import make_groceries
from sop_faiss.errors import DataError

PHOTOS = {
    "test": {"Packages/Milk/Oat-Milk": (1, 2, 3), "Fruit/Kiwi": (1,)},
    "train": {"Packages/Milk/Oat-Milk": (1, 2), "Packages/Juice/Apple-Juice": (7,), "Fruit/Kiwi": (4, 5)},
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for part, classes in PHOTOS.items():
        for place, numbers in classes.items():
            folder = tmp_path / "checkout" / "dataset" / part / place
            folder.mkdir(parents=True)
            for number in numbers:
                (folder / f"{folder.name}_{number:03d}.jpg").write_text(f"{part} {number}")
    drawn = {"gallery": 3, "queries": {"Oat-Milk": [1, 3]}, "produce": {"Kiwi": [5]}}
    (tmp_path / "drawn.json").write_text(json.dumps(drawn))
    monkeypatch.setattr(make_groceries, "DRAWN", tmp_path / "drawn.json")
    return tmp_path / "checkout"


def test_queries_are_test_photos_and_the_gallery_training_photos(checkout, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["make_groceries.py", str(checkout), str(tmp_path / "made")])
    make_groceries.main()
    assert capsys.readouterr().out.startswith("2 queries, 3 photos to search")
    assert (tmp_path / "made" / "query" / "Oat-Milk_001.jpg").read_text() == "test 1"
    assert (tmp_path / "made" / "database" / "Oat-Milk_001.jpg").read_text() == "train 1"
    assert json.loads((tmp_path / "made" / "gnd.json").read_text()) == {
        "imlist": ["Kiwi_005.jpg", "Oat-Milk_001.jpg", "Oat-Milk_002.jpg"],
        "qimlist": ["Oat-Milk_001.jpg", "Oat-Milk_003.jpg"],
        "gnd": [{"ok": [1, 2], "junk": []}] * 2,
    }


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("test/Packages/Milk/Oat-Milk/Oat-Milk_003.jpg", "such as Oat-Milk_003"),
        ("train/Packages/Milk/Oat-Milk/Oat-Milk_002.jpg", "2 of 3 are there"),
    ],
)
def test_an_incomplete_checkout_is_refused(checkout, lost, words):
    (checkout / "dataset" / lost).unlink()
    with pytest.raises(DataError, match=words):
        make_groceries.drawn_photos(checkout / "dataset")
