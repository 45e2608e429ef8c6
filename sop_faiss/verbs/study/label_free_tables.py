"""The tables of a study that judge numbers without labels by scores with labels: the run and the step they pick."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from sop_faiss.bootstrap import Interval
from sop_faiss.evaluate.stopping import NUMBERS, merit, when_to_stop, which_run
from sop_faiss.report.contact_sheet import SheetTable
from sop_faiss.verbs.study.folder import DONE
from sop_faiss.verbs.study.run_results import RunResult


def has_label_free(results: Sequence[RunResult]) -> bool:
    """Return whether a number without labels was measured next to a score with labels."""
    return any(NUMBERS.keys() & result.by_step.keys() and labeled_scores([result]) for result in results)


def label_free_tables(results: Sequence[RunResult]) -> list[SheetTable]:
    """Tabulate, for each score with labels, which run and which step each number without labels would have picked.

    Only finished runs count.
    """
    done = [result for result in results if result.status == DONE and len(result.steps)]
    tables = [make(done, score) for score in labeled_scores(done) for make in (keep_table, stop_table)]
    return [table for table in tables if table.rows]


def labeled_scores(results: Sequence[RunResult]) -> list[str]:
    """Return the scores with labels that were measured while training."""
    return list(dict.fromkeys(name for result in results for name in result.by_step if name not in NUMBERS))


def keep_table(results: Sequence[RunResult], score: str) -> SheetTable:
    """Tabulate how well each number at the end of the runs says which of them has the best score there."""
    judged = [result for result in results if score in result.by_step]
    last, rows = np.array([result.by_step[score][-1] for result in judged]), []
    for name, rule in NUMBERS.items():
        found = which_run(np.array([_merits(result, name)[-1] for result in judged]), last)
        if found is not None:
            shown = map(_shown, (found.spearman, found.kendall, found.regret))
            rows.append([name, rule, str(found.runs), *shown])
    known = last[np.isfinite(last)]
    about = f"best {known.max():.2f}, at random {known.max() - known.mean():.2f} points below" if len(known) else "-"
    caption = f"Which run to keep, judged by {score} at the end ({about}); 95 % bootstrap over runs"
    return SheetTable(["number without labels", "rule", "runs", "Spearman", "Kendall", "regret"], rows, caption)


def stop_table(results: Sequence[RunResult], score: str) -> SheetTable:
    """Tabulate how good the step is at which each number would have stopped a run; the last row is the last step."""
    judged, rows = [result for result in results if score in result.by_step], []
    for name, rule in (*NUMBERS.items(), ("step", "last")):
        found = when_to_stop([(_merits(result, name), result.by_step[score]) for result in judged])
        if found is not None:
            shown = map(_shown, (found.spearman, found.regret, found.over_last, found.over_first))
            rows.append([name, rule, str(found.runs), *shown])
    caption = f"When to stop, judged by {score} at the step picked (points); 95 % bootstrap over runs"
    columns = ["number without labels", "rule", "runs", "Spearman", "regret", "over the last step", "over step 0"]
    return SheetTable(columns, rows, caption)


def _merits(result: RunResult, name: str) -> Float64[np.ndarray, " m"]:
    """Return the merit at each scored step; a number of training is that of the newest logged step until then."""
    if name == "step":
        return result.steps
    missing = np.full(len(result.steps), np.nan)
    return merit(name, result.by_step.get(name, result.logged.get(name, missing)))


def _shown(value: Interval) -> str:
    return "-" if math.isnan(value.mean) else f"{value.mean:.2f} [{value.low:.2f}, {value.high:.2f}]"
