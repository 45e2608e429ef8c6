"""What prototypes a run drew, in `prototypes.jsonl`: a few anchors with their supports now and then, for a report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sop_faiss.sop.prototypes import Prototypes
from sop_faiss.train.log.json_lines import keep_lines_until, read_lines

__all__ = [
    "PROTOTYPES_FILE",
    "PrototypeLog",
    "PrototypeSample",
    "SeenPrototype",
    "read_prototypes",
    "sample_prototypes",
]

PROTOTYPES_FILE = "prototypes.jsonl"
_ANCHORS = 8
_SUPPORTS = 16
_DECIMALS = 5


@dataclass(frozen=True)
class SeenPrototype:
    """One anchor and its supports, nearest first, by the ids of their images (-1: a random row of the start)."""

    image: int | None
    """None where the anchor is a copy whose row has been renewed (`sop.anchors = fixed_vectors`)."""
    supports: list[int]
    similarities: list[float]
    """Of the supports to the anchor."""
    contributions: list[float]
    """What each member gives to this prototype, the anchor first."""


@dataclass(frozen=True)
class PrototypeSample:
    """The first few prototypes of one draw."""

    step: int
    """The step that used them, counted from 1 as in `metrics.jsonl`."""
    level: str
    """`cls` or `patch`."""
    prototypes: list[SeenPrototype]


def sample_prototypes(step: int, level: str, drawn: Prototypes) -> PrototypeSample:
    """The first anchors of a draw's first task, which are as random as any, with their nearest supports."""
    rows, ids = drawn.anchor_rows[0, :_ANCHORS], drawn.memory.image_ids
    supports = drawn.support_rows[0, :_ANCHORS, :_SUPPORTS]
    columns = (
        ids[rows].tolist(),
        drawn.holds_anchor[0, :_ANCHORS].tolist(),
        ids[supports].tolist(),
        drawn.support_similarities[0, :_ANCHORS, :_SUPPORTS].tolist(),
        drawn.contributions[0, :_ANCHORS, : _SUPPORTS + 1].tolist(),
    )
    seen = [
        SeenPrototype(image if holds else None, images, _rounded(similarities), _rounded(weights))
        for image, holds, images, similarities, weights in zip(*columns, strict=True)
    ]
    return PrototypeSample(step, level, seen)


def _rounded(values: list[float]) -> list[float]:
    return [round(value, _DECIMALS) for value in values]


class PrototypeLog:
    """Writes a sample of the prototypes at steps 1, 2, 5, 10, 20, 50 and so on, and at every checkpoint's.

    It draws nothing: it looks at what the step draws anyway. Only the main rank holds one.

    Args:
        run: the run directory.
        resumed_step: lines of later steps are dropped, since these steps will be made again; 0: all.
        every_steps: `train.checkpoint_every_steps`.
    """

    def __init__(self, run: Path, resumed_step: int, every_steps: int) -> None:
        self._path = run / PROTOTYPES_FILE
        self._every_steps = every_steps
        keep_lines_until(self._path, resumed_step)

    def note(self, step: int, prototypes: Mapping[str, Prototypes]) -> None:
        """Look at a step's prototypes, before its own embeddings are stored: of [CLS], or of patches without it."""
        if step % self._every_steps and str(step).rstrip("0") not in ("1", "2", "5"):
            return
        level = next(iter(prototypes))
        line = json.dumps(asdict(sample_prototypes(step, level, prototypes[level])))
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")


def read_prototypes(run: Path) -> list[PrototypeSample]:
    """The samples of a run in order of their steps, up to a line that is damaged; none if it kept none."""
    samples: list[PrototypeSample] = []
    for line in read_lines(run / PROTOTYPES_FILE):
        level, listed = line.get("level"), line.get("prototypes")
        if level not in ("cls", "patch") or not isinstance(listed, list) or not all(map(_is_whole, listed)):
            break
        samples.append(PrototypeSample(line["step"], level, [SeenPrototype(**entry) for entry in listed]))
    return samples


def _is_whole(entry: Any) -> bool:
    """Believe nothing of the file: it may have been edited."""
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
