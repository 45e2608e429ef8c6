"""What a step of training costs on 8, 64 and 512 ranks: collectives and bytes, waits for the device, search, memory.

    python benchmarks/count_collectives.py                      # the table of docs/parallel.md
    python benchmarks/count_collectives.py --sites vits16 64    # every wait and collective of a step, with its place

The real loop (`train_steps`) runs as rank 0 under torch's fake process group, whose collectives return at once with
this rank's own values. Two tiny images a rank, tiny views and memories; the networks are real. What depends on the
sizes left out is computed from the configuration, for 1,024 images a step over all ranks. Of networks that are shared
by FSDP2 one with 2 and one with 3 blocks are run, and what a block adds is added for each that is missing. As on GPUs,
DDP reduces its buckets (on CPUs they are gathered, so that resuming is exact).
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sop_faiss.config import load_config
from sop_faiss.data.images.source import open_source
from sop_faiss.data.stream import Batches
from sop_faiss.train.loop import train_steps
from sop_faiss.train.parallel import here
from sop_faiss.train.state import RunState
from sop_faiss.train.stop import StopRequest

SIZES: dict[str, tuple[str, int | None, tuple[str, ...]]] = {
    "ViT-S": ("vits16", None, ()),
    "ViT-B": ("vitb16", None, ()),
    "ViT-L": ("vitl16", 24, ()),
    "ViT-g": ("vitl16", 40, ("model.backbone=vit_giant_patch14_224", "model.patch_size=16")),
}
"""Configuration, blocks of a network that is extrapolated, and what differs."""
IMAGES = 1024  # a step, over all ranks
WORLDS = (8, 64, 512)
PLAIN_STEP, LOGGED_STEP = 3, 4  # the first two also rebuild buckets and record prototypes
SMALL = (
    "data.workers=0",
    "data.threads=1",
    "views.global_size=32",
    "views.local_size=16",
    "views.local_count=2",
    "masks.kind=random",
    "model.drop_path=0",
    "sop.cls.capacity=2048",
    "sop.cls.num_anchors=32",
    "sop.patch.capacity=2048",
    "sop.patch.num_anchors=32",
    "evaluate.every_steps=0",
    f"train.log_every_steps={LOGGED_STEP}",
    "train.checkpoint_every_steps=1000000",
    "train.check_ranks_every_steps=0",
    "train.stop_on=non_finite",
    "train.device=cpu",
)
_WAITS = {"aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten._unique2", "aten.equal"}


@dataclass
class Counted:
    """What one step did."""

    collectives: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes of the largest side of each collective, by what they are."""
    waits: Counter[str] = field(default_factory=Counter)
    """Operations that wait for the device on CUDA, by the line that asks."""


class Count(TorchDispatchMode):
    """Counts collectives, and operations whose result the CPU needs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step = Counted()
        self.steps: list[Counted] = []
        self._tolist = Tensor.tolist

    def next_step(self) -> None:
        """Begin another step."""
        self.steps.append(self.step)
        self.step = Counted()

    def __enter__(self) -> Count:
        """Also count `tolist`, which no dispatch sees."""
        super().__enter__()  # type: ignore[no-untyped-call]
        given, count = self._tolist, self

        def counted(tensor: Tensor) -> Any:
            if "stream.py" not in _place():  # of a worker, where there is one
                count.wait("tolist")
            return given(tensor)

        Tensor.tolist = counted  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *error: Any) -> None:
        """See torch."""
        Tensor.tolist = self._tolist  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def collective(self, name: str, size: int) -> None:
        """Count one, by the size of its largest side."""
        place = _place()
        of_rows = place.startswith(("sop.py", "health.py")) and name == "allgather"
        kind = "numbers" if size <= 4096 else "rows" if of_rows else "parameters"
        self.step.collectives[f"{name} of {kind}  {place}"] += 1
        self.step.sent[kind] += size

    def wait(self, name: str) -> None:
        """Count one."""
        self.step.waits[f"{name}  {_place()}"] += 1

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See torch."""
        name = function.name().partition("::")
        short = f"{name[0]}.{name[2].partition('.')[0]}"
        if name[0] in ("c10d", "_c10d_functional") and not any(word in short for word in ("wait", "wrap", "barrier")):
            sides = [sum(t.nbytes for t in tree_leaves(arg) if isinstance(t, Tensor)) for arg in args]
            self.collective(short.partition(".")[2].strip("_"), max(sides, default=0))
        elif short in _WAITS or (short == "aten.index" and any(getattr(i, "dtype", 0) == torch.bool for i in args[1])):
            self.wait(short)
        return function(*args, **(kwargs or {}))


def _place() -> str:
    """Return the line of the package that asks."""
    inside = ""
    for frame, line in traceback.walk_stack(None):
        name = frame.f_code.co_filename
        if "/fsdp/" in name:
            inside = "fsdp "
        elif "sop_faiss" in name and not name.endswith("distributed.py"):
            return f"{inside}{Path(name).name}:{line}"
    return f"{inside}autograd"


class _EnoughError(Exception):
    """The steps that count are made."""


def images(folder: Path, count: int = 2048) -> Path:
    """Write one tiny image under `count` names."""
    first = folder / "0000.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)).save(first)
    for number in range(1, count):
        (folder / f"{number:04d}.png").hardlink_to(first)
    return folder


def run(name: str, world: int, *overrides: str) -> tuple[list[Counted], RunState]:
    """Make the first steps of a configuration as rank 0 of `world`; return what each did, and the run."""
    count = Count()

    def reduced(bucket: Any) -> torch.futures.Future[Tensor]:
        count.collective("allreduce", bucket.buffer().nbytes)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def after_step(step: int, _: int | None) -> None:
        count.next_step()
        if step == LOGGED_STEP:
            raise _EnoughError

    config = load_config(name, [*SMALL, f"train.batch_size={2 * world}", *overrides])
    given = DistributedDataParallel.register_comm_hook
    hooked = lambda self, state, _: given(self, state, lambda _, bucket: reduced(bucket))  # noqa: E731
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        DistributedDataParallel.register_comm_hook = hooked  # type: ignore[method-assign]
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(_EnoughError):
            source = open_source(images(Path(folder)))
            state = RunState(config, torch.device("cpu"), len(source))
            positions = np.arange(len(source))
            batches = Batches(source, positions, config, state.student.backbone.patch_size, 0, world)
            with tempfile.TemporaryDirectory() as out, count:
                train_steps(state, batches, Path(out), StopRequest(), progress=after_step)
    finally:
        DistributedDataParallel.register_comm_hook = given  # type: ignore[method-assign]
        dist.destroy_process_group()
    return count.steps, state


def sizes_of(state: RunState) -> dict[str, float]:
    """Return parameters of backbone and of all, and the bytes that this rank holds of student and teacher."""
    student = list(state.student.parameters())
    held = [p for group in state.optimizer.state.values() for p in group.values() if isinstance(p, Tensor)]
    local = sum(here(p).nbytes for p in student)
    return {
        "parameters": sum(p.numel() for p in student),
        "of blocks": sum(p.numel() for block in state.student.backbone.blocks() for p in block.parameters()),
        "student": 2 * local + sum(here(p).nbytes for p in held),  # weights, gradients, moments
        "teacher": sum(p.nbytes for p in state.teacher.parameters()),
    }


def counted(name: str, world: int, *overrides: str, depth: int | None) -> dict[str, float]:
    """Return the numbers of one row; of `depth` blocks, from runs with 2 and 3, if it is given."""
    if depth is not None:
        two, three = (
            counted(name, world, *overrides, "train.parallel=fsdp", f"model.depth={blocks}", depth=None)
            for blocks in (2, 3)
        )
        return {key: two[key] + (depth - 2) * (three[key] - two[key]) for key in two}
    steps, state = run(name, world, *overrides)
    plain, logged = steps[PLAIN_STEP - 1], steps[LOGGED_STEP - 1]
    numbers = sum(n for place, n in plain.collectives.items() if " numbers " in place)
    total = sum(plain.collectives.values())
    return {
        "collectives": total,
        "of numbers": numbers,
        "of parameters": sum(n for place, n in plain.collectives.items() if " parameters " in place),
        "parameter bytes": plain.sent["parameters"],
        "row bytes": plain.sent["rows"] * IMAGES / (2 * world),
        "waits": sum(plain.waits.values()),
        "more when logged": sum(logged.collectives.values()) - total,
        "more waits when logged": sum(logged.waits.values()) - sum(plain.waits.values()),
        **sizes_of(state),
    }


def search_share(name: str, world: int, blocks: float) -> tuple[float, float]:
    """Return the multiply-adds of a step's searches on each rank (10^12), and these over the backbone's.

    The backbone multiplies each token by each weight of its blocks: the teacher's once, the student's three times
    (forward and backward); attention between tokens is left out.
    """
    config = load_config(name)
    searches = sum(
        term.tasks * term.num_anchors * term.capacity * config.model.embedding_dim
        for term in config.sop.terms().values()
        if term.num_supports
    )
    views = config.views
    tokens = views.global_count * (views.global_size // 16) ** 2, views.local_count * (views.local_size // 16) ** 2
    network = blocks * (4 * tokens[0] + 3 * tokens[1]) * IMAGES / world
    return searches / 1e12, searches / network


def row_of(title: str, world: int) -> list[str]:
    """Return a row of the table."""
    name, depth, overrides = SIZES[title]
    made = counted(name, world, *overrides, depth=depth)
    searches, share = search_share(name, world, made["of blocks"])
    student, teacher = made["student"] / 2**30, made["teacher"] / 2**30
    return [
        title,
        f"{world}",
        f"{IMAGES // world}",
        f"{made['collectives']:.0f} ({made['of parameters']:.0f}, {made['of numbers']:.0f})",
        f"{made['parameter bytes'] / 2**20:,.0f}",
        f"{made['row bytes'] / 2**20:.1f}",
        f"{made['waits']:.0f}",
        f"{made['more when logged']:.0f}, {made['more waits when logged']:.0f}",
        f"{searches:.2f} ({100 * share:.0f} %)",
        f"{student:.2f} + {teacher:.2f}",
    ]


HEADER = (
    "network | ranks | images a rank | collectives (of parameters, of 4 KiB or less) | MiB of gradients, parameters | "
    "MiB of rows | waits | more when logged: collectives, waits | 10^12 multiply-adds of search a rank (of the "
    "backbone's) | GiB of student, teacher"
)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", nargs=2, metavar=("CONFIG", "RANKS"), help="every place, of one run")
    parser.add_argument("--networks", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--ranks", nargs="+", type=int, default=WORLDS)
    options = parser.parse_args()
    if options.sites:
        steps, _ = run(options.sites[0], int(options.sites[1]))
        for step, what in ((PLAIN_STEP, "between logs"), (LOGGED_STEP, "logged")):
            print(f"A step {what}:")
            for place, times in [*steps[step - 1].collectives.most_common(), *steps[step - 1].waits.most_common()]:
                print(f"  {times:3d}  {place}")
        return
    print(f"| {HEADER} |\n|{'---|' * len(HEADER.split('|'))}")
    for title in options.networks:
        for world in options.ranks:
            print(f"| {' | '.join(row_of(title, world))} |", flush=True)


if __name__ == "__main__":
    import report as report  # mistakes are one line

    main()
