"""Patch tokens of images of any size, one for every so many pixels, for tasks that need to know where things are."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sop_faiss.errors import ConfigError
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.spec import OF_ONE_FEATURE, EncoderSpec

_IDLE = (*OF_ONE_FEATURE, "top_value")

_PROBE_SIDE = 256
"""Pixels, at least, of the black image that shows how many tokens there are: a multiple of all usual strides."""
_LONG_MULTIPLE = 64
"""DINO's script cuts the longer side to a multiple of this."""


def require_dense(spec: EncoderSpec, what: str) -> None:
    """Check that an encoder is asked for without what only features of complete images have.

    Raises:
        ConfigError: it is not.
    """
    for name in _IDLE:
        if getattr(spec, name) not in (None, False):
            raise ConfigError(f"`{name}` does not apply to {what}: leave it out")


class DenseEncoder:
    """An encoder's patch tokens, after its last norm; of a convolutional network also those of an earlier map.

    Attributes:
        stride: pixels from token to token.
        multiple: sides of images must be multiples of this.

    Args:
        encoder: any that takes images of other sizes.
        stride: of the map that is taken; None: the last.

    Raises:
        ConfigError: the encoder takes one size only, or has no tokens or no such map.
    """

    def __init__(self, encoder: Encoder, stride: int | None = None) -> None:
        if encoder.model.fixed:
            raise ConfigError(
                f"{encoder.name} takes only square images of {encoder.model.native_size} pixels: wanted one that takes "
                "whole frames"
            )
        self.encoder = encoder
        self._map: int | None = None
        unit = encoder.model.multiple
        side = math.ceil(_PROBE_SIDE / unit) * unit
        black = torch.zeros(1, 3, side, side, device=next(encoder.parameters()).device)
        self.stride = side // self(black)[1][0]
        if stride not in (None, self.stride):
            self._map = self._map_of_stride(stride)
            if self(black)[1] != (side // stride, side // stride):
                raise ConfigError(f"`stride={stride}`: {encoder.name} makes no square map of that stride")
            self.stride = stride
        self.multiple = math.lcm(self.stride, unit)

    def _map_of_stride(self, stride: int) -> int:
        model: Any = self.encoder.model.backbone
        model = getattr(model, "trunk", model)
        known: Any = getattr(model, "feature_info", None)
        strides = [each["reduction"] for each in known] if isinstance(known, list) else []
        if stride not in strides or not hasattr(model, "forward_intermediates"):
            found = ", ".join(map(str, sorted({*strides, self.stride})))
            raise ConfigError(f"`stride={stride}`: {self.encoder.name} has tokens every {found} pixels")
        return len(strides) - 1 - strides[::-1].index(stride)

    @torch.no_grad()
    def __call__(self, images: Float[Tensor, "b 3 h w"]) -> tuple[Float[Tensor, "b n d"], tuple[int, int]]:
        """Compute the tokens of normalized images in row-major order, and their rows and columns."""
        if self._map is None:
            _, tokens = self.encoder.tokens(images)
            return tokens.patches, tokens.grid
        model: Any = self.encoder.model.backbone
        model = getattr(model, "trunk", model)
        (found,) = model.forward_intermediates(
            images, indices=[self._map], intermediates_only=True, stop_early=True, output_fmt="NCHW"
        )
        return found.flatten(2).transpose(1, 2), (found.shape[2], found.shape[3])

    def frame_size(self, height: int, width: int, shorter: int) -> tuple[int, int]:
        """Return height and width to which a frame is resized, nearly keeping its aspect, as DINO's script does.

        The shorter side is `shorter`, the longer is cut to a multiple of 64 pixels; both to what the encoder takes.

        Raises:
            ConfigError: that leaves no token.
        """
        short = shorter // self.multiple * self.multiple
        longer = shorter * max(height, width) // min(height, width)
        unit = _LONG_MULTIPLE if _LONG_MULTIPLE % self.multiple == 0 and longer >= _LONG_MULTIPLE else self.multiple
        long = longer // unit * unit
        if not short:
            raise ConfigError(f"`size={shorter}`: {self.encoder.name} has tokens of {self.multiple} pixels; take more")
        return (short, long) if height <= width else (long, short)
