"""Several query images as one query, less others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sop_faiss.errors import ConfigError
from sop_faiss.features.store import FeatureStore
from sop_faiss.index.narrowed import combined_query

_NAMED = 3
"""Queries that are named one by one; of more, their number is given."""


def as_one(store: FeatureStore, unwanted: FeatureStore | None = None) -> FeatureStore:
    """Combine the rows of a feature store, less those of another, into one row; see `combined_query`.

    Its label is the one that all rows have, or none.
    """
    query = combined_query(store.features, None if unwanted is None else unwanted.features)
    labels = None
    if store.labels is not None:
        labels = store.labels[:1] if len(set(store.labels.tolist())) == 1 else np.full(1, -1, np.int64)
    name = name_of_all(store.keys, [] if unwanted is None else unwanted.keys)
    return replace(
        store,
        keys=[name],
        labels=labels,
        sources=store.sources[:1],
        members=store.members[:1],
        features=query,
        states=None,
    )


def name_of_all(keys: Sequence[str], minus: Sequence[str]) -> str:
    """Return a name for a query of several images: `a + b - c`."""
    plus = " + ".join(keys) if len(keys) <= _NAMED else f"{keys[0]} + {len(keys) - 1:,} more"
    if not minus:
        return plus
    return f"{plus} - {' - '.join(minus) if len(minus) <= _NAMED else f'{len(minus):,} images'}"


def refuse_minus(
    minus: Sequence[str], queries: Sequence[str], features: Path | None, normal: Callable[[str], str] = str
) -> None:
    """Refuse what cannot be subtracted, before images are encoded.

    Args:
        minus: what is subtracted, by name.
        queries: the names of the queries.
        features: the queries as a feature store.
        normal: makes names equal that are of the same image.

    Raises:
        ConfigError: images are subtracted from a feature store, or one is both wanted and not.
    """
    if minus and features is not None:
        raise ConfigError(f"`minus={minus[0]}` is for images or keys as queries, not for `features`: leave it out")
    if "" in minus:
        raise ConfigError("`minus` is empty: name an image, or a key")
    wanted = {normal(name) for name in queries}
    both = [name for name in minus if normal(name) in wanted]
    if both:
        raise ConfigError(f"`minus={both[0]}` is a query, too: name it once")
