"""A network with a linear classifier for fine-tuning."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sop_faiss.distributed import derive_seed
from sop_faiss.evaluate.finetune_choices import FinetuneChoices
from sop_faiss.evaluate.training_layers import (
    head_groups,
    layer_groups,
    require_layers,
    set_drop_path,
    size_of_recipe,
    trunk_of,
)
from sop_faiss.model.encoders.encoder import Encoder

__all__ = ["Classifier", "filled_choices", "make_classifier", "make_optimizer"]

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
