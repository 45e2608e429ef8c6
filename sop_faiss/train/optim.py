"""AdamW as the recipe has it, and gradient clipping per parameter (docs/method.md, 5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sop_faiss import distributed
from sop_faiss.config import OptimConfig
from sop_faiss.train.schedules import StepSettings

__all__ = ["apply_settings", "clip_each_gradient", "make_optimizer"]


def make_optimizer(network: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW with two groups: biases and 1-d parameters are not decayed."""
    decayed = [p for p in network.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in network.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": decayed, "decays": True}, {"params": others, "decays": False, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(config.beta1, config.beta2), fused=True)


def apply_settings(optimizer: torch.optim.Optimizer, settings: StepSettings) -> None:
    """Set the step's learning rate and weight decay."""
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate
        group["weight_decay"] = settings.weight_decay if group["decays"] else 0.0


@torch.no_grad()
def clip_each_gradient(network: nn.Module, max_norm: float) -> Tensor:
    """Scale down every gradient whose own norm exceeds `max_norm` (0: none); the norm of all before, as a scalar."""
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    shards = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    norms = torch.stack(torch._foreach_norm(shards))
    if any(isinstance(gradient, DTensor) for gradient in gradients):
        norms = (distributed.average(norms**2) * distributed.world_size()).sqrt()
    if max_norm > 0:
        factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(shards, list(factors.unbind()))
    return torch.linalg.vector_norm(norms)
