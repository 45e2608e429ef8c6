"""The tables and the page of a study."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sop_faiss.bootstrap import Interval
from sop_faiss.config.study import StudyConfig
from sop_faiss.evaluate.label_free import UNITS
from sop_faiss.report.contact_sheet import Commands, SheetTable
from sop_faiss.report.page import write_page
from sop_faiss.report.plots import Curve
from sop_faiss.report.study_figures import ArmCurves, AxisPoint, draw_axis, draw_curves
from sop_faiss.verbs.study.folder import DONE
from sop_faiss.verbs.study.run_results import RunResult, differences, means, score_names

_GIB = 2.0**30
_ONE_SEED = "(1 seed)"


def _arms(results: Sequence[RunResult]) -> list[str]:
    return list(dict.fromkeys(result.planned.arm.name for result in results))


def _of_arm(results: Sequence[RunResult], arm: str) -> list[RunResult]:
    return [result for result in results if result.planned.arm.name == arm]


def _shown(value: Interval, sign: str = "") -> str:
    """Return a mean with half of its interval; without one that is said."""
    half = (value.high - value.low) / 2
    return f"{value.mean:{sign}.2f} ± {half:.2f}" if math.isfinite(half) else f"{value.mean:{sign}.2f} {_ONE_SEED}"


def _with_unit(score: str, instead: str = "%") -> str:
    return f"{score} ({UNITS.get(score, instead)})"


def mean_table(results: Sequence[RunResult]) -> SheetTable:
    """Tabulate the mean of each score over the seeds of each arm, with its 95 % interval."""
    scores, rows = score_names(results), []
    for arm in _arms(results):
        runs = _of_arm(results, arm)
        done = [result.record for result in runs if result.status == DONE]
        found = means(results, arm)
        rows.append(
            [
                arm,
                f"{len(done)} of {len(runs)}",
                *(_shown(found[score]) if score in found else "-" for score in scores),
                f"{np.mean([record['steps'] for record in done]):,.0f}" if done else "-",
                f"{np.mean([record['seconds'] for record in done]) / 60:.1f}" if done else "-",
                f"{max(record['peak_memory_bytes'] for record in done) / _GIB:.2f}" if done else "-",
            ]
        )
    columns = ["arm", "seeds", *(_with_unit(score) for score in scores), "steps", "minutes", "peak RAM GiB"]
    return SheetTable(columns, rows, "Mean ± 95 % interval over seeds (Student's t)")


def difference_table(results: Sequence[RunResult], compare: str) -> SheetTable:
    """Tabulate how much higher each score of each other arm is than that of one arm, paired by seed."""
    scores, rows = score_names(results), []
    for arm in _arms(results):
        if arm == compare:
            continue
        found = differences(results, arm, compare)
        seeds = max((count for _, count in found.values()), default=0)
        rows.append([arm, str(seeds), *(_shown(found[score][0], "+") if score in found else "-" for score in scores)])
    columns = ["arm", "shared seeds", *(_with_unit(score, "points") for score in scores)]
    return SheetTable(columns, rows, f"Difference to {compare} ± 95 % interval, paired by seed")


def short_commit(commit: str) -> str:
    """Return the first ten digits of a commit, with the `+` of code that was changed after it."""
    return commit[:10] + ("+" if len(commit) > 10 and commit.endswith("+") else "")


def write_study_page(
    path: Path, title: str, study: StudyConfig, results: Sequence[RunResult], tables: Sequence[SheetTable], footer: str
) -> None:
    """Write the page, atomically: tables, a plot per axis, curves, and the runs.

    Raises:
        OSError: the place cannot be written.
    """
    curves = [(x, _curve_charts(results, x)) for x in ("images", "minutes")]
    axes = [(axis, _axis_charts(study, results, number)) for number, axis in enumerate(study.axes)]
    dots = "Mean with 95 % interval over seeds; a small dot is one seed."
    groups = [{"title": axis, "text": dots, "charts": charts} for axis, charts in axes]
    groups += [
        {"title": f"Scores against {x}", "text": _CURVE_TEXTS[x], "charts": charts} for x, charts in curves if charts
    ]
    values: dict[str, Any] = {
        "title": title,
        "commands": Commands(),
        "subtitle": f"{study.base}: {_counted(len(_arms(results)), 'arm')}, {_counted(len(study.seeds), 'seed')}, "
        f"{_budget(study)}.",
        "notices": _notices(results),
        "tables": tables,
        "groups": groups,
        "details": [_run_table(results), _setting_table(study)],
        "footer": footer,
    }
    write_page(path, "study.html", values)


_CURVE_TEXTS = {
    "images": "Mean over seeds; a thin line is one seed.",
    "minutes": "Minutes of training, without start-up and scores. They can be compared only between runs of one "
    "machine that did nothing else.",
}


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _budget(study: StudyConfig) -> str:
    budget = study.budget
    if budget.minutes:
        return f"{budget.minutes:g} minutes of training each"
    count = budget.steps or budget.images
    return f"{count:,} {'steps' if budget.steps else 'images'} each" if count else "each as long as its configuration"


def _notices(results: Sequence[RunResult]) -> list[str]:
    found = [f"Run {result.planned.name} failed: {result.error}" for result in results if result.status == "failed"]
    missing = sum(result.status not in (DONE, "failed") for result in results)
    if missing:
        found.append(f"{missing} of {len(results)} runs are not finished; the same command continues.")
    if len({result.planned.seed for result in results}) == 1:
        found.append("There is one seed: nothing says how much the scores would differ with another one.")
    commits = {short_commit(result.record["commit"]) or "not committed" for result in results if result.status == DONE}
    if len(commits) > 1:
        found.append(f"The runs are of {len(commits)} states of the code: {', '.join(sorted(commits))}.")
    return found


def _axis_charts(study: StudyConfig, results: Sequence[RunResult], number: int) -> list[dict[str, str]]:
    """One chart per score: a line for each combination of the choices of the other axes."""
    axis = list(study.axes)[number]
    choices = list(study.axes[axis])
    values = [value for settings in study.axes[axis].values() for value in settings.values()]
    connected = len(values) == len(choices) and all(type(value) in (int, float) for value in values)
    short = choices[0].partition("=")[0]  # the name of the field, where the choices are its values
    charts = []
    for score in score_names(results):
        lines: dict[str, list[AxisPoint]] = {}
        for arm in study.arms():
            scored = [result.scores[score] for result in _of_arm(results, arm.name) if score in result.scores]
            if scored:
                others = ", ".join(choice for place, choice in enumerate(arm.choices) if place != number)
                point = AxisPoint(choices.index(arm.choices[number]), means(results, arm.name)[score], scored)
                lines.setdefault(others, []).append(point)
        said = "; ".join(
            f"{line} {choices[point.choice]}: {_shown(point.mean)}".strip()
            for line, ps in lines.items()
            for point in ps
        )
        labels = [choice.removeprefix(f"{short}=") for choice in choices]
        charts.append(_chart(score, draw_axis(labels, lines, UNITS.get(score, "%"), connected), said))
    return charts


def _chart(title: str, uri: str, alt: str) -> dict[str, str]:
    return {"title": title, "uri": uri, "caption": "", "alt": alt}


def _curve_charts(results: Sequence[RunResult], x: str) -> list[dict[str, str]]:
    charts = []
    for score in dict.fromkeys(name for result in results for name in result.by_step):
        arms = {arm: _arm_curves(_of_arm(results, arm), score, _PLACES[x]) for arm in _arms(results)}
        drawn = {arm: curves for arm, curves in arms.items() if curves is not None}
        if any(len(curves.mean.steps) > 1 for curves in drawn.values()):
            said = "; ".join(f"{arm}: {curves.mean.values[-1]:.2f} at the end" for arm, curves in drawn.items())
            charts.append(_chart(score, draw_curves(drawn, x, UNITS.get(score, "%")), said))
    return charts


_PLACES: dict[str, Callable[[RunResult], np.ndarray]] = {
    "images": lambda result: result.steps * result.planned.config.train.batch_size,
    "minutes": lambda result: result.seconds / 60,
}


def _arm_curves(results: Sequence[RunResult], score: str, place: Callable[[RunResult], np.ndarray]) -> ArmCurves | None:
    """Return the curves of an arm; the mean is over the seeds that have a step, at the steps that all of them have."""
    measured = [result for result in results if score in result.by_step]
    if not measured:
        return None
    shared = sorted(set.intersection(*({*result.steps} for result in measured)))
    where = [np.isin(result.steps, shared) for result in measured]
    x = np.mean([place(result)[rows] for result, rows in zip(measured, where, strict=True)], axis=0)
    y = np.mean([result.by_step[score][rows] for result, rows in zip(measured, where, strict=True)], axis=0)
    return ArmCurves(Curve(x, y), [Curve(place(result), result.by_step[score]) for result in measured])


def _run_table(results: Sequence[RunResult]) -> SheetTable:
    rows = []
    for result in results:
        record = result.record
        rows.append(
            [
                result.planned.name,
                result.status,
                f"{record['steps']:,}" if "steps" in record else "-",
                f"{record['seconds']:,.1f}" if "seconds" in record else "-",
                str(record.get("device", "-")),
                short_commit(str(record.get("commit", ""))) or "-",
                *(f"{result.scores[score]:.2f}" if score in result.scores else "-" for score in score_names(results)),
            ]
        )
    columns = ["run", "status", "steps", "seconds", "device", "commit", *score_names(results)]
    return SheetTable(columns, rows, "Runs")


def _setting_table(study: StudyConfig) -> SheetTable:
    rows = [["base", study.base], *([name, str(value)] for name, value in study.settings.items())]
    return SheetTable(("setting of all runs", ""), rows, "Settings over the base")
