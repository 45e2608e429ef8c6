"""The data stream beside loaders of others: the same photos, the same views, 2 workers, whole epochs in random order.

    python benchmarks/bench_data_peers.py [--quick] [--json FILE] [--record]

Peers are those that are installed, of webdataset, litdata, MosaicML streaming, SPDL and energon (`pip install litdata
mosaicml-streaming spdl megatron-energon`, better in an environment of its own); of one that is not, the reason is in
the table. Each has the photos in its own format, as its own writer writes them, with the bytes of the JPEGs kept; SPDL
reads files, energon prepares a copy of the tar files. What is compared:

- **bytes**: every JPEG's bytes, into batches of 64;
- **two crops**: decode, two random crops of 224 px with flips, no color;
- **all 12 views**: 2 + 10 views with all colors on the CPU, and masks.

Views are made by this project's function everywhere, so that only the loaders differ. Each measurement is a process of
its own; the rounds alternate. Processor time is that of the process and its workers; the time to the first batch begins
before the loader is made. Importing is not in the images per second. Peak memory is measured in an epoch of its own:
the most that the process and its workers together hold after a batch, pages that they share counted once.
"""

from __future__ import annotations

import importlib.metadata
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil  # type: ignore[import-untyped]
import torch
from bench_data import BATCH, IMAGENETTE, PATCH, PHOTOS, WORKERS
from order_peers import write_energon
from photos import write_photos
from report import Row, finish, meets
from torch.utils.data import DataLoader, Dataset, IterableDataset

from sop_faiss.config import Config, load_config
from sop_faiss.data.batch import Buffers
from sop_faiss.data.images.source import open_source
from sop_faiss.data.pack import pack
from sop_faiss.data.stream import Batches, batch_loader
from sop_faiss.data.views.multicrop import MultiCrop

PEERS = {
    "webdataset": "webdataset",
    "litdata": "litdata",
    "mosaicml": "mosaicml-streaming",
    "spdl": "spdl",
    "energon": "megatron-energon",
}
"""Name -> distribution."""
TARGETS = {"bytes": "", "two crops": ">= 1.0", "all 12 views": ">= 1.0"}
CHUNK_BYTES = 16 << 20
BUFFER = 1000  # of images, where order is shuffled in a buffer


def config_of(stage: str) -> Config:
    settings = [f"data.workers={WORKERS}", f"train.batch_size={BATCH}", "views.color=cpu"]
    if stage != "all 12 views":
        settings += ["masks.kind=none", "sop.patch.weight=0"]
    if stage == "two crops":
        settings += ["views.local_count=0", "views.jitter=0", "views.gray=0", "views.solarize_global2=0"]
        settings += ["views.blur_global1=0", "views.blur_global2=0"]
    return load_config("vits16", settings)


class Views:
    """Makes the views of one image of a peer, as our loader does; for `bytes` the bytes as they are."""

    def __init__(self, stage: str) -> None:
        self.stage, self.config = stage, config_of(stage)
        self.multicrop = MultiCrop(self.config, self.config.views.local_count)

    def __call__(self, number: int, encoded: bytes) -> Any:
        if self.stage == "bytes":
            return encoded
        views = self.config.views
        sides = (views.global_count, views.global_size), (views.local_count, views.local_size)
        pixels = [np.empty((count, 1, side, side, 3), np.uint8) for count, side in sides]
        colors = [np.empty((count, 1, 0), np.float32) for count, _ in sides]
        masks = np.zeros((views.global_count, 1, (views.global_size // PATCH) ** 2), bool)
        image, drawn = self.multicrop.load(number, 0, encoded)
        self.multicrop.write(image, drawn, Buffers(pixels[0], pixels[1], colors[0], colors[1], masks), 0, 0)
        return [torch.from_numpy(array[:, 0]) for array in (*pixels, masks)]


def collated(images: list[Any]) -> Any:
    return images if isinstance(images[0], bytes) else [torch.stack(parts, 1) for parts in zip(*images, strict=True)]


def batches_of(images: Iterator[Any]) -> Iterator[Any]:
    batch = []
    for image in images:
        batch.append(image)
        if len(batch) == BATCH:
            yield collated(batch)
            batch = []


class Mapped(Dataset[Any]):
    """A peer's data set with random access, and the views of its images."""

    def __init__(self, dataset: Any, views: Views, key: str | None) -> None:
        self.dataset, self.views, self.key = dataset, views, key

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        sample = self.dataset[number]
        return self.views(number, sample if self.key is None else sample[self.key])


class Streamed(IterableDataset[Any]):
    """A peer's data set that is iterated over, and the views of its images."""

    def __init__(self, dataset: Iterable[Any], views: Views, key: str | None) -> None:
        self.dataset, self.views, self.key = dataset, views, key

    def __iter__(self) -> Iterator[Any]:
        for number, sample in enumerate(self.dataset):
            yield self.views(number, sample if self.key is None else sample[self.key])


def loaded(dataset: Any) -> Iterable[Any]:
    return DataLoader(dataset, BATCH, num_workers=WORKERS, collate_fn=collated, drop_last=True)


def ours(folder: Path, stage: str) -> Iterable[Any]:
    source = open_source(folder / "shards")
    if stage == "bytes":
        order = np.random.default_rng(0).permutation(len(source)).tolist()
        dataset = Mapped(_Bytes(source), Views(stage), None)
        return DataLoader(dataset, BATCH, sampler=order, num_workers=WORKERS, collate_fn=collated, drop_last=True)
    batches = Batches(source, np.arange(len(source)), config_of(stage), PATCH)
    return batch_loader(batches, range(batches.steps_per_epoch), pin_memory=False)


class _Bytes:
    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> bytes:
        read: bytes = self.source.read(number)
        return read


def of_webdataset(folder: Path, stage: str) -> Iterable[Any]:
    import webdataset

    paths = sorted(str(path) for path in (folder / "shards").glob("*.tar"))
    stream = webdataset.WebDataset(paths, shardshuffle=100).shuffle(BUFFER).to_tuple("jpg")
    return loaded(Streamed(stream, Views(stage), 0))  # type: ignore[arg-type]


def write_litdata(folder: Path, photos: list[Path]) -> None:
    from litdata import optimize

    optimize(
        fn=_read_photo,
        inputs=[str(path) for path in photos],
        output_dir=str(folder / "litdata"),
        chunk_bytes=CHUNK_BYTES,
        num_workers=1,
    )


def _read_photo(path: str) -> bytes:
    return Path(path).read_bytes()


def of_litdata(folder: Path, stage: str) -> Iterable[Any]:
    from litdata import StreamingDataLoader, StreamingDataset

    views = Views(stage)

    class Photos(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            return views(int(getattr(index, "index", index)), bytes(super().__getitem__(index)))

    dataset = Photos(str(folder / "litdata"), shuffle=True, drop_last=True)
    loader: Iterable[Any] = StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=collated, drop_last=True
    )
    return loader


def write_mosaicml(folder: Path, photos: list[Path]) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "mosaicml"), columns={"image": "bytes"}, size_limit=CHUNK_BYTES) as writer:
        for path in photos:
            writer.write({"image": path.read_bytes()})


def of_mosaicml(folder: Path, stage: str) -> Iterable[Any]:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mosaicml"), shuffle=True, batch_size=BATCH)
    return loaded(Streamed(dataset, Views(stage), "image"))


def of_spdl(folder: Path, stage: str) -> Iterable[Any]:
    from spdl.pipeline import PipelineBuilder

    paths = sorted((folder / "photos").rglob("*.jpg"))
    order = np.random.default_rng(0).permutation(len(paths)).tolist()
    views = Views(stage)

    def make(number: int) -> Any:
        return views(number, paths[number].read_bytes())

    def images() -> Iterator[Any]:
        pipeline = (
            PipelineBuilder()
            .add_source(order)
            .pipe(make, concurrency=WORKERS)
            .add_sink(BATCH)
            .build(num_threads=WORKERS)
        )
        with pipeline.auto_stop():
            yield from pipeline

    return batches_of(images())


def of_energon(folder: Path, stage: str) -> Iterable[Any]:
    from megatron.energon import (
        Cooker,
        DefaultTaskEncoder,
        Sample,
        WorkerConfig,
        get_loader,
        get_train_dataset,
        stateless,
    )

    views = Views(stage)

    @dataclass
    class Photo(Sample):  # type: ignore[misc]
        encoded: bytes

    @stateless  # type: ignore[misc]
    def cook(sample: dict[str, Any]) -> Any:
        return Photo(**{name: sample[name] for name in ("__key__", "__restore_key__")}, encoded=sample["jpg"])

    class Photos(DefaultTaskEncoder):  # type: ignore[misc]
        decoder = None
        cookers = (Cooker(cook),)

        @stateless  # type: ignore[misc]
        def encode_sample(self, sample: Any) -> Any:
            return views(0, sample.encoded)

        def batch(self, samples: list[Any]) -> Any:
            return collated(samples)

        def encode_batch(self, batch: Any) -> Any:
            return batch

    worker = WorkerConfig(rank=0, world_size=1, num_workers=WORKERS)
    dataset = get_train_dataset(
        folder / "energon",
        worker_config=worker,
        batch_size=BATCH,
        batch_drop_last=True,
        shuffle_buffer_size=BUFFER // WORKERS,
        max_samples_per_sequence=100,
        task_encoder=Photos(),
        repeat=False,
    )
    loader: Iterable[Any] = get_loader(dataset)
    return loader


LOADERS: dict[str, Callable[[Path, str], Iterable[Any]]] = {
    "ours": ours,
    "webdataset": of_webdataset,
    "litdata": of_litdata,
    "mosaicml": of_mosaicml,
    "spdl": of_spdl,
    "energon": of_energon,
}
WRITERS: dict[str, Callable[[Path, list[Path]], None]] = {
    "litdata": write_litdata,
    "mosaicml": write_mosaicml,
    "energon": lambda folder, _: write_energon(folder),
}


def measure(name: str, stage: str, folder: Path) -> dict[str, float]:
    """Load one epoch in this process, and return its figures."""
    started = time.perf_counter()
    iterator = iter(LOADERS[name](folder, stage))
    next(iterator)
    first = time.perf_counter() - started
    batches = 1 + sum(1 for _ in iterator)
    del iterator  # ends the workers, whose processor time is known only then
    seconds = time.perf_counter() - started
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "images_per_second": batches * BATCH / seconds,
        "cpu_seconds": sum(each.ru_utime + each.ru_stime for each in usage),
        "first_batch_seconds": first,
    }


def measure_memory(name: str, stage: str, folder: Path) -> dict[str, float]:
    """Load one epoch in this process, and return the most memory that it and its workers held after a batch."""
    peak = max(_held() for _ in LOADERS[name](folder, stage))
    return {"peak_MiB": peak / 2**20}


def _held() -> int:
    process = psutil.Process()
    return sum(each.memory_full_info().pss for each in (process, *process.children(recursive=True)))


MEASURES = {"time": measure, "memory": measure_memory}


def measured_apart(measured: str, name: str, stage: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", measured, name, stage, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise click.ClickException(f"{name}, {stage}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def missing(name: str) -> str:
    try:
        importlib.metadata.version(PEERS[name])
    except importlib.metadata.PackageNotFoundError:
        return f"{PEERS[name]} is not installed"
    return ""


@click.command()
@click.option("--quick", is_flag=True, help="One round, 256 photos.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the rows here, too.")
@click.option("--record", is_flag=True, help="Append the table to benchmarks/RESULTS.md.")
@click.option("--one", nargs=4, metavar="WHAT PEER STAGE FOLDER", help="Make one measurement, in this process.")
def main(quick: bool, json_file: Path | None, record: bool, one: tuple[str, str, str, str] | None) -> None:
    """Measure the data stream beside other loaders."""
    if one is not None:
        print(json.dumps(MEASURES[one[0]](one[1], one[2], Path(one[3]))))
        return
    why = {name: reason for name in PEERS if (reason := missing(name))}
    present = [name for name in LOADERS if name not in why]
    rounds = 1 if quick else 3
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_photos(256 if quick else PHOTOS, IMAGENETTE, folder / "photos")
        pack(folder / "photos", folder / "shards", samples_per_shard=64)  # several for each worker
        photos = sorted((folder / "photos").rglob("*.jpg"))
        for name in present:
            if name in WRITERS:
                WRITERS[name](folder, photos)
        figures: dict[tuple[str, str], list[dict[str, float]]] = {}
        peaks = {}
        for turn in range(rounds):
            for stage in TARGETS:
                for name in present:
                    print(f"{stage}: {name}", file=sys.stderr, flush=True)
                    figures.setdefault((stage, name), []).append(measured_apart("time", name, stage, folder))
                    if turn == 0:
                        peaks[stage, name] = measured_apart("memory", name, stage, folder)
    rows = []
    for stage, target in TARGETS.items():
        medians = {name: _medians(figures[stage, name]) | peaks[stage, name] for name in present}
        for name in PEERS:
            what = f"{stage}: images per second, ours over the peer's"
            if name in why:
                rows.append(Row(what, name, None, target, None, {"not measured": why[name]}))
                continue
            ratio = medians["ours"]["images_per_second"] / medians[name]["images_per_second"]
            detail = {f"{who}_{key}": value for who in ("ours", name) for key, value in medians[who].items()}
            rows.append(Row(what, name, ratio, target, meets(ratio, target), detail | {"rounds": rounds}))
    finish("data peers", rows, json_file=json_file, record=record)


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}


if __name__ == "__main__":
    main()
