"""Retrieval scores against the published evaluations: are they equal, and how much faster at a million distractors?

    python benchmarks/bench_retrieval.py --dino CHECKOUT --revisitop CHECKOUT [--quick] [--json FILE] [--record]

Equality: both real ground truths (`--gnd`, the published pickles) with random, tied, duplicated and perfect features.
revisitop's ranking is a stable sort of the same similarities. Speed: 70 queries, the gallery of revisited Oxford and a
million distractors, d = 384, all in memory. The other side is what DINO's script does after extraction: one product,
a full argsort, and its compute_map at medium and hard (both evaluations' are the same code).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import torch
from evaluators import MapFunction, dino_ranks, load_dino, load_revisitop, setups_of, with_in1d
from report import Row, extra_peak_bytes, finish, interleaved_medians, meets

from sop_faiss.evaluate.retrieval import PROTOCOLS, RetrievalScores, score_retrieval
from sop_faiss.evaluate.sets.ground_truth import GRADED, GroundTruth, QueryTruth, read_ground_truth
from sop_faiss.neighbors.similarity import similarity_rows

GND = Path(__file__).resolve().parents[2] / "shared" / "data" / "revisited_gnd"
KINDS = ("random", "tied", "duplicated", "perfect")
KS = [1, 5, 10]
DIM, DISTRACTORS = 384, 1_000_000
BLOCKS = (1_000, 16_384, 100_000)  # the second is what a feature store is read in
EQUAL, FASTER, SMALLER, SAME = "<= 1e-9", ">= 8", "<= 1", "<= 0"
GIGABYTE = 1e9


def unit(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float32, copy=False)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def features_of(kind: str, truth: GroundTruth, dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw unit rows of queries and gallery."""
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((len(truth.queries), dimension))
    gallery = rng.standard_normal((len(truth.images), dimension))
    if kind == "tied":
        gallery = np.eye(dimension)[rng.integers(0, dimension, len(gallery))]
    elif kind == "duplicated":
        gallery = gallery[rng.integers(0, len(gallery) // 10, len(gallery))]
    elif kind in ("related", "perfect"):
        for query, entry in zip(queries, truth.queries, strict=True):
            for name in ("easy", "hard"):
                gallery[entry.lists[name]] += (0.2 if kind == "related" else 50) * query
    return unit(queries), unit(gallery)


def stand_in_truth() -> GroundTruth:
    """Make a ground truth with the shape of revisited Oxford, for use without the real file."""
    rng = np.random.default_rng(1)
    queries = []
    for number in range(70):
        drawn = rng.permutation(4993)[:240]
        queries.append(QueryTruth(f"q{number}", None, dict(zip(GRADED, np.split(drawn, [40, 90]), strict=True))))
    return GroundTruth(Path("stand-in"), [f"i{number}" for number in range(4993)], queries, GRADED)


def equality_row(revisitop: MapFunction | None, gnd: Path) -> Row:
    what, against = "largest difference of mAP and mP@k, in percent", "revisitop's evaluation, repaired for numpy 2"
    files = [gnd / f"gnd_{name}.pkl" for name in ("roxford5k", "rparis6k")]
    missing = "no --revisitop checkout" if revisitop is None else "" if all(map(Path.is_file, files)) else "no --gnd"
    if revisitop is None or missing:
        return Row(what, against, None, EQUAL, None, {"not measured": missing})
    largest, compared = 0.0, 0
    for file in files:
        truth = read_ground_truth(file)
        for kind in KINDS:
            queries, gallery = features_of(kind, truth, 64)
            own = score_retrieval(queries, gallery, truth, PROTOCOLS["revisitop"]).metrics
            similarities = np.stack(list(similarity_rows(queries, gallery)))
            ranks = np.argsort(-similarities, axis=1, kind="stable").T
            for name, setup in setups_of(truth.queries, ("easy", "medium", "hard")).items():
                with with_in1d():
                    mean_ap, _, precisions, _ = revisitop(ranks, setup, KS)
                theirs = {"mAP": mean_ap, **{f"mP@{k}": value for k, value in zip(KS, precisions, strict=True)}}
                for metric, value in theirs.items():
                    largest = max(largest, abs(own[f"{metric}_{name}"] - 100 * value))
                    compared += 1
    detail = {"scores_compared": compared, "features": ", ".join(KINDS), "ground_truths": "Oxford and Paris"}
    return Row(what, against, largest, EQUAL, meets(largest, EQUAL), detail)


def make_distractors(count: int) -> np.ndarray:
    rows = np.empty((count, DIM), np.float32)
    rng = np.random.default_rng(2)
    for start in range(0, count, 50_000):
        part = rows[start : start + 50_000]
        rng.standard_normal(dtype=np.float32, out=part)
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return rows


def blocks(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def own_scores(queries: np.ndarray, gallery: np.ndarray, more: np.ndarray, truth: GroundTruth, size: int) -> object:
    return score_retrieval(queries, gallery, truth, PROTOCOLS["dino"], distractors=blocks(more, size))


def their_scores(queries: np.ndarray, everything: np.ndarray, truth: GroundTruth, compute_map: MapFunction) -> object:
    with with_in1d():
        ranks = dino_ranks(torch.from_numpy(queries), torch.from_numpy(everything))
        return [compute_map(ranks, setup, KS) for setup in setups_of(truth.queries, ("medium", "hard")).values()]


def distractor_rows(compute_map: MapFunction | None, truth: GroundTruth, repeats: int) -> list[Row]:
    size = f"{len(truth.queries)} queries x ({len(truth.images):,} + {DISTRACTORS:,}) x {DIM}"
    queries, gallery = features_of("related", truth, DIM)
    everything = np.concatenate([gallery, make_distractors(DISTRACTORS)])
    more = everything[len(gallery) :]
    found = [own_scores(queries, gallery, more, truth, block) for block in BLOCKS]
    same = Row(
        "queries whose AP, precisions or first rank change with the block",
        f"blocks of {BLOCKS[0]:,}",
        differing := float(max(_differing(found[0], each) for each in found[1:])),
        SAME,
        meets(differing, SAME),
        {"blocks": ", ".join(f"{block:,}" for block in BLOCKS), "problem": size},
    )
    against = "full argsort and compute_map as DINO and revisitop do"
    if compute_map is None:
        why = {"not measured": "no --dino and no --revisitop checkout"}
        return [Row(f"times faster: {size}", against, None, FASTER, None, why), same]
    seconds = interleaved_medians(
        {
            "ours": lambda: own_scores(queries, gallery, more, truth, BLOCKS[1]),
            "theirs": lambda: their_scores(queries, everything, truth, compute_map),
        },
        repeats,
        warm_up=False,
    )
    ratio = seconds["theirs"] / seconds["ours"]
    theirs = their_scores(queries, everything, truth, compute_map)
    assert isinstance(found[0], RetrievalScores) and isinstance(theirs, list)
    difference = max(
        abs(found[0].metrics[f"mAP_{name}"] - 100 * their[0])
        for name, their in zip(("medium", "hard"), theirs, strict=True)
    )
    detail = {f"{name}_seconds": value for name, value in seconds.items()}
    detail |= {"mAP_difference_by_float32_products_percent": difference, "repeats": repeats}
    return [Row(f"times faster: {size}", against, ratio, FASTER, meets(ratio, FASTER), detail), same]


def _differing(one: object, other: object) -> int:
    assert isinstance(one, RetrievalScores) and isinstance(other, RetrievalScores)
    return sum(first.scores != second.scores for first, second in zip(one.queries, other.queries, strict=True))


def measure_memory(truth: GroundTruth) -> int:
    """Measure the extra peak bytes of our evaluation, above its inputs, in a separate process."""
    queries, gallery = features_of("related", truth, DIM)
    more = make_distractors(DISTRACTORS)
    own_scores(queries, gallery, more[:20_000], truth, BLOCKS[1])
    return extra_peak_bytes(lambda: own_scores(queries, gallery, more, truth, BLOCKS[1]))


def memory_row(gnd: Path) -> Row:
    what, against = "extra peak memory at a million distractors", "1 GB"
    if not Path("/proc/self/clear_refs").exists():
        return Row(what, against, None, SMALLER, None, {"not measured": "resident peaks can be reset on Linux only"})
    command = [sys.executable, __file__, "--measure", "--gnd", str(gnd)]
    extra = int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    ratio = extra / GIGABYTE
    return Row(what, against, ratio, SMALLER, meets(ratio, SMALLER), {"megabytes": extra / 1e6})


@click.command()
@click.option("--dino", type=click.Path(path_type=Path, file_okay=False), help="A checkout of DINO.")
@click.option("--revisitop", type=click.Path(path_type=Path, file_okay=False), help="A checkout of revisitop.")
@click.option("--gnd", type=click.Path(path_type=Path), default=GND, help="Folder with the published gnd_*.pkl.")
@click.option("--quick", is_flag=True, help="One timed round.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here.")
@click.option("--record", is_flag=True, help="Append the figures to benchmarks/RESULTS.md.")
@click.option("--measure", is_flag=True, hidden=True)
def main(
    dino: Path | None,
    revisitop: Path | None,
    gnd: Path,
    quick: bool,
    json_file: Path | None,
    record: bool,
    measure: bool,
) -> None:
    """Check equality with the published evaluations; measure speed and memory at a million distractors."""
    oxford = gnd / "gnd_roxford5k.pkl"
    truth = read_ground_truth(oxford) if oxford.is_file() else stand_in_truth()
    if measure:
        print(measure_memory(truth))
        return
    published = None if revisitop is None else load_revisitop(revisitop)
    compute_map = published if dino is None else load_dino(dino).utils.compute_map
    rows = [
        equality_row(published, gnd),
        memory_row(gnd),
        *distractor_rows(compute_map, truth, 1 if quick else 3),
    ]
    finish("retrieval", rows, json_file=json_file, record=record)


if __name__ == "__main__":
    main()
