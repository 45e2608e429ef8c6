"""The order of images after a stop and a resume on another number of ranks, beside loaders of others.

    python benchmarks/bench_order_peers.py [--json FILE] [--record]

512 small images in random order, a global batch of 32, 2 workers a rank, ranks that are processes of their own (gloo).
First an epoch without a stop, on one rank. Then the same epoch with two stops: 5 steps on one rank, 6 on two ranks,
each of which loads half of a global batch, the rest on one rank again; at each stop the loader's state is written, and
new processes begin with it. The ratio is the share of the 16 steps whose images, over the ranks, are those of the epoch
without a stop. As a check that a loader's state is used rightly, the same with one rank throughout.

Each loader is used as its documentation says; in short:

- **ours**: `Batches`, whose position is the number of the step;
- **litdata**: `StreamingDataLoader.state_dict`, with `drop_last` given, which otherwise depends on the number of ranks;
- **mosaicml**: `StreamingDataLoader.state_dict`, with the batch size of a rank;
- **energon**: `save_state_rank` and `energon checkpoint redist`; ranks times workers must stay the same, so that two
  ranks have one worker each, and one rank joins two batches of 16 into a global one. Where that command fails, its
  message is in the table, and the states are distributed as it would;
- **webdataset** and **spdl** have no state. Measured is what a user can do: begin the epoch again with the same seed,
  and leave out as many batches (SPDL: draws of the sampler) as were loaded.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from order_peers import IMAGES, PEERS, SEED, SHARD, STEPS, Batches, Part, redistribute
from PIL import Image
from report import Row, finish, meets

PHASES = {"1 -> 2 -> 1 ranks": ((1, 5), (2, 6), (1, None)), "1 -> 1 -> 1 ranks": ((1, 5), (1, 6), (1, None))}
"""What -> ranks and steps of each phase; None: to the end."""
SECONDS = 300  # for one phase


def load_part(name: str, part: Part, states: Path) -> None:
    """Load a rank's part in this process; write its images and its state into `states`."""
    torch.distributed.init_process_group("gloo")
    ids, state = PEERS[name].load(part)
    torch.save(state, states / f"state_{part.rank}.pt")
    torch.distributed.barrier()
    (states / f"ids_{part.rank}.json").write_text(json.dumps(ids))
    torch.distributed.destroy_process_group()


def run_phase(name: str, folder: Path, ranks: int, done: int, steps: int | None, states: tuple[str, str]) -> Batches:
    """Load some steps with processes of their own; return the images of each step, over the ranks.

    Raises:
        RuntimeError: a process failed; its last line.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    logs = Path(states[1])
    running = []
    for rank in range(ranks):
        plan = json.dumps([name, str(folder), rank, ranks, done, steps, *states])
        environ = os.environ | {key: str(value) for key, value in known.items()} | {"RANK": str(rank)}
        environ |= {"LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--one", plan]
        with (logs / f"errors_{rank}").open("w") as errors:
            running.append(subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=errors))
    wait_for(running)
    ends = [process.wait() for process in running]
    if any(ends):
        failed = next((rank for rank, end in enumerate(ends) if end not in (0, -signal.SIGTERM)), None)
        why = f"no end within {SECONDS} s" if failed is None else last_line((logs / f"errors_{failed}").read_text())
        raise RuntimeError(why)
    parts = [json.loads((logs / f"ids_{rank}.json").read_text()) for rank in range(ranks)]
    return [list(chain(*of_ranks)) for of_ranks in zip(*parts, strict=True)]


def wait_for(running: list[subprocess.Popen[bytes]]) -> None:
    """Wait until all processes have ended; if one fails, or after `SECONDS`, end the others."""
    until = time.monotonic() + SECONDS
    while any(process.poll() is None for process in running) and time.monotonic() < until:
        if any(process.poll() for process in running):
            break
        time.sleep(0.05)
    for process in running:
        process.terminate()


def resumed(name: str, folder: Path, phases: Iterable[tuple[int, int | None]]) -> tuple[Batches, list[str]]:
    """Load an epoch in phases; return the images of each step, and what the loader's own tools could not do."""
    ids: Batches = []
    notes = []
    before = ""
    for ranks, steps in phases:
        states = folder / f"states_{name}_{len(list(folder.glob('states_*')))}"
        states.mkdir()
        if name == "energon" and before and ranks != len(list(Path(before).glob("state_*.pt"))):
            notes.append(redistribute(Path(before), ranks))
        ids += run_phase(name, folder, ranks, len(ids), steps, (before, str(states)))
        before = str(states)
    return ids, [note for note in notes if note]


def compared(reference: Batches, ids: Batches) -> dict[str, Any]:
    """Return how an epoch with stops differs from one without."""
    loaded = Counter(image for step in ids for image in step)
    pairs = list(zip(reference, ids, strict=False))
    return {
        "steps_with_the_same_images": sum(set(one) == set(other) for one, other in pairs),
        "steps_in_the_same_sequence": sum(one == other for one, other in pairs),
        "steps": len(ids),
        "images_twice": sum(count > 1 for count in loaded.values()),
        "images_never": IMAGES - len(loaded),
    }


def rows_of(name: str, folder: Path) -> list[Row]:
    """Measure one loader."""
    peer, rows = PEERS[name], []
    reference = run_phase(name, folder, 1, 0, None, ("", str(folder)))
    version = {"version": metadata.version(peer.distribution)} if peer.distribution else {}
    for what, phases in PHASES.items():
        target = ">= 1" if name == "ours" else ""
        row = f"steps with the same images after {what}, of all"
        try:
            ids, notes = resumed(name, folder, phases)
        except RuntimeError as error:
            rows.append(Row(row, name, None, target, None, {"cannot resume": str(error)} | version))
            continue
        found = compared(reference, ids)
        ratio = found["steps_with_the_same_images"] / STEPS
        detail = found | {"state": peer.state} | ({"own command failed": "; ".join(notes)} if notes else {}) | version
        rows.append(Row(row, name, ratio, target, meets(ratio, target), detail))
    return rows


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def write_images(folder: Path) -> None:
    """Write the images as files, and as shards."""
    from sop_faiss.data.pack import pack

    (folder / "images").mkdir()
    generator = np.random.default_rng(SEED)
    for number in range(IMAGES):
        pixels = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number:04d}.jpg")
    pack(folder / "images", folder / "shards", samples_per_shard=SHARD)


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the rows here, too.")
@click.option("--record", is_flag=True, help="Append the table to benchmarks/RESULTS.md.")
@click.option("--only", "names", multiple=True, type=click.Choice(list(PEERS)), help="This loader; repeatable.")
@click.option("--one", help="Load a rank's part of a phase, in this process.", hidden=True)
def main(json_file: Path | None, record: bool, names: tuple[str, ...], one: str | None) -> None:
    """Compare the order of images after a resume on another number of ranks with other loaders."""
    if one is not None:
        name, folder, rank, ranks, done, steps, before, states = json.loads(one)
        of_rank = rank if name == "energon" else 0
        state = torch.load(Path(before) / f"state_{of_rank}.pt", weights_only=False) if before else None
        load_part(name, Part(Path(folder), rank, ranks, done, steps, state), Path(states))
        return
    rows = []
    with tempfile.TemporaryDirectory() as place:
        write_images(Path(place))
        for name in names or PEERS:
            print(name, file=sys.stderr, flush=True)
            peer = PEERS[name]
            try:
                if peer.distribution:
                    metadata.version(peer.distribution)
            except metadata.PackageNotFoundError:
                why = f"{peer.distribution} is not installed"
                rows.append(Row("order after a resume", name, None, "", None, {"not measured": why}))
                continue
            if peer.write is not None:
                peer.write(Path(place))
            rows += rows_of(name, Path(place))
    finish("order of peers", rows, json_file=json_file, record=record)


if __name__ == "__main__":
    main()
