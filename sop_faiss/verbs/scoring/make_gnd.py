"""Write the ground truth of a user's own images, to be looked at, changed and measured with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.sets.ground_truth import encode_ground_truth, make_ground_truth
from sop_faiss.evaluate.sets.plain_sets import read_plain_set
from sop_faiss.files import write_file
from sop_faiss.verbs.output_paths import check_outputs


@dataclass(frozen=True)
class GndSummary:
    """What was written, in counts."""

    queries: int
    gallery: int
    relevant_min: int
    relevant_median: float
    relevant_max: int
    without_relevant: int
    """Queries to which nothing is relevant; they will not be counted."""
    alone: int
    """Images without another of their group, which are no queries."""


def write_ground_truth(dataset: str, data_root: Path | None, out: Path, *, force: bool = False) -> GndSummary:
    """Make a gnd.json from class folders or a CSV; see `plain_sets.py` for their forms.

    Args:
        dataset: the directory or the CSV file.
        data_root: the directory that holds it.
        force: replace what is there, also inside a store, index, shard folder, run or export.

    Raises:
        ConfigError: `out` is not a .json file, or, without `force`, exists or is where nothing is written.
        DataError: the data set is of another form, or contradicts itself.
    """
    if out.suffix != ".json":
        raise ConfigError(f"`make_gnd={out}`: wanted a .json file, such as gnd.json next to the images")
    check_outputs({"--make-gnd": out}, [], force=force)
    place = (data_root if data_root is not None else Path()) / dataset
    plain = read_plain_set(place)
    truth = make_ground_truth(plain.content, place)
    write_file(out, encode_ground_truth(plain.content))
    counts = np.array([len(query.lists["ok"]) for query in truth.queries])
    return GndSummary(
        queries=len(counts),
        gallery=len(truth.images),
        relevant_min=int(counts.min()),
        relevant_median=float(np.median(counts)),
        relevant_max=int(counts.max()),
        without_relevant=int((counts == 0).sum()),
        alone=plain.alone,
    )
