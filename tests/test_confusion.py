"""Counts of confused classes, and their image."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from sop_faiss.evaluate.confusion import count_confusions
from sop_faiss.report.confusion_figure import SHOWN_CLASSES, _most_confused, draw_confusion


def test_counts_by_hand() -> None:
    truth, predicted = np.array([0, 0, 0, 2, 2]), np.array([0, 2, 7, 2, 2])
    confusion = count_confusions(truth, predicted, ["ant", "bee", "cat"])
    assert confusion.names == ["ant", "cat", "7"]
    assert confusion.counts.tolist() == [[1, 1, 1], [0, 2, 0], [0, 0, 0]]
    assert confusion.per_class() == {
        "ant": {"images": 3, "right": 1, "top1": 100 / 3},
        "cat": {"images": 2, "right": 2, "top1": 100.0},
    }
    assert count_confusions(truth, predicted, None).names == ["0", "2", "7"]


def test_the_image_shows_the_most_confused_of_many_classes() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 100, 2000)
    predicted = np.where(truth % 2 == 0, truth, rng.integers(0, 50, 2000) * 2 + 1)  # only odd classes are confused
    confusion = count_confusions(truth, predicted, [f"class $_{label}$ \n" + "x" * 60 for label in range(100)])
    assert len(_most_confused(confusion)) == SHOWN_CLASSES
    assert all(place % 2 == 1 for place in _most_confused(confusion))
    image = Image.open(io.BytesIO(draw_confusion(confusion, "many $classes")))
    assert min(image.size) > 400


def test_the_image_of_few_classes_is_darkest_where_most_images_are() -> None:
    confusion = count_confusions(np.array([0, 1, 1]), np.array([0, 1, 0]), None)
    pixels = np.asarray(Image.open(io.BytesIO(draw_confusion(confusion, "two"))).convert("L"), np.float64)
    assert (pixels < 90).mean() > 0.05
