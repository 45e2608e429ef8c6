"""Muon against a loop, which matrices it gets, and its state in a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sop_faiss.config import ModelConfig, OptimConfig
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.model.backbones.build import seeded_backbone
from sop_faiss.model.checkpoint import find_checkpoint, read_tensors
from sop_faiss.model.networks import Network
from sop_faiss.model.projector import Projector
from sop_faiss.train.checkpoints.checkpoint import flat_optimizer_state, load_optimizer_state
from sop_faiss.train.muon import MuonWithAdamW
from sop_faiss.train.optim import make_optimizer
from sop_faiss.verbs.training.train import run_training
from tests.images import write_shards
from tests.runs import tiny_config

VIT = ModelConfig("vit_tiny_patch16_224", patch_size=8, embed_dim=8, depth=1, num_heads=2)
BACKBONES = {
    "vit": (VIT, {"blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"}),
    "resnet_small": (
        ModelConfig("resnet_small", drop_path=0.0),
        {f"layer{stage}.0.{name}" for stage in (1, 2, 3) for name in ("conv1", "conv2")}
        | {f"layer{stage}.0.downsample.0" for stage in (2, 3)},
    ),
    "depthwise": (ModelConfig("test_efficientnet_ln", drop_path=0.0), None),
}


def network_of(config: ModelConfig) -> Network:
    return Network(seeded_backbone(config, 32, 0), nn.ModuleDict({"shared": Projector(8, 6, 4)}), "cls")


@pytest.mark.parametrize("name", BACKBONES)
def test_muon_gets_the_matrices_above_the_stem(name):
    config, wanted = BACKBONES[name]
    network = network_of(config)
    optimizer = make_optimizer(network, OptimConfig(kind="muon", muon_lr_scale=2.0))
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    groups = {flag: [g for g in optimizer.param_groups if g["is_matrix"] == flag] for flag in (True, False)}
    matrices = {names[id(p)] for group in groups[True] for p in group["params"]}
    assert {group["lr_scale"] for group in groups[True]} == {2.0}
    assert {group["lr_scale"] for group in groups[False]} == {1.0}
    if wanted is not None:
        assert matrices == {f"backbone.trunk.{module}.weight" for module in wanted}
    else:
        assert matrices and not [m for m in matrices if "conv_dw" in m or "conv_stem" in m]
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(network.parameters()))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_step_is_torchs_muon_of_each_matrix_and_adamw_of_the_rest(layout):
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Conv2d(3, 5, 2), nn.Linear(4, 3)]).to(memory_format=layout)
    copies = [p.detach().clone() for p in layers.parameters()]
    groups = [
        {"params": [layers[0].weight, layers[1].weight], "is_matrix": True},
        {"params": [layers[0].bias, layers[1].bias], "is_matrix": False},
    ]
    optimizer = MuonWithAdamW(groups, (0.9, 0.99), 0.8)
    buffers = {index: torch.zeros_like(copies[index].flatten(1)) for index in (0, 2)}
    means = {index: [torch.zeros_like(copies[index])] * 2 for index in (1, 3)}
    for step in range(1, 4):
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.1 / step, 0.3
        gradients = [torch.randn_like(p) for p in copies]
        for parameter, gradient in zip(layers.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        for index, copy in enumerate(copies):
            copy.mul_(1 - 0.3 * 0.1 / step)
            if index in buffers:
                flat = gradients[index].flatten(1)
                buffers[index] = 0.8 * buffers[index] + 0.2 * flat
                update = newton_schulz(0.2 * flat + 0.8 * buffers[index])
                copy -= 0.1 / step * 0.2 * max(flat.shape) ** 0.5 * update.view_as(copy)
            else:
                first, second = means[index]
                means[index] = [0.9 * first + 0.1 * gradients[index], 0.99 * second + 0.01 * gradients[index] ** 2]
                first, second = means[index][0] / (1 - 0.9**step), means[index][1] / (1 - 0.99**step)
                copy -= 0.1 / step * first / (second.sqrt() + 1e-8)
    for parameter, copy in zip(layers.parameters(), copies, strict=True):
        torch.testing.assert_close(parameter.detach(), copy, rtol=2e-2, atol=2e-3)  # torch's iterations are in bfloat16


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Five of Jordan's iterations on the singular values."""
    left, values, right = torch.linalg.svd(matrix.double() / matrix.norm(), full_matrices=False)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values @ right).float()


def test_a_frozen_matrix_stays():
    network = network_of(VIT)
    optimizer = make_optimizer(network, OptimConfig(kind="muon"))
    before = [p.detach().clone() for p in network.backbone.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for parameter in network.heads.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(one, two) for one, two in zip(network.backbone.parameters(), before, strict=True))


def test_a_run_with_muon_and_sigreg_resumes_exactly(tmp_path):
    shards = write_shards(tmp_path, classes=2, per_class=6, size=20)
    overrides = (f"data.train={shards}", "train.epochs=2", "optim.kind=muon", "regularizer.kind=sigreg")
    run_training(tiny_config(tmp_path, *overrides), tmp_path / "whole")
    run_training(tiny_config(tmp_path, *overrides, "train.stop_after_steps=2"), tmp_path / "parts")
    run_training(tiny_config(tmp_path, *overrides), tmp_path / "parts", resume=True)
    for file in ("student", "teacher", "optimizer", "objective"):
        one, two = (read_tensors(find_checkpoint(tmp_path / name), file) for name in ("whole", "parts"))
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def test_the_state_of_the_other_optimizer_is_refused():
    network = network_of(VIT)
    optimizers = {kind: make_optimizer(network, OptimConfig(kind=kind)) for kind in ("adamw", "muon")}
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    states = {}
    for kind, optimizer in optimizers.items():
        optimizer.step()
        states[kind] = flat_optimizer_state(optimizer, network)
    assert {key.rpartition("|")[2] for key in states["muon"]} == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}
    load_optimizer_state(optimizers["muon"], network, states["muon"])
    for kind, other in (("adamw", "muon"), ("muon", "adamw")):
        with pytest.raises(CheckpointError, match=r"qkv\.weight"):
            load_optimizer_state(optimizers[kind], network, states[other])


def test_layers_that_timm_does_not_know_have_no_matrices():
    with pytest.raises(ConfigError, match=r"optim\.kind = muon"):
        make_optimizer(nn.Linear(2, 2), OptimConfig(kind="muon"))
