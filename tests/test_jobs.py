"""Processes of a study: some at a time, failures reported, stopped together, and as a Slurm array."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sop_faiss.verbs.study.jobs import Job, run_on_cluster, run_on_this_machine, write_slurm


def job(folder: Path, name: str, code: str) -> Job:
    return Job(name, (sys.executable, "-c", code, name), folder / "logs" / f"{name}.log")


def test_processes_run_two_at_a_time_and_failures_have_their_last_line(tmp_path):
    note = "import os, sys, time; p = sys.argv[1]; open(p + '.start', 'w').close(); time.sleep(0.3); "
    note += "n = [f for f in os.listdir('.') if f.endswith('.start') and not os.path.exists(f[:-5] + 'end')]; "
    note += "open(p + '.end', 'w').write(f'{len(n)} ' + os.environ['OMP_NUM_THREADS']); "
    bad = note + "print('error: what\\nmore', file=sys.stderr); sys.exit(3)"
    jobs = [job(tmp_path, name, bad if name == "b" else note) for name in "abcd"]
    before = Path.cwd()
    os.chdir(tmp_path)
    calls: list[int] = []
    try:
        ended = {each.name: each for each in run_on_this_machine(jobs, 2, 3, None, lambda: calls.append(1))}
    finally:
        os.chdir(before)
    assert {name: each.status for name, each in ended.items()} == {"a": 0, "b": 3, "c": 0, "d": 0}
    assert ended["b"].line == "error: what" and calls
    noted = [(tmp_path / f"{name}.end").read_text().split() for name in "abcd"]
    assert all(int(at_once) <= 2 and threads == "3" for at_once, threads in noted)


def test_a_killed_process_is_reported_by_its_status(tmp_path):
    (ended,) = run_on_this_machine([job(tmp_path, "a", "import os; os.kill(os.getpid(), 9)")], 1, 1, None)
    assert (ended.status, ended.line) == (-9, "exit status -9")


def test_interrupted_it_asks_all_to_stop_and_waits_for_them(tmp_path):
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(0.2), open(sys.argv[1] + '.saved', 'w'), "
        "sys.exit(75))); open(sys.argv[1] + '.ready', 'w'); time.sleep(60)"
    )
    names = [str(tmp_path / name) for name in "ab"]
    jobs = [Job(name, (sys.executable, "-c", code, name), Path(f"{name}.log")) for name in names]

    def interrupt() -> None:
        if all(Path(f"{name}.ready").exists() for name in names):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_on_this_machine(jobs, 2, 1, None, interrupt))
    assert all(Path(f"{name}.saved").exists() for name in names)


def test_a_lock_is_held_until_the_last_process_has_ended(tmp_path):
    """Even if the driver is killed, which closes its own descriptor."""
    descriptor = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    other = os.open(tmp_path / "lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    seen: list[str] = []

    def look() -> None:
        if not seen:
            os.close(descriptor)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            seen.append("free")
        except BlockingIOError:
            seen.append("held")
        (tmp_path / "go").touch()

    code = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.02)"
    (ended,) = run_on_this_machine([job(tmp_path, "a", code)], 1, 1, descriptor, look)
    assert ended.status == 0 and seen[0] == "held"
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_the_slurm_array_makes_each_run_and_requeues_what_was_saved(tmp_path):
    """With a stand-in for scontrol; the exit statuses are those of the runs."""
    odd = tmp_path / "a folder's"
    odd.mkdir()
    done, saved, failed = (
        Job(
            name, (sys.executable, "-c", f"import sys; print('run', {name!r}); sys.exit({status})"), odd / f"{name}.log"
        )
        for name, status in (("done", 0), ("saved", 75), ("failed", 1))
    )
    script = odd / "study.sbatch"
    write_slurm(script, [done, saved, failed], odd / "commands.txt", 2, 3)
    text = script.read_text()
    assert "--array=0-2%2" in text and "--cpus-per-task=3" in text and "--signal=B:USR1@" in text
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/requeued\n')
    (tools / "scontrol").chmod(0o755)
    statuses = []
    for task in range(3):
        environment = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": str(task),
        }
        statuses.append(subprocess.run(["bash", str(script)], env=environment, cwd="/", check=False).returncode)
    assert statuses == [0, 0, 1]
    assert (tmp_path / "requeued").read_text() == "requeue 7_1\n"
    assert [each.log.read_text() for each in (done, saved, failed)] == ["run done\n", "run saved\n", "run failed\n"]


@pytest.mark.slow
def test_on_a_cluster_of_one_machine(tmp_path):
    pytest.importorskip("ray")
    jobs = [job(tmp_path, name, f"print('at work'); raise SystemExit({int(name == 'b')})") for name in "abc"]
    ended = list(run_on_cluster(jobs, "ray", 1, 0))
    assert [(each.name, each.status, each.line) for each in ended] == [
        ("a", 0, "at work"),
        ("b", 1, "at work"),
        ("c", 0, "at work"),
    ]
