"""Which parameters decay, and clipping parameter by parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sop_faiss.config import ModelConfig, OptimConfig
from sop_faiss.errors import ConfigError
from sop_faiss.model.backbones.build import seeded_backbone
from sop_faiss.model.networks import Network
from sop_faiss.model.projector import Projector
from sop_faiss.objectives.objective import StepSettings
from sop_faiss.train.optim import apply_settings, clip_each_gradient, make_optimizer

VIT_SCALES = {
    "backbone.mask_token": 0.125, "backbone.trunk.pos_embed": 0.125, "backbone.trunk.patch_embed.proj.weight": 0.125,
    "backbone.trunk.blocks.0.attn.qkv.weight": 0.25, "backbone.trunk.blocks.1.mlp.fc1.bias": 0.5,
    "backbone.trunk.norm.weight": 0.5,
}  # fmt: skip
"""With a decay of 0.5 per layer, of a stem and two blocks."""
RESNET_SCALES = {
    "backbone.trunk.conv1.0.weight": 0.5**5, "backbone.trunk.layer1.0.conv1.weight": 0.5**4,
    "backbone.trunk.layer4.0.conv1.weight": 0.5, "backbone.mask_token": 0.5**5,
}  # fmt: skip
"""Of a stem and four blocks."""


def test_biases_and_norms_do_not_decay():
    network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = make_optimizer(network, OptimConfig())
    apply_settings(optimizer, StepSettings(learning_rate=0.1, weight_decay=0.3, momentum=0.9, teacher_temp=0.04))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay[id(network[0].weight)] == 0.3
    assert [decay[id(p)] for p in (network[0].bias, network[1].weight, network[1].bias)] == [0.0, 0.0, 0.0]
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}


@pytest.mark.parametrize("decays", [False, True])
def test_a_mask_token_decays_where_asked(decays):
    backbone = seeded_backbone(ModelConfig("vit_tiny_patch16_224", depth=1, embed_dim=8, num_heads=2), 32, seed=0)
    network = Network(backbone, nn.ModuleDict({"shared": Projector(8, 6, 4)}), "cls")
    optimizer = make_optimizer(network, OptimConfig(decay_mask_token=decays))
    decaying = {id(p) for group in optimizer.param_groups if group["decays"] for p in group["params"]}
    assert (id(backbone.mask_token) in decaying) == decays
    assert id(backbone.trunk.cls_token) in decaying and id(backbone.trunk.norm.weight) not in decaying


@pytest.mark.parametrize(
    ("backbone", "scales"),
    [
        (ModelConfig(backbone="vit_tiny_patch16_224", patch_size=8, embed_dim=24, depth=2, num_heads=2), VIT_SCALES),
        (ModelConfig(backbone="test_resnet", drop_path=0.0), RESNET_SCALES),
    ],
)
def test_lower_layers_learn_more_slowly(backbone, scales):
    network = Network(seeded_backbone(backbone, 32, 0), nn.ModuleDict({"shared": Projector(4, 4, 4)}), "cls")
    optimizers = [make_optimizer(network, OptimConfig(layer_decay=decay)) for decay in (0.5, 1.0)]
    for optimizer in optimizers:
        apply_settings(optimizer, StepSettings(0.1, 0.3, momentum=0.9, teacher_temp=0.04, backbone_lr_scale=0.25))
    rates, plain_rates = (by_parameter(optimizer, "lr") for optimizer in optimizers)
    named = dict(network.named_parameters())
    for optimizer in optimizers:
        assert by_parameter(optimizer, "weight_decay") == {id(p): 0.3 if p.ndim > 1 else 0.0 for p in named.values()}
    for name, parameter in named.items():
        in_backbone = name.startswith("backbone.")
        assert plain_rates[id(parameter)] == pytest.approx(0.1 * (0.25 if in_backbone else 1.0)), name
        assert in_backbone or rates[id(parameter)] == 0.1
    for name, scale in scales.items():
        assert rates[id(named[name])] == pytest.approx(0.1 * 0.25 * scale), name


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_a_patch_embedding_learns_more_slowly_still(decay):
    config = ModelConfig("vit_tiny_patch16_224", patch_size=8, embed_dim=24, depth=2, num_heads=2)
    network = Network(seeded_backbone(config, 32, 0), nn.ModuleDict({"shared": Projector(4, 4, 4)}), "cls")
    rates = {}
    for scale in (1.0, 0.2):
        optimizer = make_optimizer(network, OptimConfig(layer_decay=decay, patch_embed_lr_scale=scale))
        apply_settings(optimizer, StepSettings(0.1, 0.3, momentum=0.9, teacher_temp=0.04))
        rates[scale] = by_parameter(optimizer, "lr")
    for name, parameter in network.named_parameters():
        factor = 0.2 if name.startswith("backbone.trunk.patch_embed.") else 1.0
        assert rates[0.2][id(parameter)] == pytest.approx(factor * rates[1.0][id(parameter)]), name


def test_a_network_without_a_patch_embedding_is_refused():
    network = Network(seeded_backbone(ModelConfig("test_resnet", drop_path=0.0), 32, 0), nn.ModuleDict(), "cls")
    with pytest.raises(ConfigError, match=r"optim\.patch_embed_lr_scale"):
        make_optimizer(network, OptimConfig(patch_embed_lr_scale=0.2))


def by_parameter(optimizer: torch.optim.Optimizer, key: str) -> dict[int, float]:
    return {id(parameter): group[key] for group in optimizer.param_groups for parameter in group["params"]}


def test_layers_that_timm_does_not_know_cannot_decay():
    with pytest.raises(ConfigError, match=r"optim\.layer_decay = 0\.5"):
        make_optimizer(nn.Linear(2, 2), OptimConfig(layer_decay=0.5))


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
