"""Image retrieval with an encoder on a data set with ground truth: pictures to features to mAP."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sop_faiss.data.listing import FileSource
from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.results import write_result
from sop_faiss.evaluate.retrieval import Protocol, RetrievalScores, choose_protocol, score_retrieval
from sop_faiss.evaluate.retrieval_set import RetrievalSet, open_retrieval_set
from sop_faiss.files import sha256_file
from sop_faiss.model.spec import EncoderSpec
from sop_faiss.pipeline.extraction import extract_each
from sop_faiss.progress import ProgressCallback

__all__ = ["RetrievalResult", "RetrieveOptions", "evaluate_retrieval"]


@dataclass(frozen=True)
class RetrieveOptions:
    """How to look at the pictures, and how much of each ranking to keep."""

    square: bool = False
    """Resize and crop every picture to a centred square; otherwise the whole picture, longer side `size`."""
    top: int = 10
    """Gallery pictures kept per query, for the page and the table of queries."""
    batch_size: int = 64
    """Pictures per forward pass."""
    workers: int | None = None
    """Threads that read and decode; None: one per CPU, at most 8."""


@dataclass(frozen=True)
class RetrievalResult:
    """One measurement.

    Attributes:
        data: the data set.
        queries: the query pictures as the encoder saw them, cropped or whole.
        rules: the protocol followed.
        scores: metrics, and each query's own result.
        protocol: every choice that changes the numbers, as JSON values.
        encoder: name and fingerprint.
        seconds: wall-clock time.
    """

    data: RetrievalSet
    queries: FileSource
    rules: Protocol
    scores: RetrievalScores
    protocol: dict[str, Any]
    encoder: dict[str, str]
    seconds: float

    def write(self, path: Path) -> None:
        """Write the result as JSON."""
        write_result(
            path, "sop-retrieve", self.data.name, self.protocol, self.scores.metrics, self.encoder, self.seconds
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

    Every picture counts: one that cannot be read is an error, not a gap in the gallery.

    Args:
        encoder: which encoder; its `size` is the longer side of the pictures, or the side of the square.
        dataset: `roxford5k`, `rparis6k`, or a directory.
        data_root: the directory that holds the data set's directory.
        protocol: `revisitop`, `dino` or `plain`; None: the one that suits the ground truth.
        gnd: another ground-truth file than the data set's own.
        options: the rest.
        progress: called with the number of pictures read.

    Raises:
        DataError: the data set is incomplete or damaged, or does not fit the protocol.
        SopError: as `EncoderSpec.load` and `extract_features`.
    """
    options = options or RetrieveOptions()
    if options.top < 1:
        raise ConfigError(f"top = {options.top}: wanted 1 or more pictures per query")
    started = time.perf_counter()
    data = open_retrieval_set(dataset, data_root, gnd)
    rules = choose_protocol(protocol, data.truth)
    queries = data.whole_queries if rules.box == "ignored" else data.queries
    loaded = encoder.load()
    preprocess = loaded.preprocess if options.square else loaded.preprocess.keeping_aspect()
    query_store, gallery_store = extract_each(
        loaded,
        [queries, data.gallery],
        preprocess=preprocess,
        batch_size=options.batch_size,
        workers=options.workers,
        max_bad_fraction=0.0,
        progress=progress,
    )
    scores = score_retrieval(query_store.features, gallery_store.features, data.truth, rules, options.top)
    choices = {
        "name": rules.name,
        "ground_truth_sha256": sha256_file(data.truth.path),
        "queries": len(queries),
        "queries_cropped": 0 if rules.box == "ignored" else sum(box is not None for box in data.queries.boxes),
        "queries_counted": {name or "all": count for name, count in scores.counted_queries.items()},
        "database": len(data.gallery),
        "preprocess": preprocess.to_dict(),
        "pooling": loaded.pooling,
        "scales": list(preprocess.scales),
        "whitening": "none" if loaded.whitening is None else loaded.whitening.facts(),
    }
    encoder_used = {"name": loaded.name, "fingerprint": loaded.fingerprint}
    return RetrievalResult(data, queries, rules, scores, choices, encoder_used, time.perf_counter() - started)
