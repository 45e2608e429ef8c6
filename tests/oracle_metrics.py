"""Slow, literal versions of the metrics, written from the protocol's text: sort, take out, walk down the list."""

from __future__ import annotations

import math
from collections.abc import Sequence


def ranking(similarities: Sequence[float], ignored: Sequence[int]) -> list[int]:
    """Gallery positions from most to least similar (equal ones in gallery order), ignored images taken out."""
    order = sorted(range(len(similarities)), key=lambda position: -similarities[position])  # sorted() is stable
    taken_out = set(ignored)
    return [position for position in order if position not in taken_out]


def average_precision(ranked: Sequence[int], relevant: Sequence[int]) -> float:
    """Area under precision over recall, one trapezoid per relevant image met while walking down the list."""
    wanted = set(relevant)
    area, seen_relevant = 0.0, 0
    for seen, position in enumerate(ranked):
        if position in wanted:
            before = seen_relevant / seen if seen else 1.0
            after = (seen_relevant + 1) / (seen + 1)
            area += (before + after) / 2 / len(wanted)
            seen_relevant += 1
    return area


def precision_at(ranked: Sequence[int], relevant: Sequence[int], k: int) -> float:
    """Share of relevant among the first k; k shrinks to the place (from 1) of the last relevant image of the list."""
    wanted = set(relevant)
    places = [place for place, position in enumerate(ranked, start=1) if position in wanted]
    if not places:
        return 0.0
    shrunk = min(k, max(places))
    return sum(place <= shrunk for place in places) / shrunk


DIFFICULTIES = {
    "easy": (["easy"], ["junk", "hard"]),
    "medium": (["easy", "hard"], ["junk"]),
    "hard": (["hard"], ["junk", "easy"]),
}


def revisited_scores(
    similarities: Sequence[Sequence[float]], gnd: Sequence[dict[str, Sequence[int]]], ks: Sequence[int] = (1, 5, 10)
) -> dict[str, float]:
    """mAP and mP@k in percent at every difficulty; queries without a relevant image are not counted."""
    result: dict[str, float] = {}
    for name, (relevant_lists, ignored_lists) in DIFFICULTIES.items():
        rows: dict[str, list[float]] = {}
        for row, truth in zip(similarities, gnd, strict=True):
            relevant = [position for field in relevant_lists for position in truth[field]]
            if not relevant:
                continue
            ranked = ranking(row, [position for field in ignored_lists for position in truth[field]])
            rows.setdefault("mAP", []).append(average_precision(ranked, relevant))
            for k in ks:
                rows.setdefault(f"mP@{k}", []).append(precision_at(ranked, relevant, k))
        result |= {f"{metric}_{name}": 100 * math.fsum(values) / len(values) for metric, values in rows.items()}
    return result
