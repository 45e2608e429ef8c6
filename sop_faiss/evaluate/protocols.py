"""Protocols of image retrieval: which lists of a ground truth are relevant, which are ignored, and what is measured.

To a query, an image of the gallery is relevant, ignored or neither. The ground truth names images for each query in
lists (easy, hard and junk; ok and junk; or one list for each group of queries). A Difficulty says which lists are
relevant and which are ignored; a Protocol is a row of a table: difficulties, metrics, and a rule about query boxes.
Every metric of one query follows from the ranks of its relevant images (`metrics.py`). Where each protocol comes from
is in docs/evaluation.md; the folders of those with a layout of their own are read by `published_layouts.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.metrics import (
    average_precision,
    average_precision_at,
    average_precision_at_r,
    first_precision,
    ndcg,
    precision_at,
    r_precision,
    recall_at,
    standard_average_precision,
    tied_average_precision_at,
)
from sop_faiss.evaluate.sets.ground_truth import GRADED, PLAIN, GroundTruth, QueryTruth


@dataclass(frozen=True)
class Difficulty:
    """Which lists of the ground truth are relevant and which are ignored; the rest of the gallery is wrong."""

    name: str
    relevant: tuple[str, ...]
    ignored: tuple[str, ...]

    def relevant_to(self, query: QueryTruth) -> bool:
        """Return whether any image is relevant to a query."""
        return any(len(query.lists[name]) for name in self.relevant)

    def metric(self, name: str) -> str:
        """Return the name of a metric at this difficulty, as `mAP_medium`; plain `mAP` where there is only one."""
        return f"{name}_{self.name}" if self.name else name


@dataclass(frozen=True)
class Ranked:
    """The relevant images of one query at one difficulty, nearest first; ranks count from 0.

    `reached` has, for each of them, how many images are at least as similar to the query; only where ties matter.
    """

    ranks: Int64[np.ndarray, " r"]
    similarities: Float32[np.ndarray, " r"]
    reached: Int64[np.ndarray, " r"] | None = None


@dataclass(frozen=True)
class Metric:
    """A score of one query, 0..1, whose mean over queries is reported. `each` is its name for one query."""

    name: str
    score: Callable[[Ranked], float]
    each: str = ""

    @property
    def of_query(self) -> str:
        """Return the name of one query's score: `AP` of `mAP`."""
        return self.each or self.name


def _average_precision_at(k: int) -> Metric:
    return Metric(f"mAP@{k}", lambda found: average_precision_at(found.ranks, len(found.ranks), k), f"AP@{k}")


def _precision(k: int) -> Metric:
    return Metric(f"mP@{k}", lambda found: precision_at(found.ranks, k), f"P@{k}")


def _recall(k: int) -> Metric:
    return Metric(f"R@{k}", lambda found: recall_at(found.ranks, k))


def _of_threshold(found: Ranked) -> float:
    assert found.reached is not None  # the protocol's `ties`
    return tied_average_precision_at(found.ranks, found.reached, len(found.ranks), 1000)


_MAP = Metric("mAP", lambda found: average_precision(found.ranks, len(found.ranks)), "AP")
_STANDARD_MAP = Metric("mAP_standard", lambda found: standard_average_precision(found.ranks, len(found.ranks)))
_R_PRECISION = Metric("R-precision", lambda found: r_precision(found.ranks, len(found.ranks)))
_MAP_AT_R = Metric("mAP@R", lambda found: average_precision_at_r(found.ranks, len(found.ranks)))
_NDCG = Metric("nDCG", lambda found: ndcg(found.ranks, len(found.ranks)))
_FIRST_PRECISION = Metric("mMP@5", lambda found: first_precision(found.ranks, len(found.ranks), 5), "MP@5")

_REVISITED_METRICS = (_MAP, *(_precision(k) for k in (1, 5, 10)))
_PLAIN_METRICS = (
    *_REVISITED_METRICS,
    *(_recall(k) for k in (1, 5, 10)),
    _R_PRECISION,
    _MAP_AT_R,
    _NDCG,
    _STANDARD_MAP,
)


def _learning_metrics(*ks: int) -> tuple[Metric, ...]:
    """Of sets for metric learning: Recall@k, and what Musgrave et al. 2020 ask for."""
    return *(_recall(k) for k in ks), _R_PRECISION, _MAP_AT_R


EASY = Difficulty("easy", relevant=("easy",), ignored=("junk", "hard"))
MEDIUM = Difficulty("medium", relevant=("easy", "hard"), ignored=("junk",))
HARD = Difficulty("hard", relevant=("hard",), ignored=("junk", "easy"))
UNGRADED = Difficulty("", relevant=("ok",), ignored=("junk",))

_SCALES, _CLUTTERS = [[f"{name}{part}" for part in range(1, 5)] for name in ("scale", "clutter")]
ILIAS_LISTS = tuple(" ".join(pair) for pair in itertools.product(_SCALES, _CLUTTERS))
"""Positives of ILIAS by the share of the image that the object takes and by the objects around it, in quarters."""


def _ilias_group(name: str) -> Difficulty:
    own = tuple(each for each in ILIAS_LISTS if name in each.split(" "))
    return Difficulty(name, own, tuple(each for each in ILIAS_LISTS if each not in own))


@dataclass(frozen=True)
class Protocol:
    """What is reported, from which kind of ground truth, and what is done with the query's box.

    Attributes:
        name: as the user writes it.
        lists: the lists a ground truth must have; none: one for each group of its queries, and junk.
        difficulties: what is reported; of groups, one for each, set by `choose_protocol`.
        box: `required`: the caller crops queries, and each must have a box; `used`: it crops where there is a box;
            `ignored`: whole images.
        metrics: of each query; the first is the score by which queries are sorted and results compared.
        counts_all: a query to which nothing is relevant counts as 0; otherwise it is not counted.
        ties: images of equal similarity are one threshold, whose size the metrics need.
        averages_groups: the mean over the groups is reported, too, each group with the same weight.
    """

    name: str
    lists: tuple[str, ...]
    difficulties: tuple[Difficulty, ...]
    box: str
    metrics: tuple[Metric, ...]
    counts_all: bool = False
    ties: bool = False
    averages_groups: bool = False

    @property
    def headline(self) -> Metric:
        """Return the score by which queries are sorted and results compared."""
        return self.metrics[0]


def _plain(name: str, metrics: tuple[Metric, ...], *, counts_all: bool = False) -> Protocol:
    return Protocol(name, PLAIN, (UNGRADED,), "used", metrics, counts_all)


def _groups(*names: str, ignored: tuple[str, ...] = ()) -> tuple[Difficulty, ...]:
    return tuple(Difficulty(name, (name,), ignored) for name in names)


_ALL = [
    Protocol("revisitop", GRADED, (EASY, MEDIUM, HARD), "required", _REVISITED_METRICS),
    Protocol("dino", GRADED, (MEDIUM, HARD), "ignored", _REVISITED_METRICS),
    _plain("plain", _PLAIN_METRICS),
    _plain("cub", _learning_metrics(1, 2, 4, 8), counts_all=True),
    _plain("inshop", _learning_metrics(1, 10, 20, 30), counts_all=True),
    _plain("sop", _learning_metrics(1, 10, 100, 1000), counts_all=True),
    _plain("reid", (_MAP, *(_recall(k) for k in (1, 5, 10)), _STANDARD_MAP), counts_all=True),
    _plain("place", tuple(_recall(k) for k in (1, 5, 10)), counts_all=True),
    Protocol("gldv2", ("public", "private"), _groups("public", "private"), "used", (_average_precision_at(100),)),
    Protocol(
        "ilias",
        ILIAS_LISTS,
        (Difficulty("", ILIAS_LISTS, ()), *(_ilias_group(name) for name in (*_SCALES, *_CLUTTERS))),
        "used",
        (Metric("mAP@1k", _of_threshold, "AP@1k"),),
        ties=True,
    ),
    Protocol("met", ("test", "val"), (Difficulty("", ("test",), ()),), "used", (_recall(1),)),
    Protocol("uned", (), (), "used", (_recall(1), _FIRST_PRECISION), averages_groups=True),
    Protocol("copydays", (), (), "used", (_MAP,)),
    Protocol(
        "amstertime",
        ("old", "new", "junk"),
        (Difficulty("", ("old", "new"), ("junk",)), *_groups("old", "new", ignored=("junk",))),
        "used",
        (_average_precision_at(128), _recall(1), _recall(5)),
    ),
]
PROTOCOLS = {protocol.name: protocol for protocol in _ALL}
"""By name. The first three are of a ground truth in a gnd.json, the others of a layout (`published_layouts.py`)."""


def choose_protocol(name: str | None, truth: GroundTruth) -> Protocol:
    """Return the protocol of that name, else revisitop for graded lists and plain for others; check that it fits.

    Raises:
        ConfigError: the protocol is unknown.
        DataError: the ground truth lacks what the protocol needs.
    """
    chosen = name if name is not None else ("revisitop" if truth.lists == GRADED else "plain")
    protocol = _protocol(chosen)
    if not protocol.lists:
        groups = (each for each in truth.lists if each != "junk")
        return replace(protocol, lists=truth.lists, difficulties=_groups(*groups, ignored=("junk",)))
    if protocol.lists != truth.lists:
        own = ("revisitop", "dino", "plain")
        fitting = " or ".join(f"`protocol={key}`" for key in own if PROTOCOLS[key].lists == truth.lists)
        raise DataError(
            f"protocol {chosen} needs {'/'.join(protocol.lists)}, but {truth.path} has {'/'.join(truth.lists)}; "
            f"choose {fitting}"
        )
    without_box = [query.name for query in truth.queries if query.box is None]
    if protocol.box == "required" and without_box:
        raise DataError(
            f"protocol {chosen} crops every query to its box, but {len(without_box)} of {len(truth.queries)} queries "
            f"have no bbx (first: {without_box[0]}); choose `protocol=dino` for whole images"
        )
    return protocol


def _protocol(name: str) -> Protocol:
    if name not in PROTOCOLS:
        raise ConfigError(f"protocol {name!r} is unknown; wanted one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]
