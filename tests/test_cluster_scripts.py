"""What docs/cluster.md says of torchrun and Slurm: its scripts are run, with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sop_faiss.model.checkpoint import find_checkpoint
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.train.stop import REQUEUE_NAME
from tests.forked import free_port
from tests.images import write_shards
from tests.runs import tiny_config_file

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "cluster.md").read_text(), re.DOTALL)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

# Starts its command on two "nodes"; as Slurm's, it passes SIGUSR1 on to the tasks and kills them on SIGTERM.
SRUN = """#!{python}
import os, signal, subprocess, sys
tasks = [subprocess.Popen(sys.argv[1:], env=os.environ | {{"SLURM_PROCID": str(node)}}) for node in range(2)]
def pass_on(number, frame):
    for task in tasks:
        task.send_signal(signal.SIGKILL if number == signal.SIGTERM else number)
signal.signal(signal.SIGUSR1, pass_on)
signal.signal(signal.SIGTERM, pass_on)
sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCONTROL = """#!/bin/bash
case $1 in
show) echo localhost ;;
requeue) echo "$2" >> requeued ;;
esac
"""
COMMAND_TORCHRUN = """#!/bin/bash
exec {python} -m torch.distributed.run "$@"
"""


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_the_scripts_are_bash(number: int) -> None:
    done = subprocess.run(["bash", "-n"], input=SCRIPTS[number], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster")
    write_shards(folder / "shards", classes=2, per_class=12, size=20)
    tiny_config_file(folder)
    return folder


def settings(place: Path) -> list[str]:
    return [str(place / "tiny.yaml"), f"data.train={place / 'shards'}", "train.epochs=2000"]


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if any(line["step"] >= step for line in read_metrics(run)):
            return
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"the run ended or hung before step {step}: {process.communicate()}")


def assert_saved_where_it_stopped(run: Path) -> int:
    saved = int(find_checkpoint(run).name.removeprefix("step_"))
    assert (run / REQUEUE_NAME).exists()
    assert read_metrics(run)[-1]["step"] == saved
    return saved


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_torchrun_passes_a_signal_on_and_hides_the_status(place: Path, number: signal.Signals) -> None:
    run = place / number.name
    handled = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    command = [
        *TORCHRUN, "--nproc-per-node", "2", "--standalone", "--signals-to-handle", handled,
        "-m", "sop_faiss.cli.train", *settings(place), "--output", str(run), "--resume",
    ]  # fmt: skip
    steps = [0]
    for _ in range(2):
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            wait_for_step(run, steps[-1] + 5, process)
            assert not (run / REQUEUE_NAME).exists()
            process.send_signal(number)
            out, errors = process.communicate(timeout=120)
        assert process.returncode == 1, errors
        assert '"finished": false' in out
        steps.append(assert_saved_where_it_stopped(run))
    assert steps[0] < steps[1] < steps[2]


@pytest.mark.slow
@pytest.mark.distributed
def test_the_slurm_script_saves_and_requeues(place: Path) -> None:
    """Two nodes of one rank; the scheduler's signal goes to the script alone."""
    folder, run = place / "slurm", place / "slurm" / "run"
    (folder / "bin").mkdir(parents=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", COMMAND_TORCHRUN)):
        (folder / "bin" / name).write_text(text.format(python=sys.executable) if "{python}" in text else text)
        (folder / "bin" / name).chmod(0o755)
    (script,) = (script for script in SCRIPTS if script.startswith("#!/bin/bash"))
    words = " ".join(f"'{word}'" for word in settings(place))
    for pattern, line in (
        (r"^run=.*$", f"run='{run}'"),
        (r"^arguments=.*$", f"arguments=({words})"),
        (r"^ranks_per_node=.*$", "ranks_per_node=1"),
        (r":29500", f":{free_port()}"),
    ):
        script, count = re.subn(pattern, line, script, flags=re.MULTILINE)
        assert count == 1, pattern
    slurm = {"SLURM_JOB_ID": "17", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a[0-1]", "OMP_NUM_THREADS": "1"}
    environment = os.environ | slurm | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    bash = shutil.which("bash")
    assert bash is not None
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [bash, "-c", script], cwd=folder, env=environment, stdout=log, stderr=log, text=True, start_new_session=True
        )
    try:
        wait_for_step(run, 5, process)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=120) == 0, (folder / "log").read_text()
        assert (folder / "requeued").read_text() == "17\n"
        assert assert_saved_where_it_stopped(run) >= 5
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # as Slurm does with a job that is requeued
