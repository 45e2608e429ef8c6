"""A linear probe on the frozen features of one set of images, or feature store, tested on another."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field

from sop_faiss.evaluate.confusion import count_confusions
from sop_faiss.evaluate.linear_choices import LinearChoices
from sop_faiss.evaluate.linear_task import LinearTask
from sop_faiss.evaluate.sets.labeled_part import LabeledPart
from sop_faiss.evaluate.sets.labeled_sets import open_labeled_sets
from sop_faiss.features.extract import ExtractionOptions
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import ProgressCallback
from sop_faiss.verbs.scoring.classifier_result import ClassifierResult


@dataclass(frozen=True)
class LinearOptions:
    """How to train the classifier, and how to extract features where there is no store."""

    choices: LinearChoices = field(default_factory=LinearChoices)
    """Learning rates, epochs and the like."""
    extraction: ExtractionOptions = field(default_factory=ExtractionOptions)
    """How features are extracted."""
    part: LabeledPart = field(default_factory=LabeledPart)
    """Which training images are used."""


def evaluate_linear(
    train: str,
    test: str,
    encoder: EncoderSpec | None = None,
    options: LinearOptions | None = None,
    *,
    progress: ProgressCallback | None = None,
    training_progress: ProgressCallback | None = None,
) -> ClassifierResult:
    """Train a linear classifier on frozen features, and test it.

    The metrics are `top1`, and `top5` where there are five classes or more; the protocol has the accuracy of each
    learning rate on held-out images.

    Args:
        train: SRC of labeled images, or the directory of a feature store.
        test: as `train`.
        encoder: which encoder; None where both are feature stores.
        training_progress: called with the epochs trained.

    Raises:
        SopError: as of `open_labeled_sets`, `LabeledSets.features` and `linear_probe`.
    """
    options = options or LinearOptions()
    started = time.perf_counter()
    sets = open_labeled_sets(train, test, encoder, "a linear probe", options.part, options.extraction)
    task = LinearTask(sets, options.choices)
    loaded = None if encoder is None else encoder_of_spec(encoder)
    features = sets.features(loaded, progress)
    scores = task.probe(features, loaded, training_progress)
    protocol = {
        **asdict(task.choices),
        "learning_rates": list(task.choices.learning_rates),
        "learning_rate": scores.chosen,
        "held_out_top1": {str(rate): value for rate, value in scores.held_out_top1.items()},
        "held_out_images": scores.held_out_images,
        "augmentation": "none",
        **features.choices,
    }
    return ClassifierResult(
        command="sop-linear",
        dataset=test,
        protocol=protocol,
        metrics=scores.metrics,
        encoder=features.encoder,
        seconds=time.perf_counter() - started,
        confusion=count_confusions(features.test_labels, scores.predicted, features.class_names),
    )
