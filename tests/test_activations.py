"""Activation checkpointing and torch.compile leave the training as it is."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from sop_faiss.data.images.source import open_source
from sop_faiss.data.stream import Batches
from sop_faiss.model.backbones import backbone as backbone_module
from sop_faiss.model.backbones.build import seeded_backbone
from sop_faiss.train import compile as compiled
from sop_faiss.train.loop import train_step
from sop_faiss.train.state import RunState
from tests.images import write_shards
from tests.runs import conv_config, networks_of, tiny_config
from tests.test_backbone import SWIN

CPU = torch.device("cpu")


def train(tmp_path, *overrides: str) -> tuple[RunState, list[dict[str, float]]]:
    source = open_source(write_shards(tmp_path / "shards", classes=2, per_class=12, size=20))
    config = tiny_config(tmp_path, *overrides)
    state = RunState(config, CPU, len(source))
    batches = Batches(source, np.arange(len(source)), config, 4)
    return state, [{k: float(v) for k, v in train_step(state, batches[step]).metrics.items()} for step in range(2)]


@pytest.fixture
def counted(monkeypatch):
    calls = []
    real = backbone_module.checkpoint

    def counting(function, *arguments, **options):
        calls.append(function)
        return real(function, *arguments, **options)

    monkeypatch.setattr(backbone_module, "checkpoint", counting)
    return calls


@pytest.mark.parametrize("drop_path", [0, 0.4])
def test_checkpointed_activations_give_the_same_steps(tmp_path, counted, drop_path):
    kept, told = train(tmp_path / "kept", f"model.drop_path={drop_path}")
    assert not counted
    again, told_again = train(tmp_path / "again", f"model.drop_path={drop_path}", "train.checkpoint_activations=true")
    assert len(counted) == 2 * 2 * 2  # blocks x groups of views x steps; the teacher keeps nothing anyway
    for one, two in zip(told, told_again, strict=True):
        assert two == pytest.approx(one, rel=1e-6, nan_ok=True)
    for one, two in zip(kept.student.parameters(), again.student.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-6, atol=1e-7)


def test_a_swin_keeps_less_and_gives_the_same_gradients():
    gradients, kept_bytes = [], []
    for checkpoints in (False, True):
        swin = seeded_backbone(SWIN, 64, 0, drop_path=0.3)
        if checkpoints:
            swin.checkpoint_activations()
        saved = [0]

        def pack(tensor, saved=saved):
            saved[0] += tensor.nbytes
            return tensor

        torch.manual_seed(0)
        images = torch.randn(1, 3, 64, 64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = swin(images).cls.square().sum()
        loss.backward()
        gradients.append([p.grad for p in swin.parameters() if p.grad is not None])
        kept_bytes.append(saved[0])
    assert kept_bytes[1] < 0.5 * kept_bytes[0]
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["backbone", "step"])
def test_compiled_networks_give_the_same_steps(tmp_path, kind):
    _, told = train(tmp_path / "eager", "model.drop_path=0")
    state, compiled_told = train(tmp_path / "compiled", "model.drop_path=0", f"train.compile={kind}")
    module = state.student if kind == "step" else state.student.backbone.trunk.blocks[0]
    assert module._compiled_call_impl is not None
    assert set(state.student.state_dict()) == set(state.teacher.state_dict())
    for one, two in zip(told, compiled_told, strict=True):
        assert two == pytest.approx(one, rel=1e-4, abs=1e-6, nan_ok=True)


def test_a_network_without_blocks_is_not_compiled_by_blocks(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    student, teacher = networks_of(conv_config(tmp_path))
    assert not compiled.compile_networks("backbone", (student, teacher), torch.device("cpu"))
    assert "finds no blocks to compile" in caplog.text


def test_without_a_compiler_a_line_says_so_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    def refuse(*arguments, **options):
        raise RuntimeError("no C++ compiler\nfound")

    monkeypatch.setattr(compiled.torch, "compile", refuse)
    caplog.set_level(logging.WARNING)
    _, told = train(tmp_path, "train.compile=step")
    assert len(told) == 2
    expected = "train.compile = step cannot work here, so training continues without it: no C++ compiler found"
    assert [record.getMessage() for record in caplog.records] == [expected]
