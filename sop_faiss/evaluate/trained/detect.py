"""Train a detector on an encoder's network, and find the instances of images with it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Int64
from torchvision.models.detection import MaskRCNN

from sop_faiss.distributed import rank
from sop_faiss.errors import DataError
from sop_faiss.evaluate.sets.coco_masks import encode_masks
from sop_faiss.evaluate.sets.coco_set import CocoSet
from sop_faiss.evaluate.trained.detect_choices import DetectChoices
from sop_faiss.evaluate.trained.detect_data import Target, image_tensor, training_image
from sop_faiss.evaluate.trained.detect_model import make_detector, make_optimizer
from sop_faiss.evaluate.trained.training import Training, train
from sop_faiss.evaluate.trained.training_batches import Plan, load_batches, plan_batches, plan_in_order, seeded
from sop_faiss.evaluate.trained.training_ranks import score_together
from sop_faiss.evaluate.trained.training_state import TrainingState
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.progress import ProgressCallback

_FIRST_RATE = 1e-3
"""Of warm-up, relative to the peak."""
_DROPS = (8 / 12, 11 / 12)
"""Shares of the training after which the learning rate falls to a tenth: 8 and 11 of 12 epochs."""
_MASK_THRESHOLD = 0.5


def rows_to_train_on(data: CocoSet) -> Int64[np.ndarray, " m"]:
    """Return the images that have an instance to learn from; iBOT's library leaves out the others, too.

    Raises:
        DataError: none has.
    """
    rows = np.array([row for row, image in enumerate(data.images) if image.usable], dtype=np.int64)
    if not len(rows):
        raise DataError(f"{data.file} has no instance to learn from in {len(data):,} images")
    return rows


def learning_rate_at(step: int, steps: int, choices: DetectChoices) -> float:
    """Return the learning rate of the new layers at a step: a linear rise, then three constant stages."""
    rate = choices.learning_rate * 0.1 ** sum(step >= share * steps for share in _DROPS)
    warmup = min(choices.warmup_steps, steps)
    return rate * (_FIRST_RATE + (1 - _FIRST_RATE) * step / warmup) if step < warmup else rate


def train_detector(
    encoder: Encoder,
    data: CocoSet,
    choices: DetectChoices,
    state: TrainingState,
    *,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> MaskRCNN:
    """Train a copy of an encoder's network and a detector on top of it, from the last kept epoch.

    Args:
        encoder: where training starts; it stays as it is.
        data: training images.
        choices: as of `DetectChoices.filled`.
        state: what is already done, and where it is kept.
        workers: processes that decode and augment; the result does not depend on them.
        progress: called with steps done.

    Raises:
        ConfigError: the network has no maps of strides 4 to 32.
        DataError: an image cannot be used, or none has an instance.
        RunStoppedError: the loss is not finite.
    """
    model = make_detector(encoder, len(data.categories), choices)
    rows = rows_to_train_on(data)
    steps = choices.epochs * len(plan_batches(rows, choices.batch_size))

    def load(plan: Plan, epoch: int) -> Iterator[Any]:
        return load_batches(
            data.source,
            plan,
            functools.partial(training_image, data, choices, (choices.seed, epoch)),
            top_value=encoder.preprocess.top_value,
            workers=workers,
            join=list,
        )

    def loss(batch: Any, _: Any, epoch: int, number: int) -> torch.Tensor:
        of_rank = [rank()] if rank() else []  # each rank draws for its own images
        with seeded("step", choices.seed, epoch, number, *of_rank):  # sides, sampled proposals, stochastic depth
            return _loss(model, batch, choices)

    training = Training(
        "detector",
        model,
        make_optimizer(model, choices),
        steps,
        lambda epoch: plan_batches(rows, choices.batch_size, "order", choices.seed, epoch),
        load,
        loss,
        lambda step: learning_rate_at(step, steps, choices),
        f"learning_rate={choices.learning_rate:g}",
        one_seed=False,
    )
    return cast(MaskRCNN, train(training, state, progress))


def _loss(
    model: MaskRCNN, batch: list[tuple[torch.Tensor, Target] | list[Any]], choices: DetectChoices
) -> torch.Tensor:
    device = next(model.parameters()).device
    images = [image.to(device) for image, _ in batch]
    targets = [{name: value.to(device) for name, value in target.items()} for _, target in batch]
    with torch.autocast(device.type, torch.bfloat16, enabled=choices.precision == "bf16"):
        losses = model(images, targets)
    return torch.stack([value.float() for value in losses.values()]).sum()


def find_instances(
    model: MaskRCNN,
    encoder: Encoder,
    data: CocoSet,
    *,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> list[dict[str, Any]]:
    """Return the instances that a detector finds, as entries of COCO's result files; ranks share the images.

    Args:
        model: as of `train_detector`, for the categories of `data`.
        encoder: whose way of decoding images is taken.
        data: the images.
        workers: processes that decode.
        progress: called with images done, of this rank.

    Raises:
        DataError: an image cannot be used.
    """
    model.eval()
    device = next(model.parameters()).device
    ids = list(data.categories)

    @torch.inference_mode()
    def of_images(own: Int64[np.ndarray, " m"]) -> list[list[dict[str, Any]]]:
        found: list[list[dict[str, Any]]] = []
        batches = load_batches(
            data.source,
            [own[batch] for batch in plan_in_order(len(own), 1)],
            functools.partial(_test_image, data),
            top_value=encoder.preprocess.top_value,
            workers=workers,
        )
        for images, (row,) in batches:
            made = model([images[0].to(device)])[0]
            masks = encode_masks((made["masks"][:, 0] > _MASK_THRESHOLD).to(torch.uint8).cpu().numpy())
            corners = made["boxes"].double().cpu().numpy()
            boxes = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)
            common = {"image_id": data.images[row].id}
            each = zip(boxes.tolist(), made["labels"].tolist(), made["scores"].tolist(), masks, strict=True)
            found.append(
                [
                    {**common, "category_id": ids[label - 1], "score": score, "bbox": box, "segmentation": mask}
                    for box, label, score, mask in each
                ]
            )
            if progress is not None:
                progress(len(found), len(own))
        return found

    return [each for of_image in score_together(len(data), of_images) for each in of_image]


def _test_image(data: CocoSet, pixels: Any, row: int) -> torch.Tensor:
    data.check_size(pixels, row)
    return image_tensor(pixels)
