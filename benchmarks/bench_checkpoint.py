"""Time that a save stops the training loop: copied and written by a thread, against written before the next step.

    python benchmarks/bench_checkpoint.py [--quick] [--out DIR] [--json FILE] [--record]

The state is that of a run with the paper's head (memories of 65,536 and 8,192 rows, kept neighbor lists) on ViT-S/16,
or ViT-Ti/16 with `--quick`, after one step. Both sides save the same state into the same folder, with checksums and
fsync. `direct` is `train.background_save=false`. In the background the loop waits only while the copy is made. If steps
use all cores, the thread also takes some of their time: a stand-in for the steps, matrix products on all cores, is
timed with and without a write, and the difference is reported next to the ratio. The second row compares the time of
the copy plus the time taken by the thread with the time of the steps between two checkpoints by default.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from bench_step import CPU_BATCH, CUDA_BATCH, IMAGES, make_batch
from report import Row, finish, meets

from sop_faiss.config import load_config
from sop_faiss.data.batch import Batch
from sop_faiss.train.allocator import keep_freed_memory
from sop_faiss.train.checkpoints.saver import CheckpointSaver
from sop_faiss.train.loop import train_step
from sop_faiss.train.state import RunState

TARGET = "<= 0.03"
MEBIBYTE = 2**20
SIDE = 1024  # of the matrices of the stand-in


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def make_state(quick: bool) -> tuple[RunState, Batch]:
    """Make a run after one step, so that the optimizer has its moments, and return it with the batch of that step."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        keep_freed_memory()  # as `sop-train` does
    backbone = "vit_tiny_patch16_224" if quick else "vit_small_patch16_224"
    images = CUDA_BATCH if device.type == "cuda" else CPU_BATCH
    config = load_config("vits16", [f"model.backbone={backbone}", f"train.batch_size={images}"])
    state = RunState(config, device, IMAGES)
    batch = make_batch(config, state.student.backbone.patch_size)
    train_step(state, batch)
    return state, batch


class Work:
    """The stand-in for steps: matrix products for about a given time."""

    def __init__(self, device: torch.device, wanted_seconds: float) -> None:
        self.matrix = torch.randn(SIDE, SIDE, device=device) / SIDE
        self.products = 1
        self()
        self.products = 32
        self.products = max(1, round(32 * wanted_seconds / seconds(self)))

    def __call__(self) -> None:
        for _ in range(self.products):
            self.matrix @ self.matrix


def checkpoint_rows(quick: bool, out: Path) -> list[Row]:
    print("networks, memories and one step ...", file=sys.stderr, flush=True)
    state, batch = make_state(quick)
    step_seconds = statistics.median(seconds(lambda: train_step(state, batch)) for _ in range(3))
    saver = CheckpointSaver(state, out / "background")
    state.config = replace(state.config, train=replace(state.config.train, background_save=False))
    direct = CheckpointSaver(state, out / "direct")
    saver.save(wait=True)  # the copies come into being
    write = seconds(lambda: saver.save(wait=True))
    work = Work(state.device, 1.5 * write)
    print("saves ...", file=sys.stderr, flush=True)
    times: dict[str, list[float]] = {"direct": [], "copy": [], "work_while_writing": [], "work": []}
    repeats = 3 if quick else 7
    for _ in range(repeats):
        state.step += 1
        times["direct"].append(seconds(lambda: direct.save(wait=False)))
        times["copy"].append(seconds(lambda: saver.save(wait=False)))
        times["work_while_writing"].append(seconds(work))
        saver.finish()
        times["work"].append(seconds(work))
    medians = {name: statistics.median(values) for name, values in times.items()}
    taken = statistics.median(a - b for a, b in zip(times["work_while_writing"], times["work"], strict=True))
    size = (
        sum(file.stat().st_size for file in (out / "direct" / "checkpoints").glob("*/*")) / state.config.train.keep_last
    )
    detail: dict[str, Any] = {
        "checkpoint_MiB": size / MEBIBYTE,
        "direct_seconds": medians["direct"],
        "copy_seconds": medians["copy"],
        "taken_from_steps_seconds": taken,
        "repeats": repeats,
    }
    name = "ViT-Ti/16" if quick else "ViT-S/16"
    what = f"time that a save holds the loop, {name}, {state.device.type}"
    every = state.config.train.checkpoint_every_steps
    share = (medians["copy"] + taken) / (every * step_seconds)
    return [
        Row(what, "writing before the next step", medians["copy"] / medians["direct"], "", None, detail),
        Row(
            f"a save's time in all, {name}, {state.device.type}",
            f"the {every} steps between two",
            share,
            TARGET,
            meets(share, TARGET),
            {"step_seconds": step_seconds},
        ),
    ]


@click.command()
@click.option("--quick", is_flag=True, help="ViT-Ti/16 and three repeats: within a minute on 2 cores.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Save below this folder, not in /tmp.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here.")
@click.option("--record", is_flag=True, help="Append the figures to benchmarks/RESULTS.md.")
def main(quick: bool, out: Path | None, json_file: Path | None, record: bool) -> None:
    """Measure the time that a save stops the training loop, in the background against direct."""
    with tempfile.TemporaryDirectory(dir=out) as folder:
        rows = checkpoint_rows(quick, Path(folder))
    finish("checkpoint", rows, json_file=json_file, record=record)


if __name__ == "__main__":
    main()
