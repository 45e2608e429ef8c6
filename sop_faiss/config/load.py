"""Sections of settings in, a checked configuration out, and back to YAML."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationValidationError,
    OmegaConfBaseException,
)

from sop_faiss.config.checks import shown
from sop_faiss.config.config_files import (
    NO_FIELD,
    find_config,
    parse_overrides,
    read_mapping,
    reject_resolvers,
)
from sop_faiss.config.phases import phases_of
from sop_faiss.config.renamed import RENAMED, translate
from sop_faiss.config.rivals import OBJECTIVES
from sop_faiss.config.schema import Config
from sop_faiss.config.unknown_keys import known_keys, meant_by
from sop_faiss.config.wanted import wanted
from sop_faiss.errors import ConfigError


def _reject_unknown_keys(content: dict[str, Any], origin: str, prefix: str = "") -> None:
    known = known_keys()
    for key, value in content.items():
        name = f"{prefix}{key}"
        if name in RENAMED:
            raise ConfigError(f"{origin}: {name} has been renamed: write {RENAMED[name]}")
        if name in known and "." in str(key):
            raise ConfigError(f"{origin}: key {shown(name)}: in a file, write its last part below its section")
        if name not in known and not any(old.startswith(f"{name}.") for old in RENAMED):
            near = meant_by(name)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(f"{origin}: unknown configuration key {shown(name or repr(name))}{hint}")
        if value == "???":
            raise ConfigError(f"{origin}: {name} = ??? is a placeholder: give a value")
        if isinstance(value, dict):
            _reject_unknown_keys(value, origin, f"{name}.")
        has_sections = name == "train.phases"  # see `_with_phases`
        if isinstance(value, list) and not has_sections and any(isinstance(entry, dict | list) for entry in value):
            raise ConfigError(f"{origin}: {name} = {shown(value)}: {wanted(name)}")


def load_run_config(file: Path) -> Config:
    """Read the configuration that a run was started with, with the names of settings of earlier versions translated.

    Raises:
        ConfigError: the file is damaged.
    """
    return _built({f"config {file}": translate(read_mapping(file))})


def load_config(
    name_or_file: str | Path,
    overrides: Iterable[str] = (),
    *,
    weights: Path | None = None,
    teacher: str | None = None,
) -> Config:
    """Read a configuration, apply dotted overrides, and check it.

    Args:
        name_or_file: a YAML file, else the name of a packaged configuration.
        overrides: `section.field=value` strings, applied in order.
        weights: sets `model.weights`, or with `teacher` `distill.weights`; its name may contain any letters.
        teacher: sets `distill.teacher`, and `objective.kind` to distill.

    Raises:
        ConfigError: an unknown key (the nearest is suggested), a wrong type, or an impossible value.
    """
    path = find_config(name_or_file)
    given = parse_overrides(overrides)
    of_options: dict[str, str] = {}
    if teacher is not None:
        of_options = {"objective.kind": "distill", "distill.teacher": teacher}
    if weights is not None:
        of_options["model.weights" if teacher is None else "distill.weights"] = str(weights)
    if of_options:
        flat = flatten(given)
        for name, value in of_options.items():
            if flat.get(name, value) != value:
                option = "weights" if name.endswith(".weights") else "teacher"
                raise ConfigError(f"override {name}={shown(flat[name])}: `{option}` sets {name}={value}; leave one out")
        given = _nested(flat | of_options)
    return _built({f"config {path}": read_mapping(path), "overrides": given})


def load_layers(name_or_file: str | Path, layers: Mapping[str, Mapping[str, Any]]) -> Config:
    """Read a configuration with layers of values over it, and check it.

    Args:
        name_or_file: as of `load_config`.
        layers: dotted field -> value, by where they come from, for messages.

    Raises:
        ConfigError: as `load_config`.
    """
    path = find_config(name_or_file)
    named = {f"config {path}": read_mapping(path)}
    for origin, settings in layers.items():
        nested = _nested(settings)
        reject_resolvers(nested, origin)
        named[origin] = nested
    return _built(named)


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted fields as sections; the reverse of `flatten`."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *path, last = name.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{shown(name)} is set, and so is {shown(name.rpartition('.')[0])}: leave one out")
        place[last] = value
    return nested


def config_of(content: dict[str, Any], origin: str) -> Config:
    """Build a checked configuration from plain values; missing fields have their defaults.

    Args:
        content: sections of fields.
        origin: where it comes from, for the message.

    Raises:
        ConfigError: as `load_config`.
    """
    reject_resolvers(content, origin)
    return _built({origin: translate(content)})


@functools.cache
def _defaults() -> DictConfig:
    return OmegaConf.structured(Config)  # takes twice the time of copying it


def _built(layers: dict[str, dict[str, Any]]) -> Config:
    """Build the defaults with layers of values over them; a layer's key says where it comes from."""
    merged = copy.deepcopy(_defaults())
    for origin, content in _of_one_objective(layers).items():
        _reject_unknown_keys(content, origin)
        _merge(merged, _with_phases(content), origin)
    origins = " with ".join(layers)
    try:
        built = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or "").partition("[")[0]  # of an entry of a list: the list
        named = not isinstance(error, InterpolationKeyError | InterpolationResolutionError)
        reason = wanted(key) if named or isinstance(error, InterpolationValidationError) else NO_FIELD
        raise ConfigError(f"{origins}: {key or 'value'}: {reason}") from None
    if not isinstance(built, Config):
        raise ConfigError(f"{origins} is not a configuration")
    return built


def _with_phases(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content with the phases of a run as their dataclass, which OmegaConf does not make in a tuple."""
    train = content.get("train")
    if not isinstance(train, dict) or not isinstance(train.get("phases"), list):
        return content
    return {**content, "train": {**train, "phases": phases_of(train["phases"])}}


def _of_one_objective(layers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Drop from lower layers what configures another objective than the one that a higher layer chooses.

    So `objective.kind=dino` can be set on top of any file; the layer that sets it is checked as it is.
    """
    kept: dict[str, dict[str, Any]] = {}
    for origin, content in layers.items():
        chosen = content.get("objective")
        kind = chosen.get("kind") if isinstance(chosen, dict) else None
        if isinstance(kind, str) and kind in OBJECTIVES:
            others = {section for sections in OBJECTIVES.values() for section in sections} - set(OBJECTIVES[kind])
            kept = {
                below: {name: value for name, value in settings.items() if name not in others}
                for below, settings in kept.items()
            }
        kept[origin] = content
    return kept


def _merge(base: DictConfig, content: dict[str, Any], origin: str) -> None:
    try:
        OmegaConf.unsafe_merge(base, content)
    except OmegaConfBaseException:
        name, value = _culprit(base, content)
        written = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
        raise ConfigError(f"{origin}: {name} = {shown(written)}: {wanted(name)}") from None


def _culprit(base: DictConfig, content: dict[str, Any], prefix: str = "") -> tuple[str, Any]:
    """Return name and value of the first field that cannot be merged, which the error does not always name."""
    for key, value in content.items():
        nested: Any = value
        for part in reversed(f"{prefix}{key}".split(".")):
            nested = {part: nested}
        try:
            OmegaConf.merge(base, nested)
        except OmegaConfBaseException:
            return _culprit(base, value, f"{prefix}{key}.") if isinstance(value, dict) else (f"{prefix}{key}", value)
    return prefix.rstrip("."), content


def to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML that `load_config` reads."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


def flat_settings(config: Config) -> dict[str, Any]:
    """Return every field by its dotted name, as an override would name it."""
    return flatten(asdict(config))


def flatten(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return sections of fields as dotted fields; names that are dotted already stay."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": each for name, each in flatten(value).items()}
        else:
            flat[key] = value
    return flat
