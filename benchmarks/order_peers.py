"""The loaders that `bench_order_peers.py` compares: each loads a rank's part of some steps, from a saved state on.

Each is used as its documentation says. A state is anything that `torch.save` takes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["BATCH", "IMAGES", "PEERS", "SEED", "SHARD", "STEPS", "Batches", "Part", "redistribute", "write_energon"]

IMAGES, BATCH, WORKERS, SHARD, SEED = 512, 32, 2, 32, 0
STEPS = IMAGES // BATCH

Batches = list[list[int]]


@dataclass(frozen=True)
class Part:
    """What one process loads: a rank's part of some steps."""

    folder: Path
    rank: int
    ranks: int
    done: int
    """Steps before."""
    steps: int | None
    state: Any
    """As it was saved; None at the beginning."""

    @property
    def batch(self) -> int:
        return BATCH // self.ranks

    def take(self, batches: Iterable[Any]) -> Iterator[Any]:
        return islice(iter(batches), self.steps)


Loader = Callable[[Part], tuple[Batches, Any]]


def ours(part: Part) -> tuple[Batches, Any]:
    from sop_faiss.config import load_config
    from sop_faiss.data.images.source import open_source
    from sop_faiss.data.stream import Batches as Stream
    from sop_faiss.data.stream import batch_loader

    settings = [f"data.workers={WORKERS}", f"train.batch_size={BATCH}", f"train.seed={SEED}"]
    source = open_source(part.folder / "shards")
    stream = Stream(source, np.arange(IMAGES), load_config("digits_demo", settings), 8, part.rank, part.ranks)
    steps = range(part.state or 0, STEPS)
    numbers = [int(Path(key).stem) for key in source.keys]
    loaded = part.take(batch_loader(stream, steps, pin_memory=False))
    ids = [[numbers[image] for image in batch.image_ids.tolist()] for batch in loaded]
    return ids, steps.start + len(ids)


def of_webdataset(part: Part) -> tuple[Batches, Any]:
    import webdataset

    paths = sorted(str(path) for path in (part.folder / "shards").glob("*.tar"))
    stream = webdataset.WebDataset(
        paths, shardshuffle=100, detshuffle=True, seed=SEED, nodesplitter=webdataset.split_by_node
    )
    stream = stream.compose(webdataset.detshuffle(1000, seed=SEED)).map(_number)
    loader = torch.utils.data.DataLoader(stream, part.batch, num_workers=WORKERS, collate_fn=list)
    return list(part.take(islice(loader, part.done, None))), None


def _number(sample: dict[str, Any]) -> int:
    return int(Path(sample["__key__"]).stem)


def write_litdata(folder: Path) -> None:
    from litdata import optimize

    output = str(folder / "litdata")
    optimize(fn=int, inputs=list(range(IMAGES)), output_dir=output, chunk_size=SHARD, num_workers=1)


def of_litdata(part: Part) -> tuple[Batches, Any]:
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(str(part.folder / "litdata"), shuffle=True, drop_last=False, seed=SEED)
    loader = StreamingDataLoader(dataset, batch_size=part.batch, num_workers=WORKERS)
    if part.state is not None:
        loader.load_state_dict(part.state)
    ids = [batch.tolist() for batch in part.take(loader)]
    return ids, loader.state_dict()


def write_mosaicml(folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "mosaicml"), columns={"image": "int"}, size_limit=SHARD * 16) as writer:
        for number in range(IMAGES):
            writer.write({"image": number})


def of_mosaicml(part: Part) -> tuple[Batches, Any]:
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(
        local=str(part.folder / "mosaicml"), shuffle=True, shuffle_seed=SEED, batch_size=part.batch
    )
    loader = StreamingDataLoader(dataset, batch_size=part.batch, num_workers=WORKERS)
    if part.state is not None:
        loader.load_state_dict(part.state)
    ids = [batch["image"].tolist() for batch in part.take(loader)]
    return ids, loader.state_dict()


def of_spdl(part: Part) -> tuple[Batches, Any]:
    from spdl.pipeline import PipelineBuilder
    from spdl.source import DistributedRandomSampler

    sampler = DistributedRandomSampler(IMAGES, rank=part.rank, world_size=part.ranks, seed=SEED)
    left = islice(iter(sampler), part.done * part.batch, None)
    builder = PipelineBuilder().add_source(left).pipe(int, concurrency=WORKERS, output_order="input")
    pipeline = builder.aggregate(part.batch).add_sink(2).build(num_threads=WORKERS)
    with pipeline.auto_stop():
        return list(part.take(pipeline)), None


def write_energon(folder: Path) -> None:
    """Write energon's description of a copy of the tar files."""
    from megatron.energon.flavors import BaseWebdatasetFactory

    place = folder / "energon"
    shutil.copytree(folder / "shards", place)
    tars = sorted(path.name for path in place.glob("*.tar"))
    BaseWebdatasetFactory.prepare_dataset(place, tars, split_parts_ratio=[("train", 1.0)], workers=1)
    crude = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    (place / ".nv-meta" / "dataset.yaml").write_text(crude)


def of_energon(part: Part) -> tuple[Batches, Any]:
    from megatron.energon import (
        Cooker,
        DefaultTaskEncoder,
        Sample,
        WorkerConfig,
        get_savable_loader,
        get_train_dataset,
        stateless,
    )

    @dataclass
    class Photo(Sample):  # type: ignore[misc]
        number: int

    @stateless  # type: ignore[misc]
    def cook(sample: dict[str, Any]) -> Any:
        known = {name: sample[name] for name in ("__key__", "__restore_key__")}
        return Photo(**known, number=_number(sample))

    class Photos(DefaultTaskEncoder):  # type: ignore[misc]
        decoder = None
        cookers = (Cooker(cook),)

        def batch(self, samples: list[Any]) -> Any:
            return [sample.number for sample in samples]

        def encode_batch(self, batch: Any) -> Any:
            return batch

    together = WORKERS // part.ranks  # small batches in a rank's part of a global one
    dataset = get_train_dataset(
        part.folder / "energon",
        worker_config=WorkerConfig(rank=part.rank, world_size=part.ranks, num_workers=together),
        batch_size=part.batch // together,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        task_encoder=Photos(),
        repeat=False,
    )
    loader = get_savable_loader(dataset)
    if part.state is not None:
        loader.restore_state_rank(part.state)
    iterator = iter(loader)
    small = list(islice(iterator, None if part.steps is None else part.steps * together))
    ids = [list(chain(*small[at : at + together])) for at in range(0, len(small), together)]
    return ids, loader.save_state_rank() if part.steps is not None else None


def redistribute(states: Path, ranks: int) -> str:
    """Write energon's states for another number of ranks; return why its own command did not, or nothing."""
    files = [str(path) for path in sorted(states.glob("state_*.pt"))]
    command = [str(Path(sys.executable).parent / "energon"), "checkpoint", "redist", *files]
    out = states / "redist"
    out.mkdir()
    done = subprocess.run([*command, str(out), f"--new-world-size={ranks}"], capture_output=True, text=True)
    if not done.returncode:
        for path in out.iterdir():
            path.replace(states / path.name)
        return ""
    from megatron.energon.savable_loader import SavableDataLoaderState

    saved = [torch.load(path, weights_only=False) for path in files]
    workers = [worker for state in saved for worker in state.worker_states]
    each = len(workers) // ranks
    for rank in range(ranks):
        share = workers[rank * each : (rank + 1) * each]
        state = SavableDataLoaderState(
            worker_states=share, next_worker_id=0, micro_batch_size=saved[0].micro_batch_size
        )
        torch.save(state, states / f"state_{rank}.pt")
    return f"{len(files)} -> {ranks}: {done.stderr.strip().splitlines()[-1]}"


@dataclass(frozen=True)
class Peer:
    load: Loader
    distribution: str = ""
    write: Callable[[Path], None] | None = None
    state: str = "rank 0's"
    """What a phase begins with."""


PEERS = {
    "ours": Peer(ours),
    "webdataset": Peer(of_webdataset, "webdataset", state="none, images are left out by hand"),
    "litdata": Peer(of_litdata, "litdata", write_litdata),
    "mosaicml": Peer(of_mosaicml, "mosaicml-streaming", write_mosaicml),
    "spdl": Peer(of_spdl, "spdl", state="none, images are left out by hand"),
    "energon": Peer(of_energon, "megatron-energon", write_energon, state="of all ranks, redistributed"),
}
