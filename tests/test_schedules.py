"""Schedules against the recipe's closed forms."""

from __future__ import annotations

import math

import pytest

from sop_faiss.config import Config, LossConfig, OptimConfig, TrainConfig
from sop_faiss.train.schedules import Schedules, cosine


def make(**optim) -> Schedules:
    return Schedules(
        Config(
            optim=OptimConfig(base_lr=5e-4, min_lr=1e-6, warmup_epochs=10.0, momentum=0.996, momentum_end=1.0, **optim),
            loss=LossConfig(teacher_temp_start=0.04, teacher_temp=0.07, teacher_temp_epochs=30.0),
            train=TrainConfig(epochs=100.0, batch_size=1024),
        ),
        steps_per_epoch=10,
    )


def test_learning_rate_warms_up_linearly_then_falls_along_a_cosine():
    schedules = make()
    peak = 5e-4 * 1024 / 256
    assert schedules.total_steps == 1000
    assert schedules.at(0).learning_rate == 0
    assert schedules.at(50).learning_rate == pytest.approx(peak / 2)
    assert schedules.at(100).learning_rate == pytest.approx(peak)
    assert schedules.at(550).learning_rate == pytest.approx((peak + 1e-6) / 2)
    assert schedules.at(1000).learning_rate == pytest.approx(1e-6)
    quarter = 1e-6 + 0.5 * (peak - 1e-6) * (1 + math.cos(math.pi / 4))
    assert schedules.at(325).learning_rate == pytest.approx(quarter)


def test_the_peak_follows_the_root_of_the_batch_where_asked():
    schedules = make(lr_scaling="sqrt")
    assert schedules.at(100).learning_rate == pytest.approx(5e-4 * 1024**0.5 / 16)


def test_weight_decay_momentum_and_temperature():
    schedules = make()
    assert schedules.at(0).weight_decay == pytest.approx(0.04)
    assert schedules.at(500).weight_decay == pytest.approx(0.22)
    assert schedules.at(1000).weight_decay == pytest.approx(0.4)
    assert schedules.at(0).momentum == pytest.approx(0.996)
    assert schedules.at(1000).momentum == pytest.approx(1.0)
    assert [schedules.at(step).teacher_temp for step in (0, 150, 300, 900)] == pytest.approx([0.04, 0.055, 0.07, 0.07])


def test_no_warmup():
    schedules = Schedules(
        Config(optim=OptimConfig(warmup_epochs=0.0), train=TrainConfig(epochs=2.0, batch_size=256)), 5
    )
    assert schedules.at(0).learning_rate == pytest.approx(5e-4)


def test_a_frozen_backbone_warms_up_after_the_projector():
    schedules, plain, steps = make(projector_warmup_epochs=5.0), make(), (0, 49, 50, 99, 149, 500)
    scales = [schedules.at(step).backbone_lr_scale for step in steps]
    assert scales == pytest.approx([0, 0, 0.01, 0.5, 1, 1])
    for step in steps:
        assert schedules.at(step)._replace(backbone_lr_scale=1.0) == plain.at(step)
    at_once = Schedules(
        Config(optim=OptimConfig(warmup_epochs=0.0, projector_warmup_epochs=1.0), train=TrainConfig(epochs=3.0)), 4
    )
    assert [at_once.at(step).backbone_lr_scale for step in (0, 3, 4, 5)] == [0, 0, 1, 1]


def test_cosine_is_clamped_outside_the_run():
    assert cosine(1.0, 0.0, -1.0) == 1.0
    assert cosine(1.0, 0.0, 2.0) == pytest.approx(0.0)


def test_a_run_has_at_least_one_step():
    assert Schedules(Config(optim=OptimConfig(warmup_epochs=0.0), train=TrainConfig(epochs=0.001)), 3).total_steps == 1
