"""Settings as users write them, in YAML files and dotted overrides; and the files that come with the package."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from sop_faiss.config.checks import shown
from sop_faiss.errors import ConfigError, one_line
from sop_faiss.paths import path_state

_PLAIN_INTERPOLATION = re.compile(r"\$\{[\w.]+\}")
"""The value of another field. Resolvers such as `${oc.env:NAME}` would let a file read the user's environment."""

NO_FIELD = "${...} wants the name of another field, as ${train.epochs}"
"""What a message says of an interpolation that cannot be filled in."""


def reject_resolvers(value: Any, origin: str, name: str = "") -> None:
    """Refuse `${...}` that is more than the name of a field, anywhere in a value.

    Args:
        value: of a file or an override.
        origin: where it is from, for the message.
        name: of the field.

    Raises:
        ConfigError: there is one.
    """
    if isinstance(value, dict):
        for key, entry in value.items():
            reject_resolvers(entry, origin, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for entry in value:
            reject_resolvers(entry, origin, name)
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
        reject_resolvers(OmegaConf.to_container(loaded), f"{kind} {path}")
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
        return NO_FIELD
    if isinstance(error, OmegaConfBaseException):
        return "a key or a value is neither text, nor a number, nor a list or section of these"
    if isinstance(error, ValueError) and "digits" in str(error):
        return "a number has thousands of digits: wanted a smaller one"
    return f"not valid YAML: {getattr(error, 'reason', None) or ' '.join(str(error).split())[:100]}"


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
    reject_resolvers(content, "overrides")
    return {str(key): value for key, value in content.items()}


def packaged_configs() -> dict[str, Path]:
    """Return the configurations that come with the package, by name."""
    return yaml_files(resources.files("sop_faiss.configs"))


def yaml_files(folder: Traversable) -> dict[str, Path]:
    """Return the YAML files in a folder of the package, by name without suffix."""
    return {Path(str(entry)).stem: Path(str(entry)) for entry in folder.iterdir() if str(entry).endswith(".yaml")}


def packaged_suites() -> dict[str, Path]:
    """Return the suites of evaluation tasks that come with the package, by name."""
    return yaml_files(resources.files("sop_faiss.configs") / "eval")


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
