"""The manifest of a feature store: read, and checked entry by entry, since it may have been edited."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sop_faiss.errors import FeatureError, SopError
from sop_faiss.files import read_json
from sop_faiss.paths import path_state

MANIFEST_NAME = "manifest.json"
FORMAT = "sop_faiss feature store 1"
FEATURE_DTYPES = ("float32", "float16")
"""How features may be stored; they are float32 in memory."""


def require_dtype(name: str) -> None:
    """Check that features can be stored in this dtype.

    Raises:
        FeatureError: they cannot.
    """
    if name not in FEATURE_DTYPES:
        raise FeatureError(f"feature dtype {name!r}: wanted one of {', '.join(FEATURE_DTYPES)}")


def read_store_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest of a store, and check that its files are there.

    Raises:
        FeatureError: there is no store, or it is incomplete or damaged.
    """
    if not directory.is_dir():
        raise FeatureError(f"feature store {directory} {path_state(directory)}; make one with sop-embed")
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise FeatureError(f"{directory} has no {MANIFEST_NAME}: it is not a feature store, or an unfinished one")
    try:
        manifest = read_json(path)
    except SopError as error:
        raise FeatureError(str(error)) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise FeatureError(f"{path} is not the manifest of a feature store ({FORMAT})")
    agree = (
        _is_count(manifest.get("count"))
        and _is_count(manifest.get("dimension"))
        and manifest.get("feature_dtype") in FEATURE_DTYPES
        and isinstance(manifest.get("files"), list)
        and all(isinstance(part, dict) and {"name", "rows", "sha256"} <= set(part) for part in manifest["files"])
        and manifest["count"] == sum(part["rows"] for part in manifest["files"] if _is_count(part["rows"]))
    )
    if not agree:
        raise FeatureError(f"{path} is damaged: count, dimension, feature_dtype and files do not agree")
    odd = next((name for name, is_right in _FACTS.items() if name in manifest and not is_right(manifest[name])), None)
    if odd:
        raise FeatureError(f"{path} is damaged: {odd} is not what sop-embed writes; embed again")
    named = {str(part["name"]) for part in manifest["files"]}
    found = {file.name for file in directory.glob("features-*.parquet")}
    if named != found:
        odd = sorted(named ^ found)[0]
        raise FeatureError(f"{directory}: {odd} is {'missing' if odd in named else 'not in the manifest'}; embed again")
    return manifest


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 1


def _is_encoder(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("name", "fingerprint"))


def _is_dropped(value: Any) -> bool:
    counts = value.get("reasons", {}) if isinstance(value, dict) else None
    return isinstance(counts, dict) and all(isinstance(count, int) for count in counts.values())


def _is_scores(value: Any) -> bool:
    if not isinstance(value, dict):
        return value is None
    difference = value.get("difference")
    if difference is not None and not (isinstance(difference, list) and len(difference) == 3):
        return False
    scores = [value.get("first_score"), value.get("best_score"), *(difference or ())]
    are_numbers = all(isinstance(score, int | float) and math.isfinite(score) for score in scores)
    return are_numbers and isinstance(value.get("best_by"), str)


def _are_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))


_FACTS: dict[str, Callable[[Any], bool]] = {
    "encoder": _is_encoder,
    "preprocess": lambda value: isinstance(value, dict),
    "pooling": lambda value: isinstance(value, str),
    "root": lambda value: isinstance(value, str),
    "class_names": _are_names,
    "dropped": _is_dropped,
    "scores": _is_scores,
    "encoder_spec": lambda value: isinstance(value, dict | None),
    "folder": lambda value: isinstance(value, str | None),
}
"""Entries that say how features were made, and whether a value is of the kind that the extraction writes."""
