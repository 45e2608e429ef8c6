"""sop-study: run what is missing of a study, and write its results."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sop_faiss.config.load import load_layers
from sop_faiss.config.study import StudyConfig
from sop_faiss.data.demo import write_digits
from sop_faiss.data.ordered_map import processors
from sop_faiss.errors import ConfigError, SopError
from sop_faiss.files import write_json
from sop_faiss.output_checks import require_writable
from sop_faiss.progress import ProgressCallback
from sop_faiss.report.contact_sheet import SheetTable
from sop_faiss.report.markdown import write_markdown
from sop_faiss.train.checkpoints.run_lock import RunLock
from sop_faiss.verbs.study.clock import read_clock
from sop_faiss.verbs.study.final_tasks import open_final_tasks
from sop_faiss.verbs.study.folder import DONE, FAILED, StudyFolder
from sop_faiss.verbs.study.jobs import REQUEUE, Ended, Job, run_on_cluster, run_on_this_machine, write_slurm
from sop_faiss.verbs.study.label_free_tables import has_label_free, label_free_tables
from sop_faiss.verbs.study.plan import PlannedRun, arm_configs, check_arms, plan_runs
from sop_faiss.verbs.study.run_results import RunResult, collect, write_parquet
from sop_faiss.verbs.study.study_page import difference_table, mean_table, write_study_page
from sop_faiss.verbs.training.training_images import training_device

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Where:
    """Where the runs train."""

    command: tuple[str, ...]
    """Words that start a process of sop-study; the study and its options follow."""
    cluster: str | None = None
    """Address of a Ray cluster; None: on this machine."""
    slurm: Path | None = None
    """Nothing is run: the script of a Slurm array is written here."""


@dataclass(frozen=True)
class StudyResult:
    """What there is of a study."""

    results: list[RunResult]
    tables: list[SheetTable]
    """Means, and differences if one arm is compared with others."""
    failed: list[RunResult]
    unfinished: int
    """Runs that were stopped, or that another machine has still to make."""


def run_study(
    study: StudyConfig,
    out: Path,
    where: Where,
    *,
    title: str = "Study",
    compare: str | None = None,
    progress: ProgressCallback | None = None,
    footer: Callable[[], str] = str,
) -> StudyResult:
    """Make every run that is missing, and write the results of all: `study.parquet`, `study.md` and `study.html`.

    Args:
        out: its directory: new, empty, or of the same study, which is continued.
        where: where the runs train.
        compare: arm that the others are compared with; None: the first.
        progress: called with the steps made by all runs and their total.
        footer: returns how and when the page was made.

    Raises:
        ConfigError: the study is impossible, `out` has another one, or `compare` is not an arm.
        DataError: images are missing.
        SopError: as of the parts.
    """
    study, makes_data = _with_made_data(study, out)
    arms = arm_configs(study)
    if compare is not None and compare not in arms:
        raise ConfigError(f"`compare={compare}` is not an arm: wanted one of {', '.join(arms)}")
    if where.slurm is not None:
        require_writable(where.slurm)
        if study.budget.minutes:
            raise ConfigError("`slurm` with budget.minutes: the speed is not known here; use budget.steps or images")
    folder = StudyFolder(out)
    folder.check(study)
    if makes_data and not (out / "data").exists():
        write_digits(out / "data")
    images = check_arms(arms, {name for name, arm in arms.items() if folder.starts_later(name, study, arm.model.init)})
    runs = None if study.budget.minutes else plan_runs(study, arms, images)
    open_final_tasks(study.final, next(iter(arms.values())))
    lock = folder.open(study)
    try:
        if runs is None:
            folder.write_study(study)  # which the trials read
            runs = plan_runs(study, arms, images, _step_seconds(study, folder, where, lock))
        folder.require_same_runs(runs)
        folder.write_study(study)
        folder.write_plans(runs)
        _make_runs(study, folder, runs, where, lock, progress)
        return _write_results(study, folder, runs, title, compare, footer())
    finally:
        lock.release()


def _with_made_data(study: StudyConfig, out: Path) -> tuple[StudyConfig, bool]:
    """Return the study with the built-in images as its data if it names none, and whether it needs them."""
    if not study.made_data or study.settings.get("data.train") or load_layers(study.base, {}).data.train:
        return replace(study, made_data=""), False
    data = out.absolute() / "data"
    made = {"data.train": "train"}
    if "evaluate.test" not in study.settings:
        made |= {"evaluate.train": "train", "evaluate.test": "test"}
    final = study.final
    if "retrieval" in final.tasks and not final.retrieval:
        final = replace(final, retrieval=str(data / "retrieval"))
    settings = {**study.settings, **{name: str(data / part) for name, part in made.items()}}
    return replace(study, settings=settings, final=final, made_data=""), True


def _threads(study: StudyConfig) -> int:
    set_outside = os.environ.get("OMP_NUM_THREADS", "")
    if study.threads == 0 and set_outside.isdecimal():
        return max(1, int(set_outside))
    return study.threads or max(1, processors() // study.jobs)


def _job(folder: StudyFolder, where: Where, kind: str, name: str, log: Path) -> Job:
    study = ("--out", str(folder.root), kind, name)
    return Job(name, (*where.command, str(folder.study_file), *study), log)


def _start(
    jobs: Sequence[Job], study: StudyConfig, where: Where, lock: RunLock, waiting: Any = lambda: None
) -> Generator[Ended, None, None]:
    """Start processes on this machine or on the cluster."""
    if where.cluster is not None:
        gpus = int(any(training_device(config).type == "cuda" for config in arm_configs(study).values()))
        return run_on_cluster(jobs, where.cluster, _threads(study), gpus)
    return run_on_this_machine(jobs, study.jobs, _threads(study), lock.descriptor, waiting)


def _step_seconds(study: StudyConfig, folder: StudyFolder, where: Where, lock: RunLock) -> dict[str, float]:
    """Return the seconds per step of each arm, measured where that is not known yet."""
    arms = [arm.name for arm in study.arms()]
    missing = [arm for arm in arms if not folder.probe(arm).is_file()]
    if missing:
        _log.info("measuring the speed of %d arms", len(missing))
    jobs = [_job(folder, where, "--probe", arm, folder.probe(arm).with_suffix(".log")) for arm in missing]
    with contextlib.closing(_start(jobs, study, where, lock)) as all_ended:
        for ended in all_ended if jobs else ():
            if ended.status != 0:
                raise SopError(f"the trial of arm {ended.name}, which measures its speed, failed: {ended.line}")
    return {arm: folder.step_seconds(arm) for arm in arms}


def _make_runs(
    study: StudyConfig,
    folder: StudyFolder,
    runs: Sequence[PlannedRun],
    where: Where,
    lock: RunLock,
    progress: ProgressCallback | None,
) -> None:
    """Make the runs that are not done; one that fails is recorded, and the others are made."""
    missing = [planned for planned in runs if not folder.is_done(planned.name)]
    jobs = [_job(folder, where, "--run", planned.name, folder.log(planned.name)) for planned in missing]
    if where.slurm is not None:
        if jobs:
            write_slurm(where.slurm, jobs, folder.root / "commands.txt", study.jobs, _threads(study))
        return
    for planned in missing:
        folder.record_file(planned.name).unlink(missing_ok=True)  # of a failure
    if len(missing) < len(runs):
        _log.info("%d of %d runs are done already", len(runs) - len(missing), len(runs))
    total = sum(planned.steps for planned in runs)

    def report() -> None:
        if progress is not None:
            progress(min(total, sum(_steps_done(folder, planned) for planned in runs)), total)

    report()
    if not jobs:
        return
    with contextlib.closing(_start(jobs, study, where, lock, report)) as all_ended:  # closed, it stops the others
        for number, ended in enumerate(all_ended, start=1):
            if ended.status == 0:
                _log.info("run %s is done (%d of %d)", ended.name, number, len(jobs))
            elif ended.status == REQUEUE:
                _log.warning("run %s was saved on a signal and is not finished", ended.name)
            else:
                _log.warning("run %s failed: %s", ended.name, ended.line)
                record = {"status": FAILED, "error": ended.line, "exit": ended.status}
                write_json(folder.record_file(ended.name), record)
            report()


def _steps_done(folder: StudyFolder, planned: PlannedRun) -> int:
    if folder.record_file(planned.name).is_file():
        return planned.steps
    lines = read_clock(folder.clock(planned.name))
    return min(planned.steps, lines[-1][0]) if lines else 0


def _write_results(
    study: StudyConfig, folder: StudyFolder, runs: Sequence[PlannedRun], title: str, compare: str | None, footer: str
) -> StudyResult:
    results = collect(folder, runs)
    tables = [mean_table(results)]
    first = runs[0].arm.name
    if len(study.arms()) > 1:
        tables.append(difference_table(results, compare or first))
    if has_label_free(results):
        tables += label_free_tables(results)
    write_parquet(folder.root / "study.parquet", results)
    write_markdown(folder.root / "study.md", title, tables)
    write_study_page(folder.root / "study.html", title, study, results, tables, footer)
    failed = [result for result in results if result.status == FAILED]
    unfinished = sum(result.status not in (DONE, FAILED) for result in results)
    return StudyResult(results, tables, failed, unfinished)
