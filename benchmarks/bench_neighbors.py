"""The neighbors of the anchors at the paper's size, against the code one would otherwise write (docs/method.md, 2).

    python benchmarks/bench_neighbors.py --quick

The rows compare FAISS's search of the memory with torch's product and topk, in time and in memory, and the torch engine
with the same; neighbors kept from step to step with a full search every step, with `--run` also on the embeddings of a
real run; a store that the index sees with filling the index again; and on CUDA the search of all anchors of a step.
Without `--quick`, approximate search of many rows is also compared with FAISS's exact search.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch
from embeddings import drifting_stores, stores_of_run
from report import Row, extra_peak_bytes, finish, interleaved_medians, meets
from torch import Tensor
from torch.nn import functional as F

from sop_faiss.config import NeighborsConfig, TermConfig
from sop_faiss.neighbors.approximate import ApproximateSearch
from sop_faiss.neighbors.blocks import search_by_blocks
from sop_faiss.neighbors.mirror import RingMirror
from sop_faiss.sop.memory import Memory
from sop_faiss.sop.prototypes import PrototypeMaker, Prototypes

CAPACITY, DIM = 65536, 256
LARGE_CAPACITIES, LARGE_DIM = {"ivf": 2**20, "hnsw": 2**17}, 64  # HNSW takes minutes to build already
ANCHORS, TASKS, SUPPORTS = 4096, 4, 8
TIE = 1e-5


def unit_rows(count: int, seed: int) -> Tensor:
    return F.normalize(torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed)), dim=1)


def search_inputs() -> tuple[RingMirror, Tensor]:
    mirror = RingMirror(CAPACITY, DIM, torch.device("cpu"))
    mirror.rows.copy_(unit_rows(CAPACITY, 0))
    return mirror, mirror.rows[:ANCHORS].clone()


def product_and_topk(queries: Tensor, rows: Tensor) -> torch.return_types.topk:
    return torch.topk(queries @ rows.T, SUPPORTS + 1, dim=1)


def search_time(quick: bool) -> Row:
    """Time the search, and the product alone, which every exact search needs: by numpy's BLAS and by torch's."""
    mirror, queries = search_inputs()
    functions: dict[str, Callable[[], object]] = {
        "faiss": lambda: mirror.search(queries, SUPPORTS + 1),
        "torch": lambda: product_and_topk(queries, mirror.rows),
        "numpy_product_alone": lambda: queries.numpy() @ mirror.rows.numpy().T,
        "torch_product_alone": lambda: queries @ mirror.rows.T,
    }
    seconds = interleaved_medians(functions, 1 if quick else 7, warm_up=not quick)
    ratio, target = seconds["faiss"] / seconds["torch"], "<= 0.5"
    what = f"time: {ANCHORS} anchors in {CAPACITY} x {DIM}, top {SUPPORTS + 1}, FAISS mirror"
    detail = {f"{name}_seconds": value for name, value in seconds.items()}
    detail["faiss_gigaflop_per_second"] = 2e-9 * ANCHORS * CAPACITY * DIM / seconds["faiss"]
    return Row(what, "torch matmul + topk", ratio, target, meets(ratio, target), detail)


def torch_engine_time(quick: bool) -> Row:
    mirror, queries = search_inputs()
    functions = {
        "engine": lambda: search_by_blocks(queries, mirror.rows, SUPPORTS + 1),
        "torch": lambda: product_and_topk(queries, mirror.rows),
    }
    seconds = interleaved_medians(functions, 1 if quick else 7, warm_up=not quick)
    what = f"time: {ANCHORS} anchors in {CAPACITY} x {DIM}, top {SUPPORTS + 1}, torch engine"
    detail = {f"{name}_seconds": value for name, value in seconds.items()}
    return Row(what, "torch matmul + topk", seconds["engine"] / seconds["torch"], "", None, detail)


def gpu_search_times(quick: bool) -> list[Row]:
    """Time a step's anchors: the choice of neighbors.engine=auto against a user's own torch code, and bf16."""
    size = f"{TASKS} x {ANCHORS} anchors in {CAPACITY} x {DIM}, top {SUPPORTS + 1}"
    comparisons = [
        (f"GPU search: {size}, engine auto", "torch matmul + topk, at once or by tasks", "<= 1.0"),
        (f"GPU search: {size}, engine auto in bf16", "engine auto in float32", ""),
    ]
    if not torch.cuda.is_available():
        return [
            Row(what, peer, None, target, None, {"not measured": "no CUDA device"})
            for what, peer, target in comparisons
        ]
    device = torch.device("cuda")
    mirrors = {name: RingMirror(CAPACITY, DIM, device, precision=name) for name in ("float32", "bf16")}
    for mirror in mirrors.values():
        mirror.rows.copy_(unit_rows(CAPACITY, 0))
    rows = mirrors["float32"].rows
    queries = rows[: TASKS * ANCHORS].clone()
    functions = {
        "float32": lambda: mirrors["float32"].search(queries, SUPPORTS + 1),
        "bf16": lambda: mirrors["bf16"].search(queries, SUPPORTS + 1),
        "plain": lambda: product_and_topk(queries, rows),
        "plain_by_tasks": lambda: [product_and_topk(part, rows) for part in queries.split(ANCHORS)],
        "torch_engine": lambda: search_by_blocks(queries, rows, SUPPORTS + 1),
    }
    seconds = interleaved_medians(functions, 5 if quick else 25)
    detail: dict[str, Any] = {f"{name}_milliseconds": 1000 * value for name, value in seconds.items()}
    detail |= {f"{name}_engine": mirror.engine for name, mirror in mirrors.items()}
    ratios = (
        seconds["float32"] / min(seconds["plain"], seconds["plain_by_tasks"]),
        seconds["bf16"] / seconds["float32"],
    )
    return [
        Row(what, peer, ratio, target, meets(ratio, target), detail)
        for (what, peer, target), ratio in zip(comparisons, ratios, strict=True)
    ]


def extra_bytes() -> dict[str, int]:
    """Return how far the peak of this new process rises above the memory it uses before each search."""
    mirror, queries = search_inputs()
    functions: dict[str, Callable[[], object]] = {
        "faiss": lambda: mirror.search(queries, SUPPORTS + 1),
        "torch": lambda: product_and_topk(queries, mirror.rows),
    }
    return {name: extra_peak_bytes(function) for name, function in functions.items()}


def search_memory() -> Row:
    what = f"extra memory: {ANCHORS} anchors in {CAPACITY} x {DIM}, top {SUPPORTS + 1}, FAISS mirror"
    against, target = "torch matmul + topk", "<= 0.125"
    if not Path("/proc/self/clear_refs").exists():
        return Row(what, against, None, target, None, {"reason": "peak memory is measured on Linux only"})
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        extra = pool.submit(extra_bytes).result()
    ratio = extra["faiss"] / extra["torch"]
    detail = {f"{name}_megabytes": round(value / 2**20, 1) for name, value in extra.items()}
    return Row(what, against, ratio, target, meets(ratio, target), detail)


def make_maker(incremental: bool, dim: int, exclude_same_image: bool) -> PrototypeMaker:
    return PrototypeMaker(
        Memory(CAPACITY, dim, torch.Generator().manual_seed(0)),
        TermConfig(num_anchors=ANCHORS, num_supports=SUPPORTS, tasks=TASKS),
        contributions="similarity",
        eps=0.1,
        anchors="random",
        exclude_same_image=exclude_same_image,
        generator=torch.Generator().manual_seed(2),
        incremental=incremental,
    )


def largest_difference(kept: list[Prototypes], full: list[Prototypes]) -> float:
    """Compare all entries of all lists, and the similarities in the last lists with those of the memory's rows."""
    pairs = zip(kept, full, strict=True)
    differences = [(a.support_similarities - b.support_similarities).abs().max() for a, b in pairs]
    last = kept[-1]
    for task in range(TASKS):
        members = last.members(task)
        similarities = (members[:, 1:] * members[:, :1]).sum(-1)
        differences.append((similarities - last.support_similarities[task]).abs().max())
    return float(torch.stack(differences).max())


def kept_neighbors(stored: int, quick: bool, run: Path | None = None) -> Row:
    """Time one step: store, then draw anchors and find their supports.

    When timed, the lists are as old as the memory; with `quick`, or with a run, they are some steps old, so that fewer
    become too short. A run's images occur again before its memory is full: rows of the same image are then excluded.
    """
    rounds = 2 if quick else 7
    steps = 10 if quick else 100 if run is not None else CAPACITY // stored
    stores = drifting_stores(stored, CAPACITY, DIM) if run is None else stores_of_run(run, CAPACITY, steps + rounds)
    first = next(stores)
    dim, stored = first[0].shape[1], len(first[0])
    kept, full = (make_maker(incremental, dim, exclude_same_image=run is not None) for incremental in (True, False))
    lists = kept.memory._lists
    assert lists is not None
    for store in itertools.chain([first], itertools.islice(stores, CAPACITY // stored - 1)):
        kept.memory.store(*store)
        full.memory.store(*store)
    started = time.perf_counter()
    kept.memory.nearest_others(torch.arange(CAPACITY))
    first_seconds = time.perf_counter() - started
    searched = lists.searched
    for _ in range(steps):
        store = next(stores)
        kept.memory.store(*store)
        full.memory.store(*store)
        kept.draw()
    searched = lists.searched - searched

    batches = [next(stores) for _ in range(rounds)]
    ours, theirs = iter(batches), iter(batches)
    full.generator.set_state(kept.generator.get_state())
    drawn: dict[str, list[Prototypes]] = {"incremental": [], "full": []}

    def step(maker: PrototypeMaker, batch: tuple[Tensor, Tensor], name: str) -> None:
        maker.memory.store(*batch)
        drawn[name].append(maker.draw())

    functions = {
        "incremental": lambda: step(kept, next(ours), "incremental"),
        "full": lambda: step(full, next(theirs), "full"),
    }
    seconds = interleaved_medians(functions, rounds, warm_up=False)
    difference = largest_difference(drawn["incremental"], drawn["full"])
    if difference > TIE:
        raise SystemExit(f"kept neighbors differ from a full search by {difference}, more than ties of {TIE}")
    ratio, target = seconds["full"] / seconds["incremental"], ">= 5" if stored == 64 else ""
    what = f"a step's neighbors kept: {TASKS} x {ANCHORS} anchors, k = {SUPPORTS}, {stored} of {CAPACITY} rows stored"
    what += "" if run is None else f", embeddings of a run (d = {dim})"
    detail = {
        "full_seconds": seconds["full"],
        "incremental_seconds": seconds["incremental"],
        "lists_searched_per_step": searched / steps,
        "steps_before": steps,
        "largest_difference": difference,
        "all_lists_at_first_seconds": first_seconds,
        "lists_megabytes": round(sum(t.nbytes for t in lists.state_dict().values()) / 2**20, 1),
    }
    return Row(what, "full FAISS search", ratio, target, meets(ratio, target), detail)


def approximate(settings: NeighborsConfig) -> Row:
    """Search for anchors from 500 overlapping clusters; how much an index finds depends on the data.

    The index is searched when it has just been built, and again after a quarter of the rows has been overwritten; its
    result for those rows is exact. HNSW still visits the overwritten rows.
    """
    generator, capacity = torch.Generator().manual_seed(0), LARGE_CAPACITIES[settings.index]
    mirror = RingMirror(capacity, LARGE_DIM, torch.device("cpu"))
    centers = torch.randn(500, LARGE_DIM, generator=generator)

    def embeddings(count: int) -> Tensor:
        clusters = torch.randint(len(centers), (count,), generator=generator)
        return F.normalize(centers[clusters] + torch.randn(count, LARGE_DIM, generator=generator), dim=1)

    mirror.rows.copy_(embeddings(capacity))
    search = ApproximateSearch(mirror, settings, SUPPORTS)
    queries = mirror.rows[torch.randperm(capacity, generator=generator)[:ANCHORS]]
    started = time.perf_counter()
    search.search(queries[:1], SUPPORTS + 1)
    build_seconds = time.perf_counter() - started

    functions = {
        settings.index: lambda: search.search(queries, SUPPORTS + 1),
        "exact": lambda: mirror.search(queries, SUPPORTS + 1),
    }
    seconds = interleaved_medians(functions, 3)
    recall = search.recall
    fresh = torch.arange(capacity // 4)
    mirror.rows[fresh] = embeddings(len(fresh))
    search.renew(fresh)
    aged_seconds = interleaved_medians({settings.index: functions[settings.index]}, 3)
    detail = {
        **{f"{name}_seconds": value for name, value in seconds.items()},
        f"recall_at_{SUPPORTS}": recall,
        "build_and_recall_seconds": build_seconds,
        "seconds_with_a_quarter_new": aged_seconds[settings.index],
        f"recall_at_{SUPPORTS}_with_a_quarter_new": search._measure_recall(),
        "probes" if settings.index == "ivf" else "ef_search": (
            settings.probes if settings.index == "ivf" else settings.ef_search
        ),
    }
    size = f"{ANCHORS} anchors in {capacity} x {LARGE_DIM}, top {SUPPORTS + 1}"
    what = f"approximate, times faster: {size}, {settings.index}"
    return Row(what, "exact FAISS search", seconds["exact"] / seconds[settings.index], "", None, detail)


def store_in_place(quick: bool) -> Row:
    """Time stores of 512 rows that follow each other around the ring, as in training; the mean of 16."""
    import faiss  # after torch

    memory = Memory(CAPACITY, DIM, torch.Generator().manual_seed(0))
    rows, new, ids = memory.embeddings.clone(), unit_rows(512, 3), torch.arange(512)
    index = faiss.IndexFlatIP(DIM)
    stores = 16

    def refill() -> None:
        index.reset()
        index.add(rows.numpy())

    def store() -> None:
        for _ in range(stores):
            memory.store(new, ids)

    seconds = interleaved_medians({"store": store, "refill": refill}, 15 if quick else 101)
    seconds["store"] /= stores
    ratio, target = seconds["refill"] / seconds["store"], ">= 100"
    detail: dict[str, Any] = {f"{name}_milliseconds": 1000 * value for name, value in seconds.items()}
    what = f"store 512 of {CAPACITY} rows, with their ids, so that the index sees them"
    return Row(what, "reset + add", ratio, target, meets(ratio, target), detail)


@click.command()
@click.option("--quick", is_flag=True, help="Fewer repeats and steps, same sizes: about a minute on 2 quiet cores.")
@click.option("--run", type=click.Path(path_type=Path, file_okay=False), help="Also with embeddings of this run.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the rows here, too.")
@click.option("--record", is_flag=True, help="Append the table to benchmarks/RESULTS.md.")
def main(quick: bool, run: Path | None, json_file: Path | None, record: bool) -> None:
    """Measure neighbors and stores on the CPU."""
    benchmarks: dict[str, Callable[[], Row]] = {
        "store": lambda: store_in_place(quick),
        "search time": lambda: search_time(quick),
        "torch engine": lambda: torch_engine_time(quick),
        "search memory": search_memory,
        "kept neighbors": lambda: kept_neighbors(64, quick),
    }
    if run is not None:
        benchmarks["kept neighbors of a run"] = lambda: kept_neighbors(64, quick, run)
    if not quick:
        benchmarks["kept neighbors, large batch"] = lambda: kept_neighbors(1024, quick)
        benchmarks["approximate, ivf"] = lambda: approximate(NeighborsConfig(index="ivf"))
        benchmarks["approximate, hnsw"] = lambda: approximate(NeighborsConfig(index="hnsw"))
    rows = []
    for name, benchmark in benchmarks.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows.append(benchmark())
    rows += gpu_search_times(quick)
    finish("neighbors", rows, json_file=json_file, record=record)


if __name__ == "__main__":
    main()
