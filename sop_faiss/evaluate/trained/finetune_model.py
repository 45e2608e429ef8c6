"""A network with a linear classifier for fine-tuning."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sop_faiss.distributed import derive_seed
from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.trained.finetune_choices import FinetuneChoices
from sop_faiss.evaluate.trained.training_layers import (
    head_groups,
    layer_groups,
    require_layers,
    set_drop_path,
    size_of_recipe,
    trunk_of,
)
from sop_faiss.model.checkpoint import find_checkpoint, read_tensors
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.model.export import is_export

_HEAD_STD = 2e-5
"""BEiT's: 0.02, times 0.001."""


class Classifier(nn.Module):
    """A linear classifier on an encoder's features, or on a layer after them; all are trained."""

    def __init__(self, encoder: Encoder, classes: int, first_layer: nn.Sequential | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.first_layer = first_layer
        width = encoder.token_dimension if first_layer is None else first_layer[0].get_parameter("weight").shape[0]
        self.head = nn.Linear(width, classes)

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b c"]:
        """Compute a score for each class."""
        features = self.encoder(images)
        scores: Tensor = self.head(features if self.first_layer is None else self.first_layer(features))
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


def first_layer_of(spec: EncoderSpec, encoder: Encoder) -> nn.Sequential:
    """Read the first layer of the projection head that a run keeps.

    Args:
        spec: which run.
        encoder: made of it.

    Raises:
        CheckpointError: a file is damaged.
        ConfigError: it keeps none, or the layer is not one for these features.
    """
    run, tensors = Path(spec.place), dict[str, Tensor]()
    if spec.kind == "run" and run.is_dir() and not is_export(run):
        tensors = read_tensors(find_checkpoint(run), "student" if spec.student else "teacher")
    weight, bias = (tensors.get(f"heads.shared.mlp.0.{name}") for name in ("weight", "bias"))
    if weight is None or bias is None:
        raise ConfigError(
            f"`head_layer=first`: {spec.model} keeps no projection head, which runs do (not their exports): name a "
            "run, or leave it out"
        )
    if weight.shape[1] != encoder.token_dimension:
        raise ConfigError(
            f"`head_layer=first`: the projection head takes {weight.shape[1]} numbers, and `pooling={encoder.pooling}` "
            f"gives {encoder.token_dimension}: wanted the pooling of its training"
        )
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.load_state_dict({"weight": weight, "bias": bias})
    return nn.Sequential(linear, nn.GELU())


def make_classifier(
    encoder: Encoder, classes: int, choices: FinetuneChoices, first_layer: nn.Sequential | None = None
) -> Classifier:
    """Copy an encoder, put a classifier on top, and make all of it trainable.

    Args:
        encoder: stays as it is.
        classes: how many.
        choices: as of `filled_choices`.
        first_layer: of a projection head; it stays as it is.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("head", choices.seed))
        model = Classifier(copy.deepcopy(encoder), classes, copy.deepcopy(first_layer))
        nn.init.trunc_normal_(model.head.weight, std=_HEAD_STD)
    nn.init.zeros_(model.head.bias)
    trunk = trunk_of(model.encoder)
    trunk.requires_grad_(True)
    set_drop_path(trunk, choices.drop_path or 0.0)
    return model.to(next(trunk.parameters()).device)


def make_optimizer(model: Classifier, choices: FinetuneChoices) -> torch.optim.Optimizer:
    """Make AdamW with a group for each layer; `lr_scale` is its learning rate relative to the classifier's."""
    groups = layer_groups(trunk_of(model.encoder), choices.weight_decay, choices.layer_decay or 1.0)
    new = [*(model.first_layer or nn.Identity()).parameters(), *model.head.parameters()]
    return torch.optim.AdamW([*groups, *head_groups(new, choices.weight_decay)], lr=0.0)
