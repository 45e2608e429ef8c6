"""Names of classes that are whole numbers: such names are the labels themselves, wherever a set of images has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int64

__all__ = ["number_classes", "whole_numbers"]

_DIGITS = 9  # of a label at most; more are a time stamp or a code, which is a name


def whole_numbers(names: Iterable[str]) -> dict[str, int] | None:
    """The number of each name, if all names are whole numbers and no two are the same one; else None.

    Sorted as text, `10` comes before `2`: a class numbered by its place among the names would be another class in each
    set that lacks some, and in each set whose labels are numbers.
    """
    distinct = set(names)
    if not all(name.isascii() and name.isdigit() and len(name) <= _DIGITS for name in distinct):
        return None
    numbers = {name: int(name) for name in distinct}
    return numbers if len(set(numbers.values())) == len(numbers) else None


def number_classes(
    labels: Int64[np.ndarray, " n"] | None, names: Sequence[str] | None
) -> tuple[Int64[np.ndarray, " n"] | None, list[str] | None]:
    """Labels and class names, where names that are whole numbers take the place of the labels.

    Args:
        labels: places in `names`, -1 for none.
        names: of the classes; None, or too few for the labels: nothing changes.
    """
    numbers = None if labels is None or not names else whole_numbers(names)
    if labels is None or not names or numbers is None or labels.max(initial=-1) >= len(names):
        return labels, None if names is None else list(names)
    return np.array([*(numbers[name] for name in names), -1], np.int64)[labels], None
