"""Train a head that names the class of each pixel on one set of images, and test it on another: mIoU."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from sop_faiss.evaluate.sets.segment_set import open_segment_sets
from sop_faiss.evaluate.trained.segment import measure_areas, train_segmenter
from sop_faiss.evaluate.trained.segment_choices import SegmentChoices
from sop_faiss.evaluate.trained.segment_model import filled_segment_choices, make_segmenter
from sop_faiss.evaluate.trained.segment_score import class_scores, constant_areas, miou_interval, score_areas
from sop_faiss.evaluate.trained.training_batches import check_workers
from sop_faiss.evaluate.trained.training_state import digest_of_images, open_state
from sop_faiss.model.encoders.dense import require_dense
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import Stage, silent_stage
from sop_faiss.verbs.scoring.task_result import TaskResult


@dataclass(frozen=True)
class SegmentOptions:
    """How to train, and where the state is kept."""

    choices: SegmentChoices = field(default_factory=SegmentChoices)
    """The recipe."""
    supercategories: bool = False
    """Classes are COCO's supercategories."""
    workers: int = 0
    """Processes that decode and augment; 0: this one."""
    out: Path | None = None
    """Where the state is kept after each pass over the images, from which the same call continues; None: nowhere."""


def evaluate_segment(
    data: Path, encoder: EncoderSpec, options: SegmentOptions | None = None, *, stage: Stage = silent_stage
) -> TaskResult:
    """Train a head on the training images, with the network where the head is UPerNet, and test it once.

    Args:
        data: a folder laid out as ADE20K, or with `images/train`, `semantic/train` and the like.
        encoder: which encoder; `size` is not its own but of crops and windows, in the options.
        options: the recipe and the like.
        stage: announces each stage of the work.

    Raises:
        ConfigError: a choice is impossible or does not apply, or `out` has a training by other choices.
        DataError: images or masks are missing, damaged, of two sizes, or have unknown values.
        RunStoppedError: the loss is not finite.
        SopError: as of `encoder_of_spec` and `open_state`.
    """
    options = options or SegmentOptions()
    started = time.perf_counter()
    options.choices.check()
    require_dense(encoder, "segmentation, where patch tokens are used")
    check_workers(options.workers)
    train, test = open_segment_sets(data, supercategories=options.supercategories)
    network = encoder_of_spec(replace(encoder, size=None)).eval()
    choices = filled_segment_choices(network, options.choices)
    names = train.classes.names
    make_segmenter(network, len(names), choices)  # that it can be made is known before any work
    with stage("reading masks", "masks") as progress:
        total = len(train.masks) + len(test.masks)
        annotated = train.count_pixels(lambda done, _: progress(done, total))
        in_test = test.count_pixels(lambda done, _: progress(len(train.masks) + done, total))
    seen = {"mean": list(network.preprocess.mean), "std": list(network.preprocess.std)}
    settings = {
        "encoder": f"{network.name} {network.fingerprint}",
        "preprocess": {**seen, "top_value": network.preprocess.top_value},
        "training images": digest_of_images(train.images, annotated),
        "classes": list(names),
        **asdict(choices),
    }
    with open_state(options.out, settings, "segment") as state, stage("training", "steps") as progress:
        model = train_segmenter(network, train, choices, state, workers=options.workers, progress=progress)
    with stage("testing", "images") as progress:
        areas = measure_areas(model, network, test, choices, workers=options.workers, progress=progress)
    metrics, details = _summary(areas, names, int(annotated.sum(0).argmax()))
    protocol = {
        **asdict(choices),
        "window_stride": choices.window_stride,
        "preprocess": seen,
        "supercategories": options.supercategories,
        "classes": len(names),
        "classes_in_training": int(annotated.any(0).sum()),
        "classes_in_test": int(in_test.any(0).sum()),
        "train_images": len(train.masks),
        "test_images": len(test.masks),
        "kept_in_memory": f"tokens of {choices.batch_size} crops or of one window, scores of one image",
    }
    named = {"name": network.name, "fingerprint": network.fingerprint}
    return TaskResult("sop-eval segment", str(data), protocol, metrics, named, time.perf_counter() - started, details)


def _summary(
    areas: Int64[np.ndarray, "n 3 c"], names: tuple[str, ...], largest: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the metrics in percent; and their interval, the scores of each class, and those of the largest alone."""
    total = areas.sum(0)
    union, accuracy = class_scores(total)
    floor = score_areas(constant_areas(areas[:, 2], largest).sum(0))
    interval = miou_interval(areas)
    details = {
        "miou_interval": [interval.low, interval.high],
        "classes_counted": int(np.isfinite(union).sum()),
        "classes_left_out": [name for name, value in zip(names, union, strict=True) if not np.isfinite(value)],
        "largest_class_everywhere": {"class": names[largest], **floor._asdict()},
        "per_class": {
            name: {
                "iou": _percent(union[number]),
                "accuracy": _percent(accuracy[number]),
                "pixels": int(total[2, number]),
                "predicted": int(total[1, number]),
            }
            for number, name in enumerate(names)
        },
    }
    return score_areas(total)._asdict(), details


def _percent(share: float) -> float | None:
    """Return percent; None for NaN, which JSON does not have."""
    return 100.0 * float(share) if np.isfinite(share) else None
