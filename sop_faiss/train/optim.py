"""AdamW as the recipe has it, and gradient clipping per parameter (docs/method.md, 5)."""

from __future__ import annotations

from typing import Any

import torch
from timm.models import group_parameters
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sop_faiss import distributed
from sop_faiss.config import OptimConfig
from sop_faiss.errors import ConfigError
from sop_faiss.objectives.objective import StepSettings

__all__ = ["apply_settings", "clip_each_gradient", "make_optimizer"]

_BACKBONE = "backbone."
"""Prefix of the names of the backbone's parameters; all others are the projector's."""


def make_optimizer(network: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Make AdamW with a group for each learning rate and decay; biases and 1-d parameters are not decayed.

    Departs: iBOT decays the mask token; `optim.decay_mask_token` does so.

    Raises:
        ConfigError: `optim.layer_decay` is not 1, and the backbone's layers are not known.
    """
    scales = _layer_scales(network, config.layer_decay)
    groups: dict[tuple[bool, bool, float], list[Tensor]] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim > 1 or (config.decay_mask_token and name.endswith(".mask_token"))
            key = (decays, name.startswith(_BACKBONE), scales.get(name, 1.0))
            groups.setdefault(key, []).append(parameter)
    described = [
        {"params": parameters, "decays": decays, "in_backbone": in_backbone, "lr_scale": scale}
        for (decays, in_backbone, scale), parameters in groups.items()
    ]
    return torch.optim.AdamW(described, lr=0.0, betas=(config.beta1, config.beta2), fused=True)


def _layer_scales(network: nn.Module, decay: float) -> dict[str, float]:
    """Return each backbone parameter's learning rate relative to the projector's: a power of decay by its layer.

    timm counts the layers from the stem up; a final norm belongs to the last block, the mask token to the stem.
    """
    if decay == 1:
        return {}
    backbone: Any = getattr(network, "backbone", None)
    trunk: Any = getattr(backbone, "trunk", None)
    if not hasattr(trunk, "group_matcher"):
        raise ConfigError(
            f"optim.layer_decay = {decay}: timm does not say what the layers of a {type(trunk).__name__} are; "
            "set optim.layer_decay=1"
        )
    layer_of = {
        f"{_BACKBONE}trunk.{name}": layer
        for name, layer in group_parameters(trunk, trunk.group_matcher(coarse=False), reverse=True).items()
    }
    layers = max(layer_of.values()) + 1
    own = {f"{_BACKBONE}{name}" for name, _ in backbone.named_parameters(recurse=False)}
    return {name: decay ** (layers - layer) for name, layer in layer_of.items()} | dict.fromkeys(own, decay**layers)


def apply_settings(optimizer: torch.optim.Optimizer, settings: StepSettings) -> None:
    """Set the step's learning rates and weight decay."""
    for group in optimizer.param_groups:
        backbone_scale = settings.backbone_lr_scale if group["in_backbone"] else 1.0
        group["lr"] = settings.learning_rate * group["lr_scale"] * backbone_scale
        group["weight_decay"] = settings.weight_decay if group["decays"] else 0.0


@torch.no_grad()
def clip_each_gradient(network: nn.Module, max_norm: float) -> Tensor:
    """Scale down each gradient whose own norm exceeds `max_norm` (0: none); return the norm of all before scaling."""
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    shards = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    norms = torch.stack(torch._foreach_norm(shards))
    if any(isinstance(gradient, DTensor) for gradient in gradients):
        norms = (distributed.average(norms**2) * distributed.world_size()).sqrt()
    if max_norm > 0:
        factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch's clip_grad_norm_
        torch._foreach_mul_(shards, list(factors.unbind()))
    return torch.linalg.vector_norm(norms)
