"""Several retrieval results on the same queries: how much better is each than the first, and could that be chance?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from sop_faiss.bootstrap import Interval, PairedDifference, bootstrap_interval, paired_difference
from sop_faiss.errors import DataError, SopError
from sop_faiss.files import read_json
from sop_faiss.paths import path_state

_MAX_BYTES = 256 * 2**20
_NOT_COMPARED = ("name", "ground_truth_sha256", "queries_counted")
"""Choices that are checked, or follow from others."""


@dataclass(frozen=True)
class Setup:
    """One metric of all results.

    Attributes:
        metric: as `mAP_medium`.
        queries: how many are counted.
        scores: mean AP of each result in percent, with its interval.
        differences: of each result but the first to the first.
    """

    metric: str
    queries: int
    scores: list[Interval]
    differences: list[PairedDifference]


@dataclass(frozen=True)
class Comparison:
    """Results side by side.

    Attributes:
        names: of the results, all different.
        setups: one per difficulty.
        notes: choices in which a result differs from the first, in words.
    """

    names: list[str]
    setups: list[Setup]
    notes: list[str]


def compare_results(files: Sequence[Path]) -> Comparison:
    """Read results that sop-retrieve wrote, and compare them with the first.

    Args:
        files: two or more JSON files.

    Raises:
        DataError: there are fewer than two, one is not a result, or they are not about the same queries.
    """
    if len(files) < 2:
        raise DataError(f"{len(files)} result to compare: name two or more JSON files of sop-retrieve")
    results = [_read(file) for file in files]
    first = results[0]
    for file, result in zip(files[1:], results[1:], strict=True):
        _require_same_queries(first, result, files[0], file)
    aps = [key for key in first["per_query"] if key != "queries"]
    setups = [_setup(key, [result["per_query"][key] for result in results]) for key in aps]
    names = _names(files, results)
    notes = [
        f"{name}: {what} {_short(result['protocol'].get(what))} (first: {_short(first['protocol'].get(what))})"
        for name, result in zip(names[1:], results[1:], strict=True)
        for what in first["protocol"].keys() | result["protocol"].keys()
        if what not in _NOT_COMPARED and first["protocol"].get(what) != result["protocol"].get(what)
    ]
    return Comparison(names, [setup for setup in setups if setup is not None], sorted(notes))


def _read(file: Path) -> Mapping[str, Any]:
    if file.is_dir():
        raise DataError(f"result {file} is a directory: name the file in it that sop-retrieve --json wrote")
    if not file.is_file():
        raise DataError(f"result {file} {path_state(file)}: wanted what sop-retrieve --json wrote")
    if file.stat().st_size > _MAX_BYTES:
        raise DataError(f"result {file} is larger than any result of sop-retrieve")
    try:
        content = read_json(file)
    except SopError as error:
        raise DataError(str(error)) from None
    if not isinstance(content, dict) or content.get("command") != "sop-retrieve":
        raise DataError(f"{file} is not a result of sop-retrieve: wanted what its `json` wrote")
    per_query = content.get("per_query")
    whole = (
        isinstance(content.get("protocol"), dict)
        and isinstance(content.get("encoder"), dict)
        and isinstance(per_query, dict)
        and isinstance(per_query.get("queries"), list)
        and len(per_query) > 1
        and all(isinstance(each, list) and len(each) == len(per_query["queries"]) for each in per_query.values())
        and all(_is_score(value) for key, each in per_query.items() if key != "queries" for value in each)
    )
    if not whole:
        raise DataError(f"{file} has no scores of its queries (per_query): measure again with this version")
    return content


def _is_score(value: object) -> bool:
    """Read a percentage, or null for a query that is not counted."""
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require_same_queries(first: Mapping[str, Any], other: Mapping[str, Any], one: Path, two: Path) -> None:
    for what, of_first, of_other in (
        ("ground truth", first["protocol"].get("ground_truth_sha256"), other["protocol"].get("ground_truth_sha256")),
        ("protocol", first["protocol"].get("name"), other["protocol"].get("name")),
        ("queries", first["per_query"]["queries"], other["per_query"]["queries"]),
        ("difficulties", list(first["per_query"]), list(other["per_query"])),
        ("counted queries", _counted(first), _counted(other)),
    ):
        if of_first != of_other:
            shown = f" ({_short(of_first)} and {_short(of_other)})" if isinstance(of_first, str) else ""
            raise DataError(f"{one} and {two} have different {what}{shown}: compare results on the same queries")


def _counted(result: Mapping[str, Any]) -> list[list[bool]]:
    return [[value is not None for value in each] for key, each in result["per_query"].items() if key != "queries"]


def _setup(key: str, per_result: Sequence[Sequence[float | None]]) -> Setup | None:
    values: list[Float64[np.ndarray, " q"]] = [
        np.array([value for value in each if value is not None], dtype=np.float64) for each in per_result
    ]
    if not len(values[0]):
        return None
    differences = [paired_difference(values[0], each) for each in values[1:]]
    metric = f"m{key}" if key.startswith("AP") else key
    return Setup(metric, len(values[0]), [bootstrap_interval(each) for each in values], differences)


def _names(files: Sequence[Path], results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the encoders' names where they differ, else the files' names, else their paths."""
    for names in (
        [str(result["encoder"].get("name")) for result in results],
        [file.stem for file in files],
        [str(file) for file in files],
    ):
        if len(set(names)) == len(names):
            return names
    return [f"{number}: {file}" for number, file in enumerate(files, start=1)]


def _short(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {entry}" for name, entry in value.items())
    return str(value)[:40]
