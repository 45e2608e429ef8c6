"""Image retrieval: rank a gallery for each query by cosine similarity, and score the rankings against ground truth.

    features of queries, features of the gallery --similarities--> ranks of the relevant images --metrics--> mAP, mP@k

To a query, an image of the gallery is relevant, ignored or neither. The ground truth lists images for each query (easy,
hard and junk; or ok and junk). A Difficulty says which lists are relevant and which are ignored; a Protocol is a set of
difficulties with a rule about query boxes. A query to which nothing is relevant is not counted. Distractors (the
benchmark's "+R1M") are gallery images that are wrong for every query: they only move ranks down, by a count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.distributed import gather_objects
from sop_faiss.errors import ConfigError, DataError, FeatureError
from sop_faiss.evaluate.ground_truth import GRADED, PLAIN, GroundTruth, QueryTruth
from sop_faiss.evaluate.metrics import (
    average_precision,
    average_precision_at_r,
    in_ranking_order,
    mean_percent,
    ndcg,
    precision_at,
    r_precision,
    ranks_of_relevant,
    recall_at,
    standard_average_precision,
    top_positions,
)
from sop_faiss.evaluate.reranking import Reordering
from sop_faiss.neighbors.rank_counts import CountAbove
from sop_faiss.neighbors.similarity import similarity_rows
from sop_faiss.unit_rows import require_unit_rows

__all__ = [
    "PROTOCOLS",
    "Difficulty",
    "Protocol",
    "QueryResult",
    "QueryScore",
    "RetrievalScores",
    "choose_protocol",
    "score_retrieval",
]

KS = (1, 5, 10)
"""mP@k, and R@k of plain sets, are reported for these k."""

PLAIN_METRICS = (*(f"R@{k}" for k in KS), "R-precision", "mAP@R", "nDCG", "mAP_standard")
"""What plain sets report in addition to mAP, which is of trapezoids, and mP@k."""


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


EASY = Difficulty("easy", relevant=("easy",), ignored=("junk", "hard"))
MEDIUM = Difficulty("medium", relevant=("easy", "hard"), ignored=("junk",))
HARD = Difficulty("hard", relevant=("hard",), ignored=("junk", "easy"))
UNGRADED = Difficulty("", relevant=("ok",), ignored=("junk",))


@dataclass(frozen=True)
class Protocol:
    """What is reported, from which kind of ground truth, and what is done with the query's box.

    Attributes:
        name: as the user writes it.
        lists: the lists a ground truth must have.
        difficulties: what is reported.
        box: `required`: the caller crops queries, and each must have a box; `used`: it crops where there is a box;
            `ignored`: whole images.
    """

    name: str
    lists: tuple[str, ...]
    difficulties: tuple[Difficulty, ...]
    box: str


PROTOCOLS = {
    "revisitop": Protocol("revisitop", GRADED, (EASY, MEDIUM, HARD), box="required"),
    "dino": Protocol("dino", GRADED, (MEDIUM, HARD), box="ignored"),
    "plain": Protocol("plain", PLAIN, (UNGRADED,), box="used"),
}


@dataclass(frozen=True)
class QueryScore:
    """One query at one difficulty. Scores are 0..1; `first_rank` counts from 1; `plain` has PLAIN_METRICS, if any."""

    average_precision: float
    precision_at: dict[int, float]
    first_rank: int
    relevant_count: int
    plain: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class QueryResult:
    """One query: its score per difficulty (absent where it has no relevant image) and the head of its ranking.

    `top` holds gallery positions with nothing taken out, so that junk can be shown as junk.
    """

    scores: dict[str, QueryScore]
    top: Int64[np.ndarray, " _"]
    top_similarities: Float32[np.ndarray, " _"]


@dataclass(frozen=True)
class RetrievalScores:
    """Metrics in percent, how many queries were counted per difficulty, and every query's own result."""

    metrics: dict[str, float]
    counted_queries: dict[str, int]
    queries: list[QueryResult]


def choose_protocol(name: str | None, truth: GroundTruth) -> Protocol:
    """Return the protocol of that name, else revisitop for graded lists and plain for others; check that it fits.

    Raises:
        ConfigError: the protocol is unknown.
        DataError: the ground truth lacks what the protocol needs.
    """
    chosen = name if name is not None else ("revisitop" if truth.lists == GRADED else "plain")
    if chosen not in PROTOCOLS:
        raise ConfigError(f"protocol {chosen!r} is unknown; wanted one of {', '.join(PROTOCOLS)}")
    protocol = PROTOCOLS[chosen]
    if protocol.lists != truth.lists:
        fitting = " or ".join(f"`protocol={key}`" for key, other in PROTOCOLS.items() if other.lists == truth.lists)
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


@dataclass(frozen=True)
class _Ranked:
    """The relevant images of one query at one difficulty, nearest first; ranks count from 0."""

    ranks: Int64[np.ndarray, " r"]
    similarities: Float32[np.ndarray, " r"]


def score_retrieval(
    query_features: Float32[np.ndarray, "q d"],
    gallery_features: Float32[np.ndarray, "n d"],
    truth: GroundTruth,
    protocol: Protocol,
    top_count: int = 0,
    distractors: Iterable[Float32[np.ndarray, "_ d"]] | None = None,
    device: str = "cpu",
    reordering: Reordering | None = None,
) -> RetrievalScores:
    """Rank the gallery for every query and score it; exact.

    Args:
        query_features: unit rows in the order of `truth.queries`.
        gallery_features: unit rows in the order of `truth.images`.
        truth: what is relevant.
        protocol: what to report.
        top_count: how many gallery positions to keep per query.
        distractors: unit rows that are relevant to no query, in blocks that are read once. An image of the
            gallery comes before a distractor of equal similarity. Under `torchrun` each rank brings its own part,
            and all get the scores of the whole.
        device: where distractors are counted; the scores do not depend on it.
        reordering: a new order of the first images of each ranking, without distractors.

    Raises:
        FeatureError: counts do not fit the ground truth, or rows are not finite unit vectors.
        DataError: no query has a relevant image.
    """
    _check_features(query_features, gallery_features, truth)
    nothing = np.empty(0, dtype=np.int64)
    ranked, tops = [], []
    rows = similarity_rows(query_features, gallery_features)
    for number, (query, similarities) in enumerate(zip(truth.queries, rows, strict=True)):
        ranking = similarities if reordering is None else reordering.moved(number, similarities)
        ranked.append({d.name: _rank(ranking, query, d) for d in protocol.difficulties if d.relevant_to(query)})
        top = top_positions(ranking, nothing, top_count)
        tops.append((top, similarities[top]))
    counted = {d.name: sum(d.name in each for each in ranked) for d in protocol.difficulties}
    if not any(counted.values()):
        raise DataError(f"{truth.path}: no query has a relevant image, so there is nothing to measure")
    if distractors is not None:
        ranked = _among_distractors(query_features, ranked, distractors, device)
    results = [
        QueryResult({name: _score(found.ranks, protocol) for name, found in each.items()}, *top)
        for each, top in zip(ranked, tops, strict=True)
    ]
    return RetrievalScores(_average(results, protocol.difficulties), counted, results)


def _among_distractors(
    query_features: Float32[np.ndarray, "q d"],
    ranked: Sequence[dict[str, _Ranked]],
    distractors: Iterable[Float32[np.ndarray, "_ d"]],
    device: str,
) -> list[dict[str, _Ranked]]:
    """Move every rank down by the distractors above it."""
    none = [np.empty(0, np.float32)]
    counter = CountAbove(
        query_features,
        [np.concatenate([found.similarities for found in each.values()] or none) for each in ranked],
        device,
    )
    for block in distractors:
        require_unit_rows(block, "distractors")
        counter.add(block)
    above = counter.counts(np.sum(gather_objects(counter.histogram), axis=0))
    moved = []
    for each, counts in zip(ranked, above, strict=True):
        # A query without a relevant image at any difficulty has one empty part, which zip leaves out.
        ends = np.cumsum([len(found.ranks) for found in each.values()])[:-1]
        parts = np.split(counts, ends)
        moved.append(
            {
                name: _Ranked(found.ranks + part, found.similarities)
                for (name, found), part in zip(each.items(), parts, strict=False)
            }
        )
    return moved


def _check_features(
    query_features: Float32[np.ndarray, "q d"], gallery_features: Float32[np.ndarray, "n d"], truth: GroundTruth
) -> None:
    for name, features, wanted in (
        ("query", query_features, len(truth.queries)),
        ("gallery", gallery_features, len(truth.images)),
    ):
        if len(features) != wanted:
            raise FeatureError(f"{len(features)} {name} features for {wanted} names in {truth.path}: wanted one each")
        require_unit_rows(features, f"{name} features")


def _rank(similarities: Float32[np.ndarray, " n"], query: QueryTruth, difficulty: Difficulty) -> _Ranked:
    relevant = np.concatenate([query.lists[name] for name in difficulty.relevant])
    ignored = np.concatenate([query.lists[name] for name in difficulty.ignored])
    in_order = in_ranking_order(similarities, relevant)
    return _Ranked(ranks_of_relevant(similarities, relevant, ignored), similarities[in_order])


def _score(ranks: Int64[np.ndarray, " r"], protocol: Protocol) -> QueryScore:
    count = len(ranks)
    plain = {}
    if protocol.lists == PLAIN:
        values = [*(recall_at(ranks, k) for k in KS), r_precision(ranks, count)]
        values += [average_precision_at_r(ranks, count), ndcg(ranks, count), standard_average_precision(ranks, count)]
        plain = dict(zip(PLAIN_METRICS, values, strict=True))
    return QueryScore(
        average_precision=average_precision(ranks, count),
        precision_at={k: precision_at(ranks, k) for k in KS},
        first_rank=int(ranks[0]) + 1,
        relevant_count=count,
        plain=plain,
    )


def _average(results: Sequence[QueryResult], difficulties: Sequence[Difficulty]) -> dict[str, float]:
    """Means over the counted queries, in percent; a difficulty without any is left out."""
    metrics: dict[str, float] = {}
    for difficulty in difficulties:
        scores = [result.scores[difficulty.name] for result in results if difficulty.name in result.scores]
        if not scores:
            continue
        metrics[difficulty.metric("mAP")] = mean_percent(score.average_precision for score in scores)
        for k in KS:
            metrics[difficulty.metric(f"mP@{k}")] = mean_percent(score.precision_at[k] for score in scores)
        for name in scores[0].plain:
            metrics[difficulty.metric(name)] = mean_percent(score.plain[name] for score in scores)
    return metrics
