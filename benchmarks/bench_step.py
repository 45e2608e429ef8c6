"""A whole training step against its networks alone, and against iBOT's.

    python benchmarks/bench_step.py [--quick] [--json FILE] [--record] [--ibot CHECKOUT]

**Against its networks alone**: what the method costs in addition to the networks. The paper's head (N_C = 65536, K =
4096, k = 8, T = 4; N_P = 8192, K = 512) and views (2 at 224 px, 10 at 96 px, block masks) on ViT-S/16, or ViT-Ti/16
with `--quick`. Both sides normalize the same views, go forward through the teacher and forward and backward through
the student, heads included. The loss of the networks alone is the sum of the embeddings; the complete step is
`train_step`, which adds prototypes, losses, AdamW, EMA and stores. Neither reads images. The memories contain random
rows, and kept neighbor lists are made before the clock starts, as they are after the first steps of a run.

**Against iBOT** (with `--ibot`): the step of both, ViT-S/16 with the same views, masks and batch (8 on a CPU, 64 on
CUDA), in one process, alternating; iBOT's with the settings of its README for ViT-S/16, from a checkout of
github.com/bytedance/ibot. Both start from views in memory; ours normalizes them in the step, iBOT's are normalized by
its loader. Time is measured with N_C = 16384, K = 1024, T = 1, and with the paper's full memories. Peak memory is the
largest amount that a separate process uses for two steps (its resident set; on CUDA what is allocated there). Ours
processes the local views separately from the global ones (`train.views_apart`): the same gradients with less memory.
More rows say what that costs with the full memories, and how much of iBOT's step our networks alone take: no method on
these networks takes less.
"""

from __future__ import annotations

import contextlib
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import torch
from ibot import load_ibot, peer_step
from report import Row, finish, interleaved_medians, meets

from sop_faiss.config import Config, load_config
from sop_faiss.data.batch import Batch
from sop_faiss.data.views.device_color import normalize
from sop_faiss.data.views.masks import draw_mask
from sop_faiss.objectives import sop
from sop_faiss.objectives.sop_terms import Term
from sop_faiss.sop.memory import Memory
from sop_faiss.sop.prototypes import PrototypeMaker, Prototypes
from sop_faiss.train import loop
from sop_faiss.train.allocator import keep_freed_memory
from sop_faiss.train.state import RunState

IMAGES = 1_281_167  # of ImageNet-1k: the memories keep their full size
CPU_BATCH, CUDA_BATCH = 4, 64
PEER_CPU_BATCH = 8
MEBIBYTE = 2**20
SMALL = ("sop.cls.capacity=16384", "sop.cls.num_anchors=1024", "sop.cls.tasks=1")
MISSING = {"not measured": "name a checkout of github.com/bytedance/ibot with --ibot"}
APART = "train.views_apart=true"
MEMORIES = {"N_C 16384, K 1024, T 1": (*SMALL, APART), "N_C 65536, K 4096, T 4": (APART,)}

TIMED = {
    "prototypes": ((PrototypeMaker, "draw"), (Prototypes, "health")),
    "losses": ((sop, "cls_loss"), (sop, "patch_loss")),
    "optimizer_and_ema": ((loop, "clip_each_gradient"), (torch.optim.AdamW, "step"), (loop, "update_teacher")),
    "store": ((Memory, "store"),),
}
"""Parts of a step, and the functions that do them. The losses make their gradient in the forward pass."""


def make_batch(config: Config, patch_size: int) -> Batch:
    """Make a batch of noise in place of images, with masks as in training."""
    views, images = config.views, config.train.batch_size
    generator = torch.Generator().manual_seed(0)

    def noise(count: int, side: int) -> torch.Tensor:
        return torch.randint(256, (count, images, side, side, 3), dtype=torch.uint8, generator=generator)

    grid, draws = views.global_size // patch_size, np.random.default_rng(0)
    masks = [draw_mask(grid, grid, config.masks, draws) for _ in range(views.global_count * images)]
    return Batch(
        noise(views.global_count, views.global_size),
        noise(views.local_count, views.local_size),
        torch.empty(views.global_count, images, 0),  # their colors are there already
        torch.empty(views.local_count, images, 0),
        torch.from_numpy(np.stack(masks)).view(views.global_count, images, -1),
        torch.arange(images),
        [],
    )


def networks_alone(state: RunState, batch: Batch) -> None:
    """Run the teacher forward, and the student forward and backward, on the same views and masks."""
    networks = state.networks
    batch = batch.to(state.device)
    global_views = networks.normalized(batch.global_views, batch.global_colors)
    local_views = networks.normalized(batch.local_views, batch.local_colors)
    masked = batch.masks.flatten().nonzero().squeeze(1)
    state.optimizer.zero_grad(set_to_none=True)
    networks.teach(global_views.flatten(0, 1), masked, wants_cls=True)
    student = networks.study(global_views, local_views, batch.masks, masked, wants_cls=True)
    (student.cls.sum() + student.patches.sum()).backward()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Record the seconds in each of `TIMED`, waiting for the device before and after each call."""
    seconds: dict[str, float] = defaultdict(float)

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            synchronize()
            started = time.perf_counter()
            result = function(*arguments, **named)
            synchronize()
            seconds[part] += time.perf_counter() - started
            return result

        return call

    with contextlib.ExitStack() as stack:
        for part, places in TIMED.items():
            for owner, name in places:
                stack.enter_context(mock.patch.object(owner, name, timed(part, getattr(owner, name))))
        yield seconds


def seconds_by_part(state: RunState, batch: Batch, steps: int) -> dict[str, float]:
    """Return the median seconds of each part of a step; the waits make these steps a little slower."""
    rounds = []
    for _ in range(steps):
        with stopwatch() as seconds:
            loop.train_step(state, batch)
        rounds.append(seconds)
    return {f"{part}_seconds": statistics.median(seconds[part] for seconds in rounds) for part in TIMED}


def peak_mebibytes(state: RunState, functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the peak memory of a CUDA device, networks and memories included."""
    peaks = {}
    for name, function in functions.items():
        torch.cuda.reset_peak_memory_stats(state.device)
        function()
        synchronize()
        peaks[f"{name}_peak_MiB"] = torch.cuda.max_memory_allocated(state.device) / MEBIBYTE
    return peaks


def device_here() -> torch.device:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        keep_freed_memory()  # as `sop-train` does
    return device


def make_state(device: torch.device, overrides: list[str], name: str = "vits16") -> RunState:
    """Make a run of a packaged configuration before its first step, with its neighbor lists."""
    state = RunState(load_config(name, overrides), device, IMAGES)
    for term in terms_of(state).values() if state.config.objective.kind == "sop" else ():
        if term.maker.incremental:
            term.memory.nearest_others(torch.arange(term.memory.capacity, device=device))
    return state


def terms_of(state: RunState) -> dict[str, Term]:
    assert isinstance(state.objective, sop.SopObjective)
    return state.objective.terms


def step_row(quick: bool, batch_size: int | None) -> Row:
    device = device_here()
    backbone, name = ("vit_tiny_patch16_224", "ViT-Ti/16") if quick else ("vit_small_patch16_224", "ViT-S/16")
    images = batch_size or (CUDA_BATCH if device.type == "cuda" else CPU_BATCH)
    print(f"{name}, batch {images}, {device.type}: networks and memories ...", file=sys.stderr, flush=True)
    state = make_state(device, [f"model.backbone={backbone}", f"train.batch_size={images}"])
    batch = make_batch(state.config, state.student.backbone.patch_size)
    kept = any(term.maker.incremental for term in terms_of(state).values())

    print("steps ...", file=sys.stderr, flush=True)
    functions: dict[str, Callable[[], object]] = {
        "step": lambda: loop.train_step(state, batch),
        "networks": lambda: networks_alone(state, batch),
    }
    repeats = 3 if quick else 7
    seconds = interleaved_medians(functions, repeats)
    views = state.config.views
    detail: dict[str, Any] = {f"{part}_seconds": value for part, value in seconds.items()}
    detail |= seconds_by_part(state, batch, repeats)
    detail |= {
        "neighbors": "kept" if kept else "searched for",
        "precision": precision(state),
        "masked_patches": int(batch.masks.sum()),
        "repeats": repeats,
    }
    if device.type == "cuda":
        detail |= peak_mebibytes(state, functions)
    what = f"a training step, {name}, {images} images, {views.global_count} + {views.local_count} views, {device.type}"
    return Row(what, "its networks alone", seconds["step"] / seconds["networks"], "", None, detail)


def precision(state: RunState) -> str:
    return "bf16" if state.networks.autocast_dtype else "float32"


def our_step(
    device: torch.device, overrides: list[str], name: str = "vits16"
) -> tuple[RunState, Batch, Callable[[], object]]:
    state = make_state(device, overrides, name)
    batch = make_batch(state.config, state.student.backbone.patch_size)
    return state, batch, lambda: loop.train_step(state, batch)


def ibot_step(checkout: Path, device: torch.device, images: int) -> Callable[[], object]:
    """Return iBOT's step on the same views and masks."""
    config = load_config("vits16", [f"train.batch_size={images}"])
    batch = make_batch(config, 16).to(device)
    views = [
        *normalize(batch.global_views, batch.global_colors, config.views, device).unbind(),
        *normalize(batch.local_views, batch.local_colors, config.views, device).unbind(),
    ]
    side = config.views.global_size // 16
    masks = list(batch.masks.view(-1, images, side, side).unbind())
    return peer_step(checkout, "vit_small", [view.contiguous() for view in views], masks, device)


def peak_of(images: int, overrides: tuple[str, ...], name: str = "vits16", checkout: Path | None = None) -> float:
    """Return the largest number of mebibytes that a separate process uses for two steps of a configuration of ours.

    With `checkout` the steps are those of iBOT's own code.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # unlike Pool it reports a process that died
        return pool.submit(_peak_here, images, overrides, name, checkout).result()


def _peak_here(images: int, overrides: tuple[str, ...], name: str, checkout: Path | None) -> float:
    if checkout is not None:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        step = ibot_step(checkout, device, images)
    else:
        device = device_here()
        step = our_step(device, [f"train.batch_size={images}", *overrides], name)[2]
    for _ in range(2):
        step()
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MEBIBYTE
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ibot_rows(checkout: Path | None, quick: bool, batch_size: int | None) -> list[Row]:
    """Compare time and peak memory of a step with iBOT's; on CUDA also torch.compile with no torch.compile."""
    cuda = torch.cuda.is_available()
    images = batch_size or (CUDA_BATCH if cuda else PEER_CPU_BATCH)
    targets = dict(zip(MEMORIES, ("", "<= 0.5") if cuda else ("<= 0.7", "<= 1.0"), strict=True))
    whats = {name: f"a training step, ViT-S/16, {images} images, 2 + 10 views, {name}" for name in MEMORIES}
    if checkout is None:
        return [Row(what, "iBOT's step", None, targets[name], None, MISSING) for name, what in whats.items()]
    load_ibot(checkout)  # before minutes of measuring
    peaks = {name: peak_of(images, overrides) for name, overrides in MEMORIES.items()}
    peaks |= {"together": peak_of(images, ()), "ibot": peak_of(images, (), checkout=checkout)}
    device, batch = device_here(), f"train.batch_size={images}"
    print("iBOT's step and ours ...", file=sys.stderr, flush=True)
    sides = {name: our_step(device, [batch, *overrides])[2] for name, overrides in MEMORIES.items()}
    state, views, sides["together"] = our_step(device, [batch])
    sides["networks"] = lambda: networks_alone(state, views)
    sides["ibot"] = ibot_step(checkout, device, images)
    if cuda:
        sides["compiled"] = our_step(device, [batch, APART, "train.compile=step"])[2]
        for _ in range(3):
            sides["compiled"]()
    repeats = 3 if quick else 7
    seconds = interleaved_medians(sides, repeats)
    rows = []
    for name, what in whats.items():
        detail = {"seconds": seconds[name], "ibot_seconds": seconds["ibot"], "repeats": repeats}
        ratio = seconds[name] / seconds["ibot"]
        rows.append(Row(f"{what}: time", "iBOT's step", ratio, targets[name], meets(ratio, targets[name]), detail))
        target = "<= 0.7" if name == next(iter(MEMORIES)) else ""
        ratio = peaks[name] / peaks["ibot"]
        detail = {"MiB": peaks[name], "ibot_MiB": peaks["ibot"]}
        rows.append(Row(f"{what}: peak memory", "iBOT's step", ratio, target, meets(ratio, target), detail))
    full = list(MEMORIES)[-1]
    for what, against, above, below in (
        (f"{whats[full]}, without train.views_apart", "with it", "together", full),
        ("our networks alone, all views together", "iBOT's step", "networks", "ibot"),
    ):
        detail = {f"{above}_seconds": seconds[above], f"{below}_seconds": seconds[below]}
        rows.append(Row(f"{what}: time", against, seconds[above] / seconds[below], "", None, detail))
    detail = {"together_MiB": peaks["together"], "apart_MiB": peaks[full]}
    ratio = peaks["together"] / peaks[full]
    rows.append(Row(f"{whats[full]}, without train.views_apart: peak memory", "with it", ratio, "", None, detail))
    if cuda:
        ratio = seconds["compiled"] / seconds[full]
        detail = {"seconds": seconds["compiled"], "without_seconds": seconds[full]}
        rows.append(Row(f"{whats[full]}, compiled", "without", ratio, "<= 0.8", meets(ratio, "<= 0.8"), detail))
    return rows


def method_rows(quick: bool, batch_size: int | None) -> list[Row]:
    """Compare a step of the four methods at the size of their papers (as table C.1 of SOP's), all in this package."""
    images = batch_size or (CUDA_BATCH if torch.cuda.is_available() else PEER_CPU_BATCH)
    names = {"SOP": "vits16", "MaSSL": "massl_vits16", "DINO": "dino_vits16", "iBOT": "ibot_vits16"}
    overrides = (f"train.batch_size={images}", "views.local_count=10", APART)
    peaks = {method: peak_of(images, overrides, name) for method, name in names.items()}
    device = device_here()
    steps = {method: our_step(device, list(overrides), name)[2] for method, name in names.items()}
    repeats = 3 if quick else 7
    seconds = interleaved_medians(steps, repeats)
    rows = []
    for method in ("SOP", "MaSSL", "DINO"):
        what, target = (
            f"a step of {method}, ViT-S/16, {images} images, 2 + 10 views",
            "<= 1.0" if method == "SOP" else "",
        )
        for kind, figures, unit in (("time", seconds, "seconds"), ("peak memory", peaks, "MiB")):
            ratio = figures[method] / figures["iBOT"]
            detail = {unit: figures[method], f"iBOT_{unit}": figures["iBOT"], "repeats": repeats}
            rows.append(Row(f"{what}: {kind}", "our iBOT's step", ratio, target, meets(ratio, target), detail))
    return rows


@click.command()
@click.option(
    "--quick",
    is_flag=True,
    help="ViT-Ti/16 where iBOT is not compared, and three repeats: two minutes on 2 cores each.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    help=f"Images; on a CPU {CPU_BATCH}, against iBOT {PEER_CPU_BATCH}; on CUDA {CUDA_BATCH}.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here.")
@click.option("--record", is_flag=True, help="Append the figures to benchmarks/RESULTS.md.")
@click.option("--methods", is_flag=True, help="Compare SOP, MaSSL, DINO and iBOT of this package instead.")
@click.option("--ibot", "checkout", type=click.Path(path_type=Path, file_okay=False), help="A checkout of iBOT.")
def main(
    quick: bool, batch_size: int | None, json_file: Path | None, record: bool, methods: bool, checkout: Path | None
) -> None:
    """Measure a training step at the paper's size against its networks alone, and against iBOT's step."""
    if methods:
        finish("step of four methods", method_rows(quick, batch_size), json_file=json_file, record=record)
        return
    rows = [*ibot_rows(checkout, quick, batch_size), step_row(quick, batch_size)]
    finish("step", rows, json_file=json_file, record=record)


if __name__ == "__main__":
    main()
