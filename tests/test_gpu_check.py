"""benchmarks/gpu_check.py: a stage that fails is told, and the others go on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
ANSWERS_SIGTERM = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit({})); time.sleep(60)"


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu_check

    monkeypatch.setattr(gpu_check, "SAVING_SECONDS", 20.0)
    return gpu_check


@pytest.mark.parametrize(
    ("program", "seconds", "status"),
    [
        ("print('done')", 20, 0),
        ("raise SystemExit(3)", 20, 3),
        (ANSWERS_SIGTERM.format(75), 2, 75),  # saved in time
        (ANSWERS_SIGTERM.format(0), 2, None),
    ],
)
def test_a_command_ends_by_itself_or_with_its_time(gpu_check, tmp_path, program, seconds, status):
    log = tmp_path / "stage.log"
    assert gpu_check.run([sys.executable, "-c", program], log, seconds) == status
    assert log.read_text().startswith("$ ")
    if status == 0:
        assert gpu_check.last_line(log) == "done"


def test_a_command_that_does_not_answer_is_killed(gpu_check, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "SAVING_SECONDS", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    assert gpu_check.run([sys.executable, "-c", deaf], tmp_path / "stage.log", 1.0) is None


def test_all_stages_are_gone_through_and_summed_up(gpu_check, tmp_path, monkeypatch):
    def benchmark(topic: str, out: Path, quick: bool):
        if topic == "loss":
            raise KeyError("rows")
        return gpu_check.Outcome(f"bench_{topic}", "FAILED" if topic == "step" else "ok", 1.0, [f"{topic}: told"])

    monkeypatch.setattr(gpu_check, "gpu_tests", lambda out: gpu_check.Outcome("gpu tests", "skipped", 0.0, ["no CUDA"]))
    monkeypatch.setattr(gpu_check, "benchmark", benchmark)
    monkeypatch.setattr(gpu_check, "training", lambda *_: gpu_check.Outcome("training", "ok", 2.0, ["8 steps"]))
    result = CliRunner().invoke(gpu_check.main, ["--out", str(tmp_path / "out"), "--quick"])
    assert result.exit_code == 1
    expected = ["skipped", "ok", "FAILED", "FAILED", "ok"]
    lines = [line.split()[0] for line in result.stdout.splitlines() if line.startswith(("ok", "FAILED", "skipped"))]
    assert lines == expected
    assert "KeyError: 'rows'" in result.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [stage["status"] for stage in summary["stages"]] == expected
    again = CliRunner().invoke(gpu_check.main, ["--out", str(tmp_path / "out")])
    assert again.exit_code == 2 and "not empty" in again.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_the_gpu_tests_are_skipped_in_one_line(gpu_check, tmp_path):
    assert gpu_check.gpu_tests(tmp_path) == gpu_check.Outcome("gpu tests", "skipped", 0.0, ["no CUDA device here"])
    assert not list(tmp_path.iterdir())


def test_what_a_run_tells_of_its_beginning_and_end(gpu_check):
    lines = [
        {"step": 0, "knn_top1_k20": 40.0},
        {"step": 1, "images": 6, "loss": 2.0, "loss_cls_over_lnK": 1.0, "images_per_second": None},
        {"step": 2, "images": 12, "loss": 1.0, "loss_cls_over_lnK": 0.5, "images_per_second": 30.0},
        {"step": 2, "knn_top1_k20": 50.0},
    ]
    assert gpu_check.describe_metrics(lines) == [
        "2 steps, 12 images",
        "loss_cls_over_lnK: 1 at first, 0.5 at last",
        "knn_top1_k20: 40 at first, 50 at last",
        "images_per_second: 30 (median)",
    ]
    assert gpu_check.describe_metrics([]) == ["no step was logged"]
