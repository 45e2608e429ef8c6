"""Met's protocol: queries are classified by their neighbors, and some of them show nothing of the gallery.

A query's class is that of its nearest image. Its confidence is the softmax, at a temperature, over all classes of the
gallery of the largest similarity within each class; a class without an image among the k nearest has similarity 0, and
so has one whose similarity is below 0. Queries of all classes and without a class are ranked by confidence: GAP is
the average precision of that one list, so a confident answer to a query without a class costs as much as a wrong one.
k and temperature are chosen on the validation queries alone. Source: Ypsilantis, Garcia, Han, Ibrahimi, van Noord,
Tolias, "The Met Dataset: Instance-level Recognition for Artworks", NeurIPS 2021 datasets, and its released code.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from sop_faiss.errors import DataError
from sop_faiss.evaluate.sets.ground_truth import NO_CLASS, Classes

_KS = (1, 2, 3, 5, 7, 10, 15, 20, 50)
_SHARPNESSES = (0.01, 0.1, 1.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 50.0, 100.0, 500.0)
"""The released grid; a sharpness is 1 / temperature, by which similarities are multiplied."""

NEIGHBORS = max(_KS)
"""How many neighbors the classifier may need."""


@dataclass(frozen=True)
class Classified:
    """Metrics in percent, and the k and sharpness that were chosen."""

    metrics: dict[str, float]
    chosen: dict[str, Any]


def classify_by_neighbors(
    positions: Int64[np.ndarray, "q n"], similarities: Float32[np.ndarray, "q n"], classes: Classes
) -> Classified:
    """Choose k and the sharpness on the validation queries, and measure the test queries with them.

    Args:
        positions: the nearest gallery images of each query, up to NEIGHBORS of them.
        similarities: of these.
        classes: of gallery and queries, and which queries are for validation.

    Raises:
        DataError: no validation query or no test query has a class.
    """
    labels, known = classes.gallery[positions], classes.queries != NO_CLASS
    parts = {"validation": classes.validation, "test": ~classes.validation}
    for part, own in parts.items():
        if not known[own].any():
            raise DataError(f"no {part} query has a class of the database: GAP is not defined")
    count = len(np.unique(classes.gallery))

    def gap(part: str, k: int, sharpness: float) -> tuple[float, float, float]:
        own = parts[part]
        truth = classes.queries[own]
        predicted, confidence = classify(labels[own, :k], similarities[own, :k], count, sharpness)
        right, with_class = predicted == truth, truth != NO_CLASS
        return (
            global_average_precision(right & with_class, confidence, int(with_class.sum())),
            global_average_precision(right[with_class], confidence[with_class], int(with_class.sum())),
            float(right[with_class].mean()),
        )

    grid = itertools.product([k for k in _KS if k <= labels.shape[1]], _SHARPNESSES)
    k, sharpness = max(grid, key=lambda choice: gap("validation", *choice)[0])  # of equal ones the first
    scores = gap("test", k, sharpness)
    metrics = {name: 100 * score for name, score in zip(("GAP", "GAP-", "ACC"), scores, strict=True)}
    chosen = {"neighbors": k, "sharpness": sharpness, "validation_GAP": 100 * gap("validation", k, sharpness)[0]}
    return Classified(metrics, {"chosen_on_validation": chosen})


def classify(
    labels: Int64[np.ndarray, "q k"], similarities: Float32[np.ndarray, "q k"], class_count: int, sharpness: float
) -> tuple[Int64[np.ndarray, " q"], Float64[np.ndarray, " q"]]:
    """Return the class of each query and its confidence, 0..1; of classes that are equally likely the smallest number.

    Args:
        labels: classes of the neighbors.
        similarities: of the neighbors.
        class_count: classes of the whole gallery.
        sharpness: what similarities are multiplied by before the softmax.
    """
    of_class = np.maximum(similarities.astype(np.float64), 0)
    order = np.lexsort((-of_class, labels))  # by class, the nearest of each class first
    of_class, labels = np.take_along_axis(of_class, order, 1), np.take_along_axis(labels, order, 1)
    first = np.ones(labels.shape, bool)
    first[:, 1:] = labels[:, 1:] != labels[:, :-1]
    weights = np.exp(sharpness * of_class)
    # Summed query by query, as released: at a high sharpness the order of confidences depends on the last bits.
    sums = np.array([row[own].sum() for row, own in zip(weights, first, strict=True)])
    others = class_count - first.sum(axis=1)  # exp(0) each
    confidences = np.where(first, weights, 0) / (sums + others)[:, None]
    best = confidences.argmax(axis=1)[:, None]
    return np.take_along_axis(labels, best, 1)[:, 0], np.take_along_axis(confidences, best, 1)[:, 0]


def global_average_precision(
    right: Bool[np.ndarray, " q"], confidence: Float64[np.ndarray, " q"], positive_count: int
) -> float:
    """Return GAP, 0..1: the precision at each right answer of the list by falling confidence, over positive_count.

    Of equal confidences the first query comes first.
    """
    ordered = right[np.argsort(-confidence, kind="stable")]
    precision = np.cumsum(ordered) / np.arange(1, len(ordered) + 1)
    return float(precision[ordered].sum() / positive_count)
