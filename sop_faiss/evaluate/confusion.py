"""Which class was taken for which: counts, and the accuracy of each class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64


@dataclass(frozen=True)
class Confusion:
    """How often images of one class were given to another.

    Attributes:
        names: of the classes, sorted by their number.
        counts: test images of the row's class that were given to the column's class.
    """

    names: list[str]
    counts: Int64[np.ndarray, "c c"]

    def images(self) -> Int64[np.ndarray, " c"]:
        """Test images of each class."""
        return self.counts.sum(axis=1)

    def per_class(self) -> dict[str, dict[str, Any]]:
        """Return for each class that was tested `images`, `right`, and `top1` in percent."""
        return {
            name: {"images": int(images), "right": int(right), "top1": 100.0 * int(right) / int(images)}
            for name, images, right in zip(self.names, self.images(), self.counts.diagonal(), strict=True)
            if images
        }


def count_confusions(
    truth: Int64[np.ndarray, " q"], predicted: Int64[np.ndarray, " q"], class_names: list[str] | None
) -> Confusion:
    """Count pairs of true and predicted class.

    Args:
        truth: class number of each test image.
        predicted: class number given to it.
        class_names: name of each class number; None, or a number beyond it: the number itself.
    """
    labels, positions = np.unique(np.concatenate([truth, predicted]), return_inverse=True)
    counts = np.zeros((len(labels), len(labels)), np.int64)
    np.add.at(counts, (positions[: len(truth)], positions[len(truth) :]), 1)
    known = class_names or []
    return Confusion([known[label] if 0 <= label < len(known) else str(label) for label in labels.tolist()], counts)
