"""Class names that are integers: such names are the labels themselves, in every set of images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int64

_DIGITS = 9  # of a label at most; a longer number is a time stamp or a code, which is a name


def whole_numbers(names: Iterable[str]) -> dict[str, int] | None:
    """Return the number of each name if all names are different integers, else None.

    Sorted as text, `10` comes before `2`: a class that is numbered by its place among the names would be another class
    in every set that lacks some names, and in every set whose labels are numbers.
    """
    distinct = set(names)
    if not all(name.isascii() and name.isdigit() and len(name) <= _DIGITS for name in distinct):
        return None
    numbers = {name: int(name) for name in distinct}
    return numbers if len(set(numbers.values())) == len(numbers) else None


def number_classes(
    labels: Int64[np.ndarray, " n"] | None, names: Sequence[str] | None
) -> tuple[Int64[np.ndarray, " n"] | None, list[str] | None]:
    """Return labels and class names, in which names that are integers replace the labels.

    Args:
        labels: places in `names`, -1 for none.
        names: of the classes; if None or too few for the labels, nothing changes.
    """
    numbers = None if labels is None or not names else whole_numbers(names)
    if labels is None or not names or numbers is None or labels.max(initial=-1) >= len(names):
        return labels, None if names is None else list(names)
    return np.array([*(numbers[name] for name in names), -1], np.int64)[labels], None
