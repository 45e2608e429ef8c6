"""DINO's weighted k-nearest-neighbor classifier on frozen features.

Each of the k nearest training images votes for its class with weight exp(similarity / 0.07); nothing is trained.
Source: Wu et al. 2018, "Unsupervised Feature Learning via Non-Parametric Instance Discrimination"; Caron et al. 2021,
"Emerging Properties in Self-Supervised Vision Transformers" (DINO).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from sop_faiss.errors import DataError
from sop_faiss.evaluate.knn_choices import KS, TEMPERATURE, check_choices, used_ks
from sop_faiss.neighbors.exact import nearest_rows
from sop_faiss.unit_rows import require_unit_rows

QUERY_BLOCK = 8192
"""Test rows searched together."""


@dataclass(frozen=True)
class KnnScores:
    """What one search gives for every k.

    Attributes:
        metrics: `top1_k20`, `top5_k20` and so on, in percent, named by the k that was asked for.
        predicted: for each k the class of most votes of each test row.
    """

    metrics: dict[str, float]
    predicted: dict[int, Int64[np.ndarray, " q"]]


def knn_scores(
    train_features: Float32[np.ndarray, "n d"],
    train_labels: Int64[np.ndarray, " n"],
    test_features: Float32[np.ndarray, "q d"],
    test_labels: Int64[np.ndarray, " q"],
    ks: Sequence[int] = KS,
    temperature: float = TEMPERATURE,
) -> KnnScores:
    """Measure the accuracy of weighted k-NN for every k, from one search.

    A class is predicted only if one of the k neighbors belongs to it. Of two classes with equal votes the smaller
    label comes first, of two training images of equal similarity the first. Labels are any integers.

    Args:
        train_features: unit rows.
        train_labels: class of each training row.
        test_features: unit rows.
        test_labels: true class of each test row; a class without training images is never right.
        ks: numbers of neighbors; one above n uses all n (see `used_ks`).
        temperature: of the votes, above 0.

    Raises:
        ConfigError: a k or the temperature is impossible.
        DataError: there are no training or no test rows.
        FeatureError: rows are not finite unit vectors, or the dimensions differ.
    """
    check_choices(ks, temperature)
    if len(train_features) == 0 or len(test_features) == 0:
        raise DataError(f"k-NN with {len(train_features)} training and {len(test_features)} test rows: wanted some")
    require_unit_rows(train_features, "training features")
    require_unit_rows(test_features, "test features")
    neighbors_used = used_ks(ks, len(train_features))
    right = {(top, k): 0 for k in neighbors_used for top in (1, 5)}
    predicted = {k: np.empty(len(test_features), np.int64) for k in neighbors_used}
    for start in range(0, len(test_features), QUERY_BLOCK):
        block = slice(start, start + QUERY_BLOCK)
        found = nearest_rows(test_features[block], train_features, max(neighbors_used.values()))
        classes = train_labels[found.rows]
        for k, used in neighbors_used.items():
            votes = _votes(found.similarities[:, :used], classes[:, :used], temperature)
            predicted[k][block] = votes.winners()
            place = votes.place_of(test_labels[block])
            for top in (1, 5):
                right[top, k] += int((place < top).sum())
    metrics = {f"top{top}_k{k}": 100.0 * count / len(test_features) for (top, k), count in right.items()}
    return KnnScores(metrics, predicted)


@dataclass(frozen=True)
class _Votes:
    """The votes of each test row: one pair (row, class) per class among its neighbors, by rising row, then class."""

    row_count: int
    row: Int64[np.ndarray, " pairs"]
    label: Int64[np.ndarray, " pairs"]
    votes: Float64[np.ndarray, " pairs"]

    def winners(self) -> Int64[np.ndarray, " q"]:
        """Return the class of most votes of each row; of equal ones the smaller label."""
        order = np.lexsort((self.label, -self.votes, self.row))
        first = np.searchsorted(self.row, np.arange(self.row_count))  # sorting by row leaves rows where they were
        return self.label[order[first]]

    def place_of(self, truth: Int64[np.ndarray, " q"]) -> Int64[np.ndarray, " q"]:
        """Return the place of the true class among a row's classes by falling votes, from 0.

        A true class that no neighbor belongs to comes after every place. Departs: DINO sorts all classes, those without
        votes too, so where fewer than five have votes its top-5 may count one that no neighbor belongs to.
        """
        is_truth: Bool[np.ndarray, " pairs"] = self.label == truth[self.row]
        truth_votes = np.full(self.row_count, -np.inf)
        truth_votes[self.row[is_truth]] = self.votes[is_truth]
        ahead = (self.votes > truth_votes[self.row]) | (
            (self.votes == truth_votes[self.row]) & (self.label < truth[self.row])
        )
        place = np.bincount(self.row[ahead], minlength=self.row_count)
        place[np.isneginf(truth_votes)] = np.iinfo(np.int64).max
        return place


def _votes(similarities: Float32[np.ndarray, "q k"], classes: Int64[np.ndarray, "q k"], temperature: float) -> _Votes:
    rows, k = similarities.shape
    # Votes relative to the nearest neighbor's: the same order, and no overflow at any temperature.
    exact = similarities.astype(np.float64)
    votes = np.exp((exact - exact[:, :1]) / temperature)
    row_of_vote = np.repeat(np.arange(rows), k)
    names, ids = np.unique(classes, return_inverse=True)
    pair_keys, pair_of_vote = np.unique(row_of_vote * len(names) + ids.ravel(), return_inverse=True)
    pair_row, pair_class = np.divmod(pair_keys, len(names))
    return _Votes(rows, pair_row, names[pair_class], np.bincount(pair_of_vote, weights=votes.ravel()))
