"""What names the class of each pixel: a linear head on frozen tokens, or UPerNet with a network that is trained."""

from __future__ import annotations

import torch
from jaxtyping import Float
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from sop_faiss.distributed import derive_seed
from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.trained.segment_choices import SegmentChoices
from sop_faiss.evaluate.trained.training_layers import (
    head_groups,
    optimizer_of,
    require_layers,
    set_drop_path,
    size_of_recipe,
    trunk_of,
)
from sop_faiss.model.encoders.dense import DenseEncoder
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.pyramid import STRIDES, Pyramid, blocks_of_maps

_CLASSIFIER_STD = 0.01
"""mmsegmentation's, of the layer that scores classes."""
_DROPOUT = 0.1
_AUXILIARY_CHANNELS = 256
_AUXILIARY_MAP = 2
"""Of the four: stride 16."""


class LinearSegmenter(nn.Module):
    """Batch norm and a 1 x 1 convolution on an encoder's frozen tokens; only these two are its parameters.

    Attributes:
        multiple: sides of images must be multiples of this.

    Args:
        dense: the encoder.
        classes: how many.
        blocks: 1: tokens of the last block or map; 4: those of a ViT's blocks that `Pyramid` takes, joined.

    Raises:
        ConfigError: four blocks are wanted of another network.
    """

    def __init__(self, dense: DenseEncoder, classes: int, blocks: int = 1) -> None:
        super().__init__()
        self.dense = dense  # not a module, so that its weights are neither trained nor kept
        self.multiple = dense.multiple
        self._trunk = [trunk_of(dense.encoder)] if blocks > 1 else []  # in a list, for the same reason
        if not all(isinstance(trunk, VisionTransformer | Eva) for trunk in self._trunk):
            raise ConfigError(f"`blocks={blocks}`: {dense.encoder.name} is not a ViT; wanted 1")
        device = next(dense.encoder.parameters()).device
        width = self._map(torch.zeros(1, 3, dense.multiple, dense.multiple, device=device)).shape[1]
        self.head = nn.Sequential(nn.BatchNorm2d(width), _classifier(width, classes))
        self.to(device)

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> list[Float[Tensor, "b c rows columns"]]:
        """Compute scores of classes, one map in a list."""
        return [self.head(self._map(images))]

    @torch.no_grad()
    def _map(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b d rows columns"]:
        for trunk in self._trunk:
            wanted = blocks_of_maps(len(trunk.blocks))
            maps = trunk.forward_intermediates(
                images, indices=sorted(set(wanted)), norm=True, intermediates_only=True, output_fmt="NCHW"
            )
            return torch.cat(maps, 1).float()
        tokens, grid = self.dense(images)
        return tokens.float().transpose(1, 2).unflatten(2, grid)


class UperNet(nn.Module):
    """The decoder of segmentation-models-pytorch on four maps of a copy of an encoder, and an auxiliary head.

    Attributes:
        multiple: sides of images must be multiples of this.

    Raises:
        ConfigError: the package is not installed, or the network has no such maps.
    """

    multiple = STRIDES[-1]

    def __init__(self, encoder: Encoder, classes: int, choices: SegmentChoices) -> None:
        super().__init__()
        try:
            from segmentation_models_pytorch.decoders.upernet.decoder import UPerNetDecoder
        except ImportError:
            raise ConfigError(
                "`head=upernet` needs segmentation-models-pytorch: pip install 'sop-faiss[eval]', or `head=linear`"
            ) from None
        assert choices.channels is not None  # they are filled
        self.pyramid = Pyramid(encoder, choices.seed)
        set_drop_path(self.pyramid.trunk, choices.drop_path or 0.0)
        widths = self.pyramid.widths
        # The decoder counts maps from stride 1, and leaves the first two out.
        self.decoder = UPerNetDecoder((0, 0, *widths), encoder_depth=5, decoder_channels=choices.channels)
        self.classifier = nn.Sequential(nn.Dropout2d(_DROPOUT), _classifier(choices.channels, classes))
        self.auxiliary = nn.Sequential(
            nn.Conv2d(widths[_AUXILIARY_MAP], _AUXILIARY_CHANNELS, 3, padding=1, bias=False),
            nn.BatchNorm2d(_AUXILIARY_CHANNELS),
            nn.ReLU(),
            nn.Dropout2d(_DROPOUT),
            _classifier(_AUXILIARY_CHANNELS, classes),
        )
        self.to(next(encoder.parameters()).device)

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> list[Float[Tensor, "b c _ _"]]:
        """Compute scores of classes; in training those of the auxiliary head follow."""
        maps = self.pyramid(images)
        found = [self.classifier(self.decoder([images, images, *maps]))]
        return [*found, self.auxiliary(maps[_AUXILIARY_MAP])] if self.training else found


def _classifier(channels: int, classes: int) -> nn.Conv2d:
    layer = nn.Conv2d(channels, classes, 1)
    nn.init.normal_(layer.weight, std=_CLASSIFIER_STD)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


def filled_segment_choices(encoder: Encoder, choices: SegmentChoices) -> SegmentChoices:
    """Return the choices with those of the network's recipe.

    Raises:
        ConfigError: one is impossible, or this network does not have what it needs.
    """
    choices.check()
    trunk = trunk_of(encoder)
    has_layers, has_drops = require_layers(encoder, choices.layer_decay, choices.drop_path)
    width = trunk.embed_dim if isinstance(trunk, VisionTransformer | Eva) else None
    return choices.filled(size_of_recipe(trunk), width, has_layers=has_layers, has_drop_path=has_drops)


def make_segmenter(encoder: Encoder, classes: int, choices: SegmentChoices) -> LinearSegmenter | UperNet:
    """Make a segmenter with new heads; the encoder stays as it is.

    Raises:
        ConfigError: the network does not have what the head needs, or crops do not fit it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("head", choices.seed))
        made: LinearSegmenter | UperNet
        if choices.head == "linear":
            made = LinearSegmenter(DenseEncoder(encoder, choices.stride), classes, choices.blocks)
        else:
            made = UperNet(encoder, classes, choices)
    if choices.size % made.multiple:
        near = max(made.multiple, choices.size // made.multiple * made.multiple)
        raise ConfigError(
            f"`size={choices.size}` is not divisible by {made.multiple}, which {encoder.name} needs here: take {near}"
        )
    return made


def make_segmenter_optimizer(model: LinearSegmenter | UperNet, choices: SegmentChoices) -> torch.optim.Optimizer:
    """Make AdamW; `lr_scale` of a group is its learning rate relative to the head's."""
    if isinstance(model, UperNet):
        return optimizer_of(model, model.pyramid.trunk, choices.weight_decay, choices.layer_decay or 1.0)
    return torch.optim.AdamW(head_groups(model.parameters(), choices.weight_decay), lr=0.0)
