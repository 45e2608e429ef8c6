"""Our indices beside usearch, hnswlib, LanceDB and autofaiss, on the same vectors.

    python benchmarks/bench_index_peers.py [--features DIR] [--mixture DIR] [--rows N] [--queries N]
        [--peers PYTHON] [--engine NAME]... [--rounds N] [--builds N] [--quick] [--json FILE] [--record]

`--features` has views of photos (`bench_index.py` makes it); `--mixture` a mixture with heavy tails (`mixture.py`),
which is written there if it is missing; without either, the mixture, in a temporary folder. Peers are those that PYTHON
can import (`pip install usearch hnswlib lancedb autofaiss` in an environment of its own); of one that it cannot, the
reason is in the table.

Each index is built and searched in processes of its own (`index_peers.py`), with one thread each, and is searched with
several settings (`nprobe` or `ef`): a curve of recall@10 and queries a second. One query at a time; in each round all
settings of all indices take turns. Speed is queries for each second of the processor, which other work on the machine
changes little. Memory is what a process that has opened the index once takes more after it has opened it again and
searched with the largest setting; the time to open is that of the second time, with one search. Among 1 % of the rows,
at random or by whole clusters, each searches with the setting that reaches recall 0.95 among all rows.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from bench_index_filter import exact, filters
from index_peers import ENGINES
from mixture import write_mixture
from report import Row, finish, meets, vector_flags

from sop_faiss.neighbors.disk.auto_factory import near_by_vectors

DIMENSION, RECALL, SHARE = 384, 0.95, 0.01
HERE = Path(__file__).resolve().parent
ONE_THREAD = ("OMP_NUM_THREADS", "LANCE_CPU_THREADS", "TOKIO_WORKER_THREADS", "RAYON_NUM_THREADS")


class Point(NamedTuple):
    """One setting of an index."""

    setting: int | None
    recall: float
    per_second: float


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in both recall and speed, by rising recall."""
    best: list[Point] = []
    for point in sorted(points, key=lambda each: (-each.recall, -each.per_second)):
        if not best or point.per_second > best[-1].per_second:
            best.append(point)
    return best[::-1]


def speed_at(points: Sequence[Point], wanted: float) -> float | None:
    """Return queries a second at a recall, between two settings by the logarithm; None where no setting reaches it."""
    best = frontier(points)
    above = [place for place, point in enumerate(best) if point.recall >= wanted]
    if not above:
        return None
    high = best[above[0]]
    if above[0] == 0 or high.recall == wanted:
        return high.per_second
    low = best[above[0] - 1]
    part = (wanted - low.recall) / (high.recall - low.recall)
    return math.exp((1 - part) * math.log(low.per_second) + part * math.log(high.per_second))


def setting_at(points: Sequence[Point], wanted: float) -> int | None:
    """Return the setting of the fastest point that reaches a recall; else of the one with the largest recall."""
    reached = [point for point in points if point.recall >= wanted]
    if reached:
        return max(reached, key=lambda each: each.per_second).setting
    return max(points, key=lambda each: each.recall).setting


class Serving:
    """An index that a process has opened and searches when it is asked."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        )
        self.opened = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return {"not measured": f"its process ended with {self.process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, setting: int | None, name: str | None) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"setting": setting, "name": name}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def command_of(name: str, folder: Path, action: str, peers: Path) -> tuple[list[str], dict[str, str]]:
    python = sys.executable if name.startswith("ours") else str(peers)
    env = os.environ | dict.fromkeys(ONE_THREAD, "1")
    return [python, str(HERE / "index_peers.py"), name, str(folder), action], env


def build(name: str, folder: Path, peers: Path) -> dict[str, Any]:
    command, env = command_of(name, folder, "build", peers)
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        return {"not measured": (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measured(folder: Path, names: Sequence[str], peers: Path, rounds: int, at_once: int) -> dict[str, dict[str, Any]]:
    """Return the figures of each index: one curve, and recall and speed among the rows that pass."""
    gallery, queries = np.load(folder / "gallery.npy", mmap_mode="r"), np.load(folder / "queries.npy")
    passing = {path.stem.partition("-")[2]: np.load(path) for path in sorted(folder.glob("passing-*.npy"))}
    nearest = {None: exact(gallery, queries)} | {name: exact(gallery, queries, rows) for name, rows in passing.items()}
    figures: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(at_once) as pool:
        figures |= zip(names, pool.map(lambda name: build(name, folder, peers), names), strict=True)
    serving = {name: Serving(*command_of(name, folder, "serve", peers)) for name in names if "made" in figures[name]}
    for name, each in serving.items():
        figures[name] |= each.opened

    def point(name: str, setting: int | None, among: str | None) -> Point | str:
        answer = serving[name].ask(setting, among)
        if "rows" not in answer:
            return str(answer["not measured"])
        found = np.array(answer["rows"])
        right = (found >= 0) & (np.isin(found, passing[among]) if among is not None else True)
        judge = near_by_vectors(queries, nearest[among], gallery, np.arange(len(gallery)))
        share = float((judge(np.maximum(found, 0)) & right).mean())
        figures[name]["resident_megabytes"] = answer["resident_megabytes"]
        per_second = len(queries) / answer["core_seconds"]
        return Point(setting, share, per_second)

    left = {
        name: [*figures[name]["settings"]] or [None] for name, each in serving.items() if "open_seconds" in each.opened
    }
    curves: dict[str, dict[int | None, list[Point]]] = {name: {} for name in left}
    for number in range(rounds):
        for step in range(max(map(len, left.values()))):
            for name, settings in left.items():
                if step < len(settings):
                    print(f"round {number + 1}: {name} {settings[step]}", file=sys.stderr, flush=True)
                    found = point(name, settings[step], None)
                    assert isinstance(found, Point), found
                    curves[name].setdefault(settings[step], []).append(found)
    for name, by_setting in curves.items():
        points = [
            Point(setting, each[0].recall, statistics.median(one.per_second for one in each))
            for setting, each in by_setting.items()
        ]
        chosen = setting_at(points, RECALL)
        among = {which: point(name, chosen, which) for which in passing}
        figures[name] |= {"curve": points, "chosen": chosen, "among": among}
        serving[name].end()
    return figures


def rows_of(title: str, figures: dict[str, dict[str, Any]]) -> list[Row]:
    """Return a row for each index, and for all: speed, memory and filters against the others."""
    speeds = {name: speed_at(each["curve"], RECALL) for name, each in figures.items() if "curve" in each}
    reached = {name: speed for name, speed in speeds.items() if speed is not None}
    ours = {name: speed for name, speed in reached.items() if name.startswith("ours")}
    first = max(ours, key=lambda name: ours[name], default="")
    rows = []
    for name, each in figures.items():
        what = f"{title}: {name}, queries a core second at recall@10 {RECALL}"
        if "curve" not in each:
            rows.append(Row(what, first or "-", None, "", None, {"not measured": each["not measured"]}))
            continue
        speed = reached.get(name)
        ratio = speed / ours[first] if speed is not None and ours else None
        rows.append(Row(what, first or "-", ratio, "", None, _detail(each, speed)))
    memory = {name: float(figures[name]["resident_megabytes"]) for name in reached}
    rows.append(_best(f"{title}: resident MB at recall@10 {RECALL}, our least over theirs", memory, "<= 1", min))
    for which in sorted({which for each in figures.values() for which in each.get("among", {})}):
        found = {
            name: each["among"][which].recall
            for name, each in figures.items()
            if isinstance(each.get("among", {}).get(which), Point)
        }
        rows.append(_best(f"{title}: recall@10 among 1 % {which}, our best over theirs", found, ">= 1", max))
    return rows


def _best(what: str, values: dict[str, float], target: str, better: Any) -> Row:
    best = {}
    for side in (True, False):
        of_side = {name: value for name, value in values.items() if name.startswith("ours") == side}
        if not of_side:
            return Row(what, "-", None, target, None, {"not measured": f"no index of {'ours' if side else 'others'}"})
        best[side] = better(of_side, key=lambda name: of_side[name])
    ratio = values[best[True]] / values[best[False]]
    return Row(what, best[False], ratio, target, meets(ratio, target), {name: values[name] for name in best.values()})


def _detail(each: dict[str, Any], speed: float | None) -> dict[str, Any]:
    among = {
        f"among 1 % {which}": f"{found.recall:.3f} at {found.per_second:.0f}/s" if isinstance(found, Point) else found
        for which, found in each["among"].items()
    }
    return {
        "per_core_second": "recall not reached" if speed is None else speed,
        "resident_MB": each["resident_megabytes"],
        "disk_MB": each["disk_megabytes"],
        "build_core_seconds": each["build_core_seconds"],
        "build_seconds": each["build_seconds"],
        "open_seconds": each["open_seconds"],
        **among,
        "curve": ", ".join(f"{p.setting}: {p.recall:.3f} {p.per_second:.0f}/s" for p in each["curve"]),
        "made": each["made"],
        "version": each["version"],
    }


def prepare(features: Path, rows: int, queries: int, folder: Path) -> None:
    """Copy so many vectors, the queries, and the rows that pass."""
    folder.mkdir()
    gallery = np.ascontiguousarray(np.load(features / "gallery.npy", mmap_mode="r")[:rows])
    np.save(folder / "gallery.npy", gallery)
    np.save(folder / "queries.npy", np.load(features / "queries.npy")[:queries])
    known = features / "clusters.npy"
    clusters = np.load(known)[:rows] if known.is_file() else np.zeros(len(gallery), np.int64)
    at_random, by_cluster = filters(clusters, (SHARE,)).values()
    np.save(folder / "passing-at_random.npy", at_random)
    if known.is_file():
        np.save(folder / "passing-by_cluster.npy", by_cluster)


@click.command()
@click.option(
    "--features", type=click.Path(path_type=Path), help="Folder of views of photos: gallery.npy, queries.npy."
)
@click.option("--mixture", type=click.Path(path_type=Path), help="Folder of the mixture; written if it is missing.")
@click.option(
    "--rows", type=click.IntRange(1000), default=1_000_000, show_default=True, help="Vectors of each gallery."
)
@click.option("--queries", type=click.IntRange(1), default=200, show_default=True, help="Of each gallery.")
@click.option(
    "--peers",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=Path(sys.executable),
    help="A Python with the peers.",
)
@click.option("--engine", "names", multiple=True, type=click.Choice(list(ENGINES)), help="Only these; default all.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Of the timings.")
@click.option("--builds", type=click.IntRange(1), default=1, show_default=True, help="How many are built at a time.")
@click.option("--quick", is_flag=True, help="20,000 vectors of dimension 64, one round.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the rows here, too.")
@click.option("--record", is_flag=True, help="Append the table to benchmarks/RESULTS.md.")
def main(
    features: Path | None,
    mixture: Path | None,
    rows: int,
    queries: int,
    peers: Path,
    names: tuple[str, ...],
    rounds: int,
    builds: int,
    quick: bool,
    json_file: Path | None,
    record: bool,
) -> None:
    """Measure our indices beside those of others."""
    rows, dimension, rounds = (20_000, 64, 1) if quick else (rows, DIMENSION, rounds)
    place = Path(tempfile.mkdtemp())
    try:
        sets = {} if features is None else {"views": features}
        if mixture is not None or not sets:
            sets["mixture"] = mixture or place / "mixture"
        if "mixture" in sets and not (sets["mixture"] / "clusters.npy").is_file():
            write_mixture(rows, queries, dimension, sets["mixture"])
        table = [Row("processor flags", "-", None, "", None, {"flags": vector_flags()})]
        for title, folder in sets.items():
            prepare(folder, rows, queries, place / "measured")
            figures = measured(place / "measured", names or tuple(ENGINES), peers, rounds, builds)
            table += rows_of(f"{title}, {rows:,}", figures)
            shutil.rmtree(place / "measured")
        finish("index peers", table, json_file=json_file, record=record)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
