"""`sop-study` as a user types it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from sop_faiss.cli.study import main
from sop_faiss.errors import DataError
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.verbs.study import study as verb
from tests.images import write_folder
from tests.messages import command_fails
from tests.studies import runs_here, study_file


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "photos", classes=2, per_class=12, size=20)


def test_the_help_lists_the_packaged_studies():
    result = CliRunner().invoke(main, ["--help"])
    words = " ".join(result.stdout.split())
    assert "num_sops Number of prototypes (SOPs) per task for [CLS], K" in words and "Examples:" in words
    assert "--driver" not in words and "--probe" not in words


@pytest.mark.slow
def test_a_study_prints_its_tables_and_says_what_failed(tmp_path, images, monkeypatch):
    def fail(job):
        if job.name == "tasks=2/seed_0":
            raise DataError("no more images")

    monkeypatch.setattr(verb, "run_on_this_machine", runs_here(fail))
    words = [str(study_file(tmp_path, images)), "seeds=[0]", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1 and "Traceback" not in result.stderr
    assert "failed: tasks=2/seed_0: error: no more images" in result.stderr
    assert "tasks=1" in result.stdout and "1 of 1" in result.stdout and "0 of 1" in result.stdout
    monkeypatch.setattr(verb, "run_on_this_machine", runs_here())
    result = CliRunner().invoke(main, [*words, "--compare", "tasks=2"])
    assert result.exit_code == 0 and "Difference to tasks=2" in result.stdout
    assert f"page: {tmp_path / 'out' / 'study.html'}" in result.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_asks_for_the_same_command_again(number, status, tmp_path, images, monkeypatch):
    def end(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr(verb, "run_on_this_machine", end)
    result = CliRunner().invoke(main, [str(study_file(tmp_path, images)), "--out", str(tmp_path / "out")])
    assert result.exit_code == status and "the same command continues" in result.stderr


def test_bad_words_are_one_line(tmp_path, images, monkeypatch):
    monkeypatch.setattr(verb, "run_on_this_machine", runs_here())
    file, out = study_file(tmp_path, images), tmp_path / "out"
    (tmp_path / "file").write_text("mine")
    assert "num_sops" in command_fails(main, "num_sop", "--out", out)
    assert "seeds" in command_fails(main, file, "seeds=[1,1]", "--out", out)
    assert "budget.steps" in command_fails(main, file, "budget.steps=0", "--out", out)
    assert "--compare" in command_fails(main, file, "--out", out, "--compare", "tasks=7")
    assert "did you mean train" in command_fails(main, file, "tran.batch_size=3", "--out", out)
    assert "key=value" in command_fails(main, file, "nonsense", "--out", out)
    assert "quick" in command_fails(main, file, "--quick", "--out", out)
    assert "--slurm" in command_fails(main, file, "budget.minutes=1", "--out", out, "--slurm", tmp_path / "s")
    assert "Ray" in command_fails(main, file, "--out", out, "--cluster", "127.0.0.1:1")
    command_fails(main, file, "--out", tmp_path / "file")
    command_fails(main, file, "--out", tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"
    for words in (["--run", "tasks=9/seed_0"], ["--run", "../../x"]):
        command_fails(main, file, "--out", tmp_path / "nowhere", *words)
    assert not (tmp_path / "nowhere").exists()


def test_slurm_writes_a_script_and_runs_nothing(tmp_path, images, monkeypatch):
    def none(*arguments):
        raise AssertionError("started")

    monkeypatch.setattr(verb, "run_on_this_machine", none)
    words = [str(study_file(tmp_path, images)), "--out", str(tmp_path / "out"), "--slurm", str(tmp_path / "s.sbatch")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0 and "script: " in result.stderr, result.output
    commands = (tmp_path / "out" / "commands.txt").read_text().splitlines()
    assert len(commands) == 4 and "--run tasks=1/seed_0 >> " in commands[0]
    assert "--array=0-3%1" in (tmp_path / "s.sbatch").read_text()


@pytest.mark.parametrize(("threads", "outside", "wanted"), [(0, "3", 3), (2, "3", 2), (0, "", 6), (0, "4,2", 6)])
def test_threads_of_a_run(tmp_path, images, monkeypatch, threads, outside, wanted):
    """As the study says, else as the environment does, else the usable processors over jobs (two of 12 here)."""
    monkeypatch.setenv("OMP_NUM_THREADS", outside)
    monkeypatch.setattr(verb, "processors", lambda: 12)
    file, script = study_file(tmp_path, images, jobs=2, threads=threads), tmp_path / "s.sbatch"
    result = CliRunner().invoke(main, [str(file), "--out", str(tmp_path / "out"), "--slurm", str(script)])
    assert result.exit_code == 0, result.output
    assert f"--cpus-per-task={wanted}\n" in script.read_text()


@pytest.mark.slow
def test_killed_for_real_it_goes_on(tmp_path, images):
    """The driver is killed: its runs notice, save and stop; the same command finishes them. A child is killed, too."""
    long = {"budget": {"steps": 60}, "jobs": 2, "threads": 1}
    file, out = study_file(tmp_path, images, **long), tmp_path / "out"

    def start() -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "sop_faiss.cli.study", str(file), "--out", str(out)]
        return subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def wait_for(condition, seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.05)

    def steps(name: str) -> int:
        lines = read_metrics(out / "runs" / name)
        return int(lines[-1]["step"]) if lines else 0

    driver = start()
    wait_for(lambda: min(steps("tasks=1/seed_0"), steps("tasks=2/seed_0")) > 5)
    driver.kill()
    driver.communicate()
    requeue = [out / "runs" / f"tasks={k}" / "seed_0" / "requeue" for k in (1, 2)]
    wait_for(lambda: all(file.exists() for file in requeue))
    time.sleep(2)
    assert 5 < steps("tasks=1/seed_0") < 60
    driver = start()
    wait_for(lambda: steps("tasks=1/seed_1") > 5)
    found = subprocess.run(
        ["pgrep", "-f", "--", f"--run tasks=1/seed_1 --driver {driver.pid}"], capture_output=True, text=True
    )
    os.kill(int(found.stdout.split()[0]), signal.SIGKILL)
    _, said = driver.communicate(timeout=400)
    assert driver.returncode == 1 and "failed: tasks=1/seed_1" in said
    driver = start()
    _, said = driver.communicate(timeout=400)
    assert driver.returncode == 0, said
    rows = pq.read_table(out / "study.parquet").to_pylist()
    assert [row["status"] for row in rows] == ["done"] * 4 and {row["steps"] for row in rows} == {60}
    whole = tmp_path / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verb, "run_on_this_machine", runs_here())
        assert CliRunner().invoke(main, [str(file), "--out", str(whole)]).exit_code == 0
    for row, wanted in zip(rows, pq.read_table(whole / "study.parquet").to_pylist(), strict=True):
        assert row["score.knn_top1_k3"] == pytest.approx(wanted["score.knn_top1_k3"])
        assert row["by_step.steps"] == wanted["by_step.steps"]
