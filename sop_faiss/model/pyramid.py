"""Four maps of an image, 4, 8, 16 and 32 pixels from position to position: what detectors and decoders stand on."""

from __future__ import annotations

import copy
from typing import Any

import torch
from jaxtyping import Float
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sop_faiss.distributed import derive_seed
from sop_faiss.errors import ConfigError
from sop_faiss.model.encoders.encoder import Encoder

STRIDES = (4, 8, 16, 32)
_SHARES = (1 / 3, 1 / 2, 2 / 3, 1)
"""Of a ViT's depth, where iBOT takes the maps: blocks 4, 6, 8 and 12 of 12; 8, 12, 16 and 24 of 24."""


class Pyramid(nn.Module):
    """A copy of an encoder's network, trainable, and its four maps.

    A ViT has maps of one stride: the tokens of four blocks are brought to the four strides by new layers, as iBOT's
    evaluation does: transposed convolutions of side 2 (of two, batch norm and GELU between them)
    enlarge, max pooling reduces. Other networks of timm give their last map of each stride.

    Attributes:
        trunk: the timm model.
        resize: what follows each map.
        widths: channels of each map.

    Args:
        encoder: stays as it is.
        seed: of the new layers' weights.
        freezes_batchnorm: the network's batch norms keep their running statistics while training, too.
        norms: the last norm of a ViT is applied to its tokens first; other networks have none that fits all maps.

    Raises:
        ConfigError: the encoder takes one size only, or has no such maps.
    """

    def __init__(self, encoder: Encoder, seed: int = 0, *, freezes_batchnorm: bool = False, norms: bool = True) -> None:
        super().__init__()
        if encoder.model.fixed:
            raise ConfigError(
                f"{encoder.name} takes only square images of {encoder.model.native_size} pixels: wanted one that takes "
                "images of any size"
            )
        backbone = copy.deepcopy(encoder.model.backbone)
        self.trunk: Any = getattr(backbone, "trunk", backbone).requires_grad_(True)
        self.freezes_batchnorm = freezes_batchnorm
        is_vit = isinstance(self.trunk, VisionTransformer | Eva)
        self._norms = norms and is_vit
        if is_vit:
            self._indices, self.widths, factors = _maps_of_vit(self.trunk, encoder.name)
        else:
            self._indices, self.widths, factors = _maps_of_strides(self.trunk, encoder.name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed("pyramid", seed))
            self.resize = nn.ModuleList(map(_resize, self.widths, factors))
        self.to(next(self.trunk.parameters()).device)

    def train(self, mode: bool = True) -> Pyramid:
        """Set the mode as of any module, except that frozen batch norms stay in evaluation mode."""
        super().train(mode)
        for module in self.trunk.modules() if self.freezes_batchnorm else ():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> list[Float[Tensor, "b _ _ _"]]:
        """Compute the maps of normalized images whose sides are multiples of 32, finest first."""
        wanted = sorted(set(self._indices))
        maps = self.trunk.forward_intermediates(
            images, indices=wanted, norm=self._norms, intermediates_only=True, stop_early=True, output_fmt="NCHW"
        )
        found = dict(zip(wanted, maps, strict=True))
        return [resize(found[index]) for resize, index in zip(self.resize, self._indices, strict=True)]


_Maps = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""For each map the number of what makes it, its channels, and how much finer or coarser it must become."""


def blocks_of_maps(depth: int) -> tuple[int, ...]:
    """Return which blocks of a ViT the four maps are from, counted from 0."""
    return tuple(max(1, round(depth * share)) - 1 for share in _SHARES)


def _maps_of_vit(trunk: Any, name: str) -> _Maps:
    patch, depth = trunk.patch_embed.patch_size[0], len(trunk.blocks)
    if patch not in (2, *STRIDES):
        raise ConfigError(f"{name} has patches of {patch} pixels: wanted 2, 4, 8, 16 or 32 for maps of strides 4 to 32")
    return blocks_of_maps(depth), (trunk.embed_dim,) * len(STRIDES), tuple(patch / stride for stride in STRIDES)


def _maps_of_strides(trunk: Any, name: str) -> _Maps:
    """Find the last map of each stride in what timm records of a network."""
    known = getattr(trunk, "feature_info", None)
    strides = [each["reduction"] for each in known] if isinstance(known, list) else []
    if not set(STRIDES) <= set(strides) or not hasattr(trunk, "forward_intermediates"):
        found = ", ".join(map(str, sorted(set(strides)))) or "none that timm knows"
        raise ConfigError(f"{name} has maps of these strides: {found}; wanted a network with maps of strides 4 to 32")
    indices = tuple(len(strides) - 1 - strides[::-1].index(stride) for stride in STRIDES)
    assert isinstance(known, list)
    return indices, tuple(known[index]["num_chs"] for index in indices), (1.0,) * len(STRIDES)


def _resize(width: int, factor: float) -> nn.Module:
    """Return layers that make a map finer (above 1) or coarser by a power of 2."""
    if factor < 1:
        return nn.MaxPool2d(round(1 / factor))
    layers: list[nn.Module] = []
    while factor > 1:
        layers += [nn.BatchNorm2d(width), nn.GELU()] if layers else []
        layers.append(nn.ConvTranspose2d(width, width, kernel_size=2, stride=2))
        factor /= 2
    return nn.Sequential(*layers)
