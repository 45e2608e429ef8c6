"""Train a segmenter on random crops, and test it by sliding windows.

Tokens are computed for one batch or
window at a time; of an image that is tested there are in memory its scores at the size of the network's input, and
those of a few classes at its own size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn
from torch.nn import functional

from sop_faiss.distributed import average
from sop_faiss.errors import DataError
from sop_faiss.evaluate.sets.segment_set import SegmentSet
from sop_faiss.evaluate.trained.segment_choices import SegmentChoices
from sop_faiss.evaluate.trained.segment_data import training_crop, whole_input
from sop_faiss.evaluate.trained.segment_model import make_segmenter, make_segmenter_optimizer
from sop_faiss.evaluate.trained.segment_score import VOID, count_areas
from sop_faiss.evaluate.trained.training import Training, train
from sop_faiss.evaluate.trained.training_batches import Plan, load_batches, plan_batches, plan_in_order, seeded
from sop_faiss.evaluate.trained.training_ranks import score_together
from sop_faiss.evaluate.trained.training_state import TrainingState
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.progress import ProgressCallback

_SCORES = 2**25
"""Scores at the image's own size that are in memory at a time."""


def segmentation_rate_at(step: int, choices: SegmentChoices) -> float:
    """Return the head's learning rate at a step: it falls linearly to 0; during warm-up times what rises to 1."""
    assert choices.learning_rate is not None and choices.warmup_steps is not None  # they are filled
    rate = choices.learning_rate * (1 - step / choices.steps)
    return rate * max(1e-6, step / choices.warmup_steps) if step < choices.warmup_steps else rate


def train_segmenter(
    encoder: Encoder,
    scenes: SegmentSet,
    choices: SegmentChoices,
    state: TrainingState,
    *,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> nn.Module:
    """Train a head on an encoder's tokens, or with a copy of the encoder.

    Args:
        encoder: stays as it is.
        scenes: training images and masks.
        choices: as of `filled_segment_choices`.
        state: what is already done, and where it is kept.
        workers: processes that decode and augment; the result does not depend on them.
        progress: called with steps done.

    Raises:
        ConfigError: the network does not have what the head needs.
        DataError: an image or mask cannot be used.
        RunStoppedError: the loss is not finite.
    """
    model = make_segmenter(encoder, len(scenes.classes.names), choices)
    rows = np.arange(len(scenes.masks))
    if len(rows) < 2:
        raise DataError(f"{scenes.images.description} has one image: wanted two or more to train on")
    per_epoch = len(plan_batches(rows, choices.batch_size, 0))

    def load(plan: Plan, epoch: int) -> Iterator[Any]:
        return load_batches(
            scenes.images,
            plan,
            lambda pixels, row: training_crop(
                pixels, scenes.read_mask(row), encoder.preprocess, choices, "image", choices.seed, epoch, row
            ),
            top_value=encoder.preprocess.top_value,
            workers=workers,
        )

    def loss(crops: Tensor, _: Any, epoch: int, number: int) -> Tensor:
        with seeded("step", choices.seed, epoch, epoch * per_epoch + number):  # dropout and stochastic depth
            return _loss(model, crops, choices)

    training = Training(
        "",
        model,
        make_segmenter_optimizer(model, choices),
        choices.steps,
        lambda epoch: plan_batches(rows, choices.batch_size, "order", choices.seed, epoch),
        load,
        loss,
        lambda step: segmentation_rate_at(step, choices),
        f"learning_rate={choices.learning_rate:g}",
    )
    return train(training, state, progress)


def _loss(model: nn.Module, crops: Float[Tensor, "b 4 h w"], choices: SegmentChoices) -> Float[Tensor, ""]:
    """Return the mean cross-entropy of annotated pixels, the auxiliary head's added."""
    crops = crops.to(next(model.parameters()).device)
    truth = crops[:, 3].long()
    images = crops[:, :3].contiguous(memory_format=torch.channels_last)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=choices.precision == "bf16"):
        maps = model(images)
    annotated = average((truth != VOID).sum().float()).clamp(min=1)  # in the mean rank
    losses = []
    for weight, scores in zip((1.0, choices.auxiliary), maps, strict=False):
        large = functional.interpolate(scores.float(), size=truth.shape[1:], mode="bilinear", align_corners=False)
        losses.append(weight * functional.cross_entropy(large, truth, ignore_index=VOID, reduction="sum") / annotated)
    return torch.stack(losses).sum()


def measure_areas(
    model: nn.Module,
    encoder: Encoder,
    scenes: SegmentSet,
    choices: SegmentChoices,
    *,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> Int64[np.ndarray, "n 3 c"]:
    """Return the areas of `count_areas` for each image; ranks share the images.

    Args:
        model: as of `train_segmenter`.
        encoder: whose preprocessing the images go through.
        scenes: test images and masks.
        choices: as of `train_segmenter`.
        workers: processes that decode.
        progress: called with images done, of this rank.

    Raises:
        DataError: an image or mask cannot be used.
    """
    model.eval()

    def measured(own: Int64[np.ndarray, " m"]) -> list[Int64[np.ndarray, "3 c"]]:
        areas: list[Int64[np.ndarray, "3 c"]] = []
        batches = load_batches(
            scenes.images,
            [own[batch] for batch in plan_in_order(len(own), 1)],
            lambda pixels, row: whole_input(pixels, encoder.preprocess, choices.size),
            top_value=encoder.preprocess.top_value,
            workers=workers,
        )
        for (images, _), row in zip(batches, own.tolist(), strict=True):
            truth = scenes.read_mask(row)
            found = find_classes(model, images, truth.shape, choices)
            areas.append(count_areas(found, truth, len(scenes.classes.names)))
            if progress is not None:
                progress(len(areas), len(own))
        return areas

    return np.stack(score_together(len(scenes.masks), measured))


@torch.inference_mode()
def find_classes(
    model: nn.Module, image: Float[Tensor, "1 3 h w"], shape: tuple[int, ...], choices: SegmentChoices
) -> UInt8[np.ndarray, "rows columns"]:
    """Name the class of each pixel: scores of overlapping windows are averaged, then enlarged to the image's own size.

    Args:
        model: in evaluation mode.
        image: normalized.
        shape: rows and columns of the result.
        choices: size and stride of the windows; what is smaller than a window is filled up with zeros.
    """
    image = image.to(next(model.parameters()).device)
    height, width = image.shape[2:]
    side = choices.size
    total: Tensor | float = 0.0
    often = image.new_zeros(height, width)
    for top in _starts(height, side, choices.window_stride):
        for left in _starts(width, side, choices.window_stride):
            window = image[:, :, top : top + side, left : left + side]
            rows, columns = window.shape[2:]
            padded = functional.pad(window, (0, side - columns, 0, side - rows))
            with torch.autocast(image.device.type, torch.bfloat16, enabled=choices.precision == "bf16"):
                scores = model(padded.contiguous(memory_format=torch.channels_last))[0].float()
            scores = functional.interpolate(scores, size=(side, side), mode="bilinear", align_corners=False)
            if isinstance(total, float):
                total = scores.new_zeros(scores.shape[1], height, width)
            total[:, top : top + rows, left : left + columns] += scores[0, :, :rows, :columns]
            often[top : top + rows, left : left + columns] += 1
    assert isinstance(total, Tensor)
    return _largest(total / often, shape)


def _starts(length: int, side: int, stride: int) -> list[int]:
    """Return where windows start; the last ends with the image."""
    last = max(0, length - side)
    return [min(start, last) for start in range(0, last + stride, stride)]


def _largest(scores: Float[Tensor, "c h w"], shape: tuple[int, ...]) -> UInt8[np.ndarray, "rows columns"]:
    """Enlarge scores, a few classes at a time, and return the class of the largest; of equal ones the first."""
    best = torch.full(shape, -torch.inf, device=scores.device)
    found = torch.zeros(shape, dtype=torch.uint8, device=scores.device)
    several = max(1, _SCORES // (shape[0] * shape[1]))
    for first in range(0, len(scores), several):
        part = scores[None, first : first + several]
        values, numbers = functional.interpolate(part, size=shape, mode="bilinear", align_corners=False)[0].max(0)
        better = values > best
        best = torch.where(better, values, best)
        found = torch.where(better, (numbers + first).to(torch.uint8), found)
    return found.cpu().numpy()
