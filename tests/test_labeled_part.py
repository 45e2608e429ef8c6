"""Which training images a classifier may use: shares of each class, lists of names, and what a list gets wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.sets.labeled_part import LabeledPart

LABELS = np.repeat([5, 2, 9], [100, 40, 3])
KEYS = [f"k{row:03d}" for row in range(143)]
MEMBERS = [f"class/{label}/{key}.jpg" for label, key in zip(LABELS, KEYS, strict=True)]


def names_of(part: LabeledPart, order: np.ndarray | None = None) -> list[str]:
    order = np.arange(143) if order is None else order
    rows = part.rows(LABELS[order], [KEYS[row] for row in order], [MEMBERS[row] for row in order])
    assert (np.diff(rows) > 0).all()
    return sorted(KEYS[order[row]] for row in rows)


def test_all_by_default() -> None:
    assert names_of(LabeledPart()) == KEYS


def test_a_share_is_of_each_class_and_nested() -> None:
    chosen = names_of(LabeledPart(train_share=0.1))
    counts = {label: sum(LABELS[KEYS.index(name)] == label for name in chosen) for label in (5, 2, 9)}
    assert counts == {5: 10, 2: 4, 9: 1}  # at least one
    assert set(chosen) < set(names_of(LabeledPart(train_share=0.3)))
    assert names_of(LabeledPart(train_share=1.0)) == KEYS


def test_the_draw_depends_on_the_seed_and_not_on_the_order() -> None:
    order = np.random.default_rng(0).permutation(143)
    for part in (LabeledPart(train_share=0.2, seed=4), LabeledPart(images_per_class=3, seed=4)):
        assert names_of(part) == names_of(part, order)
    assert names_of(LabeledPart(train_share=0.2, seed=4)) != names_of(LabeledPart(train_share=0.2, seed=5))
    assert len(names_of(LabeledPart(images_per_class=3))) == 9


def test_names_of_a_list_are_keys_files_or_their_names(tmp_path: Path) -> None:
    file = tmp_path / "list.txt"
    file.write_text(f"k003\n{MEMBERS[7]}\r\n k099.jpg \n\n")
    assert names_of(LabeledPart(train_list=file)) == ["k003", "k007", "k099"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("k001\nk001.jpg\n", "names k001 twice"),
        ("k001\nk999\nk998", "2 of 3 names are not among the 143 .*first: k999"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_lists_that_cannot_be(tmp_path: Path, text: str | bytes, message: str) -> None:
    file = tmp_path / "list.txt"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message):
        names_of(LabeledPart(train_list=file))


def test_a_name_of_several_images(tmp_path: Path) -> None:
    file = tmp_path / "list.txt"
    file.write_text("a.jpg")
    with pytest.raises(DataError, match="several training images"):
        LabeledPart(train_list=file).rows(np.array([0, 1]), ["x/a", "y/a"], ["x/a.jpg", "y/a.jpg"])
    file.write_text("y/a.jpg")
    assert LabeledPart(train_list=file).rows(np.array([0, 1]), ["x/a", "y/a"], ["x/a.jpg", "y/a.jpg"]).tolist() == [1]


def test_impossible_choices() -> None:
    for part, names in (
        (LabeledPart(train_share=0.0), ("train_share",)),
        (LabeledPart(train_share=float("nan")), ("train_share",)),
        (LabeledPart(images_per_class=0), ("images_per_class",)),
        (LabeledPart(train_share=0.5, images_per_class=1), ("train_share", "images_per_class")),
        (LabeledPart(seed=-1), ("seed",)),
        (LabeledPart(seed=2**63), ("seed",)),
    ):
        with pytest.raises(ConfigError) as raised:
            part.check()
        assert raised.value.arguments == names
    with pytest.raises(DataError, match="class 9 has 3 training images"):
        names_of(LabeledPart(images_per_class=4))
