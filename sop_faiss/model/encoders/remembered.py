"""How an encoder is opened again: what an index or a feature store remembers of the `EncoderSpec` it was made with.

What is remembered may come from someone else, with the index: it is checked, and read as weights that a user names
are, without running code or fetching anything.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from sop_faiss.errors import CheckpointError
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.paths import path_state

_RELATIVE = "relative"
"""Entry with the places relative to the index: they hold where an index moves together with its encoder."""
_NOT_KEPT = ("device", "cache")
"""Where features are computed and kept, which the features do not depend on."""
_DIRECTORIES = ("run", "adapter")
"""Kinds of encoders that are named by their directory alone."""
_LARGEST_FILE = 16 * 2**30
"""Bytes of a weights file; no encoder that a user names is limited to this."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_triple(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(_is_number(each) for each in value)


def _is_scales(value: Any) -> bool:
    return (
        isinstance(value, list) and 1 <= len(value) <= 16 and all(_is_number(each) and 0 < each <= 4 for each in value)
    )


_KINDS: dict[str, Callable[[Any], bool]] = {
    "model": _is_text,
    "weights": _is_text,
    "whitening": _is_text,
    "arch": _is_text,
    "pooling": _is_text,
    "position_resize": _is_text,
    "random_weights": _is_count,
    "last_blocks": _is_count,
    "size": _is_count,
    "mean": _is_triple,
    "std": _is_triple,
    "scales": _is_scales,
    "top_value": _is_number,
    "mirrored": lambda value: isinstance(value, bool),
    "student": lambda value: isinstance(value, bool),
    "by_position": lambda value: isinstance(value, bool),
}


def remembered_spec(spec: EncoderSpec, checkpoint: Path | None = None) -> dict[str, Any]:
    """Return the options that make this encoder, as JSON values; places are absolute.

    Args:
        spec: what the encoder was made of, defaults included.
        checkpoint: the one that was read, where `model` names a run: the run may have others later.
    """
    kept = {
        field.name: getattr(spec, field.name)
        for field in fields(spec)
        if field.name not in _NOT_KEPT and getattr(spec, field.name) != field.default
    }
    kept["model"] = str((checkpoint or Path(spec.place)).absolute()) if spec.kind in _DIRECTORIES else spec.model
    if spec.kind == "dino" or (spec.kind == "config" and Path(spec.place).is_file()):
        kept["model"] = f"{spec.kind}:{Path(spec.place).absolute()}"
    return {name: _as_json(value) for name, value in kept.items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    return list(value) if isinstance(value, tuple) else value


def with_relative_places(remembered: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return what is remembered with its places also relative to the directory of the index, if they are not yet."""
    if _RELATIVE in remembered or _not_understood(remembered):
        return dict(remembered)
    found = _places(_spec_of(remembered))
    relative = {name: os.path.relpath(place, directory.absolute()) for name, place in found.items()}
    return {**remembered, **({_RELATIVE: relative} if relative else {})}


def without_relative_places(remembered: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is remembered without the places relative to the index, for an index elsewhere."""
    return {name: value for name, value in remembered.items() if name != _RELATIVE}


def recalled_spec(
    remembered: Mapping[str, Any], directory: Path, given: EncoderSpec, choice: Path | None = None
) -> EncoderSpec:
    """Return the spec that is remembered, with the options that are given in place of its own.

    A place is looked for where it was, then relative to the index.

    Args:
        remembered: of a manifest, which may be anyone's.
        given: options without a `model`.
        choice: the file in the directory that remembers it, for messages, if that is not an index.

    Raises:
        CheckpointError: a place does not exist, is too large a file, or what is remembered is not understood.
    """
    owner = choice or directory
    instead = "name the encoder itself, or run sop-index tune again" if choice else "give `model`"
    odd = _not_understood(remembered)
    if odd is not None:
        raise CheckpointError(f"{owner} does not say the {odd!r} of its encoder as this program does: {instead}")
    spec = _spec_of(remembered)
    relative = remembered.get(_RELATIVE)
    for name, place in _places(spec).items():
        if getattr(given, name):
            continue
        found = _find(place, relative.get(name) if isinstance(relative, Mapping) else None, directory)
        if found is None:
            state = path_state(place) if place.is_absolute() or not place.exists() else "is not an absolute path"
            new_place = (
                "name its new place by `model` and its options, as when the index was built (`sop-index sync` and "
                "`add` then remember it)"
            )
            raise CheckpointError(
                f"the encoder of {owner} was read from {place}, which {state}: {instead if choice else new_place}"
            )
        if found.is_file() and found.stat().st_size > _LARGEST_FILE:
            raise CheckpointError(f"{found}, the encoder of {owner}, is larger than 16 GiB: {instead}")
        prefix = f"{spec.kind}:" if name == "model" and spec.kind not in _DIRECTORIES else ""
        moved: dict[str, Any] = {name: f"{prefix}{found}" if name == "model" else found}
        spec = replace(spec, **moved)
    own = {field.name: getattr(given, field.name) for field in fields(given)}
    changed = {name: value for name, value in own.items() if value != EncoderSpec.__dataclass_fields__[name].default}
    return replace(spec, **{name: value for name, value in changed.items() if name != "model"})


def _not_understood(remembered: Mapping[str, Any]) -> str | None:
    """Return the name of an entry that is unknown, of another type or out of range, or `model` if it is missing."""
    given = {"model": None, **remembered}
    return next((name for name in given if name != _RELATIVE and not _is_sound(name, given[name])), None)


def _is_sound(name: str, value: Any) -> bool:
    return name in _KINDS and _KINDS[name](value)


def _spec_of(remembered: Mapping[str, Any]) -> EncoderSpec:
    values = {name: value for name, value in remembered.items() if name != _RELATIVE}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    values |= {name: Path(values[name]) for name in ("weights", "whitening") if name in values}
    return EncoderSpec(**values)


def _places(spec: EncoderSpec) -> dict[str, Path]:
    """Return the files and directories that a remembered spec names, by field."""
    place = Path(spec.place)
    names_file = spec.kind in (*_DIRECTORIES, "dino") or (spec.kind == "config" and place.is_absolute())
    found = {"model": place if names_file else None, "weights": spec.weights, "whitening": spec.whitening}
    return {name: place for name, place in found.items() if place is not None}


def _find(place: Path, relative: Any, directory: Path) -> Path | None:
    """Return the place if it exists, or else the one relative to the index; the current folder does not matter."""
    beside = [Path(os.path.normpath(directory.absolute() / relative))] if _is_text(relative) else []
    return next((each for each in (place, *beside) if each.is_absolute() and each.exists()), None)
