"""How well frozen features hold when patches of the test images are dropped or their tiles shuffled."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8

from sop_faiss.bootstrap import Interval, share_interval
from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.images.subset import Subset
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.knn import knn_scores
from sop_faiss.evaluate.knn_choices import TEMPERATURE
from sop_faiss.evaluate.robustness import DROPS, Distortions, Point, right_predictions, salient_first
from sop_faiss.evaluate.robustness_choices import RobustnessChoices
from sop_faiss.evaluate.sets.feature_sets import fill_stores, open_feature_set
from sop_faiss.evaluate.sets.labeled_sets import LabeledSets, require_images, require_two
from sop_faiss.features.extract import ExtractionOptions
from sop_faiss.features.store import FeatureStore
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import ProgressCallback
from sop_faiss.report.robustness_figure import draw_robustness
from sop_faiss.verbs.scoring.task_result import TaskResult

_WHAT = "robustness"
_CLEAN = Point("random", 0.0)
"""Nothing is dropped."""


@dataclass(frozen=True)
class RobustnessOptions:
    """What to measure, and how to extract features."""

    choices: RobustnessChoices = field(default_factory=RobustnessChoices)
    """Points of the curves and the like."""
    extraction: ExtractionOptions = field(default_factory=ExtractionOptions)
    """How features of the training images are extracted."""
    salient_by: EncoderSpec | None = None
    """Says which patches are salient, for all encoders alike; None: each for itself."""
    figure: bool = False
    """Draw the curves."""


def evaluate_robustness(
    train: str,
    test: str,
    encoder: EncoderSpec,
    options: RobustnessOptions | None = None,
    *,
    progress: ProgressCallback | None = None,
    distorting_progress: ProgressCallback | None = None,
) -> tuple[TaskResult, bytes | None]:
    """Classify distorted test images by k-NN on the features of unchanged training images.

    Args:
        train: SRC of labeled images, or the directory of a feature store.
        test: SRC of labeled images.
        progress: called with the number of training images read.
        distorting_progress: called with the number of test images done.

    Returns:
        The result, and the figure if it is wanted.

    Raises:
        ConfigError: a choice is impossible, or the encoder that says what is salient makes no tokens.
        DataError: a source is unusable or lacks labels, or the test set is a feature store.
        SopError: as of `LabeledSets`, `fill_stores` and `right_predictions`.
    """
    options = options or RobustnessOptions()
    choices = options.choices
    choices.check()
    started = time.perf_counter()
    sets, source = _open_sets(train, test, choices)
    made = encoder_of_spec(encoder)
    judge = made if options.salient_by is None else encoder_of_spec(options.salient_by)
    patches, grids = choices.for_side(made.preprocess.crop)
    black = np.zeros((judge.preprocess.crop, judge.preprocess.crop, 3), np.uint8)
    _, salient_by = salient_first(judge, black, patches)  # that it makes tokens is known before any work
    points = [_CLEAN, *(Point(kind, share) for kind in DROPS for share in choices.shares)]
    distortions = Distortions([*points, *(Point("shuffled", grid) for grid in grids)], patches, choices.seed, judge)

    extraction = replace(options.extraction, across_ranks=True)
    filled = fill_stores([sets.train], made, extraction=extraction, progress=progress)[0].store
    assert filled is not None and filled.labels is not None
    right = right_predictions(
        made,
        source,
        sets.test_labels,
        distortions,
        _neighbors_vote(filled, choices.k),
        options.extraction.max_bad_fraction,
        distorting_progress,
    )
    percents = (100.0 * right).mean(axis=0).tolist()
    intervals = dict(zip(distortions.points, (share_interval(each, len(right)) for each in percents), strict=True))
    protocol = {
        **asdict(choices),
        "shares": list(choices.shares),
        "grids": list(grids),
        "patches": patches,
        "temperature": TEMPERATURE,
        "salient_by": f"{judge.name}: {salient_by}",
        "train": train,
        "test": test,
        "train_images": len(filled),
        "test_images": len(right),
        "test_dropped": len(source) - len(right),
        "test_images_of_unseen_classes": int((~np.isin(sets.test_labels, filled.labels)).sum()),
        "classes": len(np.unique(filled.labels)),
    }
    result = _result(test, made, protocol, intervals, time.perf_counter() - started)
    return result, _figure(made, source, distortions, intervals, result) if options.figure else None


def _result(
    test: str, made: Encoder, protocol: dict[str, Any], intervals: dict[Point, Interval], seconds: float
) -> TaskResult:
    protocol |= {"preprocess": made.preprocess.to_dict(), "pooling": made.pooling}
    named = {"name": made.name, "fingerprint": made.fingerprint}
    metrics = {_name(point): interval.mean for point, interval in intervals.items()}
    details = {"intervals": {_name(point): [each.low, each.high] for point, each in intervals.items()}}
    return TaskResult("sop-eval robustness", test, protocol, metrics, named, seconds, details)


def _open_sets(train: str, test: str, choices: RobustnessChoices) -> tuple[LabeledSets, ImageSource]:
    """Open both sets, or the wanted number of their images, and return them and the test images."""
    require_two(train, test)
    train_set, test_set = open_feature_set(train), open_feature_set(test)
    source = _some(require_images(test_set, _WHAT), choices.most_test)
    if train_set.source is not None:
        train_set = replace(train_set, source=_some(train_set.source, choices.most_train))
    sets = LabeledSets(train_set, replace(test_set, source=source), _WHAT)
    if choices.k > sets.train_count:
        raise ConfigError(f"`k={choices.k}`, but {sets.train_count} training images vote: wanted at most as many")
    return sets, source


def _some(source: ImageSource, most: int | None) -> ImageSource:
    """Return the source, or as many of its images, spread evenly."""
    if most is None or len(source) <= most:
        return source
    return Subset(source, np.linspace(0, len(source) - 1, most).round().astype(np.int64))


def _neighbors_vote(train: FeatureStore, k: int) -> Callable[[Float32[np.ndarray, "m d"]], Int64[np.ndarray, " m"]]:
    def predict(features: Float32[np.ndarray, "m d"]) -> Int64[np.ndarray, " m"]:
        assert train.labels is not None
        unknown = np.zeros(len(features), np.int64)  # the true classes are compared by the caller
        return knn_scores(train.features, train.labels, features, unknown, (k,)).predicted[k]

    return predict


def _name(point: Point) -> str:
    return "clean" if point == _CLEAN else f"{point.kind}_{point.value:g}"


def _figure(
    encoder: Encoder,
    source: ImageSource,
    distortions: Distortions,
    intervals: dict[Point, Interval],
    result: TaskResult,
) -> bytes:
    """Draw the curves below the first usable image as some of the points have it."""
    middle = min({point.value for point in intervals if point.kind == "salient"}, key=lambda share: abs(share - 0.5))
    shown = [
        point
        for point in distortions.points
        if point == _CLEAN or point.value == middle or (point.kind == "shuffled" and point.value > 1)
    ]
    images = _first_image(encoder, source, replace(distortions, points=shown))
    protocol = result.protocol
    note = (
        f"{encoder.name}: {protocol['k']}-NN, {protocol['train_images']:,} training and "
        f"{protocol['test_images']:,} test images; {distortions.patches} x {distortions.patches} patches; "
        f"salient by {protocol['salient_by']}"
    )
    return draw_robustness(intervals, list(zip(shown, images, strict=True)), 100.0 / protocol["classes"], note)


def _first_image(
    encoder: Encoder, source: ImageSource, distortions: Distortions
) -> list[UInt8[np.ndarray, "side side 3"]]:
    seen, judged = encoder.preprocess, distortions.judge.preprocess
    for position in range(len(source)):
        try:
            decoded = decode_image(source.read(position), top_value=seen.top_value)
        except DataError:
            continue
        image = seen.normalize(torch.from_numpy(seen.apply(decoded))[None])[0]
        changed = distortions.apply(image, judged.apply(decoded), position).permute(0, 2, 3, 1)
        values = (changed * torch.tensor(seen.std) + torch.tensor(seen.mean)) * 255.0
        return list(values.round().clip(0, 255).byte().numpy())
    raise DataError(f"{source.description} has no usable image")
