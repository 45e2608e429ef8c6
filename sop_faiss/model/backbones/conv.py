"""timm's convolutional networks as backbones: their own pooling is the global feature, their last map the tokens."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sop_faiss.config import Config
from sop_faiss.errors import ConfigError
from sop_faiss.model.backbones.backbone import Backbone, Tokens

_PROBE_SIDE = 128
"""Pixels of the black image that shows what a model makes: four rows at the usual stride of 32."""


class ConvBackbone(Backbone):
    """A timm convolutional network without its classifier.

    Its [CLS] is what timm's classifier would get: the pooled last map, through what the network has between pooling and
    classifier. A patch token is one position of that map, through the same. Masked patches are squares of pixels as
    large as the network's stride, filled with a learned color; the mean one (0) at first.

    Args:
        model: of timm, with `num_classes=0`.
        freezes_batchnorm: whether batch norms use their running statistics while training, too.

    Raises:
        ConfigError: the model's last map is not a batch of channels, rows and columns.
    """

    linears_are_pointwise = True

    def __init__(self, model: nn.Module, *, freezes_batchnorm: bool) -> None:
        feature_dim, stride = _probe(model)
        # Images come in channels-last, the layout that convolutions like best.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        super().__init__(model, feature_dim, stride, mask_dim=3, freezes_batchnorm=freezes_batchnorm)

    def check_settings(self, config: Config) -> None:
        """See `Backbone.check_settings`."""
        name = config.model.backbone
        if config.masks.kind != "none" and not config.masks.pixels:
            weight = f" and {config.objective.kind}.patch.weight=0" if config.term_weights()["patch"] else ""
            raise ConfigError(
                f"{name} has no tokens to mask: set masks.kind=none{weight}, or hide pixels with masks.pixels=true"
            )
        if config.model.global_token == "mean":
            raise ConfigError(
                f"model.global_token = mean does not apply to {name}, which pools by itself: leave it out"
            )
        if config.train.checkpoint_activations and not self.freezes_batchnorm and self._batch_norms():
            raise ConfigError(
                f"train.checkpoint_activations = true with model.batchnorm = {config.model.batchnorm}: the batch norms "
                f"of {name} would count each batch twice; set model.batchnorm=frozen or leave it out"
            )
        self.check_batch_norms(config)

    def forward(self, images: Float[Tensor, "b 3 h w"], masks: Bool[Tensor, "b n"] | None = None) -> Tokens:
        """See `Backbone.forward`."""
        if masks is not None:
            pixels = images.permute(0, 2, 3, 1)
            images = self._masked(pixels, masks, side=self.patch_size).permute(0, 3, 1, 2)
        last_map = self.trunk.forward_features(images)
        cls = self.trunk.forward_head(last_map, pre_logits=True).flatten(1)
        positions = last_map.permute(0, 2, 3, 1).flatten(0, 2)[:, :, None, None]
        tokens = self.trunk.forward_head(positions, pre_logits=True).flatten(1)
        rows, columns = last_map.shape[2:]
        return Tokens(cls, tokens.view(len(images), -1, self.feature_dim), (rows, columns))


def _probe(model: Any) -> tuple[int, int]:
    """Return the width of a model's features and its stride in pixels; torch's generators stay as they are."""
    name = type(model).__name__
    black = torch.zeros(1, 3, _PROBE_SIDE, _PROBE_SIDE)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            last_map = model.forward_features(black)
            if not isinstance(last_map, Tensor) or last_map.ndim != 4 or last_map.shape[2] != last_map.shape[3]:
                raise ConfigError(
                    f"model.backbone is a {name}, whose features are not a map of channels, rows and columns: wanted a "
                    "timm vit_*, deit*, eva*, swin_* or convolutional network"
                )
            features = model.forward_head(last_map, pre_logits=True).flatten(1)
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).split("\n", 1)[0]
        raise ConfigError(
            f"model.backbone is a {name}, which does not take images of any size ({reason}): wanted a timm vit_*, "
            "deit*, eva*, swin_* or convolutional network"
        ) from None
    model.train(was_training)
    return features.shape[1], _PROBE_SIDE // last_map.shape[3]
