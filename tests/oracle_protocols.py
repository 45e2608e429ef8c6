"""Slow, literal scores of each protocol, from its text: walk down sorted lists, one query after the other.

Every function takes, for each query, the complete ranking of gallery positions with junk taken out, the relevant
positions, and the similarities; it returns scores 0..1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from tests import oracle_metrics as oracle

Score = Callable[[list[int], list[int], Sequence[float]], float]


def recall(k: int) -> Score:
    return lambda ranked, relevant, _: float(any(position in relevant for position in ranked[:k]))


def kept_precision(k: int) -> Score:
    """AP of the first k, over all that could be among them."""

    def score(ranked: list[int], relevant: list[int], _: Sequence[float]) -> float:
        seen, total = 0, 0.0
        for place, position in enumerate(ranked[:k], start=1):
            if position in relevant:
                seen += 1
                total += seen / place
        return total / min(k, len(relevant))

    return score


def threshold_precision(k: int) -> Score:
    """The same by thresholds: images of equal similarity enter together."""

    def score(ranked: list[int], relevant: list[int], similarities: Sequence[float]) -> float:
        seen = right = 0
        total = 0.0
        for _, group in itertools.groupby(ranked[:k], key=lambda position: similarities[position]):
            entered = list(group)
            new = sum(position in relevant for position in entered)
            seen, right = seen + len(entered), right + new
            total += new * right / seen
        return total / min(k, len(relevant))

    return score


def first_share(ranked: list[int], relevant: list[int], _: Sequence[float]) -> float:
    first = ranked[: min(5, len(relevant))]
    return sum(position in relevant for position in first) / len(first)


def share_of_r(ranked: list[int], relevant: list[int], _: Sequence[float]) -> float:
    return sum(position in relevant for position in ranked[: len(relevant)]) / len(relevant)


def trapezoids(ranked: list[int], relevant: list[int], _: Sequence[float]) -> float:
    return oracle.average_precision(ranked, relevant)


def complete(ranked: list[int], relevant: list[int], similarities: Sequence[float]) -> float:
    return kept_precision(len(ranked))(ranked, relevant, similarities) * min(len(ranked), len(relevant)) / len(relevant)


def over_r(ranked: list[int], relevant: list[int], similarities: Sequence[float]) -> float:
    return kept_precision(len(relevant))(ranked, relevant, similarities)


LEARNING = {"R-precision": share_of_r, "mAP@R": over_r}
METRICS: dict[str, dict[str, Score]] = {
    "cub": {**{f"R@{k}": recall(k) for k in (1, 2, 4, 8)}, **LEARNING},
    "inshop": {**{f"R@{k}": recall(k) for k in (1, 10, 20, 30)}, **LEARNING},
    "sop": {**{f"R@{k}": recall(k) for k in (1, 10, 100, 1000)}, **LEARNING},
    "reid": {"mAP": trapezoids, **{f"R@{k}": recall(k) for k in (1, 5, 10)}, "mAP_standard": complete},
    "place": {f"R@{k}": recall(k) for k in (1, 5, 10)},
    "gldv2": {"mAP@100": kept_precision(100)},
    "ilias": {"mAP@1k": threshold_precision(1000)},
    "uned": {"R@1": recall(1), "mMP@5": first_share},
    "copydays": {"mAP": trapezoids},
    "amstertime": {"mAP@128": kept_precision(128), "R@1": recall(1), "R@5": recall(5)},
}
ZERO_IF_NOTHING = ("cub", "inshop", "sop", "reid", "place")
"""Protocols that count a query to which nothing is relevant."""

GROUPS: dict[str, dict[str, Callable[[str], bool]]] = {
    "gldv2": {"_public": "public".__eq__, "_private": "private".__eq__},
    "ilias": {
        "": lambda _: True,
        **{f"_scale{n}": f"scale{n}".__eq__ for n in range(1, 5)},
        **{f"_clutter{n}": f"clutter{n}".__eq__ for n in range(1, 5)},
    },
    "uned": {"_cars": "cars".__eq__, "_met": "met".__eq__},
    "copydays": {"_strong": "strong".__eq__, "_crops/10": "crops/10".__eq__},
    "amstertime": {"": lambda name: name != "junk", "_old": "old".__eq__, "_new": "new".__eq__},
}
"""Suffix of a metric, and which lists are relevant; other lists of a query are taken out of its ranking."""


def scores(
    protocol: str, similarities: Sequence[Sequence[float]], gnd: Sequence[dict[str, list[int]]]
) -> dict[str, float]:
    """All metrics of a protocol, in percent."""
    found: dict[str, float] = {}
    for suffix, belongs in GROUPS.get(protocol, {"": "ok".__eq__}).items():
        rows: dict[str, list[float]] = {}
        for row, lists in zip(similarities, gnd, strict=True):
            relevant = [p for name, own in lists.items() if any(map(belongs, name.split())) for p in own]
            ignored = [p for own in lists.values() for p in own if p not in relevant]
            for name, score in METRICS[protocol].items():
                if relevant:
                    rows.setdefault(name, []).append(score(oracle.ranking(row, ignored), relevant, row))
                elif protocol in ZERO_IF_NOTHING:
                    rows.setdefault(name, []).append(0.0)
        found |= {f"{name}{suffix}": 100 * math.fsum(values) / len(values) for name, values in rows.items()}
    if protocol == "uned":
        for name in METRICS[protocol]:
            own = [value for key, value in found.items() if key.startswith(f"{name}_")]
            found[name] = sum(own) / len(own)
    return found
