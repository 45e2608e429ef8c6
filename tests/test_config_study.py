"""The file of a study: what it may hold, what it becomes, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sop_faiss.config.study import BudgetConfig, load_study, packaged_studies
from sop_faiss.errors import ConfigError
from sop_faiss.verbs.study.plan import arm_configs
from tests.messages import assert_one_line

ROOT = Path(__file__).resolve().parent.parent


def written(folder: Path, content: object) -> Path:
    file = folder / "study.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return file


@pytest.mark.parametrize("quick", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", sorted(packaged_studies()))
def test_every_packaged_study_is_possible(name, quick):
    study = load_study(name, quick=quick)
    assert len(arm_configs(study)) >= 3 and len(study.seeds) >= 2
    assert study.budget.steps or study.budget.images or study.settings["train.stop_after_steps"]
    assert bool(study.made_data) == quick
    assert f"`{name}`" in (ROOT / "docs" / "studies.md").read_text()


def test_arms_are_all_combinations(tmp_path):
    axes = {
        "sop.cls.tasks": [1, 2],
        "sop.patch.tasks": [3],
        "method": {"plain": {}, "warm": {"optim": {"warmup_epochs": 2}, "sop.fill": "teacher"}},
    }
    study = load_study(written(tmp_path, {"base": "digits_demo", "axes": axes, "settings": {"train": {"epochs": 9}}}))
    assert [arm.name for arm in study.arms()] == [
        "cls.tasks=1,patch.tasks=3,plain",
        "cls.tasks=1,patch.tasks=3,warm",
        "cls.tasks=2,patch.tasks=3,plain",
        "cls.tasks=2,patch.tasks=3,warm",
    ]
    assert study.arms()[3].settings == {
        "sop.cls.tasks": 2,
        "sop.patch.tasks": 3,
        "optim.warmup_epochs": 2,
        "sop.fill": "teacher",
    }
    assert study.settings == {"train.epochs": 9} and study.seeds == (0, 1, 2) and study.budget == BudgetConfig()
    assert [arm.name for arm in load_study(written(tmp_path, {"base": "digits_demo"})).arms()] == ["base"]


@pytest.mark.parametrize("name", sorted(packaged_studies()))
def test_what_is_written_reads_as_the_same_study(name, tmp_path):
    study = load_study(name, ["data.train=a b/{0..3}.tar", "budget.minutes=2", "seeds=[4]"], quick=True)
    assert load_study(written(tmp_path, study.to_yaml())) == study


def test_overrides_are_of_the_study_or_of_its_runs(tmp_path):
    content = {"base": "digits_demo", "budget": {"steps": 3}, "final": {"tasks": ["knn"], "ks": [5]}, "jobs": 2}
    given = ["budget.images=640", "final.ks=[7]", "train.batch_size=8", "settings.optim.beta1=0.5", "seeds=[3]"]
    study = load_study(written(tmp_path, content), given)
    assert study.budget == BudgetConfig(images=640) and study.seeds == (3,) and study.jobs == 2
    assert (study.final.tasks, study.final.ks) == (("knn",), (7,))
    assert study.settings == {"train.batch_size": 8, "optim.beta1": 0.5}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"seeds": [1, 2, 1]}, ("seeds", "1")),
        ({"seeds": []}, ("seeds",)),
        ({"seeds": 3}, ("seeds", "list")),
        ({"seeds": ["a"]}, ("seeds", "whole number")),
        ({"seeds": [True]}, ("seeds", "whole number")),
        ({"seeds": [-1]}, ("seeds", "-1")),
        ({"seeds": [2**70]}, ("seeds",)),
        ({"base": ""}, ("base",)),
        ({"base": None}, ("base",)),
        ({"axis": {}}, ("axis", "did you mean axes")),
        ({"axes": [1]}, ("axes",)),
        ({"axes": {"sop.cls.tasks": 3}}, ("axes.sop.cls.tasks", "list")),
        ({"axes": {"sop.cls.tasks": []}}, ("axes.sop.cls.tasks", "empty")),
        ({"axes": {"sop.cls.tasks": [1, 1]}}, ("tasks=1", "twice")),
        ({"axes": {"model.init": ["a/b"]}}, ("init=a/b", "name")),
        ({"axes": {"a": {"..": {"sop.eps": 0.1}}}}, ("..",)),
        ({"axes": {"a": {"x" * 300: {"sop.eps": 0.1}}}}, ("x",)),
        ({"axes": {"a": {"x": {"sop.eps": 0.1}, "X": {"sop.eps": 0.2}}}}, ("X",)),
        ({"axes": {"a": {"x": {"train.seed": 1}}}}, ("train.seed", "seeds")),
        ({"axes": {"sop.eps": [0.1], "a": {"x": {"sop.eps": 0.2}}}}, ("two axes", "sop.eps")),
        ({"axes": {f"a{n}": {f"c{m}": {} for m in range(50)} for n in range(4)}}, ("18,750,000", "runs")),
        ({"settings": {"train.seed": 3}}, ("settings", "train.seed")),
        ({"settings": 3}, ("settings",)),
        ({"budget": {"steps": 3, "minutes": 1}}, ("steps and minutes",)),
        ({"budget": {"steps": -3}}, ("budget.steps",)),
        ({"budget": {"steps": 1.5}}, ("budget.steps", "whole number")),
        ({"budget": {"minutes": float("nan")}}, ("budget.minutes",)),
        ({"budget": {"hours": 1}}, ("budget.hours",)),
        ({"budget": 100}, ("budget",)),
        ({"final": {"tasks": ["kmeans"]}}, ("final.tasks", "kmeans")),
        ({"final": {"tasks": ["knn", "knn"]}}, ("final.tasks",)),
        ({"final": {"ks": [0]}}, ("final.ks",)),
        ({"final": {"linear_epochs": 0}}, ("final.linear_epochs",)),
        ({"final": {"test": "a"}}, ("final.train",)),
        ({"jobs": 0}, ("jobs",)),
        ({"threads": 10**6}, ("threads",)),
        ({"made_data": "cats"}, ("made_data", "digits")),
        ({"base": "\x1b[31mred\n" * 99}, ("config",)),
    ],
    ids=str,
)
def test_a_bad_study_is_one_line(tmp_path, change, parts):
    with pytest.raises(ConfigError) as error:
        arm_configs(load_study(written(tmp_path, {"base": "digits_demo", **change})))
    assert_one_line(error, *parts)
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    ("axes", "parts"),
    [
        ({"sop.cls.num_anchor": [4, 8]}, ("sop.cls.num_anchor", "did you mean sop.cls.num_anchors")),
        ({"nonsense": [4, 8]}, ("nonsense",)),
        ({"sop.cls": [4, 8]}, ("sop.cls",)),
        ({"sop.fill": ["random", "nothing"]}, ("fill=nothing", "teacher")),
        ({"optim.base_lr": [0.1, "fast"]}, ("base_lr=fast", "optim.base_lr")),
        ({"sop.cls.num_anchors": [8, 4096]}, ("num_anchors=4096", "capacity")),
        ({"a": {"x": {}, "y": {"sop.cls.tasks": 1}}}, ("x", "y", "same run")),
    ],
    ids=str,
)
def test_an_axis_that_the_configuration_cannot_follow(tmp_path, axes: dict[str, Any], parts):
    with pytest.raises(ConfigError) as error:
        arm_configs(load_study(written(tmp_path, {"base": "digits_demo", "axes": axes})))
    assert_one_line(error, *parts)


def test_files_that_are_not_studies(tmp_path):
    for content in ("", "3", "- a\n- b", "base: [", "\0", "base: ${oc.env:HOME}"):
        with pytest.raises(ConfigError) as error:
            load_study(written(tmp_path, content))
        assert_one_line(error, "study.yaml")
    with pytest.raises(ConfigError) as error:
        load_study("num_sop")
    assert_one_line(error, "did you mean num_sops")
    with pytest.raises(ConfigError, match="quick"):
        load_study(written(tmp_path, {"base": "digits_demo"}), quick=True)
