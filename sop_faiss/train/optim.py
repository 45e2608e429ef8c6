"""AdamW as the recipe has it, Muon beside it if asked for, and gradient clipping per parameter (docs/method.md, 5)."""

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
from sop_faiss.train.muon import MuonWithAdamW
from sop_faiss.train.parallel import is_sharded

_BACKBONE = "backbone."
"""Prefix of the names of the backbone's parameters; all others are the projector's."""
_TRUNK = f"{_BACKBONE}trunk."
_PATCH_EMBED = f"{_TRUNK}patch_embed."


def make_optimizer(network: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Make the optimizer with a group for each learning rate and decay; biases and 1-d parameters are not decayed.

    Departs: iBOT decays the mask token; `optim.decay_mask_token` does so.

    Raises:
        ConfigError: a setting needs to know the backbone's layers, its patch embedding or its matrices, and cannot.
    """
    scales = _layer_scales(network, config)
    matrices = _matrices(network) if config.kind == "muon" else set()
    groups: dict[tuple[bool, bool, float, bool], list[Tensor]] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim > 1 or (config.decay_mask_token and name.endswith(".mask_token"))
            scale, is_matrix = scales.get(name, 1.0), name in matrices
            key = (decays, name.startswith(_BACKBONE), scale * (config.muon_lr_scale if is_matrix else 1.0), is_matrix)
            groups.setdefault(key, []).append(parameter)
    described = [
        {"params": parameters, "decays": decays, "in_backbone": in_backbone, "lr_scale": scale, "is_matrix": is_matrix}
        for (decays, in_backbone, scale, is_matrix), parameters in groups.items()
    ]
    betas = (config.beta1, config.beta2)
    if config.kind == "muon":
        return MuonWithAdamW(described, betas, config.muon_momentum)
    return torch.optim.AdamW(described, lr=0.0, betas=betas, fused=True)


def _layer_scales(network: nn.Module, config: OptimConfig) -> dict[str, float]:
    """Return each backbone parameter's learning rate relative to the projector's: a power of the decay by its layer.

    A final norm belongs to the last block, the mask token to the stem.
    """
    scales: dict[str, float] = {}
    if config.layer_decay != 1:
        layer_of = _layers(network, f"optim.layer_decay = {config.layer_decay}", "optim.layer_decay=1")
        layers = max(layer_of.values()) + 1
        scales = {name: config.layer_decay ** (layers - layer) for name, layer in layer_of.items()}
        own = network.get_submodule("backbone").named_parameters(recurse=False)
        scales |= {f"{_BACKBONE}{name}": config.layer_decay**layers for name, _ in own}
    if config.patch_embed_lr_scale != 1:
        names = [name for name, _ in network.named_parameters() if name.startswith(_PATCH_EMBED)]
        if not names:
            raise ConfigError(
                f"optim.patch_embed_lr_scale = {config.patch_embed_lr_scale}: this backbone has no patch embedding; "
                "set optim.patch_embed_lr_scale=1"
            )
        scales |= {name: scales.get(name, 1.0) * config.patch_embed_lr_scale for name in names}
    return scales


def _layers(network: nn.Module, setting: str, remedy: str) -> dict[str, int]:
    """Return the layer of each parameter of the timm model, as timm counts them from the stem (0) up."""
    trunk: Any = getattr(getattr(network, "backbone", None), "trunk", None)
    if not hasattr(trunk, "group_matcher"):
        raise ConfigError(f"{setting}: timm does not say what the layers of a {type(trunk).__name__} are; set {remedy}")
    layers = group_parameters(trunk, trunk.group_matcher(coarse=False), reverse=True)
    return {f"{_TRUNK}{name}": layer for name, layer in layers.items()}


def _matrices(network: nn.Module) -> set[str]:
    """Return the names of what Muon updates: weights of linear layers and convolutions above the backbone's stem.

    Grouped convolutions are left out, whose weights are many small matrices.
    """
    layer_of = _layers(network, "optim.kind = muon", "optim.kind=adamw")
    if is_sharded(network):
        raise ConfigError(
            "optim.kind = muon needs complete matrices, and FSDP2 gives each rank a part: set train.parallel=ddp, or "
            "optim.kind=adamw"
        )
    kinds = {
        f"{name}.weight": isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
        for name, module in network.named_modules()
    }
    return {name for name, layer in layer_of.items() if layer > 0 and kinds.get(name, False)}


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
