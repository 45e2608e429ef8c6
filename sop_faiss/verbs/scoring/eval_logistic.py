"""Logistic regression on the frozen features of one set of images, or feature store, tested on another."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field

from sop_faiss.evaluate.confusion import count_confusions
from sop_faiss.evaluate.logistic import logistic_regression
from sop_faiss.evaluate.logistic_choices import LogisticChoices
from sop_faiss.evaluate.sets.labeled_part import LabeledPart
from sop_faiss.evaluate.sets.labeled_sets import open_labeled_sets
from sop_faiss.features.extract import ExtractionOptions
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import ProgressCallback
from sop_faiss.verbs.scoring.classifier_result import ClassifierResult


@dataclass(frozen=True)
class LogisticOptions:
    """How to fit, and how to extract features where there is no store."""

    choices: LogisticChoices = field(default_factory=LogisticChoices)
    """Penalties and the like."""
    extraction: ExtractionOptions = field(default_factory=ExtractionOptions)
    """How features are extracted."""
    part: LabeledPart = field(default_factory=LabeledPart)
    """Which training images are used."""


def evaluate_logistic(
    train: str,
    test: str,
    encoder: EncoderSpec | None = None,
    options: LogisticOptions | None = None,
    *,
    progress: ProgressCallback | None = None,
    fitting_progress: ProgressCallback | None = None,
) -> ClassifierResult:
    """Fit a logistic regression on frozen features, and test it.

    Args:
        train: SRC of labeled images, or the directory of a feature store.
        test: as `train`.
        encoder: which encoder; None where both are feature stores.
        fitting_progress: called with the fits done.

    Raises:
        SopError: as of `open_labeled_sets`, `LabeledSets.features` and `logistic_regression`.
    """
    options = options or LogisticOptions()
    options.choices.check()
    started = time.perf_counter()
    sets = open_labeled_sets(train, test, encoder, "a logistic regression", options.part, options.extraction)
    features = sets.features(None if encoder is None else encoder_of_spec(encoder), progress)
    scores = logistic_regression(
        features.train_features,
        features.train_labels,
        features.test_features,
        features.test_labels,
        options.choices,
        progress=fitting_progress,
    )
    protocol = {
        **asdict(options.choices),
        "penalties": list(options.choices.penalties),
        "penalty": scores.chosen,
        "held_out_top1": {str(penalty): value for penalty, value in scores.held_out_top1.items()},
        "held_out_images": scores.held_out_images,
        **features.choices,
    }
    return ClassifierResult(
        command="sop-eval logistic",
        dataset=test,
        protocol=protocol,
        metrics=scores.metrics,
        encoder=features.encoder,
        seconds=time.perf_counter() - started,
        confusion=count_confusions(features.test_labels, scores.predicted, features.class_names),
    )
