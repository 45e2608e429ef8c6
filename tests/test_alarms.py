"""Alarms: signs and patience as plain functions, and each alarm provoked by a real run; healthy ones raise none."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from sop_faiss.cli.train import main
from sop_faiss.errors import CheckpointError, RunStoppedError
from sop_faiss.model.checkpoint import checkpoint_directories, find_checkpoint, read_state
from sop_faiss.train import loop
from sop_faiss.train.log.alarms import KINDS, PATIENCE, Alarms, Rules, signs
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.verbs.training.train import run_training
from tests.forked import launch
from tests.images import encode, make_image, write_shards
from tests.messages import assert_one_line
from tests.runs import tiny_config, tiny_config_file

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
        ({"embedding_cosine": 0.9991, "teacher_entropy_cls_over_lnK": 0.99991}, {"constant_output", "teacher_uniform"}),
        ({"embedding_cosine": 0.9989, "teacher_entropy_cls_over_lnK": 0.99991}, {"teacher_uniform"}),
        ({"embedding_cosine": 0.9991, "teacher_entropy_patch_over_lnK": 0.99991}, {"teacher_uniform"}),
        ({"teacher_entropy_cls_over_lnK": 0.991}, {"teacher_uniform"}),
        (UNIFORM, {"teacher_uniform"}),
        ({"one_image_share_cls": 0.5}, {"one_image"}),
        ({"embedding_rankme": 9.9}, {"rank_drop"}),
        ({"embedding_rankme": 10.1}, set()),
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
    assert held(alarms, {"embedding_rankme": 10.1}, 9, first=4) == [[]] * 9
    assert held(alarms, {"embedding_rankme": 9.9}, PATIENCE, first=20)[-1] == ["rank_drop"]


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
        told += [step for alarm in alarms.observe(step, {**HEALTHY, **changes}) if alarm.is_logged]
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


def at_end(*changes: dict[str, float | None], warmup_steps: int = 100) -> list[str]:
    return list(rules("certain", warmup_steps).at_end([{**HEALTHY, **change} for change in changes]))


def test_the_end_is_judged_by_what_the_last_records_all_show():
    assert at_end() == at_end({}) == []
    assert at_end(CONSTANT) == at_end(*[CONSTANT] * 4) == ["constant_output"]
    assert at_end({}, *[CONSTANT] * PATIENCE) == at_end(*[CONSTANT | UNIFORM] * 2, CONSTANT) == ["constant_output"]
    assert at_end(*[CONSTANT] * 4, {}) == at_end({}, *[CONSTANT] * (PATIENCE - 1)) == []
    assert at_end({"embedding_cosine": None, "view_auc": None}) == []
    assert at_end(*[{"view_auc": 0.5}] * 6) == [] and at_end(*[{"view_auc": 0.5}] * 7) == ["one_image"]  # 128 images
    (message,) = rules("certain").at_end([{**HEALTHY, **UNIFORM}]).values()
    assert "teacher_entropy_patch_over_lnK = 0.9950" in message and "loss.teacher_temp" in message


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
    frozen = (*longer, "train.batch_size=1024", "optim.projector_warmup_epochs=2")
    assert Rules.of(tiny_config(tmp_path, *frozen), 1251).warmup_steps == 15_012
    assert Rules.of(tiny_config(tmp_path, *longer, "train.alarm_warmup_steps=0"), 1251).warmup_steps == 0


def test_every_alarm_says_cause_and_remedy():
    for kind in KINDS.values():
        assert "; " in kind.explanation and re.search(r"[a-z]+\.[a-z_]+", kind.explanation)
        assert "\n" not in kind.explanation


# Real runs

QUICK = (
    "views.local_count=0", "model.depth=1", "model.embedding_dim=16", "sop.fill=teacher", "sop.patch.weight=0",
    "sop.contributions=one_hot", "sop.cls.num_supports=1", "sop.cls.tasks=1", "loss.teacher_temp=0.02",
    "loss.teacher_temp_start=0.02", "optim.warmup_epochs=1", "train.batch_size=12", "train.epochs=50",
    "train.alarm_warmup_steps=0",
)  # fmt: skip
FAST = ("optim.momentum=0.9", "optim.momentum_end=0.9", "optim.base_lr=0.02")
COLLAPSING = (*QUICK, *FAST, "sop.anchors=fixed_vectors", "train.checkpoint_every_steps=2")
"""Of 24 images alone; with random anchors and a teacher this fast they collapse too, some steps later."""
STILL = ("optim.base_lr=1e-12", "optim.min_lr=0", "loss.teacher_temp=10", "loss.teacher_temp_start=10")


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("alarms"), classes=4, per_class=6, size=20)


def command(tmp_path: Path, shards: Path, *words: str) -> list[str]:
    return [str(tiny_config_file(tmp_path)), f"data.train={shards}", *words, "--output", str(tmp_path / "run")]


def told_alarms(caplog: pytest.LogCaptureFixture) -> set[str]:
    return {match[1] for match in re.finditer(r"alarm (\w+) at step", caplog.text)}


def test_a_collapse_stops_the_run_and_what_was_saved_before_it_stays(tmp_path, shards, caplog):
    result = CliRunner().invoke(main, command(tmp_path, shards, *COLLAPSING))
    assert result.exit_code == 3 and result.stdout == "" and "Traceback" not in result.stderr
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    run = tmp_path / "run"
    lines = read_metrics(run)
    assert f"constant_output at step {lines[-1]['step']}: mean cosine" in error and "sop.anchors=random" in error
    # no checkpoint since the first sign, and the three before it
    first_sign = lines[-1]["step"] - PATIENCE + 1
    kept = [int(path.name.removeprefix("step_")) for path in checkpoint_directories(run)]
    last = (first_sign - 1) // 2 * 2
    assert kept == [last, last - 2, last - 4]
    assert find_checkpoint(run).name in error
    # what it left
    dump = json.loads((run / "stopped.json").read_text())
    assert dump["reason"] == "constant_output" and dump["message"].partition("`")[0] in error
    assert dump["metrics"]["embedding_cosine"] == lines[-1]["embedding_cosine"] > 0.999
    assert len(dump["image_ids"]) == len(set(dump["image_ids"])) == 12 and set(dump["image_ids"]) <= set(range(24))
    assert dump["embedding_norms"] == pytest.approx([1.0] * 12, abs=1e-5)
    assert {"backbone.trunk.blocks.0", "heads.shared.mlp.0"} <= dump["gradient_norms"].keys()
    neighbors = dump["neighbors"]["cls"]
    assert [entry["image_id"] for entry in neighbors] == dump["image_ids"][:4]
    for entry in neighbors:
        assert len(entry["neighbor_image_ids"]) == len(entry["similarities"]) == 8
        assert entry["row"] not in entry["neighbor_rows"]
        assert (
            entry["similarities"] == sorted(entry["similarities"], reverse=True) and min(entry["similarities"]) > 0.99
        )
    # go on from before it, if one must
    more = (*COLLAPSING, "train.stop_on=non_finite", f"train.stop_after_steps={lines[-1]['step'] + 1}", "--resume")
    result = CliRunner().invoke(main, command(tmp_path, shards, *more))
    assert result.exit_code == 0, result.stderr
    assert "constant_output" in told_alarms(caplog)
    assert not (run / "stopped.json").exists()


def test_a_teacher_that_is_uniform_and_a_student_that_does_not_move(tmp_path, shards, caplog):
    config = tiny_config(tmp_path, f"data.train={shards}", *QUICK, *STILL, "train.stop_after_steps=9")
    assert run_training(config, tmp_path / "warned").finished
    assert told_alarms(caplog) == {"teacher_uniform"}
    assert "loss.teacher_temp" in caplog.text
    with pytest.raises(RunStoppedError, match=r"teacher_uniform at step 5: teacher_entropy_cls_over_lnK = ") as error:
        stopping = (*QUICK, *STILL, "train.stop_on=any")
        run_training(tiny_config(tmp_path, f"data.train={shards}", *stopping), tmp_path / "stopped")
    assert_one_line(error, "last checkpoint is none", "train.stop_on")


def test_images_that_are_copies_of_one(tmp_path, caplog):
    photo = encode(make_image(np.random.default_rng(0), 20))
    (tmp_path / "photos").mkdir()
    for number in range(24):
        (tmp_path / "photos" / f"{number:02d}.jpg").write_bytes(photo)
    length = ("train.batch_size=24", "train.stop_after_steps=12")
    run_training(tiny_config(tmp_path, f"data.train={tmp_path / 'photos'}", *QUICK, *length), tmp_path / "run")
    assert told_alarms(caplog) == {"one_image"}
    assert "sop-data check --duplicates" in caplog.text


def test_a_run_that_ends_before_any_alarm_tells_of_a_collapse(tmp_path, caplog):
    (tmp_path / "photos").mkdir()
    for number in range(20):
        (tmp_path / "photos" / f"{number:02d}.jpg").write_bytes(encode(np.zeros((20, 20, 3), np.uint8)))
    more = ("train.batch_size=10", "train.epochs=25", "train.log_every_steps=20", "train.alarm_warmup_steps=null")
    words = command(tmp_path, tmp_path / "photos", *QUICK, *more)
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.stderr
    assert "constant_output" in json.loads(result.stdout)["signs"]
    assert told_alarms(caplog) == set() and "the sign of constant_output" in caplog.text
    assert "first 100 steps" in caplog.text
    assert f"{tmp_path / 'photos'}: all 16 images" in caplog.text
    caplog.clear()
    assert CliRunner().invoke(main, [*words, "--resume"]).exit_code == 0
    assert "images checked" not in caplog.text and "the sign of constant_output" in caplog.text


WIDE = ("model.embed_dim=96", "model.projector_layers=1", "model.embedding_dim=48")
"""A network whose embeddings of 24 images have a rank to lose: RankMe starts near 7."""


def test_directions_that_are_lost(tmp_path, shards, caplog):
    length = ("optim.base_lr=0.04", "train.stop_after_steps=20")
    run_training(tiny_config(tmp_path, f"data.train={shards}", *COLLAPSING, *WIDE, *length), tmp_path / "run")
    assert told_alarms(caplog) == {"rank_drop"}
    ranks = [line["embedding_rankme"] for line in read_metrics(tmp_path / "run")]
    gone_off = [
        step
        for step in range(PATIENCE, len(ranks) + 1)
        if max(ranks) >= 4 and max(ranks[step - PATIENCE : step]) < max(ranks[:step]) / 2
    ]
    assert re.search(r"alarm rank_drop at step (\d+)", caplog.text)[1] == str(gone_off[0])


def test_a_run_that_learns_raises_no_alarm(tmp_path, shards, caplog):
    length = ("train.stop_after_steps=30", "optim.base_lr=0.005")
    run_training(tiny_config(tmp_path, f"data.train={shards}", *QUICK, *length), tmp_path / "run")
    assert told_alarms(caplog) == set() and "the sign of" not in caplog.text and "images checked" not in caplog.text
    assert len(read_metrics(tmp_path / "run")) == 30
    assert not (tmp_path / "run" / "stopped.json").exists()


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(
    ("every", "message"), [(1, "a weight of the student is not finite at step 1"), (9, "loss is nan at step 2")]
)
def test_an_absurd_learning_rate_overflows_and_is_never_saved(tmp_path, shards, precision, every, message):
    absurd = ("optim.base_lr=1e38", "optim.warmup_epochs=0", f"train.precision={precision}", "sop.fill=random")
    config = tiny_config(
        tmp_path, f"data.train={shards}", *QUICK, *absurd, f"train.checkpoint_every_steps={every}", "train.stop_on=any"
    )
    with pytest.raises(RunStoppedError, match=message):
        run_training(config, tmp_path / "run")
    assert not checkpoint_directories(tmp_path / "run")
    dump = json.loads((tmp_path / "run" / "stopped.json").read_text(), parse_constant=pytest.fail)
    assert dump["reason"] == "non_finite" and len(dump["image_ids"]) == 12
    assert len(dump["neighbors"]["cls"]) == 4


def test_gradients_that_overflow_half_precision(tmp_path, shards, monkeypatch):
    """As in float16 with too large a loss scale; there is no such mode here."""
    real = loop.clip_each_gradient

    def in_half(network, limit):
        for parameter in network.heads.parameters():
            parameter.grad = (parameter.grad * 2.0**24).half().float() / 2.0**24
        return real(network, limit)

    monkeypatch.setattr(loop, "clip_each_gradient", in_half)
    with pytest.raises(RunStoppedError, match=r"gradient_norm is (inf|nan) at step 1"):
        run_training(tiny_config(tmp_path, f"data.train={shards}", *QUICK), tmp_path / "run")
    dump = json.loads((tmp_path / "run" / "stopped.json").read_text())
    spoiled = {block for block, norm in dump["gradient_norms"].items() if isinstance(norm, str)}
    assert spoiled and all(block.startswith("heads") for block in spoiled)


def test_what_alarms_have_counted_is_saved(tmp_path, shards):
    common = (f"data.train={shards}", *QUICK, *STILL)
    run_training(tiny_config(tmp_path, *common, "train.stop_after_steps=9"), tmp_path / "whole")
    for steps in (4, 9):
        config = tiny_config(tmp_path, *common, f"train.stop_after_steps={steps}")
        run_training(config, tmp_path / "parts", resume=True)
    whole, parts = (read_state(find_checkpoint(tmp_path / name))["alarms"] for name in ("whole", "parts"))
    assert whole == parts
    assert whole["held"]["teacher_uniform"] == 9 and whole["gone_off"]["teacher_uniform"] == 5
    assert set(whole["best"]) == {"embedding_rankme", "feature_rankme"} and len(whole["recent_auc"]) == 9


@pytest.mark.distributed
def test_all_ranks_stop_together(tmp_path, shards):
    launch(tmp_path / "log", ["-m", "sop_faiss.cli.train"], *command(tmp_path, shards, *COLLAPSING), status=3)
    dump = json.loads((tmp_path / "run" / "stopped.json").read_text())
    assert dump["reason"] == "constant_output" and len(dump["image_ids"]) == 12  # of both


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stop_on=sure", "wanted one of non_finite, certain, any"),
        ("train.alarm_warmup_steps=-1", "wanted 0 or more, or null"),
    ],
)
def test_settings_that_mean_nothing_are_refused(tmp_path, shards, override, message):
    result = CliRunner().invoke(main, command(tmp_path, shards, override))
    assert result.exit_code == 1 and message in result.stderr
