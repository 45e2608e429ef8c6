"""Train a detector on annotated images of COCO, and test it on others: AP of boxes and masks."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.sets.coco_masks import coco_library
from sop_faiss.evaluate.sets.coco_set import CocoSet, open_coco
from sop_faiss.evaluate.trained.average_precision import average_precision
from sop_faiss.evaluate.trained.detect import find_instances, rows_to_train_on, train_detector
from sop_faiss.evaluate.trained.detect_choices import DetectChoices
from sop_faiss.evaluate.trained.detect_model import filled_detect_choices, make_detector
from sop_faiss.evaluate.trained.training_batches import check_workers
from sop_faiss.evaluate.trained.training_state import open_state
from sop_faiss.files import sha256_file
from sop_faiss.model.encoders.dense import require_dense
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import Stage, silent_stage
from sop_faiss.verbs.scoring.task_result import TaskResult


@dataclass(frozen=True)
class DetectOptions:
    """How to train, what to test on, and where the state is kept."""

    choices: DetectChoices = field(default_factory=DetectChoices)
    """The recipe."""
    test_split: str = "val"
    """`val`, or `train`: the training images themselves, to see whether they can be learned by heart."""
    workers: int = 0
    """Processes that decode and augment; 0: this one."""
    out: Path | None = None
    """Where the state is kept after each epoch, from which the same call continues; None: nowhere."""


def evaluate_detection(
    data: Path, encoder: EncoderSpec, options: DetectOptions | None = None, *, stage: Stage = silent_stage
) -> TaskResult:
    """Train Mask R-CNN on an encoder's network, and test it once, after the last epoch.

    Args:
        data: a folder laid out as COCO; see `open_coco`.
        encoder: where training starts; `size` is not its own but of the images, in the options.
        options: the recipe and the like.
        stage: announces each stage of the work.

    Raises:
        ConfigError: a choice is impossible or does not apply, a library is missing, or `out` has a training by other
            choices.
        DataError: images or annotations are missing or damaged.
        RunStoppedError: the loss is not finite.
        SopError: as of `encoder_of_spec` and `open_state`.
    """
    options = options or DetectOptions()
    started = time.perf_counter()
    options.choices.check()
    require_dense(encoder, "detection, where maps of the image are used")
    if options.test_split not in ("val", "train"):
        raise ConfigError(f"`test_split={options.test_split}`: wanted val or train")
    check_workers(options.workers)
    coco_library()
    train, test = _open_sets(data, options)
    network = encoder_of_spec(replace(encoder, size=None)).eval()
    choices = filled_detect_choices(network, options.choices)
    make_detector(network, len(train.categories), choices)  # that it can be made is known before any work
    seen = {"mean": list(network.preprocess.mean), "std": list(network.preprocess.std)}
    settings = {
        "encoder": f"{network.name} {network.fingerprint}",
        "preprocess": {**seen, "top_value": network.preprocess.top_value},
        "training annotations": sha256_file(train.file),
        **asdict(choices),
    }
    with open_state(options.out, settings, "detect") as state, stage("training", "steps") as progress:
        model = train_detector(network, train, choices, state, workers=options.workers, progress=progress)
    with stage("testing", "images") as progress:
        found = find_instances(model, network, test, workers=options.workers, progress=progress)
    metrics, by_category = average_precision(test, found)
    protocol = {
        **asdict(choices),
        "detector": "Cascade Mask R-CNN" if choices.cascade else "Mask R-CNN",
        "preprocess": seen,
        "test_split": options.test_split,
        "categories": len(train.categories),
        "train_images": len(rows_to_train_on(train)),
        **{f"train_{name}": count for name, count in _counts(train).items()},
        "test_images": len(test),
        **{f"test_{name}": count for name, count in _counts(test).items()},
    }
    named = {"name": network.name, "fingerprint": network.fingerprint}
    details: dict[str, Any] = {"instances_found": len(found), "per_category": by_category}
    return TaskResult("sop-eval detect", str(data), protocol, metrics, named, time.perf_counter() - started, details)


def _open_sets(data: Path, options: DetectOptions) -> tuple[CocoSet, CocoSet]:
    """Read the training and the test images; they must have the same categories, and the test images an instance."""
    train = open_coco(data, "train", options.choices.images)
    test = train if options.test_split == "train" else open_coco(data, options.test_split)
    rows_to_train_on(train)
    if test.categories != train.categories:
        number = min(key for key, _ in set(test.categories.items()) ^ set(train.categories.items()))
        raise DataError(
            f"category {number} is {test.categories.get(number)!r} in {test.file} and "
            f"{train.categories.get(number)!r} in {train.file}: wanted the same categories"
        )
    if all(row.get("iscrowd") for image in test.images for row in image.annotations):
        raise DataError(f"{test.file} has no instance to find in {len(test):,} images")
    return train, test


def _counts(data: CocoSet) -> dict[str, int]:
    """Return how many annotations there are, and how many are not learned from."""
    rows = [row for image in data.images for row in image.annotations]
    crowds = sum(1 for row in rows if row.get("iscrowd"))
    usable = sum(len(image.usable) for image in data.images)
    return {"instances": len(rows) - crowds, "crowds": crowds, "instances_left_out": len(rows) - crowds - usable}
