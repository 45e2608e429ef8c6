"""All checks that need a CUDA device, with one summary: the GPU tests, the benchmarks, and a training run.

    python benchmarks/gpu_check.py --out DIR [--minutes 10] [--quick] [--config NAME|FILE] [KEY=VALUE ...]

The folder gets a log of each stage, the benchmarks' JSON, the run (with `metrics.jsonl`) and `summary.json`. A stage
that fails is reported, the next one starts, and the exit status is 1. The run ends after the given minutes, or earlier
with its schedule. Without `data.train=...` it is trained on the digits of scikit-learn and scored by k-NN: nothing is
downloaded. On a machine without CUDA the GPU tests are skipped and the rest runs on the CPU.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from report import ROOT, environment

from sop_faiss.config import load_config

STAGE_MINUTES = 30.0
"""Longest that a stage other than training may take."""
SAVING_SECONDS = 120.0
"""How long a run may take to save itself after the signal."""
EXIT_REQUEUE = 75
"""Of `sop-train`: saved on a signal."""
BENCHMARKS = ("neighbors", "loss", "step")


@dataclass(frozen=True)
class Outcome:
    """How a stage ended."""

    stage: str
    status: str
    """`ok`, `FAILED` or `skipped`."""
    seconds: float
    told: list[str]
    """What it found, or why it failed; a line each."""


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "(it said nothing)"


def run(command: list[str], log: Path, seconds: float, folder: Path | None = None) -> int | None:
    """Run a command, here or in a folder, with its output in a log; return its exit status, or None if it was ended.

    When the time is over it receives SIGTERM, on which a training run saves itself, and then SIGKILL.
    """
    with log.open("w") as stream:
        stream.write(f"$ {' '.join(command)}\n")
        stream.flush()
        process = subprocess.Popen(command, cwd=folder, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                status = process.wait(SAVING_SECONDS)
            except subprocess.TimeoutExpired:
                return None
            return status if status == EXIT_REQUEUE else None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with its workers
                process.wait()


def outcome(stage: str, status: int | None, started: float, log: Path, told: list[str]) -> Outcome:
    seconds = time.monotonic() - started
    if status in (0, EXIT_REQUEUE):
        return Outcome(stage, "ok", seconds, told)
    why = "ended after its time was over" if status is None else f"exit status {status}"
    return Outcome(stage, "FAILED", seconds, [f"{why}, see {log.name}: {last_line(log)}", *told])


def gpu_tests(out: Path) -> Outcome:
    started, log = time.monotonic(), out / "gpu_tests.log"
    if not torch.cuda.is_available():
        return Outcome("gpu tests", "skipped", 0.0, ["no CUDA device here"])
    status = run([sys.executable, "-m", "pytest", "-m", "gpu", "-rs"], log, 60 * STAGE_MINUTES, ROOT)
    return outcome("gpu tests", status, started, log, [last_line(log)] if status == 0 else [])


def benchmark(topic: str, out: Path, quick: bool) -> Outcome:
    started, log, file = time.monotonic(), out / f"bench_{topic}.log", out / f"bench_{topic}.json"
    script = str(ROOT / "benchmarks" / f"bench_{topic}.py")
    status = run(
        [sys.executable, script, "--json", str(file), *(["--quick"] if quick else [])], log, 60 * STAGE_MINUTES
    )
    rows = json.loads(file.read_text())["rows"] if status == 0 else []
    return outcome(f"bench_{topic}", status, started, log, [describe_row(row) for row in rows])


def describe_row(row: dict[str, Any]) -> str:
    if row["ratio"] is None:
        return f"{row['what']}: not measured ({', '.join(map(str, row['detail'].values()))})"
    target = f", target {row['target']}: {'met' if row['met'] else 'NOT met'}" if row["target"] else ""
    return f"{row['what']}: {row['ratio']:.3g} of {row['against']}{target}"


def training(out: Path, config: str, overrides: tuple[str, ...], minutes: float) -> Outcome:
    """Train for some minutes; return what the metrics of the run say about its beginning and end."""
    started, log, run_directory = time.monotonic(), out / "train.log", out / "run"
    settings = list(overrides)
    if not any(setting.startswith("data.train=") for setting in settings):
        digits = out / "digits"
        status = run([sys.executable, "-m", "sop_faiss.cli.data", "demo", str(digits)], log, 60 * STAGE_MINUTES)
        if status != 0:
            return outcome("training", status or 1, started, log, [])
        scored = (f"evaluate.train={digits / 'train'}", f"evaluate.test={digits / 'test'}", "evaluate.every_steps=100")
        settings = [f"data.train={digits / 'train'}", *scored, "train.stop_after_steps=0", *settings]
    command = [sys.executable, "-m", "sop_faiss.cli.train", config, *settings, "--output", str(run_directory)]
    status = run(command, log, 60 * minutes)
    metrics = run_directory / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    return outcome("training", status, started, log, describe_metrics(lines))


def describe_metrics(lines: list[dict[str, Any]]) -> list[str]:
    """Return the first and last value of the numbers that show whether a run learns, and its speed."""
    steps = [line for line in lines if "loss" in line]
    told = [f"{steps[-1]['step']} steps, {steps[-1]['images']} images"] if steps else ["no step was logged"]
    for key in ("loss_cls_over_lnK", "loss_patch_over_lnK", "teacher_entropy_cls_over_lnK", "knn_top1_k20"):
        values = [line[key] for line in lines if line.get(key) is not None]
        if values:
            told.append(f"{key}: {values[0]:.4g} at first, {values[-1]:.4g} at last")
    speeds = sorted(line["images_per_second"] for line in steps if line.get("images_per_second") is not None)
    if speeds:
        told.append(f"images_per_second: {speeds[len(speeds) // 2]:.4g} (median)")
    return told


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="A new or empty folder.")
@click.option("--minutes", type=click.FloatRange(0.1), help="Of training; 10, or 1 with --quick.")
@click.option("--quick", is_flag=True, help="Quick benchmarks and a minute of training.")
@click.option("--config", default="digits_demo", show_default=True, help="A packaged configuration or a YAML file.")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def main(out: Path, minutes: float | None, quick: bool, config: str, overrides: tuple[str, ...]) -> None:
    """Run the GPU tests, the benchmarks and a training run, and summarize them."""
    if out.exists() and any(out.iterdir()):
        raise click.UsageError(f"--out {out} is not empty: name a new folder")
    load_config(config, overrides)  # a mistake in it is found before the other stages
    out.mkdir(parents=True, exist_ok=True)
    out = out.resolve()
    minutes = minutes or (1.0 if quick else 10.0)
    stages: dict[str, Callable[[], Outcome]] = {
        "gpu tests": lambda: gpu_tests(out),
        **{f"bench_{topic}": functools.partial(benchmark, topic, out, quick) for topic in BENCHMARKS},
        "training": lambda: training(out, config, overrides, minutes),
    }
    outcomes = []
    for name, stage in stages.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        started = time.monotonic()
        try:
            outcomes.append(stage())
        except Exception as error:  # of this script itself: the other stages are worth running all the same
            seconds = time.monotonic() - started
            outcomes.append(Outcome(name, "FAILED", seconds, [f"{type(error).__name__}: {error}"]))
        (out / "summary.json").write_text(
            json.dumps({"environment": environment(), "stages": [asdict(one) for one in outcomes]}, indent=2) + "\n"
        )
    print(f"\n{environment()['machine']}")
    for one in outcomes:
        print(f"{one.status:8}{one.stage} ({one.seconds:.0f} s)")
        for line in one.told:
            print(f"          {line}")
    sys.exit(int(any(one.status == "FAILED" for one in outcomes)))


if __name__ == "__main__":
    main()
