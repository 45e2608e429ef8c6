"""The processes of a study, one for each run: some at a time here, on a Ray cluster, or as a Slurm array."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sop_faiss.files import atomic_file, write_file
from sop_faiss.index.cluster import ray_tasks

REQUEUE = 75
"""Exit status of a run that was saved on a signal."""
_POLL_SECONDS = 0.2
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_LAST_BYTES = 4096

_SLURM = """#!/bin/bash
#SBATCH --job-name={job}
#SBATCH --array=0-{last}%{jobs}
#SBATCH --cpus-per-task={threads}
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append

# One task for each line of the commands; a run that is saved on a signal is requeued and goes on.
cd {folder} || exit 1
command=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {commands})
eval "$command &"
step=$!
trap 'kill -USR1 "$step"' USR1 TERM
status=1
while kill -0 "$step" 2> /dev/null; do # a signal ends `wait`, not the step
    wait "$step"
    status=$?
done
if [ "$status" -eq {requeue} ]; then exec scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"; fi
exit "$status"
"""


@dataclass(frozen=True)
class Job:
    """A process to start."""

    name: str
    command: tuple[str, ...]
    log: Path
    """Gets what it says."""


@dataclass(frozen=True)
class Ended:
    """How a process has ended."""

    name: str
    status: int
    line: str
    """The last line that it said."""


def run_on_this_machine(
    jobs: Sequence[Job], at_once: int, threads: int, lock: int | None, waiting: Callable[[], None] = lambda: None
) -> Generator[Ended, None, None]:
    """Run processes, some at a time, in order; yield each when it has ended.

    If this is interrupted, all are asked to save and stop, and waited for.

    Args:
        jobs: the processes.
        at_once: how many at a time.
        threads: CPU threads of each.
        lock: descriptor that the processes keep open, so that a lock is held until the last has ended.
        waiting: called several times a second.
    """
    left, running = list(jobs), dict[subprocess.Popen[bytes], Job]()
    kept = () if lock is None else (lock,)
    try:
        while left or running:
            while left and len(running) < at_once:
                job = left.pop(0)
                command = (*job.command, "--driver", str(os.getpid()))
                running[_start(command, job.log, threads, kept)] = job
            time.sleep(_POLL_SECONDS)
            waiting()
            for process in [each for each in running if each.poll() is not None]:
                yield _ended(running.pop(process), process.returncode)
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in running:
            process.wait()


def _start(command: Sequence[str], log: Path, threads: int, kept: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(threads))}
    with log.open("ab") as stream:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment, pass_fds=kept
        )


def _ended(job: Job, status: int) -> Ended:
    return Ended(job.name, status, _last_line(job.log) or f"exit status {status}")


def _last_line(log: Path) -> str:
    """Return the last line of a log, an error's if the last lines have one."""
    if not log.is_file():
        return ""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = [line.strip() for line in stream.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "")


def run_on_cluster(jobs: Sequence[Job], address: str, threads: int, gpus: int) -> Generator[Ended, None, None]:
    """Run processes as Ray tasks; yield each when it and those before it have ended.

    The workers see the current directory, the study's and the data under the same paths.

    Raises:
        ConfigError: Ray is not there, or cannot be reached.
        SopError: workers were lost again and again.
    """
    with ray_tasks(address, num_cpus=threads, num_gpus=gpus) as run:
        arguments = [(job.command, str(Path.cwd()), str(job.log.absolute()), threads) for job in jobs]
        for job, status in zip(jobs, run(_run_there, arguments), strict=True):
            yield _ended(job, status)


def _run_there(command: Sequence[str], folder: str, log: str, threads: int) -> int:
    """Run a process from a folder on a worker, and return its exit status."""
    os.chdir(folder)
    return _start((*command, "--driver", str(os.getpid())), Path(log), threads).wait()


def write_slurm(script: Path, jobs: Sequence[Job], commands: Path, at_once: int, threads: int) -> None:
    """Write the script of a Slurm array and the list of its commands, one for each process.

    Raises:
        OSError: a file cannot be written.
    """
    lines = [f"{shlex.join(job.command)} >> {shlex.quote(str(job.log.absolute()))} 2>&1" for job in jobs]
    write_file(commands, "".join(f"{line}\n" for line in lines))
    for job in jobs:
        job.log.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(script) as temporary:
        temporary.write_text(
            _SLURM.format(
                job="sop-study",
                last=len(jobs) - 1,
                jobs=at_once,
                threads=threads,
                folder=shlex.quote(str(Path.cwd())),
                commands=shlex.quote(str(commands.absolute())),
                requeue=REQUEUE,
            ),
            encoding="utf-8",
        )
