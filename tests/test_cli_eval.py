"""sop-eval: tasks on features, and suites of tasks."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

from sop_faiss.cli.eval import main
from sop_faiss.cli.eval_suite import _COMMANDS, _applicable, _check, _tasks
from sop_faiss.config.config_files import packaged_suites
from sop_faiss.errors import RunStoppedError
from sop_faiss.evaluate.trained import training
from sop_faiss.verbs.scoring.eval_suite import Leaderboard
from tests.images import write_folder
from tests.messages import command_fails
from tests.test_cli_knn import RESNET, write_store
from tests.transfers import write_cifar


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def fails(*words: object) -> str:
    return command_fails(main, *words)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    labels = np.arange(30) % 3
    write_store(tmp_path / "data" / "train", 1, labels, 30)
    write_store(tmp_path / "data" / "val", 2, labels, 30)
    return tmp_path / "data"


def test_logistic_regression_of_features(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "l.json"
    result = run("logistic", "--data", data, "--penalty", 0.1, "--penalty", 0.001, "--json", file)
    assert result.exit_code == 0, result.output
    assert "chosen" in result.stdout and "30 test and 30 training images, 3 classes" in result.stdout
    content = json.loads(file.read_text())
    assert content["command"] == "sop-eval logistic" and content["metrics"] == {"top1": 100.0}
    assert content["protocol"]["penalties"] == [0.1, 0.001] and content["protocol"]["held_out_images"] == 3


def test_clusters_of_features(data: Path) -> None:
    result = run("unsupervised", "--train", data / "train", "--test", data / "val", "--json", "-")
    content = json.loads(result.stdout)
    assert content["metrics"] == {"acc": 100.0, "ari": 100.0, "nmi": 100.0, "fmi": 100.0}
    assert content["protocol"]["clusters"] == 3 and content["protocol"]["restarts"] == 5
    assert content["intervals"]["acc"][0] == pytest.approx(88.65, abs=0.01)  # 30 of 30


def test_numbers_without_labels(tmp_path: Path) -> None:
    photos, file = write_folder(tmp_path / "photos", per_class=6), tmp_path / "numbers.json"
    result = run("label-free", *RESNET, "--data", photos, "--images", 10, "--json", file)
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    assert content["protocol"]["images"] == 10 and content["protocol"]["units"]["rankme"] == "directions"
    assert 1 <= content["metrics"]["rankme"] <= 10 and 0 <= content["metrics"]["view_recall_at_1"] <= 100
    assert "rankme (directions)" in result.stdout and f"{content['metrics']['lidar']:.2f}" in result.stdout
    assert "--images 1" in fails("label-free", *RESNET, "--data", photos, "--images", 1)
    assert "--max-bad-fraction" in fails("label-free", *RESNET, "--data", photos, "--max-bad-fraction", "nan")
    assert str(tmp_path / "no") in fails("label-free", *RESNET, "--data", tmp_path / "no")
    assert "--batch-size 0" in fails("label-free", *RESNET, "--data", photos, "--batch-size", 0)
    (photos / "bad.jpg").write_bytes(b"not an image")
    assert "--max-bad-fraction of 0.01" in fails("label-free", *RESNET, "--data", photos)


def test_what_a_user_gets_wrong(data: Path, tmp_path: Path) -> None:
    for task in ("logistic", "unsupervised"):
        assert "--train SRC" in fails(task)
        assert "train/ and val/" in fails(task, "--data", tmp_path)
        assert "encoder's options" in fails(task, "--data", data, "--size", 32)
    assert "--penalty [0.0]" in fails("logistic", "--data", data, "--penalty", 0)
    assert "--clusters 1" in fails("unsupervised", "--data", data, "--clusters", 1)
    assert "--clusters 31" in fails("unsupervised", "--data", data, "--clusters", 31)
    assert "--held-out" in fails("logistic", "--data", data, "--held-out", 0.2, "--penalty", 0.1)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    sets = {
        "train": str(write_folder(tmp_path / "a", per_class=6, seed=1)),
        "test": str(write_folder(tmp_path / "b", per_class=2, seed=2)),
    }
    tasks = {
        "clusters": {"task": "unsupervised", "restarts": 1, **sets},
        "neighbors": {"task": "knn", "k": [3, 5], **sets},
    }
    file = tmp_path / "suite.yaml"
    file.write_text(yaml.safe_dump({"tasks": tasks}, sort_keys=False))
    return file


def test_a_suite_grows_by_a_column_a_model(suite: Path, tmp_path: Path) -> None:
    board = tmp_path / "board"
    first = run("suite", suite, *RESNET, "--name", "one", "--out", board)
    assert first.exit_code == 0 and ".partial" not in first.stderr, first.output
    again = run("suite", suite, *RESNET, "--name", "one", "--out", board)
    assert again.exit_code == 0 and again.stderr.count("already measured") == 2
    other = run("suite", suite, *RESNET, "--size", 48, "--name", "two", "--out", board)
    assert other.exit_code == 0 and "already measured" not in other.stderr
    header, _, *rows = (board / "leaderboard.md").read_text().splitlines()[4:]
    assert header == "| task | one | two |" and rows[0].startswith("| clusters: acc | ")
    assert [row.split(":")[0] for row in rows] == ["| clusters"] * 4 + ["| neighbors"] * (len(rows) - 4)
    content = json.loads((board / "leaderboard.json").read_text())
    assert content["two"]["neighbors"]["protocol"]["preprocess"]["crop"] == 48
    assert "neighbors: top1_k3" in (board / "leaderboard.html").read_text()
    assert not list(board.rglob("*.partial"))
    before = {file: file.read_bytes() for file in board.rglob("*.json")}
    assert "--name" in fails("suite", suite, *RESNET, "--size", 48, "--name", "one", "--out", board)
    for option in ("--json=x.json", "--version"):
        assert "cannot be an option" in fails("suite", suite, *RESNET, "--name", "one", "--out", board, option)
    assert before == {file: file.read_bytes() for file in board.rglob("*.json")}


def test_a_damaged_result_is_named_and_the_others_stay(suite: Path, tmp_path: Path) -> None:
    board = tmp_path / "board"
    for name in ("one", "two"):
        assert run("suite", suite, *RESNET, "--name", name, "--out", board).exit_code == 0
    damaged = board / "results" / "one" / "clusters.json"
    whole = json.loads((board / "results" / "one" / "neighbors.json").read_text())
    contents = ["{", "[" * 10**5, "3", json.dumps({**whole, "metrics": {"a": 10**400}})]
    contents += [json.dumps({**whole, "intervals": odd}) for odd in (3, {"top1_best": [1]}, {"top1_best": "ab"})]
    for content in contents:
        damaged.write_text(content)
        result = run("suite", suite, *RESNET, "--name", "two", "--out", board)
        assert result.exit_code == 1 and f"error: not a result of a task, and so not in the table: {damaged}" in (
            result.stderr
        )
        table = json.loads((board / "leaderboard.json").read_text())
        assert list(table["one"]) == ["neighbors"] and list(table["two"]) == ["clusters", "neighbors"]
    again = run("suite", suite, *RESNET, "--name", "one", "--out", board)
    assert again.exit_code == 0 and again.stderr.count("already measured") == 1, again.output
    assert json.loads((board / "leaderboard.json").read_text())["one"].keys() == table["two"].keys()
    assert json.loads(damaged.read_text())["command"] == "sop-eval unsupervised"


def test_a_table_has_the_intervals(suite: Path, tmp_path: Path) -> None:
    assert run("suite", suite, *RESNET, "--name", "one", "--out", tmp_path / "board").exit_code == 0
    (of_tasks,) = json.loads((tmp_path / "board" / "leaderboard.json").read_text()).values()
    low, high = of_tasks["neighbors"]["intervals"]["top1_k3"]
    top1 = of_tasks["neighbors"]["metrics"]["top1_k3"]
    assert (
        f"| neighbors: top1_k3 | {top1:.2f} [{low:.1f}, {high:.1f}] |"
        in (tmp_path / "board" / "leaderboard.md").read_text()
    )


def test_every_name_of_a_task_is_in_the_table(suite: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(suite.read_text())
    names = ("a", "a.asked", "a.json", "a.partial")
    suite.write_text(yaml.safe_dump({"tasks": dict.fromkeys(names, content["tasks"]["neighbors"])}))
    assert run("suite", suite, *RESNET, "--name", "one", "--out", tmp_path / "board").exit_code == 0
    (table,) = json.loads((tmp_path / "board" / "leaderboard.json").read_text()).values()
    assert sorted(table) == sorted(names)


def test_a_failed_task_does_not_stop_the_others(suite: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "b")
    content = yaml.safe_load(suite.read_text())
    content["tasks"]["clusters"]["test"] = str(write_folder(tmp_path / "c", per_class=2, seed=2))
    suite.write_text(yaml.safe_dump(content))
    result = run("suite", suite, *RESNET, "--out", tmp_path / "board")
    assert result.exit_code == 1 and "1 of 2 tasks failed: neighbors" in result.stderr
    (table,) = json.loads((tmp_path / "board" / "leaderboard.json").read_text()).values()
    assert list(table) == ["clusters"]


def table_of(board: Path) -> dict[str, Any]:
    """Results by task, of the only model."""
    (of_tasks,) = json.loads((board / "leaderboard.json").read_text()).values()
    return dict(of_tasks)


def test_a_stopped_suite_continues_within_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is there after each task, a training goes on where it was stopped, and one that diverges ends alone."""
    write_cifar(tmp_path / "cifar")
    short = {"task": "transfer", "data": "cifar", "quick": True, "epochs": 3, "batch_size": 6, "lr": 1}
    tasks = {"diverges": {**short, "lr": 10, "epochs": 40}, "first": short, "second": {**short, "epochs": 2}}
    file = tmp_path / "trainings.yaml"
    file.write_text(yaml.safe_dump({"tasks": tasks}, sort_keys=False))
    words = ("suite", file, *RESNET, "--root", tmp_path)
    real, steps = training._step, [0]

    def step(trained: training.Training, *more: Any) -> None:
        if trained.setting == "learning_rates=10":
            raise RunStoppedError("the loss is not finite")
        steps[0] += 1
        if steps[0] == 22:  # 15 are of `first`
            os.kill(os.getpid(), signal.SIGTERM)
        real(trained, *more)

    monkeypatch.setattr(training, "_step", step)
    stopped = run(*words, "--out", tmp_path / "board")
    assert stopped.exit_code == 75 and "after step 7 of 10" in stopped.stderr, stopped.output
    assert table_of(tmp_path / "board").keys() == {"first"}
    again = run(*words, "--out", tmp_path / "board")
    assert again.exit_code == 1 and "1 of 3 tasks failed: diverges" in again.stderr, again.output
    assert steps[0] == 25 and not list(tmp_path.rglob("second.state")) and "state:" not in again.stderr
    assert run(*words, "--out", tmp_path / "whole").exit_code == 1
    for name, result in table_of(tmp_path / "whole").items():
        assert table_of(tmp_path / "board")[name]["metrics"] == result["metrics"]


def test_again_removes_what_stands_in_the_place_of_a_state(tmp_path: Path) -> None:
    board = Leaderboard(tmp_path)
    state = board.new_state("model", "task", again=False)
    state.parent.mkdir(parents=True)
    state.write_text("no folder")
    assert board.new_state("model", "task", again=True) == state and not state.exists()
    state.symlink_to(tmp_path / "nothing")
    board.new_state("model", "task", again=True)
    assert not state.is_symlink()
    board.new_state("model", "task", again=True)


def test_options_for_all_tasks_are_left_out_where_they_do_not_apply() -> None:
    shared = ["--model", "m", "--pooling", "mean", "--mirrored", "--size=32", "--cache=c", "--random-weights", "0"]
    own = {kind: _applicable(kind, shared) for kind in _COMMANDS}
    plain = ["--model", "m", "--size=32", "--random-weights", "0"]
    assert own["knn"] == own["retrieve"] == own["robustness"] == shared
    assert own["detect"] == own["segment"] == own["video"] == plain
    assert own["finetune"] == own["transfer"] == ["--model", "m", "--pooling", "mean", *plain[2:]]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("tasks: {}", "tasks"),
        ("[1, 2]", "'tasks:'"),
        ("tasks: {a: {task: sleep}}", "task a"),
        ("tasks: {a: {task: [knn]}}", "task a"),
        ("tasks: {'../a': {task: knn}}", "a name of letters"),
        ("tasks: {a: {task: knn, train: x, test: y, nope: 3}}", "--nope"),
        ("tasks: {a: {task: knn, train: {x: 1}}}", "train"),
        ("tasks: {a: {task: knn, model: x}}", "model"),
        ("tasks: {a: {task: knn, help: true}}", "task a"),
        ("tasks: {a: {task: knn, 'json=x': true}}", "task a"),
        ("tasks: {a: {task: knn, 3: x}}", "task a"),
    ],
)
def test_suites_that_cannot_be_run(content: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(content)
    assert named in fails("suite", tmp_path / "s.yaml", *RESNET, "--out", tmp_path / "board")
    assert not (tmp_path / "board").exists()


def test_a_folder_of_something_else_is_not_a_leaderboard(suite: Path, tmp_path: Path) -> None:
    assert "something else" in fails("suite", suite, *RESNET, "--out", tmp_path / "a")
    assert "letters" in fails("suite", suite, *RESNET, "--name", "../x", "--out", tmp_path / "board")


def test_a_map_is_an_image(data: Path, tmp_path: Path) -> None:
    result = run("map", data / "val", "--out", tmp_path / "map.png", "--method", "pca")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert ".png" in fails("map", data / "val", "--out", tmp_path / "map.jpg")


def test_looks_are_an_image(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "photos", per_class=2, seed=0)
    vit = ("--model", "timm:test_vit", "--random-weights", 0)
    result = run("attention", folder, *vit, "--limit", 2, "--out", tmp_path / "a.png")
    assert result.exit_code == 0 and "patch tokens alone" not in result.stderr, result.output
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    result = run("attention", folder, *RESNET, "--out", tmp_path / "b.png")
    assert result.exit_code == 0 and "patch tokens alone" in result.stderr, result.output
    next((folder / "class_0").iterdir()).write_bytes(b"broken")
    result = run("attention", folder, *vit, "--out", tmp_path / "c.png")
    assert result.exit_code == 0 and "left out" in result.stderr and "class_0" in result.stderr
    assert "--limit 0" in fails("attention", folder, *vit, "--limit", 0, "--out", tmp_path / "c.png")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.jpg").write_bytes(b"nothing")
    assert "can be read" in fails("attention", tmp_path / "bad", *vit, "--out", tmp_path / "c.png")


def test_packaged_suites(tmp_path: Path) -> None:
    """Every task of them is one that its command takes; relative paths are below `--root`."""
    help_text = run("suite", "--help").stdout
    for name, file in packaged_suites().items():
        assert name in help_text and file.read_text().startswith("# ")
        for task, (kind, argv) in _tasks(file, tmp_path).items():
            _check(file, task, _COMMANDS[kind][1], [*argv, "--model", "lite0"])
            paths = [argv[place + 1] for place, word in enumerate(argv) if word in ("--data", "--train", "--data-root")]
            assert (paths and all(path.startswith(str(tmp_path)) for path in paths)) or kind == "retrieve"
    assert "wanted a file, or a packaged one" in fails("suite", "papre", *RESNET, "--out", tmp_path / "board")


def test_a_suite_finds_its_data_below_a_folder(suite: Path, tmp_path: Path) -> None:
    file = tmp_path / "relative.yaml"
    file.write_text("tasks: {neighbors: {task: knn, train: a, test: b, k: 1}}")
    result = run("suite", file, *RESNET, "--root", tmp_path, "--out", tmp_path / "board")
    assert result.exit_code == 0, result.output


def test_a_suite_wants_its_root(suite: Path, tmp_path: Path) -> None:
    for root in (tmp_path / "missing", suite):
        assert "--root" in fails("suite", suite, *RESNET, "--root", root, "--out", tmp_path / "board")
    assert not (tmp_path / "board").exists()
