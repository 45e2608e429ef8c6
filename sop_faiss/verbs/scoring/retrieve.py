"""Image retrieval with an encoder on a data set with ground truth: images to features to mAP."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64

from sop_faiss.bootstrap import LEVEL, RESAMPLES, SEED, Interval, bootstrap_interval
from sop_faiss.data.images.listing import FileSource
from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.baselines import Baseline, measure_baselines
from sop_faiss.evaluate.expansion import Expansion
from sop_faiss.evaluate.results import result_content
from sop_faiss.evaluate.retrieval import Protocol, RetrievalScores, choose_protocol, score_retrieval
from sop_faiss.evaluate.retrieval_task import RetrievalTask
from sop_faiss.evaluate.sets.published_layouts import RADIUS_METERS
from sop_faiss.evaluate.sets.retrieval_set import RetrievalSet, open_retrieval_set
from sop_faiss.features.extract import ExtractionOptions
from sop_faiss.index.rerank.settings import Rerank, TokenSettings
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import ProgressCallback, Stage, silent_stage


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
    baselines: bool = False
    """Measure raw pixels, a patch dictionary and the same network with random weights, too."""
    radius: float = RADIUS_METERS
    """Of protocol `place`: in meters, an image that is not farther from the query's place is relevant."""
    rerank: Rerank | None = None
    """How the first images of each ranking are put into a new order; None: not at all."""
    tokens: TokenSettings = field(default_factory=TokenSettings)
    """How tokens are made for local re-ranking."""


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
        intervals: of mAP, or the protocol's first metric, by its name, in percent, by bootstrap over the queries.
        baselines: what simpler features scored; empty if that was not asked for.
    """

    data: RetrievalSet
    queries: FileSource
    rules: Protocol
    scores: RetrievalScores
    protocol: dict[str, Any]
    encoder: dict[str, str]
    seconds: float
    intervals: dict[str, Interval]
    baselines: list[Baseline] = field(default_factory=list)

    def content(self) -> dict[str, Any]:
        """Return the result as JSON values, with each query's AP, for comparisons, and the intervals of mAP.

        A protocol without mAP has its first metric in place of these.
        """
        headline = self.rules.headline
        intervals = {name: [each.low, each.high] for name, each in self.intervals.items()}
        details: dict[str, Any] = {
            "confidence": {"level": LEVEL, "resamples": RESAMPLES, "seed": SEED, **intervals},
            "per_query": {
                "queries": self.queries.keys,
                **{
                    difficulty.metric(headline.of_query): [
                        100 * query.scores[difficulty.name].values[headline.name]
                        if difficulty.name in query.scores
                        else None
                        for query in self.scores.queries
                    ]
                    for difficulty in self.rules.difficulties
                },
            },
        }
        if self.baselines:
            details["baselines"] = {each.name: each.to_dict() for each in self.baselines}
        return result_content(
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
    stage: Stage = silent_stage,
) -> RetrievalResult:
    """Rank a data set's gallery for each of its queries, and score the rankings.

    Every image counts: one that cannot be read is an error, not a gap in the gallery.

    Args:
        encoder: which encoder; its `size` is the longer side of the images, or the side of the square.
        dataset: `roxford5k`, `rparis6k`, a directory, or a CSV file.
        data_root: the directory that holds the data set's directory.
        protocol: of `PROTOCOLS`; None: `revisitop` or `plain`, whichever suits the ground truth.
        gnd: another ground-truth file than the data set's own.
        options: the rest.
        stage: shows the progress of the extraction, and of each baseline.

    Raises:
        ConfigError: baselines are asked for together with distractors, an expansion or `rerank`.
        DataError: the data set is incomplete or damaged, or does not fit the protocol.
        SopError: as `encoder_of_spec` and `extract_features`.
    """
    options = options or RetrieveOptions()
    if options.top < 1:
        raise ConfigError(f"`top={options.top}`: wanted 1 or more images per query")
    changed = options.distractors is not None or options.expansion != Expansion() or options.rerank is not None
    if options.baselines and changed:
        raise ConfigError("`baselines` are scored without distractors, expansion and re-ranking: leave these out")
    started = time.perf_counter()
    data = open_retrieval_set(dataset, data_root, gnd, protocol, options.radius)
    task = RetrievalTask(
        data,
        choose_protocol(protocol, data.truth),
        options.square,
        options.distractors,
        options.expansion,
        replace(options.extraction, across_ranks=True),
        options.rerank,
        options.tokens,
    )
    loaded = encoder_of_spec(encoder)
    with stage("embedding", "images") as progress:
        scores, choices = task.rank(loaded, options.top, progress)
    seconds = time.perf_counter() - started
    return RetrievalResult(
        data=data,
        queries=task.queries,
        rules=task.rules,
        scores=scores,
        protocol=choices,
        encoder={"name": loaded.name, "fingerprint": loaded.fingerprint},
        seconds=seconds,
        intervals=_intervals(scores, task.rules),
        baselines=_baselines(task, loaded, stage) if options.baselines else [],
    )


def _baselines(task: RetrievalTask, encoder: Encoder, stage: Stage) -> list[Baseline]:
    def score(gallery: Float32[np.ndarray, "n d"], queries: Float32[np.ndarray, "q d"]) -> dict[str, float]:
        return score_retrieval(queries, gallery, task.data.truth, task.rules).metrics

    def score_encoder(untrained: Encoder, progress: ProgressCallback) -> dict[str, float]:
        return task.rank(untrained, progress=progress)[0].metrics

    return measure_baselines((task.data.gallery, task.queries), encoder, score, score_encoder, stage)


def _intervals(scores: RetrievalScores, rules: Protocol) -> dict[str, Interval]:
    intervals = {}
    for difficulty in rules.difficulties:
        values: Float64[np.ndarray, " q"] = np.array(
            [
                100 * query.scores[difficulty.name].values[rules.headline.name]
                for query in scores.queries
                if difficulty.name in query.scores
            ],
            dtype=np.float64,
        )
        if len(values):
            intervals[difficulty.metric(rules.headline.name)] = bootstrap_interval(values)
    return intervals
