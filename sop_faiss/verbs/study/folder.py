"""The directory of a study: what is where, and whether it may be continued."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, cast

from sop_faiss.config import flat_settings, load_run_config, to_yaml
from sop_faiss.config.study import StudyConfig, load_study
from sop_faiss.errors import ConfigError, SopError
from sop_faiss.files import read_json, write_file
from sop_faiss.output_checks import refuse_occupied
from sop_faiss.paths import real_path
from sop_faiss.train.checkpoints.run_lock import LOCK_NAME, RunLock
from sop_faiss.verbs.study.plan import PlannedRun

DONE, FAILED = "done", "failed"
_STUDY = "study.yaml"
_MAY_CHANGE = ("jobs", "threads", "seeds", "axes")
"""Parts of a study that may change when it is continued; of seeds and axes none may go."""
_MAY_CHANGE_IN_RUNS = ("data.workers", "data.threads", "data.decoded_cache_bytes", "data.cache_", "train.wandb_project")
"""Settings of a run that change neither its steps nor its scores."""


@dataclass(frozen=True)
class StudyFolder:
    """Where the files of a study are; NAME is `ARM/seed_N`.

    `study.yaml`; `runs/NAME/`, a run directory as of sop-train, and beside it `NAME.yaml`, its planned configuration,
    `NAME.log`, what it said, `NAME.clock.jsonl`, its time, and `NAME.json`, how it ended; and the results.
    """

    root: Path

    @property
    def study_file(self) -> Path:
        """Return the study as it was asked for."""
        return self.root / _STUDY

    def run(self, name: str) -> Path:
        """Return the run directory."""
        return self.root / "runs" / name

    def plan(self, name: str) -> Path:
        """Return the file of the planned configuration."""
        return self.root / "runs" / f"{name}.yaml"

    def log(self, name: str) -> Path:
        """Return the file of what the run said."""
        return self.root / "runs" / f"{name}.log"

    def clock(self, name: str) -> Path:
        """Return the file of the training time."""
        return self.root / "runs" / f"{name}.clock.jsonl"

    def record_file(self, name: str) -> Path:
        """Return the file that says how the run ended."""
        return self.root / "runs" / f"{name}.json"

    def probe(self, arm: str) -> Path:
        """Return the file of an arm's speed."""
        return self.root / "probes" / f"{arm}.json"

    def record(self, name: str) -> dict[str, Any]:
        """Return how a run ended; empty if it has not.

        Raises:
            SopError: the file is damaged.
        """
        file = self.record_file(name)
        if not file.is_file():
            return {}
        return _read_whole(file, _is_record, "the run is finished again")

    def step_seconds(self, arm: str) -> float:
        """Return the seconds of an arm's step, as its trial measured them.

        Raises:
            SopError: the file is damaged.
        """
        content = _read_whole(self.probe(arm), _is_probe, "the speed is measured again")
        return float(content["seconds_per_step"])

    def starts_later(self, arm: str, study: StudyConfig, init: str) -> bool:
        """Return whether an arm is checked by its runs: all have begun, or it starts from one that is not made yet."""
        have_begun = all((self.root / "runs" / arm / f"seed_{seed}").is_dir() for seed in study.seeds)
        start = real_path(init)
        return have_begun or (start.is_relative_to(real_path(self.root / "runs")) and not start.exists())

    def is_done(self, name: str) -> bool:
        """Return whether a run has ended as it should."""
        return self.record(name).get("status") == DONE

    def check(self, study: StudyConfig) -> None:
        """Check that this study may be written here, without writing anything.

        Raises:
            ConfigError: the directory has another study.
            SopError: the directory has something else.
        """
        if self.study_file.is_file():
            self._require_same(study)
            return
        own = {LOCK_NAME, "data"}  # of a study that was stopped before it began
        if not self.root.is_dir() or any(path.name not in own for path in self.root.iterdir()):
            refuse_occupied(self.root)

    def open(self, study: StudyConfig) -> RunLock:
        """Check as `check`, make the directory, and return its lock, which is held.

        Raises:
            ConfigError: as `check`, or a study runs there.
            SopError: as `check`.
        """
        self.check(study)
        self.root.mkdir(parents=True, exist_ok=True)
        lock = RunLock(self.root)
        try:
            lock.acquire()
        except ConfigError:
            raise ConfigError(
                f"a study is running in {self.root}, or its runs are being saved: wait for it or stop it, or choose "
                "another `out`"
            ) from None
        return lock

    def write_study(self, study: StudyConfig) -> None:
        """Write the study."""
        write_file(self.study_file, study.to_yaml())

    def _require_same(self, study: StudyConfig) -> None:
        before = load_study(self.study_file)
        other = f"{self.root} has another study"
        remedy = "choose another `out`, or give the same study"
        for key in study.__dataclass_fields__:
            old, new = getattr(before, key), getattr(study, key)
            if key not in _MAY_CHANGE and old != new:
                raise ConfigError(f"{other} ({key} {_difference(old, new)}): {remedy}")
        gone = [f"seed {seed}" for seed in before.seeds if seed not in study.seeds]
        gone += [
            f"arm {name}" for name in sorted({arm.name for arm in before.arms()} - {arm.name for arm in study.arms()})
        ]
        if gone:
            raise ConfigError(f"{other} (with {gone[0]}): {remedy}; seeds and arms can be added, and none can go")

    def require_same_runs(self, runs: Sequence[PlannedRun]) -> None:
        """Refuse a run that was started with another configuration.

        Raises:
            ConfigError: there is one.
        """
        for planned in runs:
            self._require_same_run(planned)

    def write_plans(self, runs: Sequence[PlannedRun]) -> None:
        """Write the planned configuration of each run."""
        for planned in runs:
            write_file(self.plan(planned.name), to_yaml(planned.config))

    def _require_same_run(self, planned: PlannedRun) -> None:
        file = self.plan(planned.name)
        if not file.is_file() or not (self.run(planned.name).exists() or self.record_file(planned.name).exists()):
            return
        before = flat_settings(load_run_config(file))
        for name, value in flat_settings(planned.config).items():
            old = before[name]
            if old != value and not name.startswith(_MAY_CHANGE_IN_RUNS):
                raise ConfigError(
                    f"run {planned.name} of {self.root} was started with {name} = {old or repr(old)}, "
                    f"not {value or repr(value)}: give the same settings, or choose another `out`"
                )


def _read_whole(file: Path, is_whole: Callable[[dict[str, Any]], bool], remedy: str) -> dict[str, Any]:
    """Read a JSON file of a study; one that is damaged is an error that says what removing it does."""
    content: Any = None
    with contextlib.suppress(SopError):
        content = read_json(file)
    if not isinstance(content, dict) or not is_whole(content):
        raise SopError(f"{file} is damaged: remove it, and {remedy}")
    return content


def _is_record(content: dict[str, Any]) -> bool:
    """Return whether a record has what the results are made of."""
    if content.get("status") == FAILED:
        return isinstance(content.get("error", ""), str)
    scores = content.get("scores")
    if content.get("status") != DONE or not isinstance(scores, dict) or not isinstance(content.get("commit"), str):
        return False
    numbers = [content.get(name) for name in ("steps", "seconds", "peak_memory_bytes")]
    return all(isinstance(number, int | float) for number in (*numbers, *scores.values()))


def _is_probe(content: dict[str, Any]) -> bool:
    seconds = content.get("seconds_per_step")
    return isinstance(seconds, int | float) and 0 < seconds < math.inf


def _difference(old: Any, new: Any) -> str:
    """Say how two values of one part differ."""
    if is_dataclass(old) and is_dataclass(new):
        old, new = asdict(cast(Any, old)), asdict(cast(Any, new))
    if isinstance(old, dict) and isinstance(new, dict):
        key = next(key for key in {**old, **new} if old.get(key) != new.get(key))
        return f"with {key} = {old.get(key, 'not set')} instead of {new.get(key, 'not set')}"
    return f"{old} instead of {new}"
