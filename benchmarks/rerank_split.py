"""Make a retrieval set of the database photos of a set with query/ and database/, to choose settings of re-ranking on.

    python benchmarks/rerank_split.py data/retrieval_grocery chosen/ [--most 3]
    sop-retrieve --model lite0 --size 192 --square --dataset chosen --rerank global

The queries are eight photos of the database of every second product that has queries, in alphabetical order of the
products; the gallery is all other photos of the database. No query photo of the set is read: scores that are reported
on those are of settings that were chosen without them. `--most N` leaves N photos of each of these products in the
gallery: which method helps depends on how many there are to find.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import report as report  # mistakes are one line

from sop_faiss.evaluate.sets.ground_truth import read_ground_truth

_QUERIES = 8


def write_split(folder: Path, out: Path, most: int | None) -> str:
    """Write links to the photos into OUT/query/PRODUCT and OUT/database/PRODUCT."""
    truth = read_ground_truth(folder / "gnd.json")
    groups = np.array([name.rsplit("_", 1)[0] for name in truth.images])
    products = sorted({query.name.rsplit("_", 1)[0] for query in truth.queries})[::2]
    generator = np.random.default_rng(0)
    asked = [generator.permutation(np.flatnonzero(groups == each))[:_QUERIES] for each in products]
    gallery = np.setdiff1d(np.arange(len(groups)), np.concatenate(asked))
    if most is not None:
        generator = np.random.default_rng(1)
        kept = []
        for group in sorted(set(groups[gallery])):
            own = gallery[groups[gallery] == group]
            kept.append(generator.permutation(own)[:most] if group in products else own)
        gallery = np.sort(np.concatenate(kept))
    for role, rows in (("query", np.concatenate(asked)), ("database", gallery)):
        for row in rows.tolist():
            place = out / role / groups[row]
            place.mkdir(parents=True, exist_ok=True)
            (place / truth.images[row]).symlink_to((folder / "database" / truth.images[row]).absolute())
    return f"{_QUERIES * len(products)} queries of {len(products)} products in {len(gallery)} images: {out}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--most", type=int)
    arguments = parser.parse_args()
    print(write_split(arguments.folder, arguments.out, arguments.most))
