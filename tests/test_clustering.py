"""Clusters against classes: the match against all permutations, the clusters against groups that are plain."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.cluster_choices import ClusterChoices
from sop_faiss.evaluate.clustering import cluster_and_match, partition_scores
from tests.test_logistic import blobs


def slow_accuracy(clusters: np.ndarray, labels: np.ndarray) -> float:
    """The best share of right images over all ways to give each cluster a class of its own."""
    count = max(clusters.max(), labels.max()) + 1
    return max(
        float((np.array(classes)[clusters] == labels).mean()) for classes in itertools.permutations(range(count))
    )


@pytest.mark.parametrize(("clusters", "classes"), [(4, 4), (5, 3), (3, 5)])
def test_accuracy_is_the_best_of_all_matches(clusters: int, classes: int) -> None:
    generator = np.random.default_rng(clusters)
    for _ in range(10):
        found, labels = generator.integers(clusters, size=30), generator.integers(classes, size=30)
        assert partition_scores(found, labels)["acc"] == pytest.approx(100 * slow_accuracy(found, labels))


def test_pairs_of_images_give_the_rand_and_fowlkes_mallows_indices() -> None:
    generator = np.random.default_rng(0)
    found, labels = generator.integers(3, size=25), generator.integers(4, size=25)
    pairs = [(found[i] == found[j], labels[i] == labels[j]) for i, j in itertools.combinations(range(25), 2)]
    both = sum(a and b for a, b in pairs)
    in_clusters, in_classes = sum(a for a, _ in pairs), sum(b for _, b in pairs)
    expected = in_clusters * in_classes / len(pairs)
    scores = partition_scores(found, labels)
    assert scores["fmi"] == pytest.approx(100 * both / np.sqrt(in_clusters * in_classes))
    assert scores["ari"] == pytest.approx(100 * (both - expected) / ((in_clusters + in_classes) / 2 - expected))


def test_plain_groups_are_found_without_labels() -> None:
    generator = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 20)
    rows = np.eye(4)[labels] + 0.05 * generator.normal(size=(80, 4))
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    scores = cluster_and_match(rows, 4, rows, labels + 10)
    assert scores == pytest.approx({"acc": 100, "ari": 100, "nmi": 100, "fmi": 100})
    assert cluster_and_match(rows, 4, rows, labels, ClusterChoices(clusters=8))["acc"] < 100
    again = cluster_and_match(rows, 4, rows, labels + 10)
    assert again == scores


def test_impossible_clusters() -> None:
    rows, labels = blobs(0, 5)
    for changes, named in (({"clusters": 1}, "clusters"), ({"restarts": 0}, "restarts"), ({"seed": 2**31}, "seed")):
        with pytest.raises(ConfigError, match=named):
            cluster_and_match(rows, 3, rows, labels, ClusterChoices(**changes))
    with pytest.raises(ConfigError, match="centroids"):
        cluster_and_match(rows, 16, rows, labels)
    with pytest.raises(DataError):
        cluster_and_match(rows[:0], 3, rows, labels)
