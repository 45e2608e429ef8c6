"""Measure searches in parts of images against complete images, on a set of `pasted_objects.py`.

    sop-index build pasted/database --out pasted.index --parts
    sop-index build pasted/database --size 448 --out pasted448.index
    python benchmarks/bench_parts.py pasted/query pasted.index pasted448.index

Each index is searched by the images in QUERIES/NAME/; the one image of the index in a folder NAME is relevant.
Differences are to complete images of the first index, paired over the queries, with 95 % intervals of 10,000 resamples.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import report as report  # mistakes are one line

from sop_faiss.errors import DataError
from sop_faiss.index.beside import PARTS
from sop_faiss.index.own_encoder import encoder_of_index
from sop_faiss.index.search import FeatureIndex

_RESAMPLES = 10_000
_REPEATS = 20


def scores_of(index: FeatureIndex, queries: np.ndarray, names: list[str]) -> np.ndarray:
    """Return R@1 and AP (trapezoids, as `mAP` of sop-retrieve) of each query, in percent: (2, queries)."""
    found = index.search(queries, len(index))
    folders = [Path(member).parent.name for member in index.ids.members]
    ranks = np.array([[folders[row] for row in rows].index(name) for rows, name in zip(found.rows, names, strict=True)])
    return 100 * np.array([ranks == 0, ((ranks == 0) + 1 / (ranks + 1)) / 2], np.float64)


def interval(values: np.ndarray) -> str:
    """Return the mean with its interval."""
    drawn = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
    low, high = np.percentile(values[drawn].mean(1), (2.5, 97.5))
    return f"{values.mean():.1f} ({low:.1f}..{high:.1f})"


def milliseconds(index: FeatureIndex, queries: np.ndarray) -> float:
    """Return the median time of a search for 10 neighbors by one feature."""
    taken = []
    for query in np.tile(queries, (_REPEATS, 1))[: _REPEATS * 10]:
        start = time.perf_counter()
        index.search(query, 10)
        taken.append(time.perf_counter() - start)
    return 1000 * float(np.median(taken))


def main() -> None:
    """Print one row per index, and one more where it has parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queries", type=Path)
    parser.add_argument("indices", type=Path, nargs="+")
    arguments = parser.parse_args()
    files = sorted(path for path in arguments.queries.rglob("*") if path.is_file())
    if not files:
        raise DataError(f"{arguments.queries} has no files: wanted a folder with the images of each query in its own")
    names = [path.parent.name for path in files]
    first = None
    print("| index | R@1 | mAP | R@1 difference | mAP difference | ms a query | bytes an image |")
    print(f"|{'---|' * 7}")
    for directory in arguments.indices:
        index = FeatureIndex.open(directory)
        queries = encoder_of_index(index).encode(files)
        ways = [("complete images", index, directory)]
        ways += [("and parts", index.with_parts(), directory / PARTS)] if (directory / PARTS).is_dir() else []
        for what, searched, place in ways:
            scores = scores_of(searched, queries, names)
            first = scores if first is None else first
            cells = [interval(each) for each in (*scores, *(scores - first))]
            size = sum(file.stat().st_size for file in place.iterdir() if file.is_file()) / len(index)
            cells += [f"{milliseconds(searched, queries):.2f}", f"{size:,.0f}"]
            print(f"| {directory.name}, {what} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
