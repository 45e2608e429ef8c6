"""Whether an encoder distinguishes the images of its index: measured at the build, kept in the manifest, logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.bootstrap import Interval
from sop_faiss.features.store import FeatureStore
from sop_faiss.index.store import IndexManifest
from sop_faiss.train.verdict import Outcome, describe_difference, verdict_of

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
    import torch  # here: `sop-index info` needs the rest of this file alone
    from torch.nn import functional

    from sop_faiss.train.log.embedding_spread import mean_cosine

    rows = np.random.default_rng(0).choice(count, min(count, _SAMPLED_ROWS), replace=False)
    unit = functional.normalize(torch.from_numpy(features(np.sort(rows))), dim=1)  # codes do not keep norms
    return round(mean_cosine(unit), 4)


def facts_of_encoder(
    store: FeatureStore, features: Callable[[Int64[np.ndarray, " m"]], Float32[np.ndarray, "m d"]]
) -> dict[str, Any]:
    """Return what the manifest's `search` says of the encoder of a store, whose features may be elsewhere."""
    return {"mean_cosine": random_pairs_cosine(len(store.keys), features), "scores": store.manifest.get("scores")}


def log_if_alike(manifest: IndexManifest) -> None:
    """Warn if the encoder hardly distinguishes the images of this index; if that was not measured, say nothing."""
    cosine = manifest.search.get("mean_cosine")
    if cosine is not None and cosine >= ALIKE:
        _log.warning(
            "encoder %s hardly distinguishes these images: random pairs have a mean cosine of %.3f, where 1 is all "
            "alike; neighbors may mean little: train the encoder longer, or build the index with another one",
            *(manifest.encoder["name"], cosine),
        )


def log_encoder_doubts(manifest: IndexManifest) -> None:
    """Warn of each reason why neighbors of a new index may mean little."""
    log_if_alike(manifest)
    doubt = training_doubt(manifest.search.get("scores"))
    if doubt is not None:
        _log.warning(
            "%s: %s; neighbors may mean no more than with the encoder it started from", manifest.encoder["name"], doubt
        )


def training_doubt(scores: Mapping[str, Any] | None) -> str | None:
    """Say that the training of an encoder was not shown to help; None if it was, or is not known.

    Args:
        scores: of its run, as the manifest's `search` has them.
    """
    if scores is None:
        return None
    verdict = verdict_of(scores)
    if verdict is not None:
        shown = describe_difference(Interval(*scores["difference"]))
        return None if verdict.outcome is Outcome.BEAT else f"training was not shown to help ({shown})"
    if scores["best_score"] > scores["first_score"]:
        return None
    numbers = f"{scores['best_by']} {scores['first_score']:.2f} % at step 0, at best {scores['best_score']:.2f} % later"
    return f"training was not shown to help ({numbers})"
