"""The layers of a network that is trained: learning rates, weight decay, stochastic depth, the size of its recipe."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from timm.layers import DropPath
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from sop_faiss.errors import ConfigError
from sop_faiss.model.encoders.encoder import Encoder

_DROPS = ("drop_path", "drop_path1", "drop_path2")
"""What timm's residual blocks call their stochastic depth; in a network made without, an identity or None."""
_BASE_WIDTH, _LARGE_WIDTH = 768, 1024


def require_layers(encoder: Encoder, layer_decay: float | None, drop_path: float | None) -> tuple[bool, bool]:
    """Return whether the layers of a network are known, and whether stochastic depth can be set.

    Raises:
        ConfigError: it is not so, and a value is given that needs it.
    """
    trunk = trunk_of(encoder)
    has_layers, has_blocks = hasattr(trunk, "group_matcher"), bool(_blocks(trunk))
    if layer_decay not in (None, 1.0) and not has_layers:
        raise ConfigError(f"`layer_decay={layer_decay:g}`: the layers of {encoder.name} are not known; set 1")
    if drop_path and not has_blocks:
        raise ConfigError(f"`drop_path={drop_path:g}`: {encoder.name} has no residual blocks of timm; set 0")
    return has_layers, has_blocks


def size_of_recipe(trunk: nn.Module) -> str:
    """Return `S`, `B` or `L` by the width of a ViT; of other networks `S`."""
    width = trunk.embed_dim if isinstance(trunk, VisionTransformer | Eva) else 0
    return "L" if width >= _LARGE_WIDTH else "B" if width >= _BASE_WIDTH else "S"


def layer_groups(trunk: Any, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
    """Return a network's parameters by layer; `lr_scale` is a layer's learning rate relative to that of a head above.

    Departs: BEiT has the last norm at the head's rate; timm counts it to the last block.
    """
    undecayed = trunk.no_weight_decay() if hasattr(trunk, "no_weight_decay") else set()
    groups: list[dict[str, Any]]
    if hasattr(trunk, "group_matcher"):
        groups = param_groups_layer_decay(trunk, weight_decay, undecayed, layer_decay=layer_decay)
        return [{**group, "lr_scale": group["lr_scale"] * layer_decay} for group in groups]
    groups = param_groups_weight_decay(trunk, weight_decay, undecayed)
    return [{**group, "lr_scale": 1.0} for group in groups]


def head_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return a head's parameters in two groups: those with weight decay, and biases and norms, without."""
    given = list(parameters)
    return [
        {"params": [each for each in given if each.ndim > 1], "lr_scale": 1.0, "weight_decay": weight_decay},
        {"params": [each for each in given if each.ndim <= 1], "lr_scale": 1.0, "weight_decay": 0.0},
    ]


def optimizer_of(model: nn.Module, trunk: Any, weight_decay: float, layer_decay: float) -> torch.optim.Optimizer:
    """Make AdamW with a group for each layer of a network in a model, and two for all that is new in it."""
    of_trunk = set(trunk.parameters())
    new = [each for each in model.parameters() if each not in of_trunk]
    groups = layer_groups(trunk, weight_decay, layer_decay)
    return torch.optim.AdamW([*groups, *head_groups(new, weight_decay)], lr=0.0)


def trunk_of(encoder: Encoder) -> Any:
    """Return the timm model in an encoder."""
    backbone = encoder.model.backbone
    return getattr(backbone, "trunk", backbone)


def _blocks(trunk: nn.Module) -> list[nn.Module]:
    return [module for module in trunk.modules() if any(hasattr(module, name) for name in _DROPS)]


def set_drop_path(trunk: nn.Module, rate: float) -> None:
    """Give a network's residual blocks stochastic depth that rises linearly from 0 at the first."""
    blocks = _blocks(trunk)
    for number, block in enumerate(blocks):
        own = rate * number / max(1, len(blocks) - 1)
        for name in _DROPS:
            if hasattr(block, name):
                setattr(block, name, DropPath(own) if own else nn.Identity())
