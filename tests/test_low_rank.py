"""Low-rank additions: what learns, that nothing else moves, and that merged weights are the same network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sop_faiss.config import LoraConfig, ModelConfig, load_config
from sop_faiss.data.images.source import open_source
from sop_faiss.data.stream import Batches
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.model.backbones.build import seeded_backbone
from sop_faiss.model.checkpoint import find_checkpoint, read_backbone, read_tensors
from sop_faiss.model.initial_weights import load_initial_weights
from sop_faiss.model.low_rank import add_low_rank, check_low_rank, low_rank_layers, merged, split_low_rank
from sop_faiss.train.loop import train_step
from sop_faiss.train.state import RunState
from sop_faiss.verbs.training.dry_run import describe_run
from sop_faiss.verbs.training.train import run_training
from tests.encoders import TINY_MODEL, random_images
from tests.forked import launch
from tests.images import write_shards
from tests.low_rank_runs import low_rank_config
from tests.runs import networks_of

LORA = LoraConfig(rank=3, alpha=6.0)
NETWORKS = {
    "vit": TINY_MODEL,
    "efficientnet": ModelConfig("test_efficientnet", drop_path=0.0),
    "convnext": ModelConfig("test_convnext", drop_path=0.0),
    "eva": ModelConfig("vit_small_patch16_dinov3", patch_size=8, embed_dim=32, depth=2, num_heads=2),
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("train"), classes=2, per_class=12, size=20)


def randomized(backbone):
    torch.manual_seed(1)
    for name, value in backbone.named_parameters():
        if name.endswith(".up"):
            torch.nn.init.normal_(value, std=0.1)
    return backbone


@pytest.mark.parametrize("kind", NETWORKS)
@torch.no_grad()
def test_merged_weights_are_the_same_network(kind):
    plain, live = (seeded_backbone(NETWORKS[kind], 32, 0).eval() for _ in range(2))
    for name, value in [*plain.named_parameters(), *live.named_parameters()]:
        if "gamma" in name:  # layer scale, so small that no layer would be seen
            value.fill_(1.0)
    add_low_rank(live, LORA)
    images = random_images(32, 2)
    before, last = plain(images), torch.tensor([0, 1])
    torch.testing.assert_close(live(images).patches, before.patches)  # the addition is 0 at first
    randomized(live)
    base, added = split_low_rank(live.state_dict())
    assert base.keys() == plain.state_dict().keys()
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in base.items())
    check_low_rank(base, added, LORA, "here")
    weights = merged(base, added, LORA.scale)
    for name, value in added.items():  # the slow way
        if name.endswith(".up"):
            layer = name.removesuffix(".up")
            delta = (2 * value.double() @ added[f"{layer}.down"].double()).view(base[f"{layer}.weight"].shape)
            wanted = (base[f"{layer}.weight"].double() + delta).float()
            torch.testing.assert_close(weights[f"{layer}.weight"], wanted, rtol=1e-6, atol=1e-7)
    plain.load_state_dict(weights)
    expected = plain(images)
    torch.testing.assert_close(live(images).patches, expected.patches, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(live.read(images, None, last), plain.read(images, None, last), rtol=1e-5, atol=1e-5)
    assert (expected.patches - before.patches).abs().max() > 1e-3


def test_which_layers():
    vit = seeded_backbone(NETWORKS["vit"], 32, 0)
    assert [name.removeprefix("trunk.blocks.") for name in low_rank_layers(vit, LORA)] == [
        "0.attn.qkv", "0.attn.proj", "1.attn.qkv", "1.attn.proj"
    ]  # fmt: skip
    conv = seeded_backbone(NETWORKS["efficientnet"], 32, 0)
    found = low_rank_layers(conv, LORA)
    assert found and all(tuple(layer.weight.shape[2:]) == (1, 1) and layer.groups == 1 for layer in found.values())
    assert found.keys() == low_rank_layers(conv, replace(LORA, layers="pointwise")).keys()
    linear = low_rank_layers(seeded_backbone(NETWORKS["convnext"], 32, 0), LORA)
    assert {name.rpartition(".")[2] for name in linear} == {"fc1", "fc2"}
    for network, settings, field in (
        (vit, replace(LORA, layers="pointwise"), "model.lora.layers"),
        (conv, replace(LORA, layers="attention"), "model.lora.layers"),
        (vit, replace(LORA, rank=33), "model.lora.rank"),
    ):
        with pytest.raises(ConfigError, match=field):
            low_rank_layers(network, settings)


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["model.lora.rank=-1"], "model.lora.rank"),
        (["model.lora.rank=1000000000"], "model.lora.rank"),
        (["model.lora.rank=eight"], "model.lora.rank"),
        (["model.lora.rank=0", "model.lora.alpha=8"], "model.lora.alpha"),
        (["model.lora.layers=attention"], "model.lora.layers"),
        (["model.lora.rank=8", "model.lora.layers=mlp"], "model.lora.layers"),
        (["model.lora.rank=8", "model.lora.alpha=0"], "model.lora.alpha"),
        (["model.lora.rank=8", "model.init="], "model.init"),
        (["model.lora.rank=8", "model.batchnorm=batch"], "model.batchnorm"),
        (["model.lora.rank=8", "optim.kind=muon"], "optim.kind"),
        (["model.lora.rank=8", "optim.patch_embed_lr_scale=0.2"], "optim.patch_embed_lr_scale"),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides, field):
    with pytest.raises(ConfigError, match=field):
        load_config("continue_conv", overrides)


def test_only_additions_learn(tmp_path, shards):
    config = low_rank_config(tmp_path, "optim.layer_decay=0.5", "optim.warmup_epochs=0")
    source = open_source(shards)
    state = RunState(config, torch.device("cpu"), len(source))
    load_initial_weights(state.teacher.backbone, config.model, config.views)
    state.student.load_state_dict(state.teacher.state_dict())
    base = read_backbone(find_checkpoint(tmp_path / "base"))
    before = {name: value.clone() for name, value in state.teacher.state_dict().items()}
    batches = Batches(source, np.arange(len(source)), config, 4)
    for step in range(2):
        train_step(state, batches[step])
    in_backbone = {name for name, p in state.student.backbone.named_parameters() if p.grad is not None}
    assert {name.rpartition(".")[2] for name in in_backbone} == {"down", "up", "mask_token"}
    learning = [p for p in state.student.parameters() if p.requires_grad]
    assert set(state.optimizer.state) == set(learning)
    assert len({group["lr"] for group in state.optimizer.param_groups}) > 2  # by layers
    for network in (state.student, state.teacher):
        kept, added = split_low_rank(network.backbone.state_dict())
        assert all(torch.equal(kept[name], base[name]) for name in base if name != "mask_token")
        assert any(value.any() for name, value in added.items() if name.endswith(".up"))
    student = state.student.state_dict()
    moved = [name for name, value in state.teacher.state_dict().items() if not torch.equal(value, before[name])]
    assert moved and all(not torch.equal(student[name], before[name]) for name in moved)


def test_resumed_it_is_the_same_run(tmp_path, shards):
    data = (f"data.train={shards}", "train.epochs=1")
    config = low_rank_config(tmp_path, *data)
    facts = describe_run(config)
    assert facts["trained_parameters"] < facts["backbone_parameters"] + facts["projector_parameters"]
    run_training(config, tmp_path / "whole")
    run_training(low_rank_config(tmp_path, *data, "train.stop_after_steps=3"), tmp_path / "run")
    run_training(config, tmp_path / "run", resume=True)
    whole, again = (read_tensors(find_checkpoint(tmp_path / name), "teacher") for name in ("whole", "run"))
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)
    with pytest.raises(ConfigError, match=r"model\.lora\.rank"):
        run_training(low_rank_config(tmp_path, *data, "model.lora.rank=4"), tmp_path / "run", resume=True)


@pytest.mark.slow
def test_in_parts_and_with_checkpointed_activations_it_is_the_same_run(tmp_path, shards):
    data = (f"data.train={shards}", "train.epochs=1")
    ways = {"whole": "train.accumulate=1", "parts": "train.accumulate=3", "kept": "train.checkpoint_activations=true"}
    trained = {}
    for name, override in ways.items():
        run_training(low_rank_config(tmp_path, *data, override), tmp_path / name)
        trained[name] = read_tensors(find_checkpoint(tmp_path / name), "teacher")
    for name in ("parts", "kept"):
        assert max((trained[name][key] - value).abs().max() for key, value in trained["whole"].items()) < 1e-4


def test_a_run_may_start_from_one_with_additions(tmp_path, shards):
    config = low_rank_config(tmp_path, f"data.train={shards}", "train.epochs=1", "train.stop_after_steps=1")
    run_training(config, tmp_path / "first")
    wanted = read_backbone(find_checkpoint(tmp_path / "first"))
    second = low_rank_config(tmp_path, f"model.init={tmp_path / 'first'}", "model.lora.rank=0")
    _, teacher = networks_of(second)
    load_initial_weights(teacher.backbone, second.model)
    assert all(torch.equal(wanted[name], value) for name, value in teacher.backbone.state_dict().items())


def test_additions_of_another_network_are_refused():
    live = seeded_backbone(NETWORKS["vit"], 32, 0)
    add_low_rank(live, LORA)
    base, added = split_low_rank(live.state_dict())
    name = "trunk.blocks.0.attn.qkv"
    for changed in (
        {f"{name}.up": added[f"{name}.up"]},
        {**added, f"{name}.up": torch.zeros(3, 3)},
        {**added, f"{name}.up": torch.full_like(added[f"{name}.up"], torch.nan)},
        {**added, "trunk.norm.up": torch.zeros(32, 3), "trunk.norm.down": torch.zeros(3, 32)},
        {**added, "nowhere.up": torch.zeros(32, 3), "nowhere.down": torch.zeros(3, 32)},
    ):
        with pytest.raises(CheckpointError):
            check_low_rank(base, changed, LORA, "here")
    with pytest.raises(CheckpointError):
        check_low_rank(base, added, LoraConfig(), "here")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("compiled", ["backbone", "step"])
def test_compiled_it_trains_alike(tmp_path, shards, compiled):
    data = (f"data.train={shards}", "train.epochs=1", "train.stop_after_steps=2")
    run_training(low_rank_config(tmp_path, *data), tmp_path / "plain")
    run_training(low_rank_config(tmp_path, *data, f"train.compile={compiled}"), tmp_path / "compiled")
    plain, other = (read_tensors(find_checkpoint(tmp_path / name), "teacher") for name in ("plain", "compiled"))
    assert max((plain[name] - other[name]).abs().max() for name in plain) < 1e-4


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_train_alike(tmp_path):
    shards = write_shards(tmp_path / "shards", classes=2, per_class=12, size=20)
    low_rank_config(tmp_path)
    launch(tmp_path / "log", ["-m", "tests.low_rank_ranks"], tmp_path, shards)
