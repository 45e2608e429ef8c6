"""A whole training step against its networks alone: what the method costs beside the backbone.

    python benchmarks/bench_step.py [--quick] [--json FILE] [--record]

The paper's head (N_C = 65536, K = 4096, k = 8, T = 4; N_P = 8192, K = 512) and views (2 at 224 px, 10 at 96 px, block
masks) under ViT-S/16, or ViT-Ti/16 with `--quick`. Both sides normalise the same views, go forward through the teacher
and forward and backward through the student, projector included. The networks alone have the sum of the embeddings as
their loss; the whole step is `train_step`: prototypes, losses, AdamW, EMA and stores besides. Reading images is in
neither. The memories hold random rows, and kept neighbour lists are made before the clock starts, as they are after the
first steps of a run.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import torch
from report import Row, finish, interleaved_medians

from sop_faiss.config import Config, load_config
from sop_faiss.data.batch import Batch
from sop_faiss.data.device_colour import normalise
from sop_faiss.data.masks import draw_mask
from sop_faiss.sop.memory import Memory
from sop_faiss.sop.prototypes import PrototypeMaker, Prototypes
from sop_faiss.train import loop
from sop_faiss.train.allocator import keep_freed_memory
from sop_faiss.train.state import RunState

IMAGES = 1_281_167  # of ImageNet-1k: the memories keep their full size
CPU_BATCH, CUDA_BATCH = 4, 64
MEBIBYTE = 2**20

TIMED = {
    "prototypes": ((PrototypeMaker, "draw"), (Prototypes, "health")),
    "losses": ((loop, "cls_loss"), (loop, "patch_loss")),
    "optimiser_and_ema": ((loop, "clip_each_gradient"), (torch.optim.AdamW, "step"), (loop, "update_teacher")),
    "store": ((Memory, "store"),),
}
"""Parts of a step, and the functions that do them. The losses make their gradient in the forward pass."""


def make_batch(config: Config, patch_size: int) -> Batch:
    """Noise in place of pictures, and masks as in training."""
    views, images = config.views, config.train.batch_size
    generator = torch.Generator().manual_seed(0)

    def noise(count: int, side: int) -> torch.Tensor:
        return torch.randint(256, (count, images, side, side, 3), dtype=torch.uint8, generator=generator)

    grid, draws = views.global_size // patch_size, np.random.default_rng(0)
    masks = [draw_mask(grid, grid, config.masks, draws) for _ in range(views.global_count * images)]
    return Batch(
        noise(views.global_count, views.global_size),
        noise(views.local_count, views.local_size),
        torch.empty(views.global_count, images, 0),  # their colours are there already
        torch.empty(views.local_count, images, 0),
        torch.from_numpy(np.stack(masks)).view(views.global_count, images, -1),
        torch.arange(images),
        [],
    )


def networks_alone(state: RunState, batch: Batch) -> None:
    """Forward through the teacher, forward and backward through the student, of the same views and masks."""
    config, device = state.config, state.device
    batch = batch.to(device)
    global_views = normalise(batch.global_views, batch.global_colours, config.views, device)
    local_views = normalise(batch.local_views, batch.local_colours, config.views, device)
    masked = batch.masks.flatten().nonzero().squeeze(1)
    state.optimizer.zero_grad(set_to_none=True)
    dtype = state.autocast_dtype
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        with torch.no_grad():
            state.teacher(global_views.flatten(0, 1), None, masked)
        cls, patches = state.all_views(global_views, local_views, batch.masks, masked, True)
    (cls.sum() + patches.sum()).backward()


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Seconds spent in each of `TIMED`, waiting for the device before and after each call."""
    seconds: dict[str, float] = defaultdict(float)

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            synchronise()
            started = time.perf_counter()
            result = function(*arguments, **named)
            synchronise()
            seconds[part] += time.perf_counter() - started
            return result

        return call

    with contextlib.ExitStack() as stack:
        for part, places in TIMED.items():
            for owner, name in places:
                stack.enter_context(mock.patch.object(owner, name, timed(part, getattr(owner, name))))
        yield seconds


def seconds_by_part(state: RunState, batch: Batch, steps: int) -> dict[str, float]:
    """Median seconds of each part of a step, in steps of their own, which the waiting makes a little slower."""
    rounds = []
    for _ in range(steps):
        with stopwatch() as seconds:
            loop.train_step(state, batch)
        rounds.append(seconds)
    return {f"{part}_seconds": statistics.median(seconds[part] for seconds in rounds) for part in TIMED}


def peak_mebibytes(state: RunState, functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Peak of the device's memory, networks and memories included; of a CUDA device."""
    peaks = {}
    for name, function in functions.items():
        torch.cuda.reset_peak_memory_stats(state.device)
        function()
        synchronise()
        peaks[f"{name}_peak_MiB"] = torch.cuda.max_memory_allocated(state.device) / MEBIBYTE
    return peaks


def step_row(quick: bool, batch_size: int | None) -> Row:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        keep_freed_memory()  # as `sop-train` does
    backbone, name = ("vit_tiny_patch16_224", "ViT-Ti/16") if quick else ("vit_small_patch16_224", "ViT-S/16")
    images = batch_size or (CUDA_BATCH if device.type == "cuda" else CPU_BATCH)
    config = load_config("vits16", [f"model.backbone={backbone}", f"train.batch_size={images}"])
    print(f"{name}, batch {images}, {device.type}: networks and memories ...", file=sys.stderr, flush=True)
    state = RunState(config, device, IMAGES)
    batch = make_batch(config, state.student.backbone.patch_size)
    kept = {level: parts.memory for level, parts in state.levels.items() if parts.maker.incremental}
    for memory in kept.values():
        memory.nearest_others(torch.arange(memory.capacity, device=device))

    print("steps ...", file=sys.stderr, flush=True)
    functions: dict[str, Callable[[], object]] = {
        "step": lambda: loop.train_step(state, batch),
        "networks": lambda: networks_alone(state, batch),
    }
    repeats = 3 if quick else 7
    seconds = interleaved_medians(functions, repeats)
    views = config.views
    detail: dict[str, Any] = {f"{part}_seconds": value for part, value in seconds.items()}
    detail |= seconds_by_part(state, batch, repeats)
    detail |= {
        "neighbours": "kept" if kept else "searched for",
        "precision": "bf16" if state.autocast_dtype else "float32",
        "masked_patches": int(batch.masks.sum()),
        "repeats": repeats,
    }
    if device.type == "cuda":
        detail |= peak_mebibytes(state, functions)
    what = f"a training step, {name}, {images} images, {views.global_count} + {views.local_count} views, {device.type}"
    return Row(what, "its networks alone", seconds["step"] / seconds["networks"], "", None, detail)


@click.command()
@click.option("--quick", is_flag=True, help="ViT-Ti/16 and three repeats: within two minutes on 2 cores.")
@click.option("--batch-size", type=click.IntRange(1), help=f"Images; {CPU_BATCH} on a CPU, {CUDA_BATCH} on CUDA.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here.")
@click.option("--record", is_flag=True, help="Append the figures to benchmarks/RESULTS.md.")
def main(quick: bool, batch_size: int | None, json_file: Path | None, record: bool) -> None:
    """Time of a training step at the paper's size against its networks alone."""
    finish("step", [step_row(quick, batch_size)], json_file=json_file, record=record)


if __name__ == "__main__":
    main()
