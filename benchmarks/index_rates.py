"""What an index costs per million vectors, in seconds of one core: the rates that docs/scale.md calculates with.

    OMP_NUM_THREADS=1 python benchmarks/index_rates.py --features DIR [--rows N] [--lists N]

`--features` names a folder with `gallery.npy`, unit vectors in float32 (`bench_index.py` makes one). Times are
processor times, so that other work on the machine has little effect. `--lists` is the number of lists that the large
index would have, since the cost of adding a vector is that of finding its list.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
from bench_index import make_store

from sop_faiss.features.store import FeatureStore
from sop_faiss.files import sha256_file
from sop_faiss.index.build import IndexOptions, build_index
from sop_faiss.index.export import export_parquet
from sop_faiss.index.search import FeatureIndex
from sop_faiss.neighbors.disk.from_factory import make_approximate_index


def core_seconds(act: Callable[[], object]) -> float:
    started = time.process_time()
    act()
    return time.process_time() - started


@click.command()
@click.option("--features", type=click.Path(path_type=Path), required=True, help="Folder of gallery.npy.")
@click.option("--rows", type=int, default=20_000, show_default=True, help="Vectors to measure with.")
@click.option("--lists", type=int, multiple=True, default=(1024, 4096), show_default=True, help="Lists of the index.")
def main(features: Path, rows: int, lists: tuple[int, ...]) -> None:
    """Measure the rates of building, storing and exporting an index."""
    gallery = np.load(features / "gallery.npy", mmap_mode="r")[:rows].copy()
    count, dimension = gallery.shape
    store = make_store(gallery)
    millions = count / 1e6

    def say(what: str, seconds: float, extra: str = "") -> None:
        print(f"{what:<44}{seconds / millions:10.1f} core seconds per million  {extra}")

    print(f"{count} vectors of dimension {dimension}")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        say("write a feature store", core_seconds(lambda: store.write(place / "store")))
        say("read it, every byte verified", core_seconds(lambda: FeatureStore.read(place / "store")))
        for number in lists:
            index = make_approximate_index(f"IVF{number},SQ8", dimension)
            trained = gallery[: min(count, 4 * number)]
            seconds = core_seconds(functools.partial(index.train, trained))
            per_step = seconds / len(trained) / number * 1e9
            print(
                f"train {number} lists on {len(trained)} vectors: {seconds:.1f} s, {per_step:.1f} ns a vector and list"
            )
            say(f"add to {number} lists, SQ8", core_seconds(functools.partial(index.add, gallery)))
        build_index(store, place / "index", IndexOptions(f"IVF{lists[0] // 8},SQ8"))
        files = {path.name: path.stat().st_size / count for path in (place / "index").iterdir()}
        print("bytes per vector on disk:", {name: round(size, 1) for name, size in files.items()})
        vectors = place / "index" / "index.faiss"
        hashed = core_seconds(lambda: sha256_file(vectors))
        print(f"verify: {vectors.stat().st_size / hashed / 1e9:.2f} GB per core second")
        say("open, every byte verified", core_seconds(lambda: FeatureIndex.open(place / "index")))
        say("export as Parquet", core_seconds(lambda: export_parquet(FeatureIndex.open(place / "index"), place / "p")))


if __name__ == "__main__":
    main()
