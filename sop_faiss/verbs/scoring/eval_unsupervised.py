"""Clusters of the frozen features of one set of images, compared with the classes of another."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field

import numpy as np

from sop_faiss.bootstrap import share_interval
from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.cluster_choices import ClusterChoices
from sop_faiss.evaluate.clustering import cluster_and_match
from sop_faiss.evaluate.sets.labeled_part import LabeledPart
from sop_faiss.evaluate.sets.labeled_sets import open_labeled_sets
from sop_faiss.features.extract import ExtractionOptions
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import ProgressCallback
from sop_faiss.verbs.scoring.task_result import TaskResult


@dataclass(frozen=True)
class UnsupervisedOptions:
    """How to cluster, and how to extract features where there is no store."""

    choices: ClusterChoices = field(default_factory=ClusterChoices)
    """Number of clusters and the like."""
    extraction: ExtractionOptions = field(default_factory=ExtractionOptions)
    """How features are extracted."""


def evaluate_unsupervised(
    train: str,
    test: str,
    encoder: EncoderSpec | None = None,
    options: UnsupervisedOptions | None = None,
    *,
    progress: ProgressCallback | None = None,
) -> TaskResult:
    """Cluster the training images by k-means, and compare the clusters of the test images with their classes.

    Labels of the training images give the number of clusters, where it is not named, and nothing else.

    Args:
        train: SRC of labeled images, or the directory of a feature store.
        test: as `train`.
        encoder: which encoder; None where both are feature stores.

    Raises:
        ConfigError: there are more clusters than training images.
        SopError: as of `open_labeled_sets`, `LabeledSets.features` and `cluster_and_match`.
    """
    options = options or UnsupervisedOptions()
    options.choices.check()
    started = time.perf_counter()
    sets = open_labeled_sets(train, test, encoder, "unsupervised classification", LabeledPart(), options.extraction)
    if (options.choices.clusters or 0) > sets.train_count:
        raise ConfigError(
            f"`clusters={options.choices.clusters}`: wanted at most as many as training images, {sets.train_count:,}"
        )
    features = sets.features(None if encoder is None else encoder_of_spec(encoder), progress)
    classes = len(np.unique(features.train_labels))
    metrics = cluster_and_match(
        features.train_features, classes, features.test_features, features.test_labels, options.choices
    )
    protocol = {**asdict(options.choices), "clusters": options.choices.clusters or classes, **features.choices}
    interval = share_interval(metrics["acc"], len(features.test_labels))  # of these clusters, matched as they are
    details = {"intervals": {"acc": [interval.low, interval.high]}}
    seconds = time.perf_counter() - started
    return TaskResult("sop-eval unsupervised", test, protocol, metrics, features.encoder, seconds, details)
