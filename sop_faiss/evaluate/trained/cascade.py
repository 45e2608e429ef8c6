"""Cascade Mask R-CNN on torchvision's parts: three heads, each starts from the boxes of the one before.

Cai and Vasconcelos, arXiv 1906.09756, with the heads and losses of iBOT's configuration: four convolutions with batch
norm and a layer for boxes, their loss 10 times that of GIoU, a mask head for each stage.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, maskrcnn_inference, maskrcnn_loss
from torchvision.ops import MultiScaleRoIAlign, clip_boxes_to_image, generalized_box_iou_loss, remove_small_boxes

_STAGES = (
    (0.5, (10.0, 10.0, 5.0, 5.0), 1.0),
    (0.6, (20.0, 20.0, 10.0, 10.0), 0.5),
    (0.7, (30.0, 30.0, 15.0, 15.0), 0.25),
)
"""Of each stage: overlap from which a proposal is of an object, weights of the coordinates, weight of the losses."""
_MAPS = ["0", "1", "2", "3"]
_BOX_LOSS_WEIGHT = 10.0
_SMALLEST = 1e-2
"""Pixels: narrower boxes are dropped in training, as torchvision's heads do when they test."""

Boxes = list[Tensor]
"""Of each image, (n, 4)."""


class CascadeHeads(nn.Module):
    """What `torchvision`'s `RoIHeads` do, in three stages; called by the detector as those are.

    Args:
        width: channels of the maps, and of the convolutions.
        classes: with the background.
        rois: proposals of an image that each stage learns from.
        stages: how many.
    """

    def __init__(self, width: int, classes: int, rois: int, stages: int = len(_STAGES)) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            RoIHeads(
                MultiScaleRoIAlign(_MAPS, 7, sampling_ratio=2),
                FastRCNNConvFCHead((width, 7, 7), [width] * 4, [4 * width], norm_layer=nn.BatchNorm2d),
                FastRCNNPredictor(4 * width, classes),
                *(overlap, overlap, rois, 0.25, weights),
                *(0.05, 0.5, 100),  # least score, overlap of suppression and most boxes, when testing
                MultiScaleRoIAlign(_MAPS, 14, sampling_ratio=2),
                MaskRCNNHeads(width, (width,) * 4, 1),
                MaskRCNNPredictor(width, width, classes),
            )
            for overlap, weights, _ in _STAGES[:stages]
        )

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: Boxes,
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Return the instances of each image when testing, and the losses when training."""
        losses: dict[str, Tensor] = {}
        scores = []
        stage: Any
        for number, (stage, (_, _, weight)) in enumerate(zip(self.stages, _STAGES, strict=False)):
            chosen = stage.select_training_samples(proposals, targets) if targets is not None else None
            proposals = proposals if chosen is None else chosen[0]
            logits, deltas = stage.box_predictor(stage.box_head(stage.box_roi_pool(features, proposals, image_shapes)))
            scores.append(functional.softmax(logits, dim=1))
            if targets is not None and chosen is not None:
                own = self._losses(stage, features, image_shapes, targets, chosen, logits, deltas)
                losses |= {f"loss_{name}_{number}": weight * value for name, value in own.items()}
            if number + 1 < len(self.stages):
                proposals = _refined(stage, logits, deltas, proposals, image_shapes, chosen)
        if targets is not None:
            return [], losses
        mean = torch.stack(scores).mean(0)
        found = stage.postprocess_detections(mean.log(), deltas, proposals, image_shapes)
        made = [{"boxes": each[0], "scores": each[1], "labels": each[2]} for each in zip(*found, strict=True)]
        boxes, labels = [each["boxes"] for each in made], [each["labels"] for each in made]
        of_stages = [maskrcnn_inference(_masks(each, features, boxes, image_shapes), labels) for each in self.stages]
        for result, *masks in zip(made, *of_stages, strict=True):
            result["masks"] = torch.stack(masks).mean(0)
        return made, {}

    def _losses(
        self, stage: Any, features: Any, image_shapes: Any, targets: Any, chosen: Any, logits: Tensor, deltas: Tensor
    ) -> dict[str, Tensor]:
        proposals, matched, labels, wanted = chosen
        of_object = [each > 0 for each in labels]
        boxes = [each[kept] for each, kept in zip(proposals, of_object, strict=True)]
        matches = [each[kept] for each, kept in zip(matched, of_object, strict=True)]
        truth = [each["masks"] for each in targets], [each["labels"] for each in targets]
        return {
            "class": functional.cross_entropy(logits, torch.cat(labels)),
            "box": box_loss(stage, deltas, proposals, torch.cat(labels), torch.cat(wanted)),
            "mask": maskrcnn_loss(_masks(stage, features, boxes, image_shapes), boxes, *truth, matches),
        }


def box_loss(
    stage: Any,
    deltas: Float[Tensor, "n c4"],
    proposals: Boxes,
    labels: Int64[Tensor, " n"],
    wanted: Float[Tensor, "n 4"],
) -> Float[Tensor, ""]:
    """Return 10 times 1 - GIoU of the boxes of objects, divided by the number of all proposals."""
    rows = torch.where(labels > 0)[0]
    own = torch.cat(proposals)[rows]
    made, truth = (
        stage.box_coder.decode_single(each.float(), own)
        for each in (deltas.unflatten(1, (-1, 4))[rows, labels[rows]], wanted[rows])
    )
    return _BOX_LOSS_WEIGHT * generalized_box_iou_loss(made, truth, reduction="sum") / max(1, len(labels))


def _masks(stage: Any, features: Any, boxes: Boxes, image_shapes: Any) -> Tensor:
    found: Tensor = stage.mask_predictor(stage.mask_head(stage.mask_roi_pool(features, boxes, image_shapes)))
    return found


@torch.no_grad()
def _refined(
    stage: Any, logits: Tensor, deltas: Tensor, proposals: Boxes, image_shapes: list[tuple[int, int]], chosen: Any
) -> Boxes:
    """Return the boxes of the likeliest class; in training of the true one, without the instances' own boxes."""
    likeliest = logits[:, 1:].argmax(1) + 1
    if chosen is not None:
        labels = torch.cat(chosen[2])
        likeliest = torch.where(labels > 0, labels, likeliest)
    decoded = stage.box_coder.decode(deltas, proposals)[torch.arange(len(deltas), device=deltas.device), likeliest]
    counts = [len(each) for each in proposals]
    boxes = [clip_boxes_to_image(*each) for each in zip(decoded.split(counts), image_shapes, strict=True)]
    if chosen is None:
        return boxes
    moved = [(labels == 0) | (wanted != 0).any(1) for labels, wanted in zip(chosen[2], chosen[3], strict=True)]
    boxes = [each[kept] for each, kept in zip(boxes, moved, strict=True)]
    return [each[remove_small_boxes(each, _SMALLEST)] for each in boxes]
