"""Image retrieval: rank a gallery for each query by cosine similarity, and score the rankings against ground truth.

    features of queries, features of the gallery --similarities--> ranks of the relevant images --metrics--> mAP, mP@k

To a query, an image of the gallery is relevant, ignored or neither. Which list of the ground truth means what is a
Difficulty; a Protocol is a set of difficulties with a rule about query boxes. A query to which nothing is relevant is
not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.errors import ConfigError, DataError, FeatureError
from sop_faiss.evaluate.ground_truth import GRADED, PLAIN, GroundTruth, QueryTruth
from sop_faiss.evaluate.metrics import (
    average_precision,
    mean_percent,
    precision_at,
    ranks_of_relevant,
    recall_at_1,
    top_positions,
)
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
"""mP@k is reported for these k."""


@dataclass(frozen=True)
class Difficulty:
    """Which lists of the ground truth are relevant and which are ignored; the rest of the gallery is wrong."""

    name: str
    relevant: tuple[str, ...]
    ignored: tuple[str, ...]

    def metric(self, name: str) -> str:
        """Name of a metric at this difficulty, as `mAP_medium`; plain `mAP` where there is only one."""
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
        box: `required`: queries are cropped, and each must have a box; `used`: cropped where there is a box;
            `ignored`: whole pictures.
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
    """One query at one difficulty. Scores are 0..1; `first_rank` counts from 1."""

    average_precision: float
    precision_at: dict[int, float]
    recall_at_1: float
    first_rank: int
    relevant_count: int


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
    """The protocol of that name, or the one that suits the ground truth; checked against it.

    Raises:
        ConfigError: there is no such protocol.
        DataError: the ground truth lacks what the protocol needs.
    """
    chosen = name if name is not None else ("revisitop" if truth.lists == GRADED else "plain")
    if chosen not in PROTOCOLS:
        raise ConfigError(f"protocol {chosen!r} is unknown; wanted one of {', '.join(PROTOCOLS)}")
    protocol = PROTOCOLS[chosen]
    if protocol.lists != truth.lists:
        fitting = ", ".join(key for key, other in PROTOCOLS.items() if other.lists == truth.lists)
        raise DataError(
            f"protocol {chosen} needs {'/'.join(protocol.lists)}, but {truth.path} has {'/'.join(truth.lists)}; "
            f"choose --protocol {fitting}"
        )
    without_box = [query.name for query in truth.queries if query.box is None]
    if protocol.box == "required" and without_box:
        raise DataError(
            f"protocol {chosen} crops every query to its box, but {len(without_box)} of {len(truth.queries)} queries "
            f"have no bbx (first: {without_box[0]}); choose --protocol dino for whole pictures"
        )
    return protocol


def score_retrieval(
    query_features: Float32[np.ndarray, "q d"],
    gallery_features: Float32[np.ndarray, "n d"],
    truth: GroundTruth,
    protocol: Protocol,
    top_count: int = 0,
) -> RetrievalScores:
    """Rank the gallery for every query and score it; exact.

    Args:
        query_features: unit rows in the order of `truth.queries`.
        gallery_features: unit rows in the order of `truth.images`.
        truth: what is relevant.
        protocol: what to report.
        top_count: how many gallery positions to keep per query.

    Raises:
        FeatureError: counts do not fit the ground truth, or rows are not finite unit vectors.
        DataError: no query has a relevant image.
    """
    _check_features(query_features, gallery_features, truth)
    nothing = np.empty(0, dtype=np.int64)
    results = []
    for query, similarities in zip(truth.queries, similarity_rows(query_features, gallery_features), strict=True):
        scores = {
            difficulty.name: score
            for difficulty in protocol.difficulties
            if (score := _score_query(similarities, query, difficulty)) is not None
        }
        top = top_positions(similarities, nothing, top_count)
        results.append(QueryResult(scores, top, similarities[top]))
    counted = {d.name: sum(d.name in result.scores for result in results) for d in protocol.difficulties}
    if not any(counted.values()):
        raise DataError(f"{truth.path}: no query has a relevant image, so there is nothing to measure")
    return RetrievalScores(_average(results, protocol.difficulties), counted, results)


def _check_features(
    query_features: Float32[np.ndarray, "q d"], gallery_features: Float32[np.ndarray, "n d2"], truth: GroundTruth
) -> None:
    for name, features, wanted in (
        ("query", query_features, len(truth.queries)),
        ("gallery", gallery_features, len(truth.images)),
    ):
        if len(features) != wanted:
            raise FeatureError(f"{len(features)} {name} features for {wanted} names in {truth.path}: wanted one each")
        require_unit_rows(features, f"{name} features")


def _score_query(
    similarities: Float32[np.ndarray, " n"], query: QueryTruth, difficulty: Difficulty
) -> QueryScore | None:
    """Score of one query, or None if nothing is relevant to it."""
    relevant = np.concatenate([query.lists[name] for name in difficulty.relevant])
    ignored = np.concatenate([query.lists[name] for name in difficulty.ignored])
    if len(relevant) == 0:
        return None
    ranks = ranks_of_relevant(similarities, relevant, ignored)
    return QueryScore(
        average_precision=average_precision(ranks, len(relevant)),
        precision_at={k: precision_at(ranks, k) for k in KS},
        recall_at_1=recall_at_1(ranks),
        first_rank=int(ranks[0]) + 1,
        relevant_count=len(relevant),
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
        if difficulty is UNGRADED:
            metrics["R@1"] = mean_percent(score.recall_at_1 for score in scores)
    return metrics
