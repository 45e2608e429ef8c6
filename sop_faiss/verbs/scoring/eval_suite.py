"""Results of several encoders on the same tasks, as one table: JSON, Markdown and a page.

A directory holds `results/MODEL/TASK.json`, as the commands write them, and next to each `TASK.json.asked`, the options
of the task and of the encoder.
The tables are made from these files alone, so that another model adds a column.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sop_faiss.errors import DataError
from sop_faiss.files import write_json
from sop_faiss.report.contact_sheet import Commands, SheetTable
from sop_faiss.report.markdown import write_markdown
from sop_faiss.report.page import write_page

_ASKED = ".json.asked"
_STATE = ".state"


class Leaderboard:
    """The directory of a leaderboard.

    Args:
        directory: new, empty, or one that an earlier suite wrote.

    Raises:
        DataError: it holds something else.
    """

    def __init__(self, directory: Path) -> None:
        if directory.exists() and not directory.is_dir():
            raise DataError(f"{directory} is a file: wanted a new directory, or that of an earlier suite")
        if directory.is_dir() and any(directory.iterdir()) and not (directory / "results").is_dir():
            raise DataError(f"{directory} holds something else than a suite's results: name a new directory")
        self.directory = directory

    def result_file(self, model: str, task: str) -> Path:
        """Return where the result of a task is."""
        return self.directory / "results" / model / f"{task}.json"

    def check_column(self, model: str, encoder: list[str]) -> None:
        """Check that what is there of a model was measured with these options of the encoder.

        Raises:
            DataError: it was measured with others, which one column cannot hold.
        """
        folder = self.directory / "results" / model
        for file in sorted(folder.glob(f"*{_ASKED}")):
            known = _read(file)
            if isinstance(known, dict) and isinstance(known.get("encoder"), list) and known["encoder"] != encoder:
                before, now = (" ".join(map(str, words)) for words in (known["encoder"], encoder))
                raise DataError(f"{folder} was measured with {before}, not {now}: give another `name`, or remove it")

    def is_done(self, model: str, task: str, asked: dict[str, list[str]]) -> bool:
        """Return whether the result of a command is there, and complete."""
        file = self.result_file(model, task)
        return _read(_asked_file(file)) == asked and _checked(file) is not None

    def new_state(self, model: str, task: str, again: bool) -> Path:
        """Return where the state of a training is kept until its result is there, without what it is not to continue.

        Args:
            model: the column.
            task: its name.
            again: whether it starts from the beginning.
        """
        folder = self.result_file(model, task).with_suffix(_STATE)
        if again and (folder.is_symlink() or not folder.is_dir()):
            folder.unlink(missing_ok=True)
        elif again:
            shutil.rmtree(folder, ignore_errors=True)
        return folder

    def accept(self, model: str, task: str, asked: dict[str, list[str]], file: Path) -> None:
        """Make a file the result of a task, in place of an earlier one, and record which command wrote it."""
        result = self.result_file(model, task)
        _asked_file(result).unlink(missing_ok=True)  # a kill now means that it is measured again
        file.replace(result)
        write_json(_asked_file(result), asked)
        shutil.rmtree(result.with_suffix(_STATE), ignore_errors=True)

    def damaged(self) -> list[Path]:
        """Return the files that are in no table, since they are not results of a task."""
        return [file for file in sorted((self.directory / "results").glob("*/*.json")) if _checked(file) is None]

    def results(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the results that are complete: by model, the oldest first, then by task."""

        def age(folder: Path) -> tuple[float, str]:
            return min((file.stat().st_mtime for file in folder.glob("*.json")), default=0.0), folder.name

        folders = sorted((each for each in (self.directory / "results").glob("*") if each.is_dir()), key=age)
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for folder in folders:
            for file in sorted(folder.glob("*.json")):
                if (result := _checked(file)) is not None:
                    found.setdefault(folder.name, {})[file.stem] = result
        return found

    def table(self, first: Sequence[str] = ()) -> SheetTable:
        """Tabulate every metric of every task: a column a model.

        Args:
            first: tasks in their order; others follow by name.
        """
        results = self.results()
        measured = {task for of_model in results.values() for task in of_model}
        tasks = [task for task in first if task in measured] + sorted(measured - set(first))
        rows = []
        for task in tasks:
            of_task = {model: results[model][task] for model in results if task in results[model]}
            for metric in dict.fromkeys(name for result in of_task.values() for name in result["metrics"]):
                cells = [_shown(of_task[model], metric) if model in of_task else "-" for model in results]
                rows.append([f"{task}: {metric}", *cells])
        caption = "Percent, unless a task says otherwise; in brackets the 95 % interval over other test data"
        return SheetTable(["task", *results], rows, caption)

    def write(self, title: str, first: Sequence[str], footer: str) -> SheetTable:
        """Write `leaderboard.json`, `.md` and `.html`, each atomically, and return the table.

        Raises:
            OSError: the place cannot be written.
        """
        table, results = self.table(first), self.results()
        write_json(self.directory / "leaderboard.json", results)
        write_markdown(self.directory / "leaderboard.md", title, [table])
        values = {
            "title": title,
            "commands": Commands(),
            "subtitle": f"{len(results)} models, {len({task for of in results.values() for task in of})} tasks.",
            "notices": [],
            "tables": [table],
            "groups": [],
            "details_title": "Measurements",
            "details": [_details(results)],
            "footer": footer,
        }
        write_page(self.directory / "leaderboard.html", "study.html", values)
        return table


def _asked_file(result: Path) -> Path:
    return result.with_suffix(_ASKED)


def _details(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> SheetTable:
    rows = [
        [model, task, result["command"], result["dataset"], result["encoder"]["name"], f"{result['seconds']:,.0f}"]
        for model, of_model in results.items()
        for task, result in of_model.items()
    ]
    return SheetTable(["model", "task", "command", "data", "encoder", "seconds"], rows, "How each was made")


def _shown(result: Mapping[str, Any], metric: str) -> str:
    """Return a metric of a result, with its interval where the task measures one."""
    if metric not in result["metrics"]:
        return "-"
    interval = result["intervals"].get(metric)
    return f"{result['metrics'][metric]:.2f}" + ("" if interval is None else " [{:.1f}, {:.1f}]".format(*interval))


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _intervals(result: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return the interval of each metric that has one: tasks have them by metric, retrieval below `confidence`."""
    named = {**result.get("confidence", {}), **result.get("intervals", {})}
    given = {name: named.get(name, result.get(f"{name}_interval")) for name in metrics}
    return {name: (float(each[0]), float(each[1])) for name, each in given.items() if each is not None}


def _checked(file: Path) -> dict[str, Any] | None:
    """Read a result; None where the file is damaged, or something else."""
    result = _read(file)
    try:
        numbers = {str(name): float(value) for name, value in result["metrics"].items()}
        texts = {key: str(result[key]) for key in ("command", "dataset")}
        return {
            **result,
            **texts,
            "metrics": numbers,
            "intervals": _intervals(result, numbers),
            "encoder": {"name": str(result["encoder"]["name"])},
            "seconds": float(result["seconds"]),
        }
    except (TypeError, LookupError, ValueError, AttributeError, OverflowError):
        return None
