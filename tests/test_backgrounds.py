"""The layout of the backgrounds challenge, and what is missing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sop_faiss.errors import DataError
from sop_faiss.evaluate.backgrounds import SETS, find_sets, find_training_images


def test_sets_are_found_in_their_order(tmp_path: Path) -> None:
    for name in reversed(SETS):
        (tmp_path / name / "val" / "00_dog").mkdir(parents=True)
    (tmp_path / "other" / "val").mkdir(parents=True)
    assert find_sets(tmp_path) == {name: str(tmp_path / name / "val") for name in SETS}
    with pytest.raises(DataError, match="train"):
        find_training_images(tmp_path)
    (tmp_path / "original" / "train").mkdir()
    assert find_training_images(tmp_path) == str(tmp_path / "original" / "train")


def test_a_set_that_is_needed_is_named(tmp_path: Path) -> None:
    for name in ("original", "mixed_same", "only_fg"):
        (tmp_path / name / "val").mkdir(parents=True)
    with pytest.raises(DataError, match="mixed_rand"):
        find_sets(tmp_path)
    (tmp_path / "mixed_rand" / "val").mkdir(parents=True)
    assert list(find_sets(tmp_path)) == ["original", "mixed_same", "mixed_rand", "only_fg"]
    with pytest.raises(DataError, match="nowhere"):
        find_sets(tmp_path / "nowhere")
