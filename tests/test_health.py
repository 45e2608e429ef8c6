"""What a logged step shows on the side: the right numbers, from the step's own forward pass, without a trace in it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from sop_faiss.data.images.source import open_source
from sop_faiss.data.stream import Batches
from sop_faiss.data.views.device_color import normalize
from sop_faiss.sop.memory import Memory
from sop_faiss.train.log import health as module
from sop_faiss.train.log.embedding_spread import mean_cosine, rankme, view_auc
from sop_faiss.train.log.health import watching
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.train.loop import train_step
from sop_faiss.train.state import RunState
from sop_faiss.verbs.training.train import run_training
from tests.images import write_shards
from tests.runs import tiny_config

KEYS = {
    "embedding_cosine", "embedding_rankme", "feature_cosine", "feature_rankme", "view_auc", "update_norm",
    "memory_peak_bytes",
}  # fmt: skip


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("health"), classes=2, per_class=12, size=20)


def fresh(tmp_path, shards, *overrides) -> tuple[RunState, Batches]:
    config = tiny_config(tmp_path, "optim.warmup_epochs=0", *overrides)
    source = open_source(shards)
    return RunState(config, torch.device("cpu"), len(source)), Batches(source, np.arange(len(source)), config, 4)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("train.accumulate=2", "train.views_apart=true"),
        ("views.global_count=3",),
        ("model.global_token=mean",),
        ("sop.cls.weight=0",),
    ],
)
def test_numbers_are_those_of_the_step(tmp_path, shards, overrides):
    state, batches = fresh(tmp_path, shards, *overrides)
    twin, _ = fresh(tmp_path, shards, *overrides)
    batch = batches[0]
    before = [parameter.detach().clone() for parameter in state.student.parameters()]
    with watching(state) as watch:
        step = train_step(state, batch)
    told = watch.numbers(step.learned)
    assert told.keys() == KEYS
    views = normalize(batch.global_views, batch.global_colors, twin.config.views, twin.device)
    with torch.no_grad():
        tokens = [twin.teacher.backbone(view) for view in views[:2]]
    cls = twin.config.model.global_token == "cls"
    features = [F.normalize(t.cls if cls else t.patches.mean(1), dim=1) for t in tokens]
    memory = next(iter(state.objective.terms.values())).memory
    expected = {
        "embedding_cosine": mean_cosine(memory.embeddings[:6]),
        "embedding_rankme": rankme(memory.embeddings[:6]),
        "feature_cosine": mean_cosine(features[1]),
        "feature_rankme": rankme(features[1]),
        "view_auc": view_auc(*features),
    }
    if "cls" not in state.objective.terms:  # no whole view's feature is asked for
        expected |= dict.fromkeys(("feature_cosine", "feature_rankme", "view_auc"), math.nan)
    for key, value in expected.items():
        assert told[key] == pytest.approx(value, rel=1e-4, nan_ok=True), key
    now = [parameter.detach() for parameter in state.student.parameters()]
    change = sum(float((new - old).square().sum()) for new, old in zip(now, before, strict=True))
    size = sum(float(old.square().sum()) for old in before)
    assert told["update_norm"] == pytest.approx((change / size) ** 0.5, rel=0.02)  # size: all parameters
    assert told["memory_peak_bytes"] > 2**27  # torch alone is more than that


def test_a_step_that_is_watched_is_the_same_step(tmp_path, shards, monkeypatch):
    """To the bit, and with as many passes through the teacher."""
    passes = []
    states = []
    for logged in (True, False):
        state, batches = fresh(tmp_path, shards)
        monkeypatch.setattr(module, "is_logged", lambda state, step, logged=logged: logged)
        forward = type(state.teacher.backbone).read
        calls = [0]

        def counted(self, *arguments, forward=forward, calls=calls):
            calls[0] += 1
            return forward(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(type(state.teacher.backbone), "read", counted)
            for step in range(2):
                with watching(state) as watch:
                    made = train_step(state, batches[step])
                assert bool(watch.numbers(made.learned)) == logged
        passes.append(calls[0])
        states.append(state)
    assert passes[0] == passes[1] == 2 * 3  # teacher, student's global and local views
    for one, two in zip(*(state.student.parameters() for state in states), strict=True):
        assert torch.equal(one, two)


def test_nothing_is_left_behind_also_by_a_step_that_fails(tmp_path, shards):
    state, _ = fresh(tmp_path, shards)
    with pytest.raises(ZeroDivisionError), watching(state):
        assert state.optimizer._optimizer_step_pre_hooks
        raise ZeroDivisionError
    assert not state.optimizer._optimizer_step_pre_hooks and not state.optimizer._optimizer_step_post_hooks


def test_every_line_has_the_same_numbers(tmp_path, shards):
    config = tiny_config(tmp_path, f"data.train={shards}", "train.log_every_steps=3", "train.stop_after_steps=7")
    run_training(config, tmp_path / "run")
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 3, 6]  # of 24, at the last of which a line is written, too
    for line in lines:
        assert KEYS | {"kl_cls", "kl_patch"} <= line.keys()
        assert all(line[key] is not None for key in KEYS)
        assert line["kl_cls"] > 0


def test_the_last_step_of_a_run_has_a_line(tmp_path, shards):
    run_training(tiny_config(tmp_path, f"data.train={shards}", "train.log_every_steps=100"), tmp_path / "run")
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 24] and all(lines[1][key] is not None for key in KEYS)


def test_one_global_view_has_no_other(tmp_path, shards):
    config = tiny_config(tmp_path, f"data.train={shards}", "views.global_count=1", "train.stop_after_steps=1")
    run_training(config, tmp_path / "run")
    (line,) = read_metrics(tmp_path / "run")
    assert line["view_auc"] is None and line["feature_cosine"] is not None


@pytest.mark.parametrize(
    ("stored", "count", "expected"),
    [(0, 4, []), (3, 4, [0, 1, 2]), (5, 4, [1, 2, 3, 4]), (12, 4, [8, 9, 0, 1]), (12, 99, None)],
)
def test_newest_rows_in_the_order_of_storing(stored, count, expected):
    memory = Memory(10, 3, torch.Generator().manual_seed(0))
    for step in range(stored):
        memory.store(torch.randn(1, 3), torch.tensor([step]))
    rows = memory.newest_rows(count)
    ids = memory.image_ids[rows].tolist()
    assert ids == list(range(max(0, stored - min(count, 10)), stored))
    if expected is not None:
        assert rows.tolist() == expected


def test_rows_are_spread_evenly_over_a_large_batch(monkeypatch):
    monkeypatch.setattr(module, "MAX_ROWS", 4)
    rows = torch.arange(10.0).view(10, 1, 1)
    assert module._some_rows(rows).flatten().tolist() == [0, 2, 5, 7]
    assert len(module._some_rows(rows[:3])) == 3
