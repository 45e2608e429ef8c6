"""An index of a million vectors on disk: recall, time per query, time to open it.

    python benchmarks/bench_index.py --features DIR [--model RUN --photos SRC] [--count N]
        [--quick] [--json FILE] [--record]

`--features` names a folder with `gallery.npy` and `queries.npy`, unit vectors in float32; if it does not exist, it is
made once from augmented views of photos (`photo_features.py`). The index is built as by `sop-index build --factory auto
--max-memory 1GB`; its recall is measured on the queries, and no view of their photos is in it.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import click
import numpy as np
from photo_features import write_photo_features
from report import Row, finish, interleaved_medians, meets

from sop_faiss.features.store import FeatureStore
from sop_faiss.index.build import IndexOptions, build_index
from sop_faiss.index.search import FeatureIndex
from sop_faiss.neighbors.disk.auto_factory import exact_similarities

K, BUDGET = 10, 10**9
TIMED_QUERIES = 32


def make_store(features: np.ndarray) -> FeatureStore:
    names = [f"view-{row:07d}" for row in range(len(features))]
    manifest = {"encoder": {"name": "views", "fingerprint": "0" * 64}, "preprocess": {}, "pooling": "cls", "root": "/"}
    return FeatureStore(names, None, [""] * len(names), [f"{name}.jpg" for name in names], features, manifest)


def recall_of(index: FeatureIndex, gallery: np.ndarray, queries: np.ndarray) -> float:
    """Return the share of the 10 nearest rows that are found; a row with the similarity of the tenth counts."""
    blocks = (gallery[start : start + 65_536] for start in range(0, len(gallery), 65_536))
    nearest = exact_similarities(queries, blocks, K)
    rows = [[int(key.removeprefix("view-")) for key in line] for line in index.search(queries, K).keys]
    found = np.einsum("qd,qkd->qk", queries, gallery[np.array(rows)], dtype=np.float64)
    return float((found >= nearest[:, -1:] - 1e-6).mean())


def rows_of(gallery: np.ndarray, queries: np.ndarray, folder: Path, repeats: int) -> list[Row]:
    store, timed = make_store(gallery), queries[:TIMED_QUERIES]
    started = time.perf_counter()
    manifest = build_index(store, folder / "auto", IndexOptions(max_bytes=BUDGET))
    built_seconds = time.perf_counter() - started
    build_index(store, folder / "flat", IndexOptions("Flat"))
    auto, flat = (FeatureIndex.open(folder / name) for name in ("auto", "flat"))
    recall = recall_of(auto, gallery, queries)
    seconds = interleaved_medians(
        {
            "flat": lambda: [flat.search(query, K) for query in timed],
            "auto": lambda: [auto.search(query, K) for query in timed],
            "flat together": lambda: flat.search(queries, K),
            "auto together": lambda: auto.search(queries, K),
        },
        repeats,
    )
    opened = interleaved_medians({"sizes": lambda: FeatureIndex.open(folder / "auto", verify="sizes")}, 5)["sizes"]
    size = (folder / "auto" / "index.faiss").stat().st_size
    detail = {
        "factory": manifest.factory,
        "effort": manifest.search["effort"],
        "recall_when_built": manifest.search["recall"],
        "vectors": len(gallery),
        "dimension": gallery.shape[1],
        "gigabytes": size / 1e9,
        "build_seconds": built_seconds,
    }
    one, many = seconds["flat"] / seconds["auto"], seconds["flat together"] / seconds["auto together"]
    return [
        Row("recall@10 of auto under 1 GB", "brute force, held-out queries", recall, ">= 0.95", recall >= 0.95, detail),
        Row(
            "one query at a time, times faster",
            "Flat",
            one,
            ">= 10",
            meets(one, ">= 10"),
            {f"{name}_milliseconds": 1000 * seconds[name] / len(timed) for name in ("flat", "auto")},
        ),
        Row(
            f"{len(queries)} queries together, times faster",
            "Flat",
            many,
            "",
            None,
            {f"{name}_milliseconds": 1000 * seconds[f"{name} together"] / len(queries) for name in ("flat", "auto")},
        ),
        Row('seconds to open it, verify="sizes"', "-", opened, "<= 1", meets(opened, "<= 1"), {}),
    ]


@click.command()
@click.option("--features", type=click.Path(path_type=Path), required=True, help="Folder of gallery.npy, queries.npy.")
@click.option("--model", type=click.Path(path_type=Path), help="A run, to make the features with.")
@click.option("--photos", help="SRC of the photos to make them of.")
@click.option("--count", type=int, default=1_000_000, show_default=True, help="Vectors of the gallery.")
@click.option("--quick", is_flag=True, help="One round of the timings.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the rows here, too.")
@click.option("--record", is_flag=True, help="Append the table to benchmarks/RESULTS.md.")
def main(
    features: Path,
    model: Path | None,
    photos: str | None,
    count: int,
    quick: bool,
    json_file: Path | None,
    record: bool,
) -> None:
    """Measure an index of a million vectors."""
    if not (features / "queries.npy").is_file():
        if model is None or photos is None:
            raise SystemExit(f"--features {features} has no queries.npy: give --model and --photos to make it")
        write_photo_features(model, photos, count, 1000, features)
    gallery, queries = np.load(features / "gallery.npy")[:count], np.load(features / "queries.npy")
    folder = Path(tempfile.mkdtemp())
    try:
        finish("index", rows_of(gallery, queries, folder, 1 if quick else 5), json_file=json_file, record=record)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
