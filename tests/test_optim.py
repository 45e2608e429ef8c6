"""Which parameters decay, and clipping parameter by parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sop_faiss.config import OptimConfig
from sop_faiss.train.optim import apply_settings, clip_each_gradient, make_optimizer
from sop_faiss.train.schedules import StepSettings


def test_biases_and_norms_do_not_decay():
    network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = make_optimizer(network, OptimConfig())
    apply_settings(optimizer, StepSettings(learning_rate=0.1, weight_decay=0.3, momentum=0.9, teacher_temp=0.04))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay[id(network[0].weight)] == 0.3
    assert [decay[id(p)] for p in (network[0].bias, network[1].weight, network[1].bias)] == [0.0, 0.0, 0.0]
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}


def test_each_gradient_is_clipped_by_itself():
    network = nn.Linear(2, 2)
    network.weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])  # norm 5
    network.bias.grad = torch.tensor([0.3, 0.4])  # norm 0.5
    total = clip_each_gradient(network, 1.0)
    assert total.item() == pytest.approx((25 + 0.25) ** 0.5)
    assert network.weight.grad.norm().item() == pytest.approx(1.0, rel=1e-5)
    assert network.bias.grad.tolist() == pytest.approx([0.3, 0.4])  # under the limit: untouched


def test_zero_switches_clipping_off():
    network = nn.Linear(1, 1)
    network.weight.grad, network.bias.grad = torch.tensor([[100.0]]), torch.tensor([0.0])
    clip_each_gradient(network, 0.0)
    assert network.weight.grad.item() == 100.0
