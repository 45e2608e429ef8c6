"""A study from its file to its results: what runs, what does not run again, and what the tables say."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from sop_faiss.config import to_yaml
from sop_faiss.config.study import load_study
from sop_faiss.errors import ConfigError, DataError, SopError
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.verbs.study import study as verb
from sop_faiss.verbs.study.clock import StepClock
from sop_faiss.verbs.study.folder import StudyFolder
from sop_faiss.verbs.study.one_run import run_one
from sop_faiss.verbs.study.plan import arm_configs, check_arms
from sop_faiss.verbs.study.study import StudyResult, Where, run_study
from sop_faiss.verbs.study.study_page import short_commit
from tests.images import write_folder
from tests.messages import assert_one_line
from tests.pages import Page
from tests.runs import tiny_config
from tests.studies import SMALL, runs_here, study_file

WHERE = Where(("sop-study",))
NAMES = ["tasks=1/seed_0", "tasks=2/seed_0", "tasks=1/seed_1", "tasks=2/seed_1"]


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "photos", classes=2, per_class=12, size=20)


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """The runs that are started, in this process."""
    started: list[str] = []
    monkeypatch.setattr(verb, "run_on_this_machine", runs_here(lambda job: started.append(job.name)))
    return started


@pytest.fixture(scope="module")
def whole(tmp_path_factory, images) -> Path:
    """A study that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verb, "run_on_this_machine", runs_here())
        run_study(load_study(study_file(folder, images)), folder / "out", WHERE, title="Tiny")
    return folder / "out"


def run(file: Path, out: Path, *overrides: str, **options: object) -> StudyResult:
    return run_study(load_study(file, overrides), out, WHERE, **options)


def losses(out: Path, name: str) -> list[float]:
    return [line["loss"] for line in read_metrics(out / "runs" / name) if "loss" in line]


def table_of(out: Path) -> dict[str, dict[str, object]]:
    rows = pq.read_table(out / "study.parquet").to_pylist()
    return {f"{row['arm']}/seed_{row['seed']}": row for row in rows}


def test_the_table_says_what_the_runs_say(whole):
    """One row a run; every score against the run's own records."""
    rows = table_of(whole)
    assert list(rows) == NAMES
    for name, row in rows.items():
        lines = [line for line in read_metrics(whole / "runs" / name) if "loss" not in line]
        assert row["status"] == "done" and row["error"] is None and row["steps"] == 4 and row["images"] == 16
        assert row["sop.cls.tasks"] == int(str(row["arm"])[-1])
        assert row["by_step.steps"] == [0, 2, 4] and row["by_step.images"] == [0, 8, 16]
        assert row["by_step.knn_top1_k3"] == [line["knn_top1_k3"] for line in lines]
        seconds = row["by_step.seconds"]
        assert seconds[0] == 0 < seconds[1] <= seconds[2] == pytest.approx(row["seconds"], abs=2e-3)
        # the last teacher, measured by the command's own task on the images held out
        assert row["score.knn_top1_k3"] == pytest.approx(lines[-1]["knn_top1_k3"])
        assert row["peak_memory_bytes"] > 2**20 and row["device"] == "cpu" and row["torch"]
    assert len({tuple(losses(whole, name)) for name in NAMES}) == 4


def test_means_and_differences_are_those_of_a_loop(whole):
    rows = table_of(whole)
    scores = {name: float(row["score.knn_top1_k3"]) for name, row in rows.items()}  # type: ignore[arg-type]
    one, two = ([scores[f"tasks={k}/seed_{seed}"] for seed in (0, 1)] for k in (1, 2))
    half = 12.706204736432095 * np.std(one, ddof=1) / np.sqrt(2)  # t(0.975, 1)
    text = (whole / "study.md").read_text()
    assert f"| tasks=1 | 2 of 2 | {np.mean(one):.2f} ± {half:.2f} | 4 |" in text
    differences = [b - a for a, b in zip(one, two, strict=True)]
    half = 12.706204736432095 * np.std(differences, ddof=1) / np.sqrt(2)
    assert f"| tasks=2 | 2 | {np.mean(differences):+.2f} ± {half:.2f} |" in text


def test_numbers_without_labels_are_judged_where_they_are_measured(whole, tmp_path, images, made):
    """By the score with labels next to them; the tables say what a loop over the runs finds."""
    settings = {**SMALL, "data.train": str(images), "evaluate.label_free": True}
    result = run(study_file(tmp_path, images, settings=settings, final=None), tmp_path / "out")
    keep, stop = (table for table in result.tables if "knn_top1_k3" in table.caption)
    rows = table_of(tmp_path / "out").values()
    best = max(rows, key=lambda row: row["by_step.rankme"][-1])
    regret = max(row["score.knn_top1_k3"] for row in rows) - best["score.knn_top1_k3"]
    (shown,) = [row for row in keep.rows if row[0] == "rankme"]
    assert shown[1:3] == ["highest", "4"] and float(shown[-1].split()[0]) == pytest.approx(regret, abs=0.006)
    picked = [row["by_step.knn_top1_k3"][int(np.argmax(row["by_step.rankme"]))] for row in rows]
    gain = np.mean([score - row["by_step.knn_top1_k3"][0] for score, row in zip(picked, rows, strict=True)])
    (shown,) = [row for row in stop.rows if row[0] == "rankme"]
    assert float(shown[-1].split()[0]) == pytest.approx(gain, abs=0.006)
    assert {row[0] for row in stop.rows} >= {"view_recall_at_1", "lidar", "feature_rankme", "step"}
    assert result.tables[0].columns[2:5] == ["knn_top1_k3 (%)", "view_recall_at_1 (%)", "rankme (directions)"]
    assert keep.caption in (tmp_path / "out" / "study.md").read_text()
    assert "Which run to keep" not in (whole / "study.md").read_text()


def test_the_page_stands_alone(whole):
    page = Page((whole / "study.html").read_text())
    sources = [attrs["src"] for attrs in page.of("img")]
    assert len(sources) == 3 and all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert {"Scores against images", "Scores against minutes", "sop.cls.tasks"} <= {*page.texts}
    assert all(attrs["alt"] for attrs in page.of("img"))


def test_the_commit_of_changed_code_is_marked():
    assert [short_commit(commit) for commit in ("a" * 40, "a" * 40 + "+", "", "abc+")] == [
        "a" * 10, "a" * 10 + "+", "", "abc+",
    ]  # fmt: skip


def test_a_run_is_an_ordinary_run_directory(whole, tmp_path, images):
    """The same run by itself has the same losses."""
    from sop_faiss.config import load_run_config
    from sop_faiss.verbs.training.train import run_training

    config = load_run_config(whole / "runs" / NAMES[0] / "config.yaml")
    assert (config.train.epochs, config.train.stop_after_steps) == (pytest.approx(4 / 3), 0)
    run_training(config, tmp_path / "alone")
    alone = [line["loss"] for line in read_metrics(tmp_path / "alone") if "loss" in line]
    assert alone == losses(whole, NAMES[0])


def test_what_is_there_is_not_run_again(whole, tmp_path, images, made):
    out = shutil.copytree(whole, tmp_path / "out")
    result = run(study_file(tmp_path, images, base=str(whole.parent / "tiny.yaml")), out)
    assert made == [] and result.unfinished == 0 and table_of(out) == table_of(whole)


@pytest.mark.slow
def test_seeds_can_be_added(whole, tmp_path, images, made):
    out = shutil.copytree(whole, tmp_path / "out")
    file = study_file(tmp_path, images, base=str(whole.parent / "tiny.yaml"))
    result = run(file, out, "seeds=[0,1,5]", compare="tasks=2")
    assert made == ["tasks=1/seed_5", "tasks=2/seed_5"]
    assert "Difference to tasks=2" in result.tables[1].caption and result.tables[1].rows[0][:2] == ["tasks=1", "3"]


def test_killed_it_goes_on(whole, tmp_path, images, monkeypatch):
    """Killed within the second run; the results are those of an undisturbed study."""

    class Killed(BaseException):
        pass

    real, calls = StepClock.__call__, 0

    def kill_at(self: StepClock, step: int, last: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 8:  # after the checkpoint of step 3
            raise Killed
        real(self, step, last)

    file = study_file(tmp_path, images, base=str(whole.parent / "tiny.yaml"), seeds=[0])
    started: list[str] = []
    monkeypatch.setattr(verb, "run_on_this_machine", runs_here(lambda job: started.append(job.name)))
    monkeypatch.setattr(StepClock, "__call__", kill_at)
    with pytest.raises(Killed):
        run(file, tmp_path / "out")
    assert started == NAMES[:2] and not (tmp_path / "out" / "study.parquet").exists()
    started.clear()
    run(file, tmp_path / "out")
    assert started == [NAMES[1]]
    found, wanted = table_of(tmp_path / "out"), table_of(whole)
    for name in NAMES[:2]:
        assert losses(tmp_path / "out", name) == losses(whole, name)
        for key in ("score.knn_top1_k3", "by_step.knn_top1_k3", "steps"):
            assert found[name][key] == wanted[name][key]


@pytest.mark.slow
def test_a_run_that_was_saved_on_a_signal_is_not_finished(tmp_path, images, monkeypatch):
    real = StepClock.__call__

    def stop(self: StepClock, step: int, last: int) -> None:
        real(self, step, last)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(verb, "run_on_this_machine", runs_here())
    file = study_file(tmp_path, images, axes={}, seeds=[0])
    with monkeypatch.context() as patch:
        patch.setattr(StepClock, "__call__", stop)
        result = run(file, tmp_path / "out")
    assert result.unfinished == 1 and not result.failed
    assert run(file, tmp_path / "out").unfinished == 0
    assert table_of(tmp_path / "out")["base/seed_0"]["steps"] == 4


def test_a_failed_run_is_reported_and_the_rest_goes_on(whole, tmp_path, images, monkeypatch):
    def fail(job):
        assert job.name == NAMES[1]
        raise DataError("the disk has <b>gone</b>")

    out = shutil.copytree(whole, tmp_path / "out")
    (out / "runs" / f"{NAMES[1]}.json").unlink()
    file = study_file(tmp_path, images, base=str(whole.parent / "tiny.yaml"))
    monkeypatch.setattr(verb, "run_on_this_machine", runs_here(fail))
    result = run(file, out)
    assert [each.planned.name for each in result.failed] == [NAMES[1]] and result.unfinished == 0
    row = table_of(out)[NAMES[1]]
    assert (row["status"], row["score.knn_top1_k3"]) == ("failed", None) and "gone" in str(row["error"])
    assert result.tables[0].rows[1][:2] == ["tasks=2", "1 of 2"] and "(1 seed)" in result.tables[0].rows[1][2]
    assert result.tables[1].rows[0][1] == "1"  # one seed is shared
    page = (out / "study.html").read_text()
    assert "&lt;b&gt;gone&lt;/b&gt;" in page and "<b>gone" not in page
    monkeypatch.setattr(verb, "run_on_this_machine", runs_here())
    assert not run(file, out).failed  # its training was complete: only the measuring is repeated
    assert table_of(out)[NAMES[1]]["steps"] == 4


def test_damaged_records_are_named_with_a_remedy(whole, tmp_path):
    folder = StudyFolder(shutil.copytree(whole, tmp_path / "out"))
    good = folder.record(NAMES[0])
    wrong = [{name: value for name, value in good.items() if name != gone} for gone in ("scores", "steps", "commit")]
    for bad in ("", "{", "[]", *map(json.dumps, [*wrong, {"status": "done"}, good | {"scores": {"a": "b"}}])):
        folder.record_file(NAMES[0]).write_text(bad)
        with pytest.raises(SopError, match=r"\.json is damaged: remove it, and the run is finished again$"):
            folder.record(NAMES[0])
    folder.probe("base").parent.mkdir()
    for bad in ("", "[3]", "{}", *(f'{{"seconds_per_step": {value}}}' for value in ('"fast"', "0", "NaN"))):
        folder.probe("base").write_text(bad)
        with pytest.raises(SopError, match=r"\.json is damaged: remove it, and the speed is measured again$"):
            folder.step_seconds("base")


def test_a_budget_that_was_used_up_by_lost_steps_is_not_over(tmp_path, images, monkeypatch):
    """Killed at its limit before anything was saved: there is no checkpoint to measure."""

    class Trained(Exception):
        pass

    def train(*_: object, **__: object) -> None:
        raise Trained

    monkeypatch.setattr("sop_faiss.verbs.study.one_run.run_training", train)
    folder = StudyFolder(tmp_path / "out")
    for file in (folder.plan(NAMES[0]), folder.clock(NAMES[0])):
        file.parent.mkdir(parents=True, exist_ok=True)
    folder.study_file.write_text(load_study(study_file(tmp_path, images, budget={"minutes": 0.02})).to_yaml())
    folder.plan(NAMES[0]).write_text(to_yaml(tiny_config(tmp_path, f"data.train={images}")))
    folder.clock(NAMES[0]).write_text('{"step": 2, "seconds": 99.0}\n')
    with pytest.raises(Trained):
        run_one(tmp_path / "out", NAMES[0])
    assert not folder.clock(NAMES[0]).read_text()


@pytest.mark.slow
def test_a_budget_of_minutes_is_met_by_the_schedule_or_stopped(tmp_path, images, monkeypatch):
    """A trial of each arm sets the number of steps; an arm that is slower afterwards is stopped, and still scored."""
    monkeypatch.setattr(verb, "run_on_this_machine", runs_here())
    monkeypatch.setattr("sop_faiss.verbs.study.one_run._PROBE_STEPS", 5)
    settings = {**SMALL, "data.train": str(images), "optim.warmup_epochs": 0}
    file = study_file(tmp_path, images, budget={"minutes": 0.02}, seeds=[0], settings=settings)
    probes = tmp_path / "out" / "probes"
    probes.mkdir(parents=True)
    (probes / "tasks=2.json").write_text('{"seconds_per_step": 1e-5}')  # a lie: it is far slower, and will be stopped
    (tmp_path / "out" / "study.yaml").write_text(load_study(file).to_yaml())
    run(file, tmp_path / "out")
    speed = json.loads((probes / "tasks=1.json").read_text())["seconds_per_step"]
    rows = table_of(tmp_path / "out")
    planned, row = int(1.2 / speed), rows["tasks=1/seed_0"]
    assert row["steps"] == planned or row["seconds"] >= 1.2
    assert 0 < rows["tasks=2/seed_0"]["steps"] < 120_000 and rows["tasks=2/seed_0"]["seconds"] >= 1.2
    assert all(row["score.knn_top1_k3"] is not None for row in rows.values())
    assert [path.name for path in sorted(probes.iterdir())] == ["tasks=1.json", "tasks=2.json"]
    assert run(file, tmp_path / "out").unfinished == 0


def test_a_trial_weighs_the_phases_by_their_steps(tmp_path, images, monkeypatch):
    from sop_faiss.verbs.study import one_run

    sizes = []

    def measured(config, place, arm):
        sizes.append(config.views.global_size)
        assert not config.train.phases
        return config.views.global_size / 100, 7

    monkeypatch.setattr(one_run, "_measure", measured)
    phases = [{"until": 0.7, "global_size": 8}]
    settings = {**SMALL, "data.train": str(images), "train.phases": phases}
    file = study_file(tmp_path, images, budget={"minutes": 0.02}, seeds=[0], settings=settings)
    (tmp_path / "out" / "probes").mkdir(parents=True)
    (tmp_path / "out" / "study.yaml").write_text(load_study(file).to_yaml())
    one_run.probe_arm(tmp_path / "out", "tasks=1")
    found = json.loads((tmp_path / "out" / "probes" / "tasks=1.json").read_text())
    assert sizes == [8, 16] and found["seconds_per_step"] == pytest.approx(0.7 * 0.08 + 0.3 * 0.16)


def test_bad_studies_are_refused_before_anything_is_written(tmp_path, images, made):
    def refused(kind: type[SopError], *parts: str, **changes: object) -> None:
        with pytest.raises(kind) as error:
            run(study_file(tmp_path, images, **changes), tmp_path / "out")
        assert_one_line(error, *parts)
        assert not (tmp_path / "out").exists() and made == []

    refused(ConfigError, "sop.cls.task", "sop.cls.tasks", axes={"sop.cls.task": [1, 2]})
    refused(ConfigError, "same run", "first", "second", axes={"a": {"first": {}, "second": {"sop.cls.tasks": 2}}})
    refused(ConfigError, "one batch", "tasks=1", budget={"images": 3})
    refused(ConfigError, "cannot meet", "warmup_epochs", budget={"steps": 1})
    refused(ConfigError, "arm backbone=nope:", "timm", axes={"model.backbone": ["vit_tiny_patch16_224", "nope"]})
    refused(ConfigError, "arm depth=0", "model.depth", axes={"model.depth": [1, 0]})
    refused(ConfigError, "arm global_size=18:", "patch", axes={"views.global_size": [16, 18]})
    refused(ConfigError, "arm init=gone:", "model.init", axes={"model.init": ["", "gone"]})
    refused(ConfigError, "arm batch_size=99:", "exceeds", axes={"train.batch_size": [4, 99]}, budget={"minutes": 1})
    refused(DataError, "arm train=nowhere:", axes={"data.train": ["nowhere"]}, budget={"minutes": 1})
    refused(DataError, "arm b:", "nowhere", axes={"x": {"a": {}, "b": {"evaluate.retrieval": "nowhere"}}})
    refused(ConfigError, "num_anchors", "capacity", axes={"sop.cls.num_anchors": [4, 4096]})
    refused(ConfigError, "final.ks", final={"tasks": ["knn"], "ks": [500]})
    refused(ConfigError, "final.retrieval", final={"tasks": ["retrieval"]})
    refused(DataError, "nowhere", final={"tasks": ["knn"], "train": "nowhere", "test": "nowhere"})
    with pytest.raises(ConfigError) as error:
        run(study_file(tmp_path, images), tmp_path / "out", compare="tasks=9")
    assert error.value.arguments == ("compare",)


def test_arms_are_checked_unless_what_they_start_from_is_gone_or_not_made_yet(tmp_path, images):
    def later(*arms: str, init: str = "", seeds: Sequence[int] = (0,)) -> list[bool]:
        study = load_study(study_file(tmp_path, images, seeds=list(seeds)))
        return [StudyFolder(tmp_path / "out").starts_later(arm, study, init) for arm in arms]

    (tmp_path / "out" / "runs" / "a" / "seed_0").mkdir(parents=True)
    assert later("a", "b") == [True, False]
    assert later("a", "b", seeds=(0, 1)) == [False, False]
    assert later("b", init=str(tmp_path / "out" / "runs" / "a" / "seed_1")) == [True]
    assert later("b", init=str(tmp_path / "out" / "runs" / "a" / "seed_0")) == [False]
    assert later("b", init=str(tmp_path / "gone")) == [False]


def test_what_an_unchecked_arm_has_in_common_with_another_is_checked(tmp_path, images):
    study = load_study(
        study_file(
            tmp_path,
            images,
            axes={"sop.cls.tasks": [1, 2]},
            settings={**SMALL, "data.train": str(images), "model.init": "gone"},
        )
    )
    arms = arm_configs(study)
    first, second = arms
    with pytest.raises(ConfigError, match=f"arm {second}: .*gone"):
        check_arms(arms, {first})


def test_arms_with_low_rank_additions_are_checked(tmp_path, images):
    small = {"data.train": str(images), "sop.cls.num_anchors": 4, "train.batch_size": 4, "evaluate.every_steps": 0}
    changes = {"base": "continue_conv", "settings": small, "axes": {"model.lora.rank": [0, 2]}, "final": None}
    study = load_study(study_file(tmp_path, images, **changes))
    assert len(check_arms(arm_configs(study))) == 2


def test_another_study_in_the_directory_loses_nothing(whole, tmp_path, images, made):
    out = shutil.copytree(whole, tmp_path / "out")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    base = str(whole.parent / "tiny.yaml")
    for part, changes in {
        "budget": {"budget": {"steps": 5}},
        "seed 1": {"seeds": [0]},
        "arm tasks=2": {"axes": {"sop.cls.tasks": [1]}},
        "optim.base_lr": {"axes": {"optim.base_lr": [0.1, 0.2]}, "settings": {"optim.base_lr": 1.0}},
    }.items():
        with pytest.raises(ConfigError, match="another study") as error:
            run(study_file(tmp_path, images, **{"base": base, **changes}), out)
        assert_one_line(error, part if part != "optim.base_lr" else "settings")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before and made == []
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(SopError, match="not empty"):
        run(study_file(tmp_path, images), other)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


def test_a_run_of_a_base_that_has_changed_is_refused(whole, tmp_path, images, made):
    out = shutil.copytree(whole, tmp_path / "out")
    base = whole.parent / "tiny.yaml"
    original = base.read_text()
    base.write_text(original.replace("base_lr: 0.01", "base_lr: 0.02"))
    try:
        with pytest.raises(ConfigError) as error:
            run(study_file(tmp_path, images, base=str(base)), out)
    finally:
        base.write_text(original)
    assert_one_line(error, "tasks=1/seed_0", "optim.base_lr = 0.01")


def test_two_studies_in_one_directory(whole, tmp_path, images, monkeypatch):
    out = shutil.copytree(whole, tmp_path / "out")
    file = study_file(tmp_path, images, base=str(whole.parent / "tiny.yaml"))

    def again(job):
        with pytest.raises(ConfigError, match="running") as error:
            run(file, out, "seeds=[0,1,2]")
        assert "out" in error.value.arguments
        raise DataError("seen")

    monkeypatch.setattr(verb, "run_on_this_machine", runs_here(again))
    assert len(run(file, out, "seeds=[0,1,2]").failed) == 2


@pytest.mark.slow
def test_without_data_the_built_in_digits_are_used(tmp_path, images, made, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(verb, "run_on_this_machine", lambda *args: (each for each in ()))
    settings = {"data.decoded_cache_bytes": 10_000_000}
    file = study_file(tmp_path, images, base="digits_demo", made_data="digits", settings=settings, budget={"steps": 70})
    result = run(file, tmp_path / "out", 'final.tasks=["knn","retrieval"]')
    assert result.unfinished == 4
    planned = result.results[0].planned.config
    data = tmp_path / "out" / "data"
    assert (planned.data.train, planned.evaluate.test) == (str(data / "train"), str(data / "test"))
    assert load_study(tmp_path / "out" / "study.yaml").final.retrieval == str(data / "retrieval")
