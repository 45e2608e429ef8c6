"""Unsupervised classification: do clusters of features match classes that nobody named?

Source: iBOT's and Self-Classifier's protocol: clusters and classes are matched one to one so that most images are right
(Hungarian method), which gives the accuracy ACC; the adjusted Rand index (ARI), normalized mutual information (NMI) and
Fowlkes-Mallows index (FMI) compare the two partitions without matching.

Departs: iBOT takes the largest output of a head that was trained with as many outputs as there are classes. Here the
clusters are those of k-means, so that any encoder can be measured.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.errors import DataError
from sop_faiss.evaluate.cluster_choices import ClusterChoices
from sop_faiss.neighbors.kmeans import kmeans, nearest_centroids
from sop_faiss.unit_rows import require_unit_rows


def cluster_and_match(
    train_features: Float32[np.ndarray, "n d"],
    classes: int,
    test_features: Float32[np.ndarray, "q d"],
    test_labels: Int64[np.ndarray, " q"],
    choices: ClusterChoices | None = None,
) -> dict[str, float]:
    """Cluster the training images without their labels, and compare the clusters of the test images with their classes.

    Args:
        train_features: unit rows.
        classes: number of clusters where `choices` names none.
        test_features: unit rows.
        test_labels: class of each; any integers.
        choices: number of clusters and the like.

    Returns:
        `acc`, `ari`, `nmi` and `fmi`, in percent.

    Raises:
        ConfigError: a choice is impossible, or there are more clusters than training images.
        DataError: there are no images.
        FeatureError: rows are not finite unit vectors.
    """
    choices = choices or ClusterChoices()
    choices.check()
    if len(train_features) == 0 or len(test_features) == 0:
        raise DataError(f"clusters of {len(train_features)} training and {len(test_features)} test rows")
    require_unit_rows(train_features, "training features")
    require_unit_rows(test_features, "test features")
    centroids = kmeans(
        train_features, choices.clusters or classes, choices.iterations, choices.seed, restarts=choices.restarts
    )
    return partition_scores(nearest_centroids(test_features, centroids), test_labels)


def partition_scores(clusters: Int64[np.ndarray, " q"], labels: Int64[np.ndarray, " q"]) -> dict[str, float]:
    """Return how well two partitions of the same images agree: `acc`, `ari`, `nmi` and `fmi`, in percent.

    Args:
        clusters: cluster of each image.
        labels: class of each.
    """
    from scipy.optimize import linear_sum_assignment
    from sklearn import metrics

    _, rows = np.unique(clusters, return_inverse=True)
    _, columns = np.unique(labels, return_inverse=True)
    together = np.zeros((rows.max() + 1, columns.max() + 1), dtype=np.int64)
    np.add.at(together, (rows, columns), 1)
    matched = together[linear_sum_assignment(together, maximize=True)].sum()
    scores = {
        "acc": matched / len(labels),
        "ari": metrics.adjusted_rand_score(labels, clusters),
        "nmi": metrics.normalized_mutual_info_score(labels, clusters),
        "fmi": metrics.fowlkes_mallows_score(labels, clusters),
    }
    return {name: 100.0 * float(score) for name, score in scores.items()}
