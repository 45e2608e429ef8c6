"""Alarms: signs, patience and memory as plain functions, and each alarm provoked by a real run; healthy ones raise none."""

from __future__ import annotations

import json
import math
import re

import pytest

from sop_faiss.errors import CheckpointError
from sop_faiss.train.alarms import KINDS, PATIENCE, Alarms, Rules, signs
from tests.messages import assert_one_line
from tests.runs import tiny_config

HEALTHY = {
    "step": 300,
    "loss": 3.0,
    "teacher_temp": 0.04,
    "teacher_entropy_cls_over_lnK": 0.9,
    "teacher_entropy_patch_over_lnK": 0.98,
    "one_image_share_cls": 0.3,
    "embedding_cosine": 0.99,
    "embedding_rankme": 12.0,
    "feature_rankme": 6.0,
    "view_auc": 0.7,
}
CONSTANT = {"embedding_cosine": 1 - 1e-6}
UNIFORM = {"teacher_entropy_patch_over_lnK": 0.995}


def rules(stop_on: str, warmup_steps: int = 0) -> Alarms:
    return Alarms(Rules(stop_on, warmup_steps, student_temp=0.1, auc_steps=7))


def held(alarms: Alarms, changes: dict[str, float], steps: int, first: int = 1) -> list[list[str]]:
    """Names of the alarms at each of some logged steps that all look alike."""
    return [
        [alarm.name for alarm in alarms.observe(step, {**HEALTHY, **changes})] for step in range(first, first + steps)
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, set()),
        ({"embedding_cosine": 1 - 3.1e-5}, {"constant_output"}),  # 0.2 x 0.04 = 0.008 = sqrt(2 x 3.2e-5)
        ({"embedding_cosine": 1 - 3.3e-5}, set()),
        ({"embedding_cosine": 1 - 3.1e-5, "teacher_temp": 0.02}, set()),
        ({"embedding_cosine": 1 + 1e-7}, {"constant_output"}),  # rounding
        ({"teacher_entropy_cls_over_lnK": 0.991}, {"teacher_uniform"}),
        (UNIFORM, {"teacher_uniform"}),
        ({"one_image_share_cls": 0.5}, {"one_image"}),
        ({"embedding_rankme": 4.9}, {"rank_drop"}),
        ({"feature_rankme": 1.0}, set()),  # there was none to lose
        (dict.fromkeys(HEALTHY, math.nan), set()),
    ],
)
def test_signs(changes, expected):
    best = {"embedding_rankme": 20.0, "feature_rankme": 3.9}
    shown = signs({**HEALTHY, **changes}, best, 0.6, 0.1)
    assert shown.keys() == expected
    assert all(re.search(r"\d", numbers) for numbers in shown.values())


def test_views_that_cannot_be_told_apart_are_a_matter_of_several_steps():
    alarms = rules("certain")
    assert held(alarms, {"view_auc": 0.5}, 7 + PATIENCE - 1) == [[]] * (7 + PATIENCE - 2) + [["one_image"]]
    assert held(alarms, {"view_auc": 0.8}, 1, first=20) == [["one_image"]]  # the mean is not there yet
    assert held(alarms, {"view_auc": 0.8}, 1, first=21) == [[]]
    assert signs(HEALTHY, {}, 0.549, 0.1).keys() == {"one_image"}
    assert signs(HEALTHY, {}, 0.551, 0.1) == {}


def test_a_teacher_that_is_too_soft_is_no_constant_output():
    soft = {**HEALTHY, "teacher_temp": 10.0}
    assert signs(soft, {}, 0.6, 0.1) == {}
    assert signs({**soft, "embedding_cosine": 1 - 1.9e-4}, {}, 0.6, 0.1).keys() == {"constant_output"}


def test_an_alarm_waits_for_the_warm_up_and_for_several_steps_in_a_row():
    alarms = rules("certain", 10)
    assert held(alarms, CONSTANT, 10) == [[]] * 10
    assert not alarms.may_stop_soon
    assert held(alarms, CONSTANT, PATIENCE - 1, first=11) == [[]] * (PATIENCE - 1)
    assert alarms.may_stop_soon
    assert held(alarms, {}, 1, first=20) == [[]]
    assert not alarms.may_stop_soon
    assert held(alarms, CONSTANT, PATIENCE, first=30)[-2:] == [[], ["constant_output"]]


def test_rank_drops_are_seen_from_the_best_since_the_warm_up():
    alarms = rules("certain", 2)
    held(alarms, {"embedding_rankme": 100.0}, 2)
    held(alarms, {"embedding_rankme": 20.0}, 1, first=3)
    assert held(alarms, {"embedding_rankme": 5.1}, 9, first=4) == [[]] * 9
    assert held(alarms, {"embedding_rankme": 4.9}, PATIENCE, first=20)[-1] == ["rank_drop"]


@pytest.mark.parametrize(
    ("stop_on", "changes", "stops"),
    [
        ("certain", CONSTANT, True),
        ("certain", UNIFORM, False),
        ("any", UNIFORM, True),
        ("non_finite", CONSTANT, False),
    ],
)
def test_what_stops_a_run(stop_on, changes, stops):
    alarms = rules(stop_on)
    held(alarms, changes, PATIENCE - 1)
    assert alarms.may_stop_soon == stops
    (alarm,) = alarms.observe(PATIENCE, {**HEALTHY, **changes})
    assert alarm.stops == stops


def test_the_log_hears_of_an_alarm_each_time_it_has_gone_off_twice_as_often():
    alarms = rules("certain")
    told = []
    for step in range(1, 105):
        changes = {} if step == 50 else UNIFORM  # it goes off again, and is no news
        told += [step for alarm in alarms.observe(step, {**HEALTHY, **changes}) if alarm.is_told]
    assert told == [5, 6, 8, 12, 20, 36, 73]


def test_alarms_survive_a_restart():
    whole, first = rules("certain"), rules("certain")
    changes = [{"view_auc": 0.5 + 0.01 * step, **(UNIFORM if step % 9 else CONSTANT)} for step in range(40)]
    for step in range(17):
        assert whole.observe(step + 1, HEALTHY | changes[step]) == first.observe(step + 1, HEALTHY | changes[step])
    second = rules("certain")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.may_stop_soon == whole.may_stop_soon
    for step in range(17, 40):
        assert whole.observe(step + 1, HEALTHY | changes[step]) == second.observe(step + 1, HEALTHY | changes[step])
    assert whole.state_dict() == second.state_dict()


@pytest.mark.parametrize(
    "state", [3, None, {"held": [1]}, {"held": {"rank_drop": "x"}}, {"best": {"a": None}}, {"recent_auc": 0.5}]
)
def test_counts_that_were_changed_are_one_line(state):
    with pytest.raises(CheckpointError) as error:
        rules("certain").load_state_dict(state)
    assert_one_line(error, "alarms", "state.json", "remove the checkpoint")


def test_a_checkpoint_from_before_the_alarms_starts_without_counts():
    alarms = rules("certain")
    alarms.load_state_dict({})
    assert alarms.state_dict() == rules("certain").state_dict()


def test_the_rules_of_a_run(tmp_path):
    longer = ("train.epochs=800", "optim.warmup_epochs=10")
    assert Rules.of(tiny_config(tmp_path), 4) == Rules("certain", 100, 0.1, 22)  # 22 x 6 images
    assert Rules.of(tiny_config(tmp_path, *longer, "train.batch_size=1024"), 1251) == Rules("certain", 12_510, 0.1, 5)
    assert Rules.of(tiny_config(tmp_path, *longer, "train.alarm_warmup_steps=0"), 1251).warmup_steps == 0


def test_every_alarm_says_cause_and_remedy():
    for kind in KINDS.values():
        assert "; " in kind.explanation and re.search(r"[a-z]+\.[a-z_]+", kind.explanation)
        assert "\n" not in kind.explanation
