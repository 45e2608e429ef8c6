"""What a run costs beside its training steps: health records against steps without any.

    python benchmarks/bench_overhead.py [--quick] [--json FILE] [--record]

Both sides make the same steps on the same batch, `log_every_steps` (20) at a time, so that one of them is logged. One
side is `train_step` alone, without the health of the memories; the loss is read once per step, as in every loop. The
other is the body of the loop: watching, health, means over ranks, finiteness, `metrics.jsonl`, TensorBoard, alarms.
Neither reads images. On a CPU the time is the processor time of the process. `health_share` is the time spent in what
the first side leaves out over the total time, in a separate block: it is less noisy than a ratio near 1.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from bench_step import make_batch
from report import Row, finish, interleaved_medians, meets

from sop_faiss.config import load_config
from sop_faiss.data.batch import Batch
from sop_faiss.sop.prototypes import Prototypes
from sop_faiss.train.allocator import keep_freed_memory
from sop_faiss.train.log import health, records
from sop_faiss.train.log.health import watching
from sop_faiss.train.log.monitor import Monitor
from sop_faiss.train.log.records import keep_records
from sop_faiss.train.loop import train_step
from sop_faiss.train.state import RunState

TARGET = "<= 1.03"
IMAGES = 1_281_167  # of ImageNet-1k: the memories keep their full size
HEALTH = (
    (Prototypes, "health"),
    (health.Watch, "_before_update"),
    (health.Watch, "_after_update"),
    (health.Watch, "numbers"),
    (records, "check_finite"),
    (records, "check_alarms"),
    (Monitor, "log"),
)


def bare_steps(state: RunState, batch: Batch, steps: int) -> None:
    with mock.patch.object(Prototypes, "health", lambda self: {}):
        for _ in range(steps):
            float(train_step(state, batch).metrics["loss"])


def recorded_steps(state: RunState, batch: Batch, steps: int, monitor: Monitor) -> None:
    for _ in range(steps):
        with watching(state) as watch:
            step = train_step(state, batch)
        keep_records(state, batch, step.metrics, watch.numbers(step.learned), monitor, monitor.run, IMAGES)


@contextlib.contextmanager
def stopwatch(clock: Callable[[], float]) -> Iterator[list[float]]:
    """Record the seconds of each call of `HEALTH`; none of them calls another."""
    seconds: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            started = clock()
            result = function(*arguments, **named)
            seconds.append(clock() - started)
            return result

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in HEALTH:
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        yield seconds


def health_row(config_name: str, overrides: tuple[str, ...], repeats: int, device: torch.device) -> Row:
    config = load_config(config_name, overrides)
    state = RunState(config, device, IMAGES)
    batch = make_batch(config, state.student.backbone.patch_size)
    steps = config.train.log_every_steps
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        monitor = Monitor(Path(folder))
        functions: dict[str, Callable[[], object]] = {
            "bare": lambda: bare_steps(state, batch, steps),
            "recorded": lambda: recorded_steps(state, batch, steps, monitor),
        }
        seconds = interleaved_medians(functions, repeats, clock=clock)
        started = clock()
        with stopwatch(clock) as spent:
            recorded_steps(state, batch, steps, monitor)
        share = sum(spent) / (clock() - started)
        monitor.close()
    ratio = seconds["recorded"] / seconds["bare"]
    what = f"{steps} steps with health records, {config_name}, {config.train.batch_size} images, {device.type}"
    detail = {
        **{f"{name}_seconds_per_step": value / steps for name, value in seconds.items()},
        "health_share": share,
        "repeats": repeats,
    }
    return Row(what, "the same steps without", ratio, TARGET, meets(ratio, TARGET), detail)


@click.command()
@click.option("--quick", is_flag=True, help="One repeat: within a minute on 2 cores.")
@click.option("--config", "config_name", default="cifar10_vit_micro", show_default=True, metavar="NAME|FILE")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here.")
@click.option("--record", is_flag=True, help="Append the figures to benchmarks/RESULTS.md.")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def main(quick: bool, config_name: str, json_file: Path | None, record: bool, overrides: tuple[str, ...]) -> None:
    """Measure what records cost in addition to the steps themselves."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        keep_freed_memory()  # as `sop-train` does
    rows = [health_row(config_name, overrides, 1 if quick else 9, device)]
    finish("overhead", rows, json_file=json_file, record=record)


if __name__ == "__main__":
    main()
