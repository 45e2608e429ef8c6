"""How much a linear classifier on frozen features depends on what is behind objects: ImageNet-9."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from sop_faiss.bootstrap import share_difference, share_interval
from sop_faiss.evaluate.backgrounds import find_sets, find_training_images
from sop_faiss.evaluate.logistic import logistic_regression
from sop_faiss.evaluate.logistic_choices import LogisticChoices
from sop_faiss.evaluate.sets.feature_sets import fill_stores, open_feature_set, require_encoder_or_stores
from sop_faiss.evaluate.sets.labeled_sets import LabeledFeatures, LabeledSets
from sop_faiss.features.extract import ExtractionOptions
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import ProgressCallback
from sop_faiss.verbs.scoring.task_result import TaskResult

_WHAT = "the classifier"


@dataclass(frozen=True)
class BackgroundsOptions:
    """How to fit, and how to extract features."""

    choices: LogisticChoices = field(default_factory=LogisticChoices)
    """Penalties and the like."""
    extraction: ExtractionOptions = field(default_factory=ExtractionOptions)
    """How features are extracted."""


def evaluate_backgrounds(
    data: Path,
    train: str | None,
    encoder: EncoderSpec,
    options: BackgroundsOptions | None = None,
    *,
    progress: ProgressCallback | None = None,
    fitting_progress: ProgressCallback | None = None,
) -> TaskResult:
    """Fit a logistic regression on the features of unchanged training images, and test it on each set.

    Args:
        data: ImageNet-9 in the layout of the backgrounds challenge.
        train: SRC of labeled images, or the directory of a feature store; None: `original/train` of `data`.
        fitting_progress: called with the fits done.

    Raises:
        DataError: the layout is another, a set is empty, or its classes are not those of the training images.
        SopError: as of `LabeledSets`, `fill_stores` and `logistic_regression`.
    """
    options = options or BackgroundsOptions()
    options.choices.check()
    started = time.perf_counter()
    found = find_sets(data)
    train = find_training_images(data) if train is None else train
    features = _features(train, list(found.values()), encoder, options.extraction, progress)
    scores = logistic_regression(
        features[0].train_features,
        features[0].train_labels,
        np.concatenate([each.test_features for each in features]),
        np.concatenate([each.test_labels for each in features]),
        options.choices,
        progress=fitting_progress,
    )
    ends = np.cumsum([len(each.test_labels) for each in features])[:-1]
    right = {
        name: 100.0 * (predicted == each.test_labels)
        for name, predicted, each in zip(found, np.split(scores.predicted, ends), features, strict=True)
    }
    intervals = {name: share_interval(float(values.mean()), len(values)) for name, values in right.items()}
    intervals["bg_gap"] = share_difference(intervals["mixed_same"], intervals["mixed_rand"])
    known = features[0].choices
    protocol = {
        **asdict(options.choices),
        "penalties": list(options.choices.penalties),
        "penalty": scores.chosen,
        "held_out_images": scores.held_out_images,
        "train": train,
        **{key: known[key] for key in ("train_images", "classes", "train_dropped", "preprocess", "pooling")},
        "test_images": {name: len(values) for name, values in right.items()},
        **{
            key: sum(each.choices[key] for each in features)
            for key in ("test_dropped", "test_images_of_unseen_classes")
        },
    }
    return TaskResult(
        "sop-eval backgrounds",
        str(data),
        protocol,
        {name: interval.mean for name, interval in intervals.items()},
        features[0].encoder,
        time.perf_counter() - started,
        {"intervals": {name: [interval.low, interval.high] for name, interval in intervals.items()}},
    )


def _features(
    train: str,
    tests: Sequence[str],
    encoder: EncoderSpec,
    extraction: ExtractionOptions,
    progress: ProgressCallback | None,
) -> list[LabeledFeatures]:
    """Extract the training set once, and each test set."""
    sets = [open_feature_set(source) for source in (train, *tests)]
    for test in sets[1:]:
        LabeledSets(sets[0], test, _WHAT)  # that the classes are the same is known before any work
    require_encoder_or_stores(sets, encoder)
    extraction = replace(extraction, across_ranks=True)
    filled = fill_stores(sets, encoder_of_spec(encoder), extraction=extraction, progress=progress)
    return [LabeledSets(filled[0], test, _WHAT).features(None) for test in filled[1:]]
