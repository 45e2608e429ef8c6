"""A few prototypes of a step, by the ids of their images, for a report."""

from __future__ import annotations

from dataclasses import dataclass

from sop_faiss.sop.prototypes import Prototypes

# A sheet of a report shows this many; more decimals than these would only make the file longer.
_ANCHORS = 8
_SUPPORTS = 16
_DECIMALS = 5


@dataclass(frozen=True)
class SeenPrototype:
    """One anchor and its supports, nearest first, by the ids of their images (-1: a random row of the start)."""

    image: int | None
    """None if the anchor is a copy whose row has been overwritten (`sop.anchors = fixed_vectors`)."""
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
    """The loss term, `cls` or `patch`; named as in files of earlier versions."""
    prototypes: list[SeenPrototype]


def sample_prototypes(step: int, term: str, drawn: Prototypes) -> PrototypeSample:
    """Return the first anchors of a draw's first task, which are as random as any, with their nearest supports."""
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
    return PrototypeSample(step, term, seen)


def _rounded(values: list[float]) -> list[float]:
    return [round(value, _DECIMALS) for value in values]
