"""What a study has shown so far: one row per run, and means and differences over seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float64

from sop_faiss.bootstrap import Interval
from sop_faiss.config import flat_settings
from sop_faiss.evaluate.seed_intervals import mean_interval, paired_interval
from sop_faiss.evaluate.stopping import NUMBERS
from sop_faiss.files import atomic_file
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.verbs.study.clock import read_clock
from sop_faiss.verbs.study.folder import DONE, StudyFolder
from sop_faiss.verbs.study.plan import PlannedRun

_PLACE = ("step", "epoch", "images")
_MISSING = "not finished"


@dataclass(frozen=True)
class RunResult:
    """One run, whether it is finished or not."""

    planned: PlannedRun
    status: str
    """`done`, `failed` or `not finished`."""
    error: str
    """The last line of a failed run."""
    record: dict[str, Any]
    """How it ended; empty if it has not."""
    steps: Float64[np.ndarray, " m"]
    """Steps with scores, rising."""
    seconds: Float64[np.ndarray, " m"]
    """Of training until then."""
    by_step: dict[str, Float64[np.ndarray, " m"]]
    """Score -> its values at these steps; NaN where it was not measured."""
    logged: dict[str, Float64[np.ndarray, " m"]]
    """Numbers without labels of the newest logged step until then; NaN before the first."""

    @property
    def scores(self) -> dict[str, float]:
        """Return the scores at the end of a finished run: of the final tasks, else the last ones while training."""
        if self.status != DONE:
            return {}
        last = {name: float(values[-1]) for name, values in self.by_step.items() if np.isfinite(values[-1])}
        return {**last, **self.record["scores"]}


def collect(folder: StudyFolder, runs: Sequence[PlannedRun]) -> list[RunResult]:
    """Read what there is of each run.

    Raises:
        SopError: a record is damaged.
    """
    return [_read(folder, planned) for planned in runs]


def _read(folder: StudyFolder, planned: PlannedRun) -> RunResult:
    record = folder.record(planned.name)
    lines: dict[int, dict[str, Any]] = {}
    logged: dict[int, dict[str, Any]] = {}
    for line in read_metrics(folder.run(planned.name)):
        kind = logged if "loss" in line else lines  # scores have lines of their own
        kind[line["step"]] = {name: value for name, value in line.items() if name not in _PLACE}
    steps = sorted(lines)
    names = dict.fromkeys(name for step in steps for name in lines[step])
    clock = [(0, 0.0), *read_clock(folder.clock(planned.name))]
    return RunResult(
        planned,
        record.get("status", _MISSING),
        record.get("error", ""),
        record,
        np.array(steps, np.float64),
        np.interp(steps, *np.array(clock, np.float64).T) if steps else np.empty(0),
        {name: np.array([_number(lines[step].get(name)) for step in steps], np.float64) for name in names},
        _newest(logged, steps),
    )


def _newest(logged: Mapping[int, Mapping[str, Any]], steps: Sequence[int]) -> dict[str, Float64[np.ndarray, " m"]]:
    until = [max((step for step in logged if step <= scored), default=None) for scored in steps]
    lines = [{} if step is None else logged[step] for step in until]
    return {
        name: np.array([_number(line.get(name)) for line in lines], np.float64)
        for name in NUMBERS
        if any(name in line for line in lines)
    }


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def score_names(results: Sequence[RunResult]) -> list[str]:
    """Return the scores that some finished run has, those of final tasks first."""
    final = [name for result in results if result.status == DONE for name in result.record["scores"]]
    return list(dict.fromkeys([*final, *(name for result in results for name in result.scores)]))


def _by_seed(results: Sequence[RunResult], arm: str, score: str) -> dict[int, float]:
    return {
        result.planned.seed: result.scores[score]
        for result in results
        if result.planned.arm.name == arm and score in result.scores
    }


def means(results: Sequence[RunResult], arm: str) -> dict[str, Interval]:
    """Return each score's mean over the seeds of an arm, with its interval."""
    found = {score: _by_seed(results, arm, score) for score in score_names(results)}
    return {score: mean_interval(list(values.values())) for score, values in found.items() if values}


def differences(results: Sequence[RunResult], arm: str, other: str) -> dict[str, tuple[Interval, int]]:
    """Return how much higher each score of an arm is than another arm's, paired by seed, and the number of seeds."""
    found = {}
    for score in score_names(results):
        mine, theirs = (_by_seed(results, name, score) for name in (arm, other))
        if mine.keys() & theirs.keys():
            found[score] = paired_interval(theirs, mine)
    return found


def write_parquet(path: Path, results: Sequence[RunResult]) -> None:
    """Write one row per run, atomically.

    Columns: arm, seed, status, error, steps, images, seconds, peak_memory_bytes, cuda_peak_bytes, device, threads,
    commit, the versions and the date of `environment`; every setting that an arm sets, by its dotted name;
    `score.NAME` at the end; `by_step.steps`, `by_step.images`, `by_step.seconds` and `by_step.NAME` as lists.
    """
    columns: dict[str, list[Any]] = {
        "arm": [result.planned.arm.name for result in results],
        "seed": [result.planned.seed for result in results],
        "status": [result.status for result in results],
        "error": [result.error or None for result in results],
    }
    for name in ("steps", "images", "seconds", "peak_memory_bytes", "cuda_peak_bytes", "device", "threads", "commit"):
        columns[name] = [result.record.get(name) for result in results]
    for name in ("sop_faiss", "torch", "python", "platform", "gpu", "date"):
        columns[name] = [result.record.get("environment", {}).get(name) for result in results]
    settings = [flat_settings(result.planned.config) for result in results]
    for name in dict.fromkeys(field for result in results for field in result.planned.arm.settings):
        columns[name] = _of_one_type([each[name] for each in settings])
    for name in score_names(results):
        columns[f"score.{name}"] = [result.scores.get(name) for result in results]
    columns |= {
        "by_step.steps": [result.steps.astype(np.int64).tolist() for result in results],
        "by_step.images": [
            (result.steps * result.planned.config.train.batch_size).astype(np.int64).tolist() for result in results
        ],
        "by_step.seconds": [result.seconds.tolist() for result in results],
    }
    for name in dict.fromkeys(name for result in results for name in result.by_step):
        columns[f"by_step.{name}"] = [
            [None if np.isnan(value) else value for value in result.by_step.get(name, ())] for result in results
        ]
    types = {"error": pa.string(), "cuda_peak_bytes": pa.int64(), "gpu": pa.string()}
    arrays = {name: pa.array(values, types.get(name)) for name, values in columns.items()}
    with atomic_file(path) as temporary:
        pq.write_table(pa.table(arrays), temporary)


def _of_one_type(values: list[Any]) -> list[Any]:
    """Return the values of a setting as one Parquet type: as text where they are of several."""
    kinds: Mapping[type, None] = dict.fromkeys(type(value) for value in values if value is not None)
    if len(kinds) == 1 or {*kinds} <= {int, float}:
        return [list(value) if isinstance(value, tuple) else value for value in values]
    return [value if isinstance(value, str | None) else json.dumps(value) for value in values]
