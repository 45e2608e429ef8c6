"""YAML files and dotted overrides in, a checked configuration out, and back to YAML."""

from __future__ import annotations

import copy
import difflib
import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationValidationError,
    OmegaConfBaseException,
)

from sop_faiss.config.checks import shown
from sop_faiss.config.phases import phases_of
from sop_faiss.config.renamed import RENAMED, translate
from sop_faiss.config.rivals import OBJECTIVES
from sop_faiss.config.schema import Config
from sop_faiss.config.unknown_keys import known_keys, meant_by
from sop_faiss.config.wanted import wanted
from sop_faiss.errors import ConfigError, one_line
from sop_faiss.paths import path_state

_PLAIN_INTERPOLATION = re.compile(r"\$\{[\w.]+\}")
"""The value of another field. Resolvers such as `${oc.env:NAME}` would let a file read the user's environment."""

_NO_FIELD = "${...} wants the name of another field, as ${train.epochs}"


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


def _reject_resolvers(value: Any, origin: str, name: str = "") -> None:
    """Refuse `${...}` that is more than the name of a field, anywhere in a value."""
    if isinstance(value, dict):
        for key, entry in value.items():
            _reject_resolvers(entry, origin, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for entry in value:
            _reject_resolvers(entry, origin, name)
    elif isinstance(value, str) and "${" in _PLAIN_INTERPOLATION.sub("", value):
        raise ConfigError(
            f"{origin}: {shown(name)} = {shown(value)}: only ${{section.field}} is filled in, nothing from outside; "
            "write the value itself"
        )


_SECTIONS = {"config": "'data:' and 'views:'", "study": "'base:' and 'axes:'", "suite": "'tasks:'"}
"""Examples, by the kind of file."""


def read_mapping(path: Path, kind: str = "config") -> dict[str, Any]:
    """Read a YAML file of sections; `kind` is what messages call it.

    Raises:
        ConfigError: it cannot be read, is not YAML, or has no sections.
    """
    single = f"{kind} {path} has no sections: wanted some such as {_SECTIONS[kind]}"
    try:
        loaded = OmegaConf.load(path)
        _reject_resolvers(OmegaConf.to_container(loaded), f"{kind} {path}")
        content = OmegaConf.to_container(loaded, resolve=True)
    except ConfigError:
        raise
    except OSError as error:
        if error.errno is None:  # as OmegaConf says it
            raise ConfigError(single) from None
        raise ConfigError(f"{kind} {path} cannot be read: {error.strerror}") from None
    except Exception as error:
        raise ConfigError(f"{kind} {path}: {_unreadable(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(single)
    return {str(key): value for key, value in content.items()}


def _unreadable(error: Exception) -> str:
    """Return why YAML could not be read, and where; the classes of its errors are not OmegaConf's."""
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        where = f"line {mark.line + 1}, column {mark.column + 1}"
        return f"not valid YAML in {where}: {' '.join(str(getattr(error, 'problem', '')).split())}"
    if isinstance(error, UnicodeError):
        return "not UTF-8 text"
    if isinstance(error, InterpolationKeyError | InterpolationResolutionError | GrammarParseError):
        return _NO_FIELD
    if isinstance(error, OmegaConfBaseException):
        return "a key or a value is neither text, nor a number, nor a list or section of these"
    if isinstance(error, ValueError) and "digits" in str(error):
        return "a number has thousands of digits: wanted a smaller one"
    return f"not valid YAML: {getattr(error, 'reason', None) or ' '.join(str(error).split())[:100]}"


def packaged_configs() -> dict[str, Path]:
    """Return the configurations that come with the package, by name."""
    return yaml_files(resources.files("sop_faiss.configs"))


def yaml_files(folder: Traversable) -> dict[str, Path]:
    """Return the YAML files in a folder of the package, by name without suffix."""
    return {Path(str(entry)).stem: Path(str(entry)) for entry in folder.iterdir() if str(entry).endswith(".yaml")}


def packaged_suites() -> dict[str, Path]:
    """Return the suites of evaluation tasks that come with the package, by name."""
    return yaml_files(resources.files("sop_faiss.configs") / "eval")


def packaged_settings() -> dict[str, dict[str, Any]]:
    """Return what each packaged configuration sets, by its name and the field's dotted name."""
    return {name: flatten(read_mapping(path)) for name, path in sorted(packaged_configs().items())}


def config_summary(path: Path) -> str:
    """Return what a configuration is for: the first sentence of its opening comment; empty if it has none."""
    comment, _, _ = path.read_text(encoding="utf-8").partition("\n")
    return comment.removeprefix("#").strip().partition(". ")[0].removesuffix(".") if comment.startswith("#") else ""


def find_config(name_or_file: str | Path) -> Path:
    """Return the file of a configuration, given a path that exists, else the name of a packaged one.

    Raises:
        ConfigError: it is neither; the nearest name is suggested.
    """
    return find_file("config", name_or_file, packaged_configs())


def find_file(kind: str, name_or_file: str | Path, packaged: Mapping[str, Path]) -> Path:
    """Return a path that exists, else the packaged file of this name.

    Raises:
        ConfigError: it is neither; the nearest name is suggested.
    """
    path = Path(name_or_file)
    if os.path.isfile(path):  # noqa: PTH113  # Path.is_file() raises on names too long
        return path
    if str(name_or_file) in packaged:
        return packaged[str(name_or_file)]
    near = difflib.get_close_matches(str(name_or_file), packaged, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    what = path_state(path) if str(name_or_file) else "is empty"
    if str(name_or_file) and os.path.isfile(path / "config.yaml"):  # noqa: PTH113
        what += f" (it has {path / 'config.yaml'})"
    raise ConfigError(
        f"{kind} {one_line(str(name_or_file)) or repr('')} {what}: wanted a file, or a packaged one of "
        f"{', '.join(sorted(packaged))}{hint}"
    )


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Parse dotted `key=value` strings into sections of fields.

    Raises:
        ConfigError: one is not of this form, or its value is not YAML.
    """
    pairs = list(overrides)
    for pair in pairs:
        if "=" not in pair or not pair.split("=", 1)[0].strip():
            raise ConfigError(f"override {shown(repr(pair))}: wanted key=value, for example train.batch_size=64")
        try:
            OmegaConf.to_container(OmegaConf.from_dotlist([pair]))
        except Exception as error:
            raise ConfigError(f"override {shown(repr(pair))}: {_unreadable(error)}") from None
    content = OmegaConf.to_container(OmegaConf.from_dotlist(pairs))
    assert isinstance(content, dict)
    _reject_resolvers(content, "overrides")
    return {str(key): value for key, value in content.items()}


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
        _reject_resolvers(nested, origin)
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
    _reject_resolvers(content, origin)
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
        reason = wanted(key) if named or isinstance(error, InterpolationValidationError) else _NO_FIELD
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
