"""A million vectors: searches among some of them, and an index of 100 MB with the vectors on disk.

    python benchmarks/bench_index_filter.py --features DIR [--count N] [--quick] [--json FILE] [--record]

`--features` names a folder with `gallery.npy`, `queries.npy` and `clusters.npy`; if it does not exist, a mixture with
heavy tails is written there (`mixture.py`). The lists are learned once for both kinds. The search setting is tuned on
other queries than those that are measured. Rows pass at random, or with their clusters. Times are of one query on one
core: processor time, which other work on the machine changes little, beside the time that went by.

The index that re-ranks keeps float16 vectors, whose rounding can exchange the tenth row with the next. Its recall among
up to 1 % of the rows is against brute force over the vectors that it keeps; the share of the vectors as they were is
beside it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import faiss
import numpy as np
import pyarrow as pa
from mixture import write_mixture
from report import Row, finish, meets
from resident import resident

from sop_faiss.index.packed_texts import PackedTexts, RowsOfTexts
from sop_faiss.neighbors.disk import among
from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from sop_faiss.neighbors.disk.auto_factory import choices, near_by_vectors, tune_search
from sop_faiss.neighbors.disk.from_factory import make_approximate_index, read_approximate_index

DIMENSION, K, TARGET, BLOCK = 384, 10, 0.95, 50_000
SHARES = (0.001, 0.01, 0.1, 0.5)
QUICK_ROUNDS, QUICK_ROWS = 5, 20
"""Of k-means, and rows for each list that it learns from."""
SMALL_BYTES = 100
"""Of memory for each vector: 100 MB for a million."""


def learned_lists(gallery: np.ndarray, lists: int, quick: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the centers, and the list of each row."""
    index = make_approximate_index(f"IVF{lists},Flat", DIMENSION)
    wanted = index.training_rows()
    if quick:
        index._ivf.cp.niter, wanted = QUICK_ROUNDS, QUICK_ROWS * lists
    drawn = np.random.default_rng(0).permutation(len(gallery))[:wanted]
    index.train(gallery[np.sort(drawn)])
    quantizer: Any = faiss.downcast_index(index._ivf.quantizer)
    centers = faiss.rev_swig_ptr(quantizer.get_xb(), lists * DIMENSION).reshape(lists, DIMENSION).copy()
    found = [quantizer.search(gallery[at : at + BLOCK], 1)[1][:, 0] for at in range(0, len(gallery), BLOCK)]
    return centers, np.concatenate(found)


def filled(factory: str, gallery: np.ndarray, centers: np.ndarray, assigned: np.ndarray) -> ApproximateIndex:
    """Make an index of all rows in the lists that were learned."""
    index = make_approximate_index(factory, DIMENSION)
    index._ivf.quantizer.add(centers)
    index.train(np.ascontiguousarray(gallery[:: max(1, len(gallery) // 65_536)]))
    inner: Any = index._faiss
    for at in range(0, len(gallery), BLOCK):
        rows = np.ascontiguousarray(gallery[at : at + BLOCK])
        lists, ids = assigned[at : at + BLOCK].copy(), np.arange(at, at + len(rows))
        index._ivf.add_core(len(rows), faiss.swig_ptr(rows), faiss.swig_ptr(ids), faiss.swig_ptr(lists))
        if isinstance(inner, faiss.IndexRefine):
            inner.refine_index.add(rows)
    index._count_rows()
    return index


def exact(
    gallery: np.ndarray, queries: np.ndarray, rows: np.ndarray | None = None, kept: type = np.float32
) -> np.ndarray:
    """Return the 10 largest similarities of each query with the rows that pass, as they are kept."""
    best = np.full((len(queries), K), -np.inf, np.float32)
    rows = np.arange(len(gallery)) if rows is None else rows
    for at in range(0, len(rows), BLOCK):
        part = gallery[rows[at : at + BLOCK]].astype(kept).astype(np.float32)
        found = faiss.knn(queries, part, min(K, len(part)), metric=faiss.METRIC_INNER_PRODUCT)[0]
        best = -np.sort(-np.concatenate([best, found], 1), 1)[:, :K]
    return best


def recall(
    gallery: np.ndarray, queries: np.ndarray, found: np.ndarray, nearest: np.ndarray, kept: type = np.float32
) -> float:
    vectors = gallery[found].reshape(-1, DIMENSION).astype(kept).astype(np.float32)
    rows = np.arange(found.size).reshape(found.shape)
    return float(near_by_vectors(queries, nearest, vectors, np.arange(found.size))(rows).mean())


def filters(clusters: np.ndarray, shares: tuple[float, ...] = SHARES) -> dict[str, np.ndarray]:
    """Return the rows that pass, by name: at random, and by whole clusters."""
    rng, count = np.random.default_rng(1), len(clusters)
    order, numbers = rng.permutation(count), rng.permutation(int(clusters.max()) + 1)
    by_cluster = np.argsort(numbers[clusters], kind="stable")
    return {
        f"{100 * share:g} % {name}": np.sort(ranked[: int(share * count)])
        for share in shares
        for name, ranked in (("at random", order), ("by cluster", by_cluster))
    }


def searched(index: ApproximateIndex, queries: np.ndarray, among: np.ndarray | None) -> tuple[np.ndarray, Any]:
    """Return the rows found, and the milliseconds of a query: of a core, and that went by."""
    index.search(queries[:1], K, among)
    started, spent = time.perf_counter(), time.process_time()
    found = np.concatenate([index.search(query[None], K, among).rows for query in queries])
    seconds = {"core": time.process_time() - spent, "wall": time.perf_counter() - started}
    return found, {f"{name}_milliseconds": 1000 * each / len(queries) for name, each in seconds.items()}


def filter_rows(name: str, index: ApproximateIndex, gallery: np.ndarray, queries: np.ndarray, sets: Any) -> list[Row]:
    rows, kept = [], np.float16 if index.rerank else np.float32
    for what, (passing, nearest) in sets.items():
        found, detail = searched(index, queries, passing)
        share = recall(gallery, queries, found, nearest)
        detail |= {"rows_that_do_not_pass": int((~np.isin(found, passing)).sum()), "passing": len(passing)}
        target, against = TARGET, "brute force"
        if len(passing) <= 0.01 * len(gallery):
            target, detail["of_the_vectors_as_they_were"] = 1.0, share
            share = recall(gallery, queries, found, exact(gallery, queries, passing, kept), kept)
            against = f"brute force, {np.dtype(kept)}"
        met = share >= target - 1e-9 and detail["rows_that_do_not_pass"] == 0
        rows.append(Row(f"{name}: recall@10 among {what}", against, share, f">= {target:g}", met, detail))
    return rows


def small_rows(path: Path, factory: str, setting: int, gallery: np.ndarray, queries: np.ndarray, nearest: Any) -> Any:
    index = read_approximate_index(path, factory, DIMENSION, len(gallery))
    index.search_setting = setting
    found, spent = searched(index, queries, None)
    share, megabytes = recall(gallery, queries, found, nearest), resident(path) / 1e6
    detail = {"factory": factory, "nprobe": setting, "candidates": K * (index.rerank or 1)}
    taken, limit = spent["core_milliseconds"], f"<= {SMALL_BYTES * len(gallery) / 1e6:g}"
    detail |= {"file_megabytes": path.stat().st_size / 1e6}
    return [
        Row("small index: recall@10", "brute force", share, ">= 0.95", meets(share, ">= 0.95"), detail),
        Row("small index: resident MB after all queries", "-", megabytes, limit, meets(megabytes, limit), {}),
        Row("small index: ms of a core for one query", "-", taken, "<= 5", meets(taken, "<= 5"), spent),
    ]


def id_rows(count: int) -> list[Row]:
    """Return what the names of images take, with 12 bytes more each where they are looked up."""
    names = [f"products/season_{row % 40:02d}/image_{row * 7919 % count:08d}" for row in range(count)]
    columns = [
        PackedTexts(pa.chunked_array([names])),
        PackedTexts(pa.chunked_array([[f"{each}.jpg" for each in names]])),
    ]
    packed = sum(sys.getsizeof(block) + 100 for column in columns for _, block in column._blocks)
    found = RowsOfTexts(names[:1000])
    packed += count * (found._hashes.itemsize + found._order.itemsize) + 8 * count  # and the labels
    listed = 2 * sum(map(sys.getsizeof, names)) + 16 * count
    each = packed / count
    detail = {"lists_of_texts_bytes": listed / count}
    return [Row("bytes of ids in memory, each image", "-", each, "<= 40", meets(each, "<= 40"), detail)]


@click.command()
@click.option("--features", type=click.Path(path_type=Path), required=True, help="Folder of the vectors.")
@click.option("--count", type=int, default=1_000_000, show_default=True, help="Vectors of the gallery.")
@click.option("--quick", is_flag=True, help="100 queries instead of 200, and lists that are learned quickly.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the rows here, too.")
@click.option("--record", is_flag=True, help="Append the table to benchmarks/RESULTS.md.")
def main(features: Path, count: int, quick: bool, json_file: Path | None, record: bool) -> None:
    """Measure searches among some of a million vectors, and a small index of them."""
    if not (features / "clusters.npy").is_file():
        write_mixture(count, 1000, DIMENSION, features)
    gallery, clusters = np.load(features / "gallery.npy", mmap_mode="r")[:count], np.load(features / "clusters.npy")
    clusters, queries = clusters[:count], np.load(features / "queries.npy")
    number = 100 if quick else 200
    tuned_on, queries = queries[number : 3 * number], queries[:number]
    small = choices(len(gallery), DIMENSION, SMALL_BYTES * len(gallery))[0].factory
    plain = small.replace(small.partition(",")[2], "Flat")
    centers, assigned = learned_lists(gallery, int(plain.partition(",")[0].removeprefix("IVF")), quick)
    faiss.omp_set_num_threads(1)
    for_tuning, nearest = exact(gallery, tuned_on), exact(gallery, queries)
    sets = {name: (rows, exact(gallery, queries, rows)) for name, rows in filters(clusters).items()}
    judge = near_by_vectors(tuned_on, for_tuning, gallery, np.arange(len(gallery)))
    among._ALL_COMPARED = len(gallery) // 50  # of fewer vectors the same share is searched in part
    rows = id_rows(len(gallery))
    with tempfile.TemporaryDirectory() as folder:
        for factory in (small, plain):
            index = filled(factory, gallery, centers, assigned)
            reached = tune_search(index, tuned_on, K, judge, TARGET).share
            print(f"{factory}: nprobe {index.search_setting}, candidates {index.rerank}, recall {reached:.3f}")
            if factory == small:
                path = Path(folder) / "index.faiss"
                index.write(path)
                assert index.search_setting is not None
                rows += small_rows(path, factory, index.search_setting, gallery, queries, nearest)
            rows += filter_rows(factory, index, gallery, queries, sets)
            del index
    finish("index filter", rows, json_file=json_file, record=record)


if __name__ == "__main__":
    main()
