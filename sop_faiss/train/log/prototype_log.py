"""Some prototypes of a run in `prototypes.jsonl`: a few anchors with their supports at some steps, for a report."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sop_faiss.objectives.objective import Objective
from sop_faiss.sop.prototype_sample import PrototypeSample, SeenPrototype
from sop_faiss.train.log.json_lines import keep_lines_until, read_lines

PROTOTYPES_FILE = "prototypes.jsonl"


class PrototypeLog:
    """Writes some prototypes at steps 1, 2, 5, 10, 20, 50 and so on, and at every checkpoint.

    It records what the step has drawn, and draws nothing itself. Only the main rank has one.

    Args:
        run: the run directory.
        resumed_step: lines of later steps are dropped, since these steps will be made again; 0: all.
        every_steps: `train.checkpoint_every_steps`.
    """

    def __init__(self, run: Path, resumed_step: int, every_steps: int) -> None:
        self._path = run / PROTOTYPES_FILE
        self._every_steps = every_steps
        keep_lines_until(self._path, resumed_step)

    def note(self, step: int, objective: Objective) -> None:
        """Record some of a step's prototypes, between the objective's `begin_step` and `end_step`."""
        if step % self._every_steps and str(step).rstrip("0") not in ("1", "2", "5"):
            return
        sample = objective.prototypes(step)
        if sample is None:
            return
        line = json.dumps(asdict(sample))
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")


def read_prototypes(run: Path) -> list[PrototypeSample]:
    """Return the recorded prototypes of a run in order of their steps, up to a damaged line."""
    samples: list[PrototypeSample] = []
    for line in read_lines(run / PROTOTYPES_FILE):
        level, listed = line.get("level"), line.get("prototypes")
        if level not in ("cls", "patch") or not isinstance(listed, list) or not all(map(_is_whole, listed)):
            break
        samples.append(PrototypeSample(line["step"], level, [SeenPrototype(**entry) for entry in listed]))
    return samples


def _is_whole(entry: Any) -> bool:
    """Return whether an entry has the right fields and types; the file may have been edited."""
    if not isinstance(entry, dict) or entry.keys() != SeenPrototype.__annotations__.keys():
        return False
    image, supports = entry["image"], entry["supports"]
    similarities, weights = entry["similarities"], entry["contributions"]
    if not all(isinstance(values, list) for values in (supports, similarities, weights)):
        return False
    ids = [*supports, *([] if image is None else [image])]
    lengths_fit = len(supports) == len(similarities) == len(weights) - 1
    return lengths_fit and all(type(value) is int for value in ids) and all(map(_is_number, [*similarities, *weights]))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
