"""A study: a base configuration, arms, seeds, a budget and what is measured at the end; its file and its checks."""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf

from sop_faiss.config.checks import require, require_between, require_finite, require_one_of, shown
from sop_faiss.config.config_files import find_file, parse_overrides, read_mapping, yaml_files
from sop_faiss.config.load import flatten
from sop_faiss.errors import ConfigError

FINAL_TASKS = ("knn", "linear", "retrieval")
_ARM_NAME = re.compile(r"[A-Za-z0-9][\w.,=+-]{0,199}", re.ASCII)
"""An arm's name is the name of a folder."""
_MOST_RUNS = 10_000
_WANTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple[int, ...]: "a list of whole numbers, as [0, 1, 2]",
    tuple[str, ...]: "a list of texts",
}


@dataclass(frozen=True)
class BudgetConfig:
    """How long every run trains: one of the three, else each is as long as its own configuration says.

    With a budget, `train.epochs` is set so that the schedules end with it, and `train.stop_after_steps` to 0.
    """

    steps: int = 0
    """Optimizer updates."""
    images: int = 0
    """Images seen: this many over the batch size of the arm is its number of steps."""
    minutes: float = 0.0
    """Minutes of training, without start-up and scores. A short trial of each arm measures its speed, from which its
    number of steps follows; a run that takes longer nevertheless is stopped at this time (docs/studies.md)."""

    def __post_init__(self) -> None:
        require_finite("budget", self)
        for name in ("steps", "images", "minutes"):
            require(getattr(self, name) >= 0, f"budget.{name} = {getattr(self, name)}: wanted 0 or more")
        given = [name for name in ("steps", "images", "minutes") if getattr(self, name)]
        require(len(given) <= 1, f"budget has {' and '.join(given)}: wanted one of steps, images and minutes")


@dataclass(frozen=True)
class FinalConfig:
    """What is measured of each run's last teacher."""

    tasks: tuple[str, ...] = ()
    """Of `knn`, `linear` and `retrieval`."""
    train: str = ""
    """SRC of the labeled images for `knn` and `linear` (empty: that of `evaluate`)."""
    test: str = ""
    retrieval: str = ""
    """Data set for `retrieval` (empty: that of `evaluate`); its root and protocol are those of `evaluate`."""
    ks: tuple[int, ...] = (20,)
    """Numbers of neighbors for `knn`."""
    linear_epochs: int = 100
    """Epochs of `linear`."""

    def __post_init__(self) -> None:
        for name in self.tasks:
            require_one_of("final.tasks", name, FINAL_TASKS)
        require(len(set(self.tasks)) == len(self.tasks), f"final.tasks = {list(self.tasks)}: wanted each once")
        require(bool(self.ks) and min(self.ks) >= 1, f"final.ks = {list(self.ks)}: wanted numbers of 1 or more")
        require_between("final.linear_epochs", self.linear_epochs, 1, 1_000_000)
        require(bool(self.train) == bool(self.test), "final.train and final.test: wanted both or neither")


@dataclass(frozen=True)
class Arm:
    """One combination of the choices of all axes."""

    name: str
    choices: tuple[str, ...]
    """Of each axis, in order."""
    settings: dict[str, Any]
    """Dotted field -> value."""


@dataclass(frozen=True)
class StudyConfig:
    """Everything that determines a study.

    A file may also have a section `quick` with some of these keys, which take the place of the others for a small size.
    """

    base: str
    """A configuration: a file, else the name of a packaged one."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Dotted field -> value, over the base in every run."""
    axes: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Axis -> choice -> dotted field -> value. In a file, an axis that is the name of a field may be a list of values.
    The arms are all combinations."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """`train.seed` of the runs of each arm."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    final: FinalConfig = field(default_factory=FinalConfig)
    made_data: str = ""
    """`digits`: without `data.train`, the built-in digits are written into the study's directory and used."""
    jobs: int = 1
    """Runs that train at the same time."""
    threads: int = 0
    """CPU threads of each (0: `OMP_NUM_THREADS` where that is set, else the usable cores divided by `jobs`)."""

    def __post_init__(self) -> None:
        require(bool(self.seeds), "seeds is empty: wanted one seed or more")
        for seed in self.seeds:
            require(0 <= seed < 2**63, f"seeds = {list(self.seeds)}: wanted numbers of 0 or more")
        repeated = sorted({seed for seed in self.seeds if self.seeds.count(seed) > 1})
        require(
            not repeated, f"seeds repeats {', '.join(map(str, repeated))}: the same run twice; wanted each seed once"
        )
        require_between("jobs", self.jobs, 1, 1024)
        require_between("threads", self.threads, 0, 1024)
        require(self.made_data in ("", "digits"), f"made_data = {shown(self.made_data)}: wanted digits, or nothing")
        for place, settings in self._all_settings().items():
            require("train.seed" not in settings, f"{place} sets train.seed: name the seeds in `seeds`")
        count = math.prod(len(choices) for choices in self.axes.values()) * len(self.seeds)
        require(count <= _MOST_RUNS, f"the axes and seeds give {count:,} runs: wanted {_MOST_RUNS:,} or fewer")
        self.arms()

    def _all_settings(self) -> dict[str, dict[str, Any]]:
        found = {"settings": self.settings}
        for axis, choices in self.axes.items():
            found |= {f"axes.{axis}.{choice}": settings for choice, settings in choices.items()}
        return found

    def arms(self) -> list[Arm]:
        """Return all combinations of choices; without axes one arm, `base`.

        Raises:
            ConfigError: two axes set one field, or the name of an arm is not one of a folder.
        """
        arms: dict[str, Arm] = {}
        for combination in itertools.product(*(choices.items() for choices in self.axes.values())):
            name = ",".join(choice for choice, _ in combination) or "base"
            settings: dict[str, Any] = {}
            for _, chosen in combination:
                twice = settings.keys() & chosen.keys()
                require(not twice, f"arm {name}: two axes set {', '.join(sorted(twice))}")
                settings |= chosen
            if not _ARM_NAME.fullmatch(name):
                raise ConfigError(
                    f"arm {shown(repr(name))}: wanted a name of at most 200 letters, digits and . , = + - _: name its "
                    "choices, as in axes: {method: {first: {...}, second: {...}}}"
                )
            require(
                name.lower() not in {other.lower() for other in arms}, f"two arms are named {name}: name them apart"
            )
            arms[name] = Arm(name, tuple(choice for choice, _ in combination), settings)
        return list(arms.values())

    def to_yaml(self) -> str:
        """Return the study as a file that `load_study` reads."""
        return OmegaConf.to_yaml(OmegaConf.create(_plain(asdict(self))))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple | list) else value


def packaged_studies() -> dict[str, Path]:
    """Return the studies that come with the package, by name."""
    return yaml_files(resources.files("sop_faiss.studies"))


def find_study(name_or_file: str | Path) -> Path:
    """Return the file of a study, given a path that exists, else the name of a packaged one.

    Raises:
        ConfigError: it is neither; the nearest name is suggested.
    """
    return find_file("study", name_or_file, packaged_studies())


def load_study(name_or_file: str | Path, overrides: Iterable[str] = (), *, quick: bool = False) -> StudyConfig:
    """Read a study, apply its `quick` section and dotted overrides, and check it.

    Args:
        name_or_file: a YAML file, else the name of a packaged study.
        overrides: `key=value` strings: keys of the study (`seeds=[0,1]`, `budget.steps=100`), else fields of the
            configuration, which go to `settings`.
        quick: use the section `quick`.

    Raises:
        ConfigError: an unknown key, a wrong type, or an impossible value. Fields of the configuration are checked when
            the runs are planned.
    """
    path = find_study(name_or_file)
    origin = f"study {path}"
    content = read_mapping(path, "study")
    smaller = content.pop("quick", None)
    if quick:
        require(isinstance(smaller, dict), f"{origin} has no small size: leave --quick out, or add a section quick")
        content = {**content, **(smaller or {})}
    given = parse_overrides(overrides)
    own = {entry.name for entry in fields(StudyConfig)}
    ours = {key: value for key, value in given.items() if key in own}
    others = {key: value for key, value in given.items() if key not in own}
    for name, value in _section(ours.get("budget"), "budget").items():
        require(value != 0, f"budget.{name} = {shown(value)}: wanted more than 0")
    content = _replaced(content, {**ours, "settings": {**_section(ours.get("settings"), "settings"), **others}})
    return _parsed(content, origin)


def _replaced(content: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a study with overrides: of `settings` and `final` by field, of others as a whole."""
    result = {**content, **other}
    for key in ("settings", "final"):
        if key in other:
            result[key] = {**flatten(_section(content.get(key), key)), **flatten(_section(other[key], key))}
    return result


def _section(value: Any, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{name} = {shown(value)}: wanted settings by name, as {name}: {{...}}")
    return {str(key): entry for key, entry in value.items()}


def _parsed(content: dict[str, Any], origin: str) -> StudyConfig:
    try:
        built: StudyConfig = _built(StudyConfig, content)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None
    return built


def _built(kind: Any, content: dict[str, Any], prefix: str = "") -> Any:
    """Build a dataclass from plain values, with every type checked."""
    types = get_type_hints(kind)
    values = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if key not in types:
            near = difflib.get_close_matches(key, types, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            raise ConfigError(f"unknown key {shown(repr(name))}: wanted some of {', '.join(types)}{hint}")
        if key == "axes":
            values[key] = _axes(value)
        elif key == "settings":
            values[key] = flatten(_section(value, name))
        elif is_dataclass(types[key]):
            values[key] = _built(types[key], _section(value, name), f"{name}.")
        else:
            values[key] = _checked(value, types[key], name)
    if kind is StudyConfig:
        require(bool(values.get("base")), "base is missing: wanted a configuration file, or the name of a packaged one")
    return kind(**values)


def _checked(value: Any, kind: Any, name: str) -> Any:
    """Return a value as its type, or refuse it."""
    inner = get_args(kind)
    if inner and isinstance(value, list):
        return tuple(_checked(entry, inner[0], name) for entry in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**63 else math.inf
    if inner or not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} = {shown(_text(value))}: wanted {_WANTED[kind]}")
    return value


def _axes(value: Any) -> dict[str, dict[str, dict[str, Any]]]:
    axes = {}
    given = _section(value, "axes")
    for axis, choices in given.items():
        if isinstance(choices, list):
            short = _short_name(axis, given)
            named = [(f"{short}={_text(each)}", {axis: each}) for each in choices]
        elif isinstance(choices, dict):
            named = [(str(name), flatten(_section(each, f"axes.{axis}.{name}"))) for name, each in choices.items()]
        else:
            raise ConfigError(
                f"axes.{axis} = {shown(_text(choices))}: wanted a list of values of a field, or named choices"
            )
        require(bool(named), f"axes.{axis} is empty: wanted a value or more")
        names = [name for name, _ in named]
        for name in names:
            require(names.count(name) == 1, f"axes.{axis} has {shown(name)} twice: the same run twice; wanted it once")
        axes[axis] = dict(named)
    return axes


def _short_name(axis: str, axes: Mapping[str, Any]) -> str:
    """Return the last parts of a field's name that tell it from the other axes."""
    parts = axis.split(".")
    for count in range(1, len(parts)):
        short = ".".join(parts[-count:])
        if sum(other == short or other.endswith(f".{short}") for other in axes) == 1:
            return short
    return axis


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)
