"""Class names that are whole numbers are labels themselves; all others are names."""

from __future__ import annotations

import numpy as np

from sop_faiss.data.images.class_numbers import number_classes, whole_numbers


def test_which_names_are_numbers() -> None:
    assert whole_numbers(["0", "10", "2", "10"]) == {"0": 0, "10": 10, "2": 2}
    assert whole_numbers(["007", "12"]) == {"007": 7, "12": 12}
    assert whole_numbers([]) == {}
    for names in (["1", "cat"], ["1", "01"], ["-1", "2"], ["1.5"], ["٣"], ["²"], ["1", ""], ["1" * 10]):
        assert whole_numbers(names) is None


def test_labels_take_the_numbers_of_their_names() -> None:
    labels = np.array([0, 2, -1, 1])
    numbers, names = number_classes(labels, ["0", "10", "2"])
    assert numbers is not None and numbers.tolist() == [0, 2, -1, 10] and names is None
    for kept in (["a", "10", "2"], ["0", "10"], None):  # names, too few of them, none
        same, names = number_classes(labels, kept)
        assert same is labels and names == kept
    assert number_classes(None, ["1"]) == (None, ["1"])
