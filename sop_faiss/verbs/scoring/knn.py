"""Weighted k-NN classification of one set of images, or feature store, by another."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float32

from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.baselines import Baseline, measure_baselines
from sop_faiss.evaluate.confusion import count_confusions
from sop_faiss.evaluate.knn_choices import KS, TEMPERATURE
from sop_faiss.evaluate.knn_task import KnnTask
from sop_faiss.evaluate.sets.labeled_part import LabeledPart
from sop_faiss.evaluate.sets.labeled_sets import LabeledFeatures, LabeledSets, open_labeled_sets
from sop_faiss.features.extract import ExtractionOptions
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import ProgressCallback, Stage, silent_stage
from sop_faiss.verbs.scoring.classifier_result import ClassifierResult


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
    baselines: bool = False
    """Measure raw pixels, a patch dictionary and the same network with random weights, too."""


def evaluate_knn(
    train: str,
    test: str,
    encoder: EncoderSpec | None = None,
    options: KnnOptions | None = None,
    *,
    stage: Stage = silent_stage,
) -> ClassifierResult:
    """Classify the test images by their nearest training images.

    The metrics are `top1_k20` and so on, and `top1_best`; the confusion is that at the best k.

    Args:
        train: SRC of labeled images, or the directory of a feature store.
        test: as `train`.
        encoder: which encoder; None where both are feature stores.

    Raises:
        ConfigError: the encoder is missing or idle, or an option is impossible: baselines need images.
        SopError: as of `open_labeled_sets` and `LabeledSets.features`.
    """
    options = options or KnnOptions()
    started = time.perf_counter()
    sets = open_labeled_sets(train, test, encoder, "k-NN", options.part, options.extraction)
    task = KnnTask(sets, KS if options.ks is None else tuple(dict.fromkeys(options.ks)), options.temperature)
    if options.baselines:
        _require_images(sets)
    loaded = None if encoder is None else encoder_of_spec(encoder)
    with stage("embedding", "images") as progress:
        features = sets.features(loaded, progress)
    task.require_voters(len(features.train_labels))
    scores = task.classify(features)
    seconds = time.perf_counter() - started
    baselines = _baselines(task, features, loaded, stage) if options.baselines else []
    best = max(task.ks, key=lambda k: scores.metrics[f"top1_k{k}"])
    return ClassifierResult(
        command="sop-knn",
        dataset=test,
        protocol={"ks": list(task.ks), "best_k": best, "temperature": task.temperature, **features.choices},
        metrics={**scores.metrics, "top1_best": scores.metrics[f"top1_k{best}"]},
        encoder=features.encoder,
        seconds=seconds,
        confusion=count_confusions(features.test_labels, scores.predicted[best], features.class_names),
        baselines=baselines,
    )


def _require_images(sets: LabeledSets) -> None:
    stores = [each.name for each in (sets.train, sets.test) if each.source is None]
    if stores:
        raise ConfigError(f"`baselines` are measured on images, and {stores[0]} is a feature store: name its images")


def _baselines(task: KnnTask, features: LabeledFeatures, encoder: Encoder | None, stage: Stage) -> list[Baseline]:
    assert encoder is not None and features.train_images is not None and features.test_images is not None

    def score(train: Float32[np.ndarray, "n d"], test: Float32[np.ndarray, "q d"]) -> dict[str, float]:
        return task.classify(replace(features, train_features=train, test_features=test)).metrics

    def score_encoder(untrained: Encoder, progress: ProgressCallback) -> dict[str, float]:
        return task.classify(task.sets.features(untrained, progress)).metrics

    return measure_baselines((features.train_images, features.test_images), encoder, score, score_encoder, stage)
