"""Judge numbers without labels by finished studies: the run that each would have kept, and the step to stop at.

    python benchmarks/label_free_rules.py STUDY... [--numbers DIR]

STUDY is a directory of sop-study whose runs have scores with labels. Each of four runs or more gets a table of which
run to keep, and one is of all together, with ranks within each study. When to stop is pooled over all runs of all
studies. For runs without `evaluate.label_free`, DIR/STUDY/ARM/seed_N/STEP.json adds the numbers of a step that was
scored, as `sop-eval label-free --json` writes them of a checkpoint (step 0: --model config:NAME --random-weights N).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import report as report  # mistakes are one line
from scipy.stats import rankdata

from sop_faiss.config.study import load_study
from sop_faiss.evaluate.stopping import NUMBERS, merit
from sop_faiss.files import read_json
from sop_faiss.report.contact_sheet import SheetTable
from sop_faiss.report.markdown import write_markdown
from sop_faiss.verbs.study.folder import DONE, StudyFolder
from sop_faiss.verbs.study.label_free_tables import keep_table, labeled_scores, stop_table
from sop_faiss.verbs.study.plan import PlannedRun
from sop_faiss.verbs.study.run_results import RunResult, collect


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", type=Path)
    parser.add_argument("--numbers", type=Path)
    parser.add_argument("--out", type=Path, default=Path("label_free_rules.md"))
    arguments = parser.parse_args()
    tables: list[SheetTable] = []
    pooled: list[RunResult] = []
    ranked: list[RunResult] = []
    for place in arguments.studies:
        found = [
            _with_numbers(result, None if arguments.numbers is None else arguments.numbers / place.name)
            for result in _results(place)
            if result.status == DONE
        ]
        named = [_as_score(result) for result in found]
        if len(found) >= 4:
            table = keep_table(found, labeled_scores(found)[0])
            tables.append(replace(table, caption=f"{place.name}: {table.caption}"))
            ranked += _ranked(named)
        pooled += named
    together = keep_table(ranked, "score")
    rows = [row[:-1] for row in together.rows]
    tables.append(SheetTable(together.columns[:-1], rows, "Which run to keep: ranks within each study, pooled"))
    tables.append(stop_table(pooled, "score"))
    write_markdown(arguments.out, "Numbers without labels", tables)
    print(arguments.out.read_text(encoding="utf-8"))


def _results(place: Path) -> list[RunResult]:
    study = load_study(place / "study.yaml")
    runs = [PlannedRun(arm, seed, None, 0) for arm in study.arms() for seed in study.seeds]  # type: ignore[arg-type]
    return collect(StudyFolder(place), runs)


def _with_numbers(result: RunResult, folder: Path | None) -> RunResult:
    numbers: dict[str, np.ndarray] = {}
    for place, step in enumerate(result.steps.astype(int).tolist()):
        if folder is None:
            break
        file = folder / result.planned.name / f"{step}.json"
        if file.is_file():
            for name, value in read_json(file)["metrics"].items():
                numbers.setdefault(name, np.full(len(result.steps), np.nan))[place] = value
    return replace(result, logged={**result.logged, **numbers})


def _as_score(result: RunResult) -> RunResult:
    """Name the first score with labels alike in all studies."""
    return replace(result, by_step={"score": result.by_step[labeled_scores([result])[0]]})


def _ranked(results: list[RunResult]) -> list[RunResult]:
    """Replace each number's last value by its merit's rank among the runs of one study, from 0 to 1."""
    kinds = ("by_step", "logged")
    found: list[dict[str, Any]] = [{kind: {} for kind in kinds} for _ in results]
    for kind in kinds:
        for name in dict.fromkeys(name for result in results for name in getattr(result, kind)):
            last = np.array([getattr(result, kind).get(name, [np.nan])[-1] for result in results])
            ranks = rankdata(merit(name, last), nan_policy="omit") / len(results)
            for numbers, rank in zip(found, ranks, strict=True):
                numbers[kind][name] = np.array([_UNMERIT[NUMBERS.get(name, "highest")](rank)])
    one = np.zeros(1)
    return [replace(result, steps=one, **numbers) for result, numbers in zip(results, found, strict=True)]


_UNMERIT = {"highest": lambda rank: rank, "lowest": lambda rank: -rank, "nearest to 1": lambda rank: 2 - rank}
"""A value that has this rank as its merit, but for a constant."""


if __name__ == "__main__":
    main()
