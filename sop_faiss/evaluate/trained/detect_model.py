"""Mask R-CNN of torchvision over an encoder's network: a feature pyramid, proposals, boxes and masks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from jaxtyping import Float
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

from sop_faiss.distributed import derive_seed
from sop_faiss.evaluate.trained.cascade import CascadeHeads
from sop_faiss.evaluate.trained.detect_choices import DetectChoices
from sop_faiss.evaluate.trained.training_layers import (
    optimizer_of,
    require_layers,
    set_drop_path,
    size_of_recipe,
    trunk_of,
)
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.pyramid import STRIDES, Pyramid

_RATIOS = (0.5, 1.0, 2.0)
"""Height to width of the anchors."""
_BOX_SIDE = 7
"""Rows and columns of a map that the box head sees of a proposal."""


class _FeaturePyramid(nn.Module):
    """The maps of a network, and a coarser one, each with what the coarser ones know."""

    def __init__(self, body: Pyramid, width: int) -> None:
        super().__init__()
        self.body = body
        self.fpn = FeaturePyramidNetwork(list(body.widths), width, extra_blocks=LastLevelMaxPool())
        self.out_channels = width

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> dict[str, Float[Tensor, "b width _ _"]]:
        """Return the maps of strides 4 to 64 by the names that torchvision has for them."""
        maps = self.body(images.contiguous(memory_format=torch.channels_last))
        found: dict[str, Tensor] = self.fpn(OrderedDict((str(place), each) for place, each in enumerate(maps)))
        return found


def filled_detect_choices(encoder: Encoder, choices: DetectChoices) -> DetectChoices:
    """Return the choices with those of the network's recipe.

    Raises:
        ConfigError: one is impossible, or this network does not have what it needs.
    """
    choices.check()
    trunk = trunk_of(encoder)
    has_layers, has_drops = require_layers(encoder, choices.layer_decay, choices.drop_path)
    size = size_of_recipe(trunk) if isinstance(trunk, VisionTransformer | Eva) else "other"
    return choices.filled(size, has_layers=has_layers, has_drop_path=has_drops)


def make_detector(encoder: Encoder, classes: int, choices: DetectChoices) -> MaskRCNN:
    """Copy an encoder's network and put Mask R-CNN on top, perhaps in a cascade; all of it is trainable.

    Args:
        encoder: stays as it is; images are normalized by its mean and standard deviation.
        classes: how many, without the background.
        choices: as of `DetectChoices.filled`.

    Raises:
        ConfigError: the network has no maps of strides 4 to 32.
    """
    # iBOT's detectors see tokens without the last norm (`out_with_norm` of its `register_backbone.py`)
    body = Pyramid(encoder, choices.seed, freezes_batchnorm=choices.batchnorm == "frozen", norms=False)
    set_drop_path(body.trunk, choices.drop_path or 0.0)
    width = choices.width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("detector", choices.seed))
        model: Any = MaskRCNN(
            _FeaturePyramid(body, width),
            min_size=choices.sides,
            max_size=choices.longest,
            image_mean=list(encoder.preprocess.mean),
            image_std=list(encoder.preprocess.std),
            rpn_anchor_generator=AnchorGenerator(
                tuple((round(choices.anchor * stride),) for stride in (*STRIDES, 2 * STRIDES[-1])),
                (_RATIOS,) * (len(STRIDES) + 1),
            ),
            box_head=TwoMLPHead(width * _BOX_SIDE**2, 4 * width),
            box_predictor=FastRCNNPredictor(4 * width, classes + 1),
            box_batch_size_per_image=choices.rois,
            mask_head=MaskRCNNHeads(width, (width,) * 4, 1),
            mask_predictor=MaskRCNNPredictor(width, width, classes + 1),
        )
        if choices.cascade:
            model.roi_heads = CascadeHeads(width, classes + 1, choices.rois)
    _fix_scales(model)
    return model.to(next(body.parameters()).device)


def _fix_scales(model: nn.Module) -> None:
    """Let poolings learn the strides of the maps from an image without padding.

    torchvision guesses them from the first batch that a process sees, wrongly where much of it is padding.
    """
    side = 2 * STRIDES[-1]
    maps = {str(place): torch.zeros(1, 1, side // stride, side // stride) for place, stride in enumerate(STRIDES)}
    for module in model.modules():
        if isinstance(module, MultiScaleRoIAlign):
            module(maps, [torch.tensor([[0.0, 0.0, 8.0, 8.0]])], [(side, side)])


def make_optimizer(model: MaskRCNN, choices: DetectChoices) -> torch.optim.Optimizer:
    """Make AdamW with a group for each layer of the network and two for all that is new."""
    trunk: Any = model.backbone.body.trunk
    return optimizer_of(model, trunk, choices.weight_decay, choices.layer_decay or 1.0)
