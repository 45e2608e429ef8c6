"""The differences between two runs, bit for bit: metrics.jsonl, tensors of checkpoints, features, JSON results.

Each side is read as values by name. Names of the older side are first translated by rules to those of the newer one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pyarrow.parquet as parquet
import torch
from safetensors import safe_open
from torch import Tensor

__all__ = [
    "Differences",
    "Stored",
    "compare",
    "load_map",
    "read_features",
    "read_json",
    "read_numbers",
    "read_tensors",
    "renamed",
]

SECTIONS = ("settings", "metrics", "tensors")
MACHINE = re.compile(r"per_second|seconds|_bytes|wait_share")
"""Metrics of time and memory, which differ from run to run."""

Rules = Mapping[str, str]


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file, which is read when it is compared."""

    file: Path
    name: str

    def read(self) -> Tensor:
        with safe_open(self.file, "pt") as content:
            tensor: Tensor = content.get_tensor(self.name)
            return tensor


@dataclass(frozen=True)
class Differences:
    """The result of `compare`."""

    compared: int
    """Names that both sides have."""
    changed: dict[str, float]
    """Names whose values differ, in the older side's order, each with the largest absolute difference: infinity where
    shapes, types or words differ, 0 where only bits do (-0.0 and 0.0)."""
    only_old: list[str]
    only_new: list[str]

    @property
    def count(self) -> int:
        return len(self.changed) + len(self.only_old) + len(self.only_new)

    def detail(self, first: int = 3) -> dict[str, Any]:
        """Return numbers for a row: how many were compared, first and largest differences, first unmatched names."""
        detail: dict[str, Any] = {"compared": self.compared}
        if self.changed:
            largest = max(self.changed, key=lambda name: self.changed[name])
            detail["changed"] = len(self.changed)
            detail["first"] = ", ".join(f"{name} ({size:.3g})" for name, size in [*self.changed.items()][:first])
            detail["largest"] = f"{largest} ({self.changed[largest]:.3g})"
        for side, names in (("only_old", self.only_old), ("only_new", self.only_new)):
            if names:
                detail[side] = f"{len(names)}: {', '.join(names[:first])}"
        return detail


def load_map(file: Path | None) -> dict[str, Rules]:
    """Read the rules of each section; no file, no rules.

    Raises:
        ValueError: the file is not such a table.
    """
    if file is None:
        return {section: {} for section in SECTIONS}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: no JSON: {error}") from None
    if not isinstance(content, dict) or not set(content) <= set(SECTIONS):
        raise ValueError(f"{file}: wanted a JSON object with some of the sections {', '.join(SECTIONS)}")
    for section, rules in content.items():
        if not isinstance(rules, dict) or not all(isinstance(to, str) for to in rules.values()):
            raise ValueError(f"{file}: {section}: wanted an object of names, each with the text that replaces it")
        for pattern, to in rules.items():
            try:
                re.compile(pattern)
                renamed("", {pattern: to})
            except (re.error, IndexError) as error:
                raise ValueError(f"{file}: {section}: {pattern}: {error}") from None
    return {section: content.get(section, {}) for section in SECTIONS}


def renamed(name: str, rules: Rules) -> str:
    """Apply all rules in order: `re:PATTERN` is replaced wherever it matches, any other text at the start of a name."""
    for pattern, to in rules.items():
        if pattern.startswith("re:"):
            name = re.sub(pattern.removeprefix("re:"), to, name)
        elif name.startswith(pattern):
            name = to + name.removeprefix(pattern)
    return name


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Differences:
    """Compare two sides by name. A name that only one of them has is a difference, too."""
    changed = {}
    common = [name for name in old if name in new]
    for name in common:
        a, b = (value.read() if isinstance(value, Stored) else value for value in (old[name], new[name]))
        if not _same(a, b):
            changed[name] = _distance(a, b)
    lone = [name for name in old if name not in new], [name for name in new if name not in old]
    return Differences(len(common), changed, *lone)


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))
    if _is_number(a) and _is_number(b):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    return type(a) is type(b) and a == b


def _distance(a: object, b: object) -> float:
    if _is_number(a) and _is_number(b):
        a, b = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape):
        return math.inf
    apart = (a.double() - b.double()).abs()
    apart[(a == b) | ((a != a) & (b != b))] = 0.0  # infinities are equal, and so is NaN to NaN
    return float(apart.nan_to_num(nan=math.inf, posinf=math.inf).max()) if apart.numel() else 0.0


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_numbers(run: Path, rules: Rules, after_step: int = -1) -> dict[str, Any]:
    """Read every number of metrics.jsonl after a step, by name and step, except time and memory."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return _by_name(
        (f"{renamed(name, rules)} at step {line['step']}", value)
        for line in lines
        if line["step"] > after_step
        for name, value in line.items()
        if name != "step" and not MACHINE.search(name)
    )


def read_tensors(run: Path, rules: Rules, *, best: bool = True) -> dict[str, Stored]:
    """List the tensors of all files of the last checkpoint, as FILE/NAME, and of `best/`, as best/FILE/NAME."""
    checkpoints = sorted((run / "checkpoints").glob("step_*"))
    if not checkpoints:
        raise FileNotFoundError(f"{run} has no checkpoint")
    return _by_name(
        (f"{place}{renamed(f'{file.stem}/{name}', rules)}", Stored(file, name))
        for place, folder in (("", checkpoints[-1]), ("best/", run / "best"))[: 1 + best]
        for file in sorted(folder.glob("*.safetensors"))
        for name in _names(file)
    )


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as content:
        return sorted(content.keys())


def read_features(store: Path) -> dict[str, Any]:
    """Read each cell of a feature store, as COLUMN of KEY."""
    tables = [parquet.read_table(file) for file in sorted(store.glob("*.parquet"))]
    return _by_name(
        (f"{column} of {key}", torch.from_numpy(np.array(cell.values)) if column == "feature" else cell.as_py())
        for table in tables
        for column in table.column_names
        for key, cell in zip(table["key"].to_pylist(), table[column], strict=True)
    )


def read_json(content: Any, rules: Rules) -> dict[str, Any]:
    """Flatten a JSON value: `queries.0.neighbors.2.similarity`."""
    return _by_name((renamed(name, rules), value) for name, value in _leaves(content))


def _leaves(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict | list):
        entries = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in entries:
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, content


def _by_name(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict; the same name with two values is a mistake of the rules, or of the run.

    Raises:
        ValueError: a name has two values.
    """
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values and (isinstance(value, Stored | Tensor) or not _same(values[name], value)):
            raise ValueError(f"{name} has two values: two names were mapped to one, or the run wrote it twice")
        values[name] = value
    return values
