"""Low-rank additions to frozen weights (LoRA, arXiv 2106.09685): in a network that learns, and merged into tensors.

A layer's weight is `W + alpha / r * up @ down`. It is a parametrization of torch's, so that whatever reads the weight
gets the sum: some layers of timm, and the last block of a ViT here, use it without calling the layer.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sop_faiss.config.lora import LoraConfig
from sop_faiss.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from sop_faiss.model.backbones.backbone import Backbone

_ATTENTION = re.compile(r"(^|\.)attn\.(qkv|q_proj|k_proj|v_proj|proj)$")
_BASE = ".parametrizations.weight.original"
_ADDED = re.compile(r"\.parametrizations\.weight\.0\.(?=(down|up)$)")


class LowRank(nn.Module):
    """What is added to one weight. At first it is 0: `up` is, and `down` is random from torch's global generator."""

    def __init__(self, shape: torch.Size, settings: LoraConfig) -> None:
        super().__init__()
        rank = min(settings.rank, *shape[:2])
        self.scale = settings.scale
        self.down = nn.Parameter(torch.empty(rank, shape[1]))
        self.up = nn.Parameter(torch.zeros(shape[0], rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))  # as torch fills a linear layer

    def forward(self, weight: Float[Tensor, "rows columns *ones"]) -> Float[Tensor, "rows columns *ones"]:
        """Return the sum, in the precision of the weight."""
        on_meta = weight.device.type == "meta"  # shapes alone, which autocast does not know
        with contextlib.nullcontext() if on_meta else torch.autocast(weight.device.type, enabled=False):
            return torch.addmm(weight.flatten(1), self.up, self.down, alpha=self.scale).view_as(weight)


def low_rank_layers(backbone: Backbone, settings: LoraConfig) -> dict[str, nn.Module]:
    """Return the layers that get an addition, by name.

    Raises:
        ConfigError: the backbone has none of this kind, or the rank exceeds all of them.
    """
    kinds = {name: _kind(backbone, name, module) for name, module in backbone.named_modules()}
    wanted = ("attention", "pointwise") if settings.layers == "all" else (settings.layers,)
    found = {name: module for name, module in backbone.named_modules() if kinds[name] in wanted}
    if not found:
        others, has = [kind for kind in kinds.values() if kind], "train all of it: leave model.lora out"
        if others:
            has = f"it has {others[0]} ones: set model.lora.layers=all"
        raise ConfigError(
            f"model.lora.layers = {settings.layers}: a {type(backbone.trunk).__name__} has no such layers; {has}"
        )
    most = max(min(weight.shape[:2]) for module in found.values() if isinstance(weight := module.weight, Tensor))
    if settings.rank > most:
        raise ConfigError(
            f"model.lora.rank = {settings.rank} exceeds the smaller side of every layer: wanted at most {most}, and "
            "for few parameters 4 to 64"
        )
    return found


def _kind(backbone: Backbone, name: str, module: nn.Module) -> str | None:
    """Return `attention` or `pointwise`; None for a layer that gets no addition."""
    if isinstance(module, nn.Linear) and _ATTENTION.search(name):
        return "attention"
    is_pointwise = isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.groups == 1
    return "pointwise" if is_pointwise or (isinstance(module, nn.Linear) and backbone.linears_are_pointwise) else None


def add_low_rank(backbone: Backbone, settings: LoraConfig) -> None:
    """Add to the weights of the backbone from now on; its features stay as they are at first.

    Raises:
        ConfigError: as `low_rank_layers`.
    """
    for layer in low_rank_layers(backbone, settings).values():
        assert isinstance(layer.weight, Tensor)
        parametrize.register_parametrization(layer, "weight", LowRank(layer.weight.shape, settings))


def freeze_base(backbone: Backbone) -> None:
    """Let what is added learn, and the mask token, and nothing else."""
    backbone.requires_grad_(False)
    backbone.mask_token.requires_grad_(True)
    for module in backbone.modules():
        if isinstance(module, LowRank):
            module.requires_grad_(True)


def fill_base(backbone: Backbone, plain: Backbone) -> None:
    """Copy the tensors of a backbone without additions into the same one with some."""
    tensors = plain.state_dict()
    for name, value in backbone.state_dict().items():
        if not _ADDED.search(name):
            value.copy_(tensors[name.replace(_BASE, ".weight")])


def weights_made(network: nn.Module) -> list[Tensor]:
    """Return the sums that a network's layers use; within `parametrize.cached()` these are the tensors themselves."""
    layers = [module for module in network.modules() if parametrize.is_parametrized(module, "weight")]
    return [layer.weight for layer in layers if isinstance(layer.weight, Tensor)]


def split_low_rank(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split the tensors of a network into those without additions, under their usual names, and the additions.

    The latter are called by the layer: `trunk.conv_head.down` and `trunk.conv_head.up`.
    """
    added = {_ADDED.sub(".", name): value for name, value in tensors.items() if _ADDED.search(name)}
    base = {name.replace(_BASE, ".weight"): value for name, value in tensors.items() if not _ADDED.search(name)}
    return base, added


def check_low_rank(base: Mapping[str, Tensor], added: Mapping[str, Tensor], settings: LoraConfig, origin: str) -> None:
    """Check that additions from a file have the names, shapes and numbers of such additions to these tensors.

    Args:
        base: as of `split_low_rank`.
        added: as of `split_low_rank`.
        settings: that they were made with.
        origin: where they come from, for the message.

    Raises:
        CheckpointError: they do not.
    """
    if not settings.rank:
        raise CheckpointError(f"{origin} has low-rank additions, and its configuration none: it was changed")
    for name, value in added.items():
        layer, _, part = name.rpartition(".")
        weight, other = base.get(f"{layer}.weight"), added.get(f"{layer}.{'up' if part == 'down' else 'down'}")
        if weight is None or other is None or weight.ndim < 2 or weight[0, 0].numel() != 1:
            raise CheckpointError(f"{origin} has {name}, which is no addition to a layer of its network")
        rows, columns = weight.shape[:2]
        rank = min(settings.rank, rows, columns)
        wanted = (rank, columns) if part == "down" else (rows, rank)
        if tuple(value.shape) != wanted:
            raise CheckpointError(f"{origin} has {name} of shape {tuple(value.shape)}: wanted {wanted}")
        if not value.is_floating_point() or not value.isfinite().all():
            raise CheckpointError(f"{origin} has {name}, which holds other than finite numbers: it is damaged")


def merged(base: Mapping[str, Tensor], added: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return the tensors with the additions in them.

    Each number is a sum in a fixed order of products that float64 holds exactly, and does not depend on the machine's
    library: features and fingerprints of a merged encoder are the same everywhere.
    """
    result = dict(base)
    for name in added:
        if not name.endswith(".up"):
            continue
        weight = base[f"{name.removesuffix('up')}weight"]
        up, down = added[name].double(), added[f"{name.removesuffix('up')}down"].double()
        delta = torch.zeros(len(up), down.shape[1], dtype=torch.float64)
        for column, row in zip(up.T, down, strict=True):
            delta += torch.outer(column, row)
        summed = weight.double() + (scale * delta).view(weight.shape)
        result[f"{name.removesuffix('up')}weight"] = summed.to(weight.dtype)
    return result
