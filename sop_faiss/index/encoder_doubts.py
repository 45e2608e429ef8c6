"""Whether an encoder distinguishes the images of its index: measured at the build, kept in the manifest, logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch.nn import functional

from sop_faiss.features.store import FeatureStore
from sop_faiss.index.store import IndexManifest
from sop_faiss.train.log.embedding_spread import mean_cosine
from sop_faiss.train.verdict import Outcome, verdict_of

_log = logging.getLogger(__name__)

ALIKE = 0.9
"""From this mean cosine on, an encoder is doubted. A network with random weights had 0.94 on photos of ten kinds, and
one whose training collapsed has more than 0.99."""
_SAMPLED_ROWS = 2000
_FEWEST_ROWS = 20
"""Fewer images may well be alike, whatever the encoder."""


def random_pairs_cosine(
    count: int, features: Callable[[Int64[np.ndarray, " m"]], Float32[np.ndarray, "m d"]]
) -> float | None:
    """Measure the mean cosine of random pairs of images: 1 if all are alike, about 0 for unrelated directions.

    Args:
        count: number of images.
        features: gives the features of some rows.

    Returns:
        None for fewer than 20 images.
    """
    if count < _FEWEST_ROWS:
        return None
    rows = np.random.default_rng(0).choice(count, min(count, _SAMPLED_ROWS), replace=False)
    unit = functional.normalize(torch.from_numpy(features(np.sort(rows))), dim=1)  # codes do not keep norms
    return round(mean_cosine(unit), 4)


def facts_of_encoder(
    store: FeatureStore, features: Callable[[Int64[np.ndarray, " m"]], Float32[np.ndarray, "m d"]]
) -> dict[str, Any]:
    """Return what the manifest's `search` says of the encoder of a store, whose features may be elsewhere."""
    return {"mean_cosine": random_pairs_cosine(len(store.keys), features), "scores": store.manifest.get("scores")}


def log_encoder_doubts(manifest: IndexManifest) -> None:
    """Warn of each reason why neighbors of this index may mean little; of an index without facts nothing is known."""
    name = manifest.encoder["name"]
    cosine, scores = manifest.search.get("mean_cosine"), manifest.search.get("scores")
    if cosine is not None and cosine >= ALIKE:
        _log.warning(
            "encoder %s hardly distinguishes these images: random pairs have a mean cosine of %.3f, where 1 is all "
            "alike; neighbors may mean little: train the encoder longer, or build the index with another one",
            *(name, cosine),
        )
    if scores is None:
        return
    verdict = verdict_of(scores)
    if verdict is not None and verdict.outcome is not Outcome.BEAT:
        _log.warning(
            "encoder %s is of a run that was not shown to improve on what it started from, which best/ of the run "
            "keeps: %s; neighbors may mean no more than before: train with other settings, or build the index with "
            "another encoder",
            *(name, verdict.text),
        )
    elif verdict is None and scores["best_score"] <= scores["first_score"]:
        _log.warning(
            "encoder %s is of a run that never improved on its start: %s was %.2f %% at step 0 and at best %.2f %% "
            "later; neighbors may mean little: train with other settings, or build the index with another encoder",
            *(name, scores["best_by"], scores["first_score"], scores["best_score"]),
        )
