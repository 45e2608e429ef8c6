"""Image retrieval as a task: queries and a gallery with ground truth; the protocols are in `retrieval`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float32

from sop_faiss.bootstrap import Score
from sop_faiss.data.images.listing import FileSource
from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.expansion import Expansion, augment_database, expand_queries
from sop_faiss.evaluate.reranking import Reordering, reorder_by_features, reorder_by_tokens
from sop_faiss.evaluate.retrieval import Difficulty, Protocol, RetrievalScores, score_retrieval
from sop_faiss.evaluate.sets.distractors import Distractors, open_distractors
from sop_faiss.evaluate.sets.retrieval_set import RetrievalSet
from sop_faiss.evaluate.task import percents
from sop_faiss.features.extract import ExtractionOptions, extract_each
from sop_faiss.index.rerank.settings import Rerank, TokenSettings
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.preprocess import Preprocess
from sop_faiss.progress import ProgressCallback

_NOT_REPORTED = ("easy",)
"""Difficulties whose mAP is not a score: the easy one says little of an encoder."""


@dataclass(frozen=True)
class RetrievalTask:
    """Rank a gallery for each query, and score the rankings.

    Every image of the data set counts: one that cannot be read is an error, not a gap in the gallery.

    Raises:
        ConfigError: the expansion is impossible.
    """

    data: RetrievalSet
    """Queries, gallery, and what is relevant."""
    rules: Protocol
    """The protocol followed."""
    square: bool = False
    """Resize and crop every image to a centered square; otherwise the whole image, longer side `size`."""
    distractors: str | None = None
    """A feature store, or SRC of images, that is relevant to no query: the benchmark's "+R1M"."""
    expansion: Expansion = field(default_factory=Expansion)
    """Query expansion and database augmentation."""
    extraction: ExtractionOptions = field(default_factory=ExtractionOptions)
    """How features are extracted. Its `max_bad_fraction` is of the distractors; of the data set no image may be bad."""
    rerank: Rerank | None = None
    """How the first images of each ranking are put into a new order; None: not at all."""
    tokens: TokenSettings = field(default_factory=TokenSettings)
    """How tokens are made for local re-ranking."""

    def __post_init__(self) -> None:
        self.expansion.check()
        if self.distractors is not None and self.expansion.database_neighbors:
            raise ConfigError(
                "database augmentation with distractors would compare each of them with all others: "
                "leave one of them out"
            )
        if self.distractors is not None and self.data.truth.classes is not None:
            raise ConfigError(
                f"distractors have no class, and protocol {self.rules.name} classifies by the nearest images: leave "
                "them out (its queries without a class are in the data set)"
            )
        if self.rerank is not None and self.data.truth.classes is not None:
            raise ConfigError(
                f"`rerank` changes the order, and protocol {self.rules.name} classifies by similarities: leave it out"
            )
        if self.rerank is not None and self.distractors is not None:
            raise ConfigError(
                "`rerank` needs the first images of a ranking, and distractors are only counted: leave one of them out"
            )

    @property
    def queries(self) -> FileSource:
        """The query images as the encoder sees them, cropped or whole."""
        return self.data.whole_queries if self.rules.box == "ignored" else self.data.queries

    @property
    def names(self) -> tuple[str, ...]:
        """`map`, or `map_medium` and `map_hard`: those for which some query has a relevant image."""
        return tuple(difficulty.metric(self.rules.headline.name.lower()) for difficulty in self._counted())

    def measure(self, encoder: Encoder) -> dict[str, float]:
        """Return the mAP, or the protocol's first metric, of each difficulty; see `EvaluationTask`."""
        return percents(self.measure_each(encoder))

    def measure_each(self, encoder: Encoder, progress: ProgressCallback | None = None) -> dict[str, Score]:
        """Return the same, with the AP of each query that is counted, in percent."""
        ranked = self.rank(encoder, progress=progress)[0]
        name, scores = self.rules.headline.name, {}
        for difficulty in self._counted():
            counted = [query.scores[difficulty.name] for query in ranked.queries if difficulty.name in query.scores]
            each = 100.0 * np.array([score.values[name] for score in counted])
            scores[difficulty.metric(name.lower())] = Score(float(ranked.metrics[difficulty.metric(name)]), each)
        return scores

    def rank(
        self, encoder: Encoder, top_count: int = 0, progress: ProgressCallback | None = None
    ) -> tuple[RetrievalScores, dict[str, Any]]:
        """Return all scores, and every choice that changes them as JSON values.

        Args:
            encoder: whose features rank the images.
            top_count: gallery positions kept of each ranking.
            progress: called with the number of images read.

        Raises:
            ConfigError: distractors that are images would be encoded twice.
            SopError: as of `extract_features`, `open_distractors` and `score_retrieval`.
        """
        self.data.queries.top_value = encoder.preprocess.top_value
        preprocess = encoder.preprocess if self.square else encoder.preprocess.keeping_aspect()
        extra = self._open_distractors(encoder, preprocess, progress)
        queries, gallery = self._features(encoder, preprocess, progress)
        gallery, queries = _expanded(queries, gallery, self.expansion, extra)
        reordering = self._reordering(encoder, queries, gallery, progress)
        scores = score_retrieval(
            queries,
            gallery,
            self.data.truth,
            self.rules,
            top_count,
            distractors=None if extra is None else extra.own_blocks(),
            device=str(next(encoder.parameters()).device),
            reordering=reordering,
        )
        whole = self.rules.box == "ignored"
        return scores, {
            "name": self.rules.name,
            "ground_truth_sha256": self.data.truth.sha256,
            "queries": len(self.queries),
            "queries_cropped": 0 if whole else sum(box is not None for box in self.data.queries.boxes),
            "queries_counted": {name or "all": count for name, count in scores.counted_queries.items()},
            "database": len(self.data.gallery),
            "distractors": None if extra is None else {"name": extra.name, "count": extra.count},
            **({"queries_counted_as_0": self._without_relevant()} if self.rules.counts_all else {}),
            **self.data.choices,
            **scores.chosen,
            **self.expansion.to_dict(),
            **self._rerank_choices(),
            "preprocess": preprocess.to_dict(),
            "pooling": encoder.pooling,
            "scales": list(preprocess.scales),
            "whitening": "none" if encoder.whitening is None else encoder.whitening.facts(),
        }

    def _without_relevant(self) -> int:
        (difficulty,) = self.rules.difficulties
        return sum(not difficulty.relevant_to(query) for query in self.data.truth.queries)

    def _reordering(
        self,
        encoder: Encoder,
        queries: Float32[np.ndarray, "q d"],
        gallery: Float32[np.ndarray, "n d"],
        progress: ProgressCallback | None,
    ) -> Reordering | None:
        if self.rerank is None:
            return None
        if self.rerank.method != "local":
            return reorder_by_features(self.rerank, queries, gallery, self.data.query_rows)
        sources = (self.queries, self.data.gallery)
        return reorder_by_tokens(self.rerank, self.tokens, encoder, sources, self.data.query_rows, progress)

    def _rerank_choices(self) -> dict[str, Any]:
        """Return nothing where nothing is re-ranked: results of earlier versions have no such entry."""
        if self.rerank is None:
            return {}
        tokens = {"tokens": asdict(self.tokens)} if self.rerank.method == "local" else {}
        return {"rerank": self.rerank.to_dict() | tokens}

    def _counted(self) -> list[Difficulty]:
        reported = (difficulty for difficulty in self.rules.difficulties if difficulty.name not in _NOT_REPORTED)
        return [each for each in reported if any(each.relevant_to(query) for query in self.data.truth.queries)]

    def _open_distractors(
        self, encoder: Encoder, preprocess: Preprocess, progress: ProgressCallback | None
    ) -> Distractors | None:
        if self.distractors is None:
            return None
        alone = replace(self.extraction, across_ranks=False)  # ranks go through different distractors
        extra = open_distractors(self.distractors, encoder, preprocess, extraction=alone, progress=progress)
        if self.expansion.query_neighbors and not extra.stored:
            raise ConfigError(
                f"query expansion goes through the distractors twice, and {extra.name} would be encoded twice: make a "
                "feature store of it first (sop-embed --whole)"
            )
        return extra

    def _features(
        self, encoder: Encoder, preprocess: Preprocess, progress: ProgressCallback | None
    ) -> tuple[Float32[np.ndarray, "q d"], Float32[np.ndarray, "n d"]]:
        """Of queries and gallery; queries that are images of the gallery are not encoded twice."""
        stores = extract_each(
            encoder,
            [self.queries, self.data.gallery] if self.data.query_rows is None else [self.data.gallery],
            replace(self.extraction, max_bad_fraction=0.0),
            preprocess=preprocess,
            progress=progress,
        )
        gallery = stores[-1].features
        return (stores[0].features if self.data.query_rows is None else gallery[self.data.query_rows]), gallery


def _expanded(
    queries: Float32[np.ndarray, "q d"],
    gallery: Float32[np.ndarray, "n d"],
    expansion: Expansion,
    extra: Distractors | None,
) -> tuple[Float32[np.ndarray, "n d"], Float32[np.ndarray, "q d"]]:
    """Gallery and queries after augmentation and expansion, in this order."""
    if expansion.database_neighbors:
        gallery = augment_database(gallery, expansion.database_neighbors, expansion.database_alpha)
    if expansion.query_neighbors:
        more = () if extra is None else extra.all_blocks()
        queries = expand_queries(queries, gallery, expansion.query_neighbors, expansion.query_alpha, more)
    return gallery, queries
