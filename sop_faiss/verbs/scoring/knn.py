"""Weighted k-NN classification of one set of images, or feature store, by another."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import Any

from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.confusion import Confusion, count_confusions
from sop_faiss.evaluate.knn import knn_scores
from sop_faiss.evaluate.knn_choices import KS, TEMPERATURE, check_choices
from sop_faiss.evaluate.labeled_part import LabeledPart
from sop_faiss.features.extract import ExtractionOptions
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import ProgressCallback
from sop_faiss.verbs.scoring.classifier_result import ClassifierResult
from sop_faiss.verbs.scoring.labeled_sets import LabeledSets, labeled_sets

__all__ = ["KnnOptions", "evaluate_knn"]


@dataclass(frozen=True)
class KnnOptions:
    """How to classify, and how to extract features where there is no store."""

    ks: tuple[int, ...] | None = None
    """Numbers of neighbors, none above the number of training images that vote. None: DINO's 10, 20, 100 and 200."""
    temperature: float = TEMPERATURE
    """Of the votes: weight exp(similarity / temperature)."""
    extraction: ExtractionOptions = field(default_factory=ExtractionOptions)
    """How features are extracted."""
    part: LabeledPart = field(default_factory=LabeledPart)
    """Which training images vote."""


def evaluate_knn(
    train: str,
    test: str,
    encoder: EncoderSpec | None = None,
    options: KnnOptions | None = None,
    *,
    progress: ProgressCallback | None = None,
) -> ClassifierResult:
    """Classify the test images by their nearest training images.

    The metrics are `top1_k20` and so on, and `top1_best`; the confusion is that at the best k.

    Args:
        train: SRC of labeled images, or the directory of a feature store.
        test: likewise.
        encoder: which encoder; None where both are feature stores.
        options: numbers of neighbors and the like.
        progress: called with the number of images read.

    Raises:
        ConfigError: the encoder is missing or idle, or an option is impossible.
        SopError: as of `labeled_sets`.
    """
    options = options or KnnOptions()
    check_choices(KS if options.ks is None else options.ks, options.temperature)
    started = time.perf_counter()
    sets = labeled_sets(
        train,
        test,
        encoder,
        options.part,
        what="k-NN",
        check_count=functools.partial(_require_voters, options),
        extraction=options.extraction,
        progress=progress,
    )
    metrics, protocol, confusion = _classify(sets, options)
    seconds = time.perf_counter() - started
    return ClassifierResult("sop-knn", test, protocol, metrics, sets.encoder, seconds, confusion)


def _classify(sets: LabeledSets, options: KnnOptions) -> tuple[dict[str, float], dict[str, Any], Confusion]:
    """The metrics, the protocol that they depend on, and what was taken for what."""
    ks = list(dict.fromkeys(KS if options.ks is None else options.ks))
    scores = knn_scores(
        sets.train_features,
        sets.train_labels,
        sets.test_features,
        sets.test_labels,
        ks,
        options.temperature,
    )
    best = max(ks, key=lambda k: scores.metrics[f"top1_k{k}"])
    protocol = {
        "ks": ks,
        "best_k": best,
        "temperature": options.temperature,
        **sets.choices,
    }
    confusion = count_confusions(sets.test_labels, scores.predicted[best], sets.class_names)
    return {**scores.metrics, "top1_best": scores.metrics[f"top1_k{best}"]}, protocol, confusion


def _require_voters(options: KnnOptions, count: int) -> None:
    """Check that there are as many training images as neighbors."""
    largest = max(KS if options.ks is None else options.ks)
    if largest > count:
        asked = f"-k {largest}" if options.ks is not None else f"the default numbers of neighbors go up to {largest}"
        raise ConfigError(
            f"{asked}, but {count} training images vote: wanted k <= {count}, such as -k {min(20, count)}"
        )
