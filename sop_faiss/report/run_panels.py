"""The panels of a run: which curves share one, their units, and reference values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sop_faiss.report.plots import Curve

_PLACE = ("step", "epoch", "images")
_OTHERS_SHOWN = 30


class Reference(NamedTuple):
    """A value with a special meaning, such as the floor of a metric."""

    value: float
    label: str


@dataclass(frozen=True)
class RunConstants:
    """The constants of a run on which the meaning of its metrics depends."""

    floors: Mapping[str, float]
    """ln K of each loss term."""
    embedding_dim: int | None
    """d; None: that of an encoder which is not read."""

    def log_counts(self) -> list[Reference]:
        """Return ln K of each loss term, equal ones once: the loss of uniform assignments."""
        terms: dict[float, list[str]] = {}
        for term, floor in self.floors.items():
            terms.setdefault(floor, []).append(_TERMS.get(term, term))
        return [
            Reference(floor, f"ln {round(math.exp(floor)):,} ({', '.join(names)}): uniform")
            for floor, names in terms.items()
        ]


@dataclass(frozen=True)
class Panel:
    """Curves that share an axis."""

    group: str
    title: str
    unit: str
    """The label of the axis."""
    curves: dict[str, Curve]
    """Name in the legend -> curve."""
    references: list[Reference] = field(default_factory=list)
    logarithmic: bool = False
    """Whether the axis is logarithmic; values that are not positive are left out."""
    is_score: bool = False
    """Whether it is a score (larger is better), whose value at step 0 is the baseline."""

    def heading(self, name: str) -> str:
        """Return the full name of one of its curves, for use without a legend."""
        return self.title if name in (self.title, "") else f"{self.title}: {name}"


_TERMS = {"cls": "[CLS]", "patch": "patches"}
_LEGEND = {
    **_TERMS,
    "loss": "weighted sum",
    "loss_cls": "[CLS]",
    "loss_patch": "patches",
    "embedding_cosine": "embeddings",
    "feature_cosine": "features",
    "embedding_rankme": "embeddings",
    "feature_rankme": "features",
    "rankme": "RankMe",
    "lidar": "LiDAR",
    **dict.fromkeys(("learning_rate", "weight_decay", "momentum", "teacher_temp"), ""),
    **dict.fromkeys(
        ("alpha_req", "assignment_entropy", "images_per_second", "data_wait_share", "memory_peak_bytes"), ""
    ),
    **dict.fromkeys(
        ("view_recall_at_1", "view_auc", "backbone_lr_scale", "gradient_norm", "update_norm", "regularizer"), ""
    ),
}
_GIB = 2.0**30


class _Kind(NamedTuple):
    """A panel that a run may have; `pattern` matches its keys, and the first group is the name of the curve."""

    group: str
    title: str
    unit: str
    pattern: str
    references: Callable[[RunConstants], list[Reference]] = lambda constants: []
    logarithmic: bool = False
    divisor: float = 1.0
    is_score: bool = False


def _always(*references: tuple[float, str]) -> Callable[[RunConstants], list[Reference]]:
    return lambda constants: [Reference(*reference) for reference in references]


_ALIKE = _always((1.0, "1: all alike"))
_KINDS = (
    _Kind("Scores over time", "k-NN accuracy", "%", r"knn_(top\d+_k\d+)", is_score=True),
    _Kind("Scores over time", "Mean average precision", "%", r"(mAP\w*|map\w*)", is_score=True),
    _Kind("Scores over time", "Recall between two views", "%", r"(view_recall\w*)", is_score=True),
    _Kind("Scores over time", "Ranks without labels", "directions", r"(rankme|lidar)"),
    _Kind("Scores over time", "alpha-ReQ", "exponent", r"(alpha_req)"),
    _Kind("Scores over time", "Entropy of assignments to views", "%", r"(assignment_entropy)"),
    _Kind("Loss", "Loss", "nats", r"(loss|loss_cls|loss_patch)", RunConstants.log_counts),
    _Kind("Loss", "Loss over ln K", "ratio", r"loss_(\w+)_over_lnK", _always((1.0, "1: uniform"))),
    _Kind(
        "Loss",
        "Teacher entropy over ln K",
        "ratio",
        r"teacher_entropy_(\w+)_over_lnK",
        _always((1.0, "1: uniform"), (0.0, "0: one prototype takes all")),
    ),
    _Kind("Loss", "KL: loss minus teacher entropy", "nats", r"kl_(\w+)", _always((0.0, "0: student is teacher"))),
    _Kind("Loss", "Regularizer before its weight", "value", r"(regularizer)"),
    _Kind("Health", "Supports' similarity to anchor", "cosine", r"support_similarity_(\w+)", _ALIKE),
    _Kind("Health", "Mean similarity of different images", "cosine", r"((?:embedding|feature)_cosine)", _ALIKE),
    _Kind(
        "Health",
        "RankMe: dimensions in use",
        "dimensions",
        r"((?:embedding|feature)_rankme)",
        lambda constants: [
            Reference(1.0, "1: one direction"),
            *(Reference(float(dim), f"{dim}: all of the embeddings'") for dim in (constants.embedding_dim,) if dim),
        ],
        logarithmic=True,
    ),
    _Kind(
        "Health",
        "Views of one image against those of others",
        "probability",
        r"(view_auc)",
        _always((1.0, "1: always"), (0.5, "0.5: chance")),
    ),
    _Kind(
        "Health",
        "Memory that holds stored rows",
        "share",
        r"memory_fill_(\w+)",
        _always((1.0, "1: none is random"), (0.0, "0: all random")),
    ),
    _Kind("Health", "Mean age of the memory's rows", "steps", r"memory_age_(\w+)"),
    _Kind("Health", "Different rows that are members", "share of the memory", r"distinct_rows_(\w+)"),
    _Kind("Health", "Anchors with supports of one image", "share", r"one_image_share_(\w+)"),
    _Kind("Health", "Recall of the approximate search", "share", r"neighbor_recall_(\w+)", _always((1.0, "1: exact"))),
    _Kind("Health", "Gradient before clipping", "L2 norm", r"(gradient_norm)", logarithmic=True),
    _Kind("Health", "A step's change of the weights", "over their norm", r"(update_norm)", logarithmic=True),
    _Kind("Schedules", "Learning rate", "per step", r"(learning_rate)"),
    _Kind("Schedules", "Backbone's rate / projector's", "ratio", r"(\w+_lr_scale)", _always((0.0, "0: frozen"))),
    _Kind("Schedules", "Weight decay", "factor", r"(weight_decay)"),
    _Kind("Schedules", "Teacher momentum", "share kept", r"(momentum)"),
    _Kind("Schedules", "Teacher temperature", "temperature", r"(teacher_temp)"),
    _Kind("Speed", "Images per second", "images/s", r"(images_per_second)"),
    _Kind("Speed", "Time spent waiting for data", "share", r"(data_wait_share)", _always((0.0, "0: never waits"))),
    _Kind("Speed", "Memory peak", "GiB", r"(memory_peak_bytes)", divisor=_GIB),
)


def panels_of_run(curves: Mapping[str, Curve], constants: RunConstants) -> tuple[list[Panel], int]:
    """Sort a run's curves into panels; each unknown name gets its own panel under "Other".

    Returns:
        The panels, known kinds first, and the number of others beyond thirty, which are left out.
    """
    left = {key: curve for key, curve in curves.items() if key not in _PLACE}
    panels = []
    for kind in _KINDS:
        found = {key: match[1] for key in left if (match := re.fullmatch(kind.pattern, key))}
        if not found:
            continue
        members = {_legend(name): _divided(left.pop(key), kind.divisor) for key, name in found.items()}
        panels.append(
            Panel(
                kind.group,
                kind.title,
                kind.unit,
                members,
                kind.references(constants),
                kind.logarithmic and all((curve.values > 0).any() for curve in members.values()),
                kind.is_score,
            )
        )
    others = sorted(left)
    panels += [Panel("Other", key, "", {key: left[key]}) for key in others[:_OTHERS_SHOWN]]
    return panels, max(0, len(others) - _OTHERS_SHOWN)


def heading_of(key: str) -> str:
    """Return the name that readers see of a number, with that of its panel; the key itself where no panel knows it."""
    for kind in _KINDS:
        if match := re.fullmatch(kind.pattern, key):
            return Panel(kind.group, kind.title, kind.unit, {}).heading(_legend(match[1]))
    return key


def _legend(name: str) -> str:
    """Name a curve in the legend, as `top-1, k = 20` for `top1_k20`; one that is alone in its panel needs no name."""
    return _LEGEND.get(name, re.sub(r"^top(\d+)_k(\d+)$", r"top-\1, k = \2", name))


def _divided(curve: Curve, divisor: float) -> Curve:
    return Curve(curve.steps, curve.values / divisor)
