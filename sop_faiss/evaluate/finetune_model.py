"""A network with a linear classifier for fine-tuning: its layers, learning rates and stochastic depth."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from timm.layers import DropPath
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn

from sop_faiss.distributed import derive_seed
from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.finetune_choices import FinetuneChoices
from sop_faiss.model.encoders.encoder import Encoder

__all__ = [
    "Classifier",
    "filled_choices",
    "head_groups",
    "layer_groups",
    "make_classifier",
    "make_optimizer",
    "optimizer_of",
    "require_layers",
    "set_drop_path",
    "size_of_recipe",
    "trunk_of",
]

_DROPS = ("drop_path", "drop_path1", "drop_path2")
"""What timm's residual blocks call their stochastic depth; in a network made without, an identity or None."""
_BASE_WIDTH, _LARGE_WIDTH = 768, 1024
_HEAD_STD = 2e-5
"""BEiT's: 0.02, times 0.001."""


class Classifier(nn.Module):
    """A linear classifier on an encoder's features, which are trained, too."""

    def __init__(self, encoder: Encoder, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.token_dimension, classes)

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b c"]:
        """Compute a score for each class."""
        scores: Tensor = self.head(self.encoder(images))
        return scores


def filled_choices(encoder: Encoder, choices: FinetuneChoices) -> FinetuneChoices:
    """Return the choices with those of the network's recipe.

    Raises:
        ConfigError: one is impossible, or this network does not have what it needs.
    """
    choices.check()
    trunk = trunk_of(encoder)
    has_layers, has_blocks = require_layers(encoder, choices.layer_decay, choices.drop_path)
    return choices.filled(size_of_recipe(trunk), has_layers=has_layers, has_drop_path=has_blocks)


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


def make_classifier(encoder: Encoder, classes: int, choices: FinetuneChoices) -> Classifier:
    """Copy an encoder, put a classifier on top, and make all of it trainable.

    Args:
        encoder: stays as it is.
        classes: how many.
        choices: as of `filled_choices`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("head", choices.seed))
        model = Classifier(copy.deepcopy(encoder), classes)
        nn.init.trunc_normal_(model.head.weight, std=_HEAD_STD)
    nn.init.zeros_(model.head.bias)
    trunk = trunk_of(model.encoder)
    trunk.requires_grad_(True)
    set_drop_path(trunk, choices.drop_path or 0.0)
    return model.to(next(trunk.parameters()).device)


def make_optimizer(model: Classifier, choices: FinetuneChoices) -> torch.optim.Optimizer:
    """Make AdamW with a group for each layer; `lr_scale` is its learning rate relative to the classifier's."""
    groups = layer_groups(trunk_of(model.encoder), choices.weight_decay, choices.layer_decay or 1.0)
    return torch.optim.AdamW([*groups, *head_groups(model.head.parameters(), choices.weight_decay)], lr=0.0)


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
