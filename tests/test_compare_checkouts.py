"""benchmarks/compare_checkouts.py: what counts as a difference, names that were mapped, and what fails as a run."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import click
import pyarrow
import pyarrow.parquet
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
LINES = [
    {"step": 0, "knn_top1_k20": 41.5},
    {"step": 1, "loss": 7.25, "loss_cls": 5.0, "memory_age_cls": None, "images_per_second": 99.0},
    {"step": 2, "loss": 7.125, "loss_cls": 4.5, "memory_age_cls": 3, "images_per_second": 98.0},
]


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.fixture
def differences(load):
    return load("differences")


def write_run(run: Path, lines: list[dict], **files: dict[str, torch.Tensor]) -> Path:
    folder = run / "checkpoints" / "step_00000002"
    folder.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return run


@pytest.mark.parametrize(
    ("a", "b", "size"),
    [
        (1.0, 1, None),
        (math.nan, math.nan, None),
        (None, None, None),
        (0.1 + 0.2, 0.3, 5.551115123125783e-17),
        (0.0, -0.0, 0.0),
        (1.0, None, math.inf),
        (1, True, math.inf),
        (math.nan, 1.0, math.inf),
        ("cls", "patch", math.inf),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), None),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.5, math.inf]), 0.5),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), math.inf),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), math.inf),
        (torch.zeros(2, 3), torch.zeros(3, 2), math.inf),
        (torch.tensor([2**62]), torch.tensor([2**62 + 1]), 0.0),  # beyond float64, and yet a difference
        (torch.tensor(3.0), torch.tensor(2.0), 1.0),
        (torch.empty(0), torch.empty(0), None),
    ],
)
def test_values_are_equal_in_every_bit_or_differ(differences, a, b, size):
    expected = {} if size is None else {"x": size}
    for one, two in ((a, b), (b, a)):
        found = differences.compare({"x": one}, {"x": two})
        assert found.changed == expected
        assert (found.compared, found.count) == (1, len(expected))


def test_a_name_on_one_side_is_a_difference(differences):
    found = differences.compare({"a": 1, "b": 2, "gone": 3}, {"b": 5, "a": 1, "came": 4, "too": 4})
    assert (found.compared, found.count) == (2, 4)
    detail = found.detail()
    assert detail["changed"] == 1 and detail["first"] == detail["largest"] == "b (3)"
    assert (detail["only_old"], detail["only_new"]) == ("1: gone", "2: came, too")


def test_the_first_and_the_largest_differences_are_named(differences):
    sizes = {"a": 1.0, "b": 0.0, "c": 3.0, "d": 2.0, "e": 5.0}
    detail = differences.compare(sizes, dict.fromkeys(sizes, 0.0)).detail(first=2)
    assert detail == {"compared": 5, "changed": 4, "first": "a (1), c (3)", "largest": "e (5)"}


@pytest.mark.parametrize(
    ("rules", "name", "expected"),
    [
        ({}, "loss", "loss"),
        ({"loss.cls_weight=": "sop.cls.weight="}, "loss.cls_weight=0.5", "sop.cls.weight=0.5"),
        ({"cls_weight": "weight"}, "loss.cls_weight=1", "loss.cls_weight=1"),  # only where a name begins so
        ({"re:cls_weight": "weight"}, "loss.cls_weight=1", "loss.weight=1"),
        ({r"re:^(student|teacher)/trunk[.]": r"\1/"}, "teacher/trunk.x", "teacher/x"),
        ({"memories/": "sop/", "sop/cls.": "sop/terms.cls."}, "memories/cls.x", "sop/terms.cls.x"),
        ({"re:^gone=.*$": ""}, "gone=1", ""),
    ],
)
def test_rules_rename_in_their_order(differences, rules, name, expected):
    assert differences.renamed(name, rules) == expected


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("none", "map.json"),
        ("[]", "sections"),
        ('{"tensor": {}}', "tensors"),
        ('{"tensors": {"a": 1}}', "tensors"),
        ('{"metrics": {"re:(": "x"}}', r"re:\("),
        (r'{"metrics": {"re:a": "\\1"}}', "re:a"),
    ],
)
def test_a_map_that_is_none_is_refused(differences, tmp_path, content, named):
    (tmp_path / "map.json").write_text(content)
    with pytest.raises(ValueError, match=named):
        differences.load_map(tmp_path / "map.json")


def test_numbers_are_read_by_name_and_step(differences, tmp_path):
    run = write_run(tmp_path / "run", [*LINES, {"step": 2, "loss": 7.125, "map": 3.5}])
    numbers = differences.read_numbers(run, {"loss_cls": "loss_of_cls", "re:^map$": "mAP"})
    assert numbers == {
        "knn_top1_k20 at step 0": 41.5,
        "loss at step 1": 7.25,
        "loss_of_cls at step 1": 5.0,
        "memory_age_cls at step 1": None,
        "loss at step 2": 7.125,
        "loss_of_cls at step 2": 4.5,
        "memory_age_cls at step 2": 3,
        "mAP at step 2": 3.5,
    }
    assert set(differences.read_numbers(run, {}, after_step=1)) == {
        f"{name} at step 2" for name in ("loss", "loss_cls", "memory_age_cls", "map")
    }
    with pytest.raises(ValueError, match="loss at step 1"):
        differences.read_numbers(run, {"loss_cls": "loss"})


def test_tensors_of_all_files_are_one_set(differences, tmp_path):
    row, bits = torch.randn(3), torch.tensor([1, 2])
    old = write_run(tmp_path / "old", LINES, teacher={"trunk.w": row}, memories={"cls.ids": bits, "draws": bits + 1})
    new = write_run(tmp_path / "new", LINES, teacher={"w": row.clone(), "draws": bits + 1}, terms={"cls.ids": bits})
    for run in (old, new):
        (run / "best").mkdir()
        save_file({"trunk.w" if run is old else "w": row}, run / "best" / "teacher.safetensors")
    (old / "checkpoints" / "step_00000001").mkdir()  # an older one
    rules = {"teacher/trunk.": "teacher/", "memories/draws": "teacher/draws", "memories/": "terms/"}
    read = differences.read_tensors
    found = differences.compare(read(old, rules), read(new, {}))
    assert (found.compared, found.count) == (4, 0)
    del rules["memories/draws"]
    found = differences.compare(read(old, rules, best=False), read(new, {}, best=False))
    assert (found.compared, found.only_old, found.only_new) == (2, ["terms/draws"], ["teacher/draws"])
    with pytest.raises(ValueError, match="terms/"):
        read(old, {"re:^memories/.*": "terms/"})
    with pytest.raises(FileNotFoundError):
        read(tmp_path, {})


def test_a_feature_that_changed_in_its_last_bit_is_found(differences, tmp_path):
    for name, value in (("old", 0.5), ("new", math.nextafter(0.5, 1))):
        (tmp_path / name).mkdir()
        columns = {"key": ["a", "b"], "label": [None, 3], "feature": [[0.0, value], [1.0, 2.0]]}
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / name / "features-00000.parquet")
    found = differences.compare(*(differences.read_features(tmp_path / name) for name in ("old", "new")))
    assert (found.compared, list(found.changed)) == (6, ["feature of a"])


@pytest.fixture
def runs(load):
    return load("checkout_runs")


@pytest.fixture
def side(runs, tmp_path):
    def make(program: str, **settings: str):
        (tmp_path / "program.py").write_text(program)
        return runs.Checkout("new", tmp_path, Path(sys.executable), tmp_path, settings)

    return make


def test_words_of_a_command_are_mapped(runs, side, tmp_path):
    checkout = side("import sys; print(sys.argv[1:])", **{"a=": "b=", "re:^gone=.*": "", "one": "two\nthree=3"})
    assert checkout.run(["program", "a=1", "gone=2", "one", "kept"], "log") == ""
    assert (tmp_path / "log.log").read_text().strip() == "['b=1', 'two', 'three=3', 'kept']"


@pytest.mark.parametrize(
    ("said", "status", "refusal"),
    [
        ("error: the run is of version 0.1: train again", 1, True),
        ("resuming\\nerror: the run was written by sop_faiss 0.1", 1, True),
        ("error: no such model", 1, False),
        ("error: one\\nerror: the run is of version 0.1", 1, False),
        ("Traceback (most recent call last):\\nerror: the run is of version 0.1", 1, False),
        ("error: the run is of version 0.1", 2, False),
    ],
)
def test_a_refusal_is_one_line_that_names_a_version(runs, side, said, status, refusal):
    checkout = side(f"import sys; print('{said}'); sys.exit({status})")
    if refusal:
        assert checkout.run(["program"], "log", may_refuse=True) == said.split("\\n")[-1]
    else:
        with pytest.raises(runs.RunFailed, match="new: log: exit status"):
            checkout.run(["program"], "log", may_refuse=True)
    with pytest.raises(runs.RunFailed):
        checkout.run(["program"], "log")


def test_a_failure_is_told_by_its_last_error(runs, side):
    checkout = side("import sys; print('error: a\\nKeyError: b\\nroot cause:\\n====='); sys.exit(1)")
    with pytest.raises(runs.RunFailed, match=r"exit status 1: KeyError: b$"):
        checkout.run(["program"], "log")


def test_a_python_of_another_checkout_is_refused(runs, tmp_path):
    with pytest.raises(click.UsageError, match="wanted the code of"):
        runs.checkout("new", tmp_path, Path(sys.executable), tmp_path / "work", {})
    with pytest.raises(click.UsageError, match="--old-python"):
        runs.checkout("old", tmp_path, None, tmp_path / "work", {})


def test_each_case_is_a_configuration(runs, tmp_path):
    """Every setting of every case is known and possible."""
    from sop_faiss.config import load_config

    data = {"digits": "digits", "images": "images", "weights": "weights"}
    for case in (*runs.CASES.values(), runs.Case("", "digits_demo", runs.DIGITS)):
        words = runs.training(case, data, tmp_path)
        words = words[words.index("sop_faiss.cli.train") + 1 : words.index("--output")]
        assert load_config(words[0], words[1:]).train.stop_after_steps > case.kill_after_step


def test_the_table_says_what_differs_and_what_failed(load, tmp_path, monkeypatch):
    tool, runs = load("compare_checkouts"), load("checkout_runs")
    changed = [LINES[0], LINES[1] | {"loss": 7.5}, LINES[2]]

    def train(self, name, case, data):
        if name == "swin":
            raise runs.RunFailed(f"{self.side}: exit status 1")
        lines = changed if self.side == "new" and name == "vit" else LINES
        return write_run(tmp_path / self.side / name, lines, student={"w": torch.ones(2)})

    monkeypatch.setattr(tool.Checkout, "train", train)
    monkeypatch.setattr(tool, "make_data", lambda *_: {})
    python = ("--old-python", sys.executable, "--new-python", sys.executable)
    arguments = [str(ROOT), str(ROOT), *python, "--json", str(tmp_path / "rows.json"), "--only"]
    assert CliRunner().invoke(tool.main, [*arguments, "ranks"]).exit_code == 0
    for side in ("old", "new"):
        (tmp_path / side / "ranks").rename(tmp_path / side / "former")
    result = CliRunner().invoke(tool.main, [*arguments, "ranks,vit,swin"])
    assert result.exit_code == 1, result.output
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["what"].split(":")[0], row["ratio"], row["met"]) for row in rows] == [
        *[("ranks", 0, True)] * 3,
        ("vit", 1, False),
        *[("vit", 0, True)] * 2,
        ("swin", None, False),
    ]
    assert rows[3]["detail"]["first"] == "loss at step 1 (0.25)"
    assert "exit status 1" in rows[-1]["detail"]["failed"]
    assert CliRunner().invoke(tool.main, [*arguments, "no_case"]).exit_code == 2
