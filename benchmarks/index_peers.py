"""An index of one library in a process of its own: `bench_index_peers.py` starts it, with the library's Python.

    PYTHON benchmarks/index_peers.py ENGINE FOLDER build|serve

It needs NumPy and the library alone. FOLDER has `gallery.npy`, `queries.npy` and `passing-NAME.npy`; the index is
written to FOLDER/ENGINE. `build` prints its figures; `serve` answers commands, a line of JSON each.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

K = 10
NPROBES = (1, 4, 12, 32, 80, 200, 500)
EF_SEARCHES = (10, 20, 40, 80, 160, 320, 640)
HNSW = {"links": 16, "ef_construction": 128}  # near the defaults of hnswlib and usearch
REFINED = 20
"""Candidates for each neighbor that LanceDB compares by full vectors; its product quantizer alone finds too few."""

Search = Callable[[np.ndarray, "int | None", "str | None"], Any]
"""From a query, a setting and the name of the rows that pass to the rows found."""


class NotOffered(Exception):
    """A library has no such search; the table says so."""


class Ours:
    distribution = "sop_faiss"

    def __init__(self, factory: str) -> None:
        from sop_faiss.index.search import FeatureIndex

        self.factory, self.open_index = factory, FeatureIndex.open
        self.settings = () if factory == "Flat" else EF_SEARCHES if factory.startswith("HNSW") else NPROBES

    def build(self, gallery: np.ndarray, passing: dict[str, np.ndarray], folder: Path) -> str:
        from bench_index import make_store

        from sop_faiss.index.build import IndexOptions, build_index
        from sop_faiss.neighbors.disk.auto_factory import choices

        lists = choices(len(gallery), gallery.shape[1], 10**12)[-1].factory.partition(",")[0]
        factory = self.factory.replace("IVF", lists)
        build_index(make_store(gallery), folder / "index", IndexOptions(factory))
        return factory

    def open(self, folder: Path, passing: dict[str, np.ndarray]) -> Search:
        index = self.open_index(folder / "index", verify="sizes")
        rows = np.array([int(key.removeprefix("view-")) for key in index.ids.keys])
        among = {name: np.flatnonzero(np.isin(rows, each)) for name, each in passing.items()}
        vectors: Any = index._vectors

        def search(query: np.ndarray, setting: int | None, name: str | None) -> Any:
            if setting is not None and vectors.search_setting != setting:
                vectors.search_setting = min(setting, vectors.search_settings()[-1])
            return rows[index.search(query, K, among=None if name is None else among[name]).rows[0]]

        return search


class Usearch:
    distribution, settings = "usearch", EF_SEARCHES

    def __init__(self, dtype: str) -> None:
        from usearch.index import Index

        self.dtype, self.index_class = dtype, Index

    def build(self, gallery: np.ndarray, passing: dict[str, np.ndarray], folder: Path) -> str:
        options = {"connectivity": HNSW["links"], "expansion_add": HNSW["ef_construction"], "dtype": self.dtype}
        index = self.index_class(ndim=gallery.shape[1], metric="ip", **options)
        index.add(np.arange(len(gallery)), gallery, threads=1)
        index.save(str(folder / "index.usearch"))
        return json.dumps(options)

    def open(self, folder: Path, passing: dict[str, np.ndarray]) -> Search:
        index: Any = self.index_class.restore(str(folder / "index.usearch"), view=True)

        def search(query: np.ndarray, setting: int | None, name: str | None) -> Any:
            if name is not None:
                raise NotOffered("its Python has no search among some rows")
            index.expansion_search = setting
            return index.search(query, K, threads=1).keys

        return search


class Hnswlib:
    distribution, settings = "hnswlib", EF_SEARCHES

    def __init__(self, _: str) -> None:
        import hnswlib

        self.index_class = hnswlib.Index

    def build(self, gallery: np.ndarray, passing: dict[str, np.ndarray], folder: Path) -> str:
        index = self.index_class("ip", gallery.shape[1])
        index.init_index(len(gallery), M=HNSW["links"], ef_construction=HNSW["ef_construction"], random_seed=0)
        index.add_items(gallery, num_threads=1)
        index.save_index(str(folder / "index.hnsw"))
        (folder / "dimension").write_text(str(gallery.shape[1]))
        return json.dumps(HNSW)

    def open(self, folder: Path, passing: dict[str, np.ndarray]) -> Search:
        index = self.index_class("ip", int((folder / "dimension").read_text()))
        index.load_index(str(folder / "index.hnsw"))
        index.set_num_threads(1)
        sets = {name: frozenset(rows.tolist()) for name, rows in passing.items()}

        def search(query: np.ndarray, setting: int | None, name: str | None) -> Any:
            index.set_ef(setting)
            passes = None if name is None else sets[name].__contains__
            return index.knn_query(query, K, filter=passes)[0][0]

        return search


class LanceDb:
    distribution, settings = "lancedb", NPROBES

    def __init__(self, kind: str) -> None:
        import lancedb

        self.kind, self.connect = kind, lancedb.connect

    def build(self, gallery: np.ndarray, passing: dict[str, np.ndarray], folder: Path) -> str:
        import pyarrow as pa

        count, dimension = gallery.shape
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(gallery.reshape(-1)), dimension)
        columns = {name: pa.array(np.isin(np.arange(count), rows)) for name, rows in passing.items()}
        table = self.connect(folder).create_table(
            "gallery", pa.table({"row": pa.array(np.arange(count)), "vector": vectors, **columns})
        )
        options: dict[str, Any] = {"num_partitions": max(1, round(count**0.5))}
        if self.kind == "IVF_PQ":
            options["num_sub_vectors"] = dimension // 8
        table.create_index(metric="dot", index_type=self.kind, **options)
        for name in columns:
            table.create_scalar_index(name, index_type="BITMAP")
        return json.dumps(options)

    def open(self, folder: Path, passing: dict[str, np.ndarray]) -> Search:
        table = self.connect(folder).open_table("gallery")

        def search(query: np.ndarray, setting: int | None, name: str | None) -> Any:
            asked = table.search(query, vector_column_name="vector").distance_type("dot").nprobes(setting)
            if name is not None:
                asked = asked.where(name, prefilter=True)
            asked = asked.refine_factor(REFINED)
            return asked.select(["row", "_distance"]).limit(K).to_arrow()["row"].to_numpy()

        return search


class Autofaiss:
    distribution, settings = "autofaiss", NPROBES

    def __init__(self, megabytes_per_million: str) -> None:
        import autofaiss
        import faiss

        self.library, self.faiss, self.megabytes = autofaiss, faiss, int(megabytes_per_million)

    def build(self, gallery: np.ndarray, passing: dict[str, np.ndarray], folder: Path) -> str:
        limit = f"{max(1, self.megabytes * gallery.size // (10**6 * 384))}MB"
        index, infos = self.library.build_index(
            embeddings=np.ascontiguousarray(gallery),
            save_on_disk=False,  # what it says of the index fails to be written with NumPy 2
            metric_type="ip",
            max_index_memory_usage=limit,
            current_memory_available="8GB",
            nb_cores=1,
        )
        self.faiss.write_index(index, str(folder / "knn.index"))
        return f"{type(index).__name__} for {limit}, {(infos or {}).get('index_key', '')}"

    def open(self, folder: Path, passing: dict[str, np.ndarray]) -> Search:
        faiss: Any = self.faiss
        index = faiss.read_index(str(folder / "knn.index"), faiss.IO_FLAG_MMAP)
        ivf = faiss.try_extract_index_ivf(index)
        name_of_setting = "nprobe" if ivf is not None else "efSearch"

        def search(query: np.ndarray, setting: int | None, name: str | None) -> Any:
            if name is not None:
                raise NotOffered("it has no search among some rows")
            faiss.ParameterSpace().set_index_parameter(index, name_of_setting, setting)
            return index.search(query[None], K)[1][0]

        return search


ENGINES: dict[str, Callable[[], Any]] = {
    "ours Flat": lambda: Ours("Flat"),
    "ours SQfp16": lambda: Ours("IVF,SQfp16"),
    "ours SQ8": lambda: Ours("IVF,SQ8"),
    "ours HNSW": lambda: Ours("HNSW16,SQfp16"),
    "ours RaBitQ": lambda: Ours("IVF,RaBitQ,Refine(SQfp16)"),
    "usearch f16": lambda: Usearch("f16"),
    "usearch i8": lambda: Usearch("i8"),
    "hnswlib": lambda: Hnswlib(""),
    "lancedb IVF_PQ": lambda: LanceDb("IVF_PQ"),
    "lancedb IVF_RQ": lambda: LanceDb("IVF_RQ"),
    "autofaiss 1 GB": lambda: Autofaiss("1000"),
    "autofaiss 100 MB": lambda: Autofaiss("100"),
}
"""Ours and others; the megabytes of autofaiss are of a million vectors of dimension 384."""


def core_seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usage)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def built(engine: Any, folder: Path, place: Path, passing: dict[str, np.ndarray]) -> dict[str, Any]:
    place.mkdir(parents=True)
    gallery = np.load(folder / "gallery.npy")
    started, spent = time.perf_counter(), core_seconds()
    made = engine.build(gallery, passing, place)
    return {
        "made": made,
        "version": importlib.metadata.version(engine.distribution),
        "settings": list(engine.settings),
        "build_seconds": time.perf_counter() - started,
        "build_core_seconds": core_seconds() - spent,
        "disk_megabytes": sum(path.stat().st_size for path in place.rglob("*") if path.is_file()) / 1e6,
    }


class Served:
    """An index that is opened and searched by commands."""

    def __init__(self, engine: Any, folder: Path, place: Path, passing: dict[str, np.ndarray]) -> None:
        self.queries, self.passing = np.load(folder / "queries.npy"), passing
        self.first = engine.open(place, passing)  # loads libraries, which are not the index's memory
        self.first(self.queries[0], next(iter(engine.settings), None), None)
        self.before = resident_bytes()
        started = time.perf_counter()
        self.find = engine.open(place, passing)
        self.find(self.queries[0], next(iter(engine.settings), None), None)
        self.open_seconds = time.perf_counter() - started

    def answer(self, setting: int | None, name: str | None) -> dict[str, Any]:
        """Search by each query alone; the time is that of all of them."""
        try:
            self.find(self.queries[0], setting, name)
        except NotOffered as error:
            return {"not measured": str(error)}
        spent = time.process_time()
        found = [self.find(query, setting, name) for query in self.queries]
        figures = {"core_seconds": time.process_time() - spent}
        rows = [[*map(int, line[:K]), *[-1] * (K - len(line))] for line in found]
        return {"rows": rows, **figures, "resident_megabytes": (resident_bytes() - self.before) / 1e6}


def main() -> None:
    name, folder, action = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    passing = {path.stem.partition("-")[2]: np.load(path) for path in sorted(folder.glob("passing-*.npy"))}
    engine, place = ENGINES[name](), folder / name.replace(" ", "_")
    if action == "build":
        print(json.dumps(built(engine, folder, place, passing)), file=answers, flush=True)
        return
    served = Served(engine, folder, place, passing)
    print(json.dumps({"open_seconds": served.open_seconds}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(served.answer(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
