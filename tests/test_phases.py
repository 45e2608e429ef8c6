"""Phases of a run: their settings, the views of each step, and what the rest of the system makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sop_faiss.config import load_config, to_yaml
from sop_faiss.data.images.source import open_source
from sop_faiss.data.profile import time_stages
from sop_faiss.data.sequential_stream import SequentialBatches
from sop_faiss.data.shards.shard_stream import ShardStream
from sop_faiss.data.stream import Batches, batch_loader
from sop_faiss.errors import ConfigError
from sop_faiss.progress import silent_stage
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.verbs.training.dry_run import describe_run
from sop_faiss.verbs.training.profile_data import profile_data
from sop_faiss.verbs.training.train import run_training
from tests.images import write_shards
from tests.runs import conv_config, networks_of, tiny_config

PHASES = "train.phases=[{until: 0.25, global_size: 8}, {until: 0.5, global_size: 12, local_size: 12}]"
SIZES = [(8, 8), (8, 8), (12, 12), (12, 12), (16, 8), (16, 8), (16, 8), (16, 8)]
"""Of global and local views in the eight steps of a run with these phases."""
TIMINGS = ("images_per_second", "data_wait_share", "memory_peak_bytes")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("train"), classes=2, per_class=12, size=40)


@pytest.mark.parametrize(
    ("phases", "named"),
    [
        ("3", "train.phases"),
        ("null", "train.phases"),
        ("[3]", "train.phases"),
        ("[[1]]", "train.phases[0]"),
        ("{until: 0.5}", "train.phases.until"),
        ("[{until: 0.5}]", "train.phases[0] lacks global_size"),
        ("[{until:0.5,global_size:8}]", "a blank"),
        ("[{until: 0.5, global_size: 8, local: 8}]", "'local'"),
        ("[{until: half, global_size: 8}]", "train.phases[0].until"),
        ("[{until: .nan, global_size: 8}]", "train.phases[0].until"),
        ("[{until: 1, global_size: 8}]", "train.phases[0].until"),
        ("[{until: 0, global_size: 8}]", "train.phases[0].until"),
        ("[{until: 0.5, global_size: 8}, {until: 0.5, global_size: 8}]", "train.phases[1].until"),
        ("[{until: 0.5, global_size: 8.5}]", "train.phases[0].global_size"),
        ("[{until: 0.5, global_size: true}]", "train.phases[0].global_size"),
        ("[{until: 0.5, global_size: 99999999999999999999}]", "train.phases[0].global_size"),
        ("[{until: 0.5, global_size: 4}]", "train.phases[0].global_size"),
        ("[{until: 0.5, global_size: 8, local_size: 5000}]", "train.phases[0].local_size"),
    ],
)
def test_bad_phases_are_one_line(tmp_path, phases, named):
    with pytest.raises(ConfigError) as caught:
        tiny_config(tmp_path, f"train.phases={phases}")
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_phases_are_read_as_they_are_written(tmp_path):
    config = tiny_config(tmp_path, PHASES)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config
    assert [(each.views.global_size, each.views.local_size) for each in config.each_phase()] == [*SIZES[1:6:2]]
    assert not load_config(tmp_path / "config.yaml", ["train.phases=[]"]).train.phases


def test_sizes_that_the_backbone_cannot_cut_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.phases\[0\]\.global_size = 10 "):
        networks_of(tiny_config(tmp_path, "train.phases=[{until: 0.5, global_size: 10}]"))
    with pytest.raises(ConfigError, match=r"train\.phases\[0\]\.local_size = 48 "):
        networks_of(conv_config(tmp_path, "train.phases=[{until: 0.5, global_size: 32, local_size: 48}]"))


@pytest.mark.parametrize("more", [(), ("data.scaled_decoding=true",), ("masks.kind=random", "data.workers=1")])
def test_a_step_has_the_views_of_a_run_of_its_phases_sizes(tmp_path, shards, more):
    def make(*overrides: str) -> Batches:
        source = open_source(shards)
        return Batches(source, np.arange(24), tiny_config(tmp_path, "train.epochs=2", *more, *overrides), 4)

    made = list(batch_loader(make(PHASES), range(8), pin_memory=False))
    for step, (global_size, local_size) in enumerate(SIZES):
        alone = make(f"views.global_size={global_size}", f"views.local_size={local_size}")[step]
        for name in ("global_views", "local_views", "masks", "image_ids"):
            assert torch.equal(getattr(made[step], name), getattr(alone, name)), (step, name)


def test_a_stream_in_sequence_has_phases_too(tmp_path, shards):
    config = tiny_config(
        tmp_path, "data.access=sequential", "data.samples_per_epoch=24", "train.epochs=2", "data.threads=1", PHASES
    )
    batches = SequentialBatches(ShardStream("", [str(path) for path in sorted(shards.glob("*.tar"))]), config, 4)
    assert [batches[step].global_views.shape[2] for step in range(8)] == [global_size for global_size, _ in SIZES]


def test_a_run_resumed_at_and_beside_borders_is_the_same(tmp_path, shards):
    common = (f"data.train={shards}", "train.epochs=2", "train.accumulate=2", "sop.fill=teacher", PHASES)

    def lines(name: str, *ends: int) -> list[dict]:
        for end in ends:
            config = tiny_config(tmp_path, *common, f"train.stop_after_steps={end}")
            assert run_training(config, tmp_path / name, resume=True).step == end
        records = read_metrics(tmp_path / name)
        return [{key: value for key, value in line.items() if key not in TIMINGS} for line in records]

    assert lines("resumed", 1, 2, 4, 5, 8) == lines("whole", 8)


def test_a_convolutional_network_goes_through_phases(tmp_path, shards):
    stages: list[str] = []

    def stage(what: str, unit: str):
        stages.append(what)
        return silent_stage(what, unit)

    phases = "train.phases=[{until: 0.5, global_size: 32}]"
    config = conv_config(tmp_path, f"data.train={shards}", "train.epochs=1", phases)
    assert run_training(config, tmp_path / "run", stage=stage).step == 4
    assert [what for what in stages if "phase" in what] == [
        "training, phase 1 of 2 (32 px)", "training, phase 2 of 2 (64 px)"
    ]  # fmt: skip


@pytest.mark.parametrize("largest", [16, 32])
def test_a_dry_run_counts_the_largest_phase(tmp_path, shards, largest):
    def described(*overrides: str) -> dict:
        return describe_run(tiny_config(tmp_path, f"data.train={shards}", *overrides))

    phases = f"train.phases=[{{until: 0.5, global_size: 8}}, {{until: 0.7, global_size: {largest}}}]"
    found, alone = described(phases), described(f"views.global_size={largest}")
    for name in ("activations_bytes", "views_bytes", "loss_bytes"):
        assert found[name] == alone[name], name


def test_a_profile_is_of_the_last_phase_and_counts_the_others(tmp_path, shards):
    config = tiny_config(tmp_path, f"data.train={shards}", "train.epochs=2", PHASES)
    profile = profile_data(config, steps=2)
    assert len(profile["images_per_second_of_phases"]) == 2
    assert time_stages(Batches(open_source(shards), np.arange(24), config, 4), [0])["masks"] > 0
    assert "images_per_second_of_phases" not in profile_data(tiny_config(tmp_path, f"data.train={shards}"), steps=2)
