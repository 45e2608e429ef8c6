"""Weighted k-NN classification of one set of images, or feature store, by another."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from sop_faiss.evaluate.confusion import count_confusions
from sop_faiss.evaluate.knn_choices import KS, TEMPERATURE
from sop_faiss.evaluate.knn_task import KnnTask
from sop_faiss.evaluate.labeled_part import LabeledPart
from sop_faiss.evaluate.labeled_sets import open_labeled_sets
from sop_faiss.features.extract import ExtractionOptions
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import ProgressCallback
from sop_faiss.verbs.scoring.classifier_result import ClassifierResult

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
        test: as `train`.
        encoder: which encoder; None where both are feature stores.
        options: numbers of neighbors and the like.
        progress: called with the number of images read.

    Raises:
        ConfigError: the encoder is missing or idle, or an option is impossible.
        SopError: as of `open_labeled_sets` and `LabeledSets.features`.
    """
    options = options or KnnOptions()
    started = time.perf_counter()
    extraction = replace(options.extraction, across_ranks=True)
    sets = open_labeled_sets(train, test, encoder, "k-NN", options.part, extraction)
    task = KnnTask(sets, KS if options.ks is None else tuple(dict.fromkeys(options.ks)), options.temperature)
    features = sets.features(None if encoder is None else encoder_of_spec(encoder), progress)
    task.require_voters(len(features.train_labels))
    scores = task.classify(features)
    best = max(task.ks, key=lambda k: scores.metrics[f"top1_k{k}"])
    return ClassifierResult(
        command="sop-knn",
        dataset=test,
        protocol={"ks": list(task.ks), "best_k": best, "temperature": task.temperature, **features.choices},
        metrics={**scores.metrics, "top1_best": scores.metrics[f"top1_k{best}"]},
        encoder=features.encoder,
        seconds=time.perf_counter() - started,
        confusion=count_confusions(features.test_labels, scores.predicted[best], features.class_names),
    )
