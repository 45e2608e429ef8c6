"""Image retrieval with an encoder on a data set with ground truth: images to features to mAP."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from sop_faiss.data.images.listing import FileSource
from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.bootstrap import LEVEL, RESAMPLES, SEED, Interval, bootstrap_interval
from sop_faiss.evaluate.expansion import Expansion, augment_database, expand_queries
from sop_faiss.evaluate.results import write_result
from sop_faiss.evaluate.retrieval import Protocol, RetrievalScores, choose_protocol, score_retrieval
from sop_faiss.evaluate.retrieval_set import RetrievalSet, open_retrieval_set
from sop_faiss.features.extract import ExtractionOptions, extract_each
from sop_faiss.model.encoders.encoder import Encoder, encoder_of_spec
from sop_faiss.model.encoders.preprocess import Preprocess
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import ProgressCallback
from sop_faiss.verbs.scoring.distractors import Distractors, open_distractors

__all__ = ["RetrievalResult", "RetrieveOptions", "evaluate_retrieval"]


@dataclass(frozen=True)
class RetrieveOptions:
    """How to look at the images, and how much of each ranking to keep."""

    square: bool = False
    """Resize and crop every image to a centered square; otherwise the whole image, longer side `size`."""
    top: int = 10
    """Gallery images kept per query, for the page and the table of queries."""
    extraction: ExtractionOptions = field(default_factory=ExtractionOptions)
    """How features are extracted; its bad fraction is of the distractors, of the data set no image may be unusable."""
    distractors: str | None = None
    """A feature store, or SRC of images, that is relevant to no query: the benchmark's "+R1M"."""
    expansion: Expansion = field(default_factory=Expansion)
    """Query expansion and database augmentation."""


@dataclass(frozen=True)
class RetrievalResult:
    """One measurement.

    Attributes:
        data: the data set.
        queries: the query images as the encoder saw them, cropped or whole.
        rules: the protocol followed.
        scores: metrics, and each query's own result.
        protocol: every choice that changes the numbers, as JSON values.
        encoder: name and fingerprint.
        seconds: wall-clock time.
        intervals: of mAP by the metric's name, in percent, by bootstrap over the queries.
    """

    data: RetrievalSet
    queries: FileSource
    rules: Protocol
    scores: RetrievalScores
    protocol: dict[str, Any]
    encoder: dict[str, str]
    seconds: float
    intervals: dict[str, Interval]

    def write(self, path: Path) -> None:
        """Write the result as JSON, with each query's AP, for comparisons, and the intervals of mAP."""
        intervals = {name: [each.low, each.high] for name, each in self.intervals.items()}
        details = {
            "confidence": {"level": LEVEL, "resamples": RESAMPLES, "seed": SEED, **intervals},
            "per_query": {
                "queries": self.queries.keys,
                **{
                    difficulty.metric("AP"): [
                        100 * query.scores[difficulty.name].average_precision
                        if difficulty.name in query.scores
                        else None
                        for query in self.scores.queries
                    ]
                    for difficulty in self.rules.difficulties
                },
            },
        }
        write_result(
            path,
            "sop-retrieve",
            self.data.name,
            self.protocol,
            self.scores.metrics,
            self.encoder,
            self.seconds,
            details,
        )


def evaluate_retrieval(
    encoder: EncoderSpec,
    dataset: str,
    data_root: Path | None = None,
    *,
    protocol: str | None = None,
    gnd: Path | None = None,
    options: RetrieveOptions | None = None,
    progress: ProgressCallback | None = None,
) -> RetrievalResult:
    """Rank a data set's gallery for each of its queries, and score the rankings.

    Every image counts: one that cannot be read is an error, not a gap in the gallery.

    Args:
        encoder: which encoder; its `size` is the longer side of the images, or the side of the square.
        dataset: `roxford5k`, `rparis6k`, a directory, or a CSV file of groups or pairs.
        data_root: the directory that holds the data set's directory.
        protocol: `revisitop`, `dino` or `plain`; None: the one that suits the ground truth.
        gnd: another ground-truth file than the data set's own.
        options: the rest.
        progress: called with the number of images read.

    Raises:
        DataError: the data set is incomplete or damaged, or does not fit the protocol.
        SopError: as `encoder_of_spec` and `extract_features`.
    """
    options = options or RetrieveOptions()
    _check(options)
    started = time.perf_counter()
    data = open_retrieval_set(dataset, data_root, gnd)
    rules = choose_protocol(protocol, data.truth)
    queries = data.whole_queries if rules.box == "ignored" else data.queries
    loaded = encoder_of_spec(encoder)
    data.queries.top_value = loaded.preprocess.top_value
    preprocess = loaded.preprocess if options.square else loaded.preprocess.keeping_aspect()
    extra = _open_distractors(options, loaded, preprocess, progress)
    query_features, gallery_features = _features(loaded, data, queries, preprocess, options, progress)
    gallery_features, query_features = _expanded(query_features, gallery_features, options.expansion, extra)
    scores = score_retrieval(
        query_features,
        gallery_features,
        data.truth,
        rules,
        options.top,
        distractors=None if extra is None else extra.own_blocks(),
        device=str(next(loaded.parameters()).device),
    )
    choices = {
        "name": rules.name,
        "ground_truth_sha256": data.truth.sha256,
        "queries": len(queries),
        "queries_cropped": 0 if rules.box == "ignored" else sum(box is not None for box in data.queries.boxes),
        "queries_counted": {name or "all": count for name, count in scores.counted_queries.items()},
        "database": len(data.gallery),
        "distractors": None if extra is None else {"name": extra.name, "count": extra.count},
        **options.expansion.to_dict(),
        "preprocess": preprocess.to_dict(),
        "pooling": loaded.pooling,
        "scales": list(preprocess.scales),
        "whitening": "none" if loaded.whitening is None else loaded.whitening.facts(),
    }
    encoder_used = {"name": loaded.name, "fingerprint": loaded.fingerprint}
    seconds = time.perf_counter() - started
    return RetrievalResult(data, queries, rules, scores, choices, encoder_used, seconds, _intervals(scores, rules))


def _check(options: RetrieveOptions) -> None:
    """Refuse what would fail, or take days, before any work."""
    if options.top < 1:
        raise ConfigError(f"top = {options.top}: wanted 1 or more images per query")
    options.expansion.check()
    if options.distractors is not None and options.expansion.database_neighbors:
        raise ConfigError(
            "database augmentation with distractors would compare each of them with all others: leave one of them out"
        )


def _open_distractors(
    options: RetrieveOptions, encoder: Encoder, preprocess: Preprocess, progress: ProgressCallback | None
) -> Distractors | None:
    if options.distractors is None:
        return None
    extra = open_distractors(
        options.distractors,
        encoder,
        preprocess,
        extraction=options.extraction,
        progress=progress,
    )
    if options.expansion.query_neighbors and not extra.stored:
        raise ConfigError(
            f"query expansion goes through the distractors twice, and {extra.name} would be encoded twice: make a "
            "feature store of it first (sop-embed --whole)"
        )
    return extra


def _features(
    encoder: Encoder,
    data: RetrievalSet,
    queries: FileSource,
    preprocess: Preprocess,
    options: RetrieveOptions,
    progress: ProgressCallback | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Of queries and gallery; queries that are images of the gallery are not encoded twice."""
    stores = extract_each(
        encoder,
        [queries, data.gallery] if data.query_rows is None else [data.gallery],
        replace(options.extraction, max_bad_fraction=0.0, across_ranks=True),
        preprocess=preprocess,
        progress=progress,
    )
    gallery = stores[-1].features
    return (stores[0].features if data.query_rows is None else gallery[data.query_rows]), gallery


def _expanded(
    queries: np.ndarray, gallery: np.ndarray, expansion: Expansion, extra: Distractors | None
) -> tuple[np.ndarray, np.ndarray]:
    """Gallery and queries after augmentation and expansion, in this order."""
    if expansion.database_neighbors:
        gallery = augment_database(gallery, expansion.database_neighbors, expansion.database_alpha)
    if expansion.query_neighbors:
        more = () if extra is None else extra.all_blocks()
        queries = expand_queries(queries, gallery, expansion.query_neighbors, expansion.query_alpha, more)
    return gallery, queries


def _intervals(scores: RetrievalScores, rules: Protocol) -> dict[str, Interval]:
    intervals = {}
    for difficulty in rules.difficulties:
        values: Float64[np.ndarray, " q"] = np.array(
            [
                100 * query.scores[difficulty.name].average_precision
                for query in scores.queries
                if difficulty.name in query.scores
            ],
            dtype=np.float64,
        )
        if len(values):
            intervals[difficulty.metric("mAP")] = bootstrap_interval(values)
    return intervals
