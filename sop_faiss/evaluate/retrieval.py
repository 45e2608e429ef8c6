"""Image retrieval: rank a gallery for each query by cosine similarity, and score the rankings against ground truth.

    features of queries, features of the gallery --similarities--> ranks of the relevant images --metrics--> mAP, mP@k

To a query, an image of the gallery is relevant, ignored or neither: `protocols.py` says which, and what is measured. A
query to which nothing is relevant is not counted, unless the protocol counts it as 0. Distractors (the benchmark's
"+R1M") are gallery images that are wrong for every query: they only move ranks down, by a count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.distributed import gather_objects
from sop_faiss.errors import DataError, FeatureError
from sop_faiss.evaluate.metrics import in_ranking_order, mean_percent, ranks_of_relevant, top_positions
from sop_faiss.evaluate.neighbor_classes import NEIGHBORS, classify_by_neighbors
from sop_faiss.evaluate.protocols import PROTOCOLS, Difficulty, Protocol, Ranked, choose_protocol
from sop_faiss.evaluate.reranking import Reordering
from sop_faiss.evaluate.sets.ground_truth import GroundTruth, QueryTruth
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


@dataclass(frozen=True)
class QueryScore:
    """One query at one difficulty: its score, 0..1, by the metric's name.

    `first_rank` counts from 1; it is 0 if no image is relevant.
    """

    values: dict[str, float]
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
    """Metrics in percent, how many queries were counted per difficulty, and every query's own result.

    `chosen` has what was chosen on the queries of a validation part.
    """

    metrics: dict[str, float]
    counted_queries: dict[str, int]
    queries: list[QueryResult]
    chosen: dict[str, Any] = field(default_factory=dict)


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
    kept = top_count if truth.classes is None else max(top_count, NEIGHBORS)
    ranked, tops = [], []
    rows = similarity_rows(query_features, gallery_features)
    for number, (query, similarities) in enumerate(zip(truth.queries, rows, strict=True)):
        ranking = similarities if reordering is None else reordering.moved(number, similarities)
        counted = (d for d in protocol.difficulties if protocol.counts_all or d.relevant_to(query))
        ranked.append({d.name: _rank(ranking, query, d, protocol.ties) for d in counted})
        top = top_positions(ranking, nothing, kept)
        tops.append((top, similarities[top]))
    if not any(d.relevant_to(query) for d in protocol.difficulties for query in truth.queries):
        raise DataError(f"{truth.path}: no query has a relevant image, so there is nothing to measure")
    if distractors is not None:
        ranked = _among_distractors(query_features, ranked, distractors, device)
    results = [
        QueryResult(
            {name: _score(found, protocol) for name, found in each.items()}, *(part[:top_count] for part in own)
        )
        for each, own in zip(ranked, tops, strict=True)
    ]
    counts = {d.name: sum(d.name in each for each in ranked) for d in protocol.difficulties}
    metrics = _average(results, protocol)
    if truth.classes is None:
        return RetrievalScores(metrics, counts, results)
    positions, similarities = (np.stack(each) for each in zip(*tops, strict=True))
    classified = classify_by_neighbors(positions, similarities, truth.classes)
    return RetrievalScores(classified.metrics | metrics, counts, results, classified.chosen)


def _among_distractors(
    query_features: Float32[np.ndarray, "q d"],
    ranked: Sequence[dict[str, Ranked]],
    distractors: Iterable[Float32[np.ndarray, "_ d"]],
    device: str,
) -> list[dict[str, Ranked]]:
    """Move every rank down by the distractors above it."""
    none = [np.empty(0, np.float32)]
    counter = CountAbove(
        query_features, [np.concatenate([*map(_thresholds, each.values()), *none]) for each in ranked], device
    )
    for block in distractors:
        require_unit_rows(block, "distractors")
        counter.add(block)
    above = counter.counts(np.sum(gather_objects(counter.histogram), axis=0))
    moved = []
    for each, counts in zip(ranked, above, strict=True):
        # A query without a relevant image at any difficulty has one empty part, which zip leaves out.
        parts = np.split(counts, np.cumsum([len(_thresholds(found)) for found in each.values()])[:-1])
        moved.append({name: _moved(found, part) for (name, found), part in zip(each.items(), parts, strict=False)})
    return moved


def _thresholds(found: Ranked) -> Float32[np.ndarray, " t"]:
    """Return what distractors are counted above: the similarities, and, where ties matter, the next smaller numbers."""
    if found.reached is None:
        return found.similarities
    return np.concatenate([found.similarities, np.nextafter(found.similarities, np.float32(-2))])


def _moved(found: Ranked, above: Int64[np.ndarray, " t"]) -> Ranked:
    count = len(found.ranks)
    reached = None if found.reached is None else found.reached + above[count:]
    return Ranked(found.ranks + above[:count], found.similarities, reached)


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


def _rank(similarities: Float32[np.ndarray, " n"], query: QueryTruth, difficulty: Difficulty, ties: bool) -> Ranked:
    relevant = np.concatenate([query.lists[name] for name in difficulty.relevant])
    ignored = np.concatenate([np.empty(0, np.int64), *(query.lists[name] for name in difficulty.ignored)])
    own = similarities[in_ranking_order(similarities, relevant)]
    reached = None
    if ties:
        kept = np.sort(np.delete(similarities, ignored))
        reached = len(kept) - np.searchsorted(kept, own, side="left")
    return Ranked(ranks_of_relevant(similarities, relevant, ignored), own, reached)


def _score(found: Ranked, protocol: Protocol) -> QueryScore:
    count = len(found.ranks)
    values = {metric.name: metric.score(found) if count else 0.0 for metric in protocol.metrics}
    return QueryScore(values, first_rank=int(found.ranks[0]) + 1 if count else 0, relevant_count=count)


def _average(results: Sequence[QueryResult], protocol: Protocol) -> dict[str, float]:
    """Means over the counted queries, in percent; a difficulty without any is left out."""
    metrics: dict[str, float] = {}
    for difficulty in protocol.difficulties:
        scores = [result.scores[difficulty.name] for result in results if difficulty.name in result.scores]
        for metric in protocol.metrics if scores else ():
            metrics[difficulty.metric(metric.name)] = mean_percent(score.values[metric.name] for score in scores)
    if protocol.averages_groups:
        for metric in protocol.metrics:
            names = (difficulty.metric(metric.name) for difficulty in protocol.difficulties)
            metrics[metric.name] = float(np.mean([metrics[name] for name in names if name in metrics]))
    return metrics
