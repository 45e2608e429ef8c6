"""Sentences and small tables from a run's records: its progress, scores, failures and settings."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sop_faiss.config import Config, flat_settings
from sop_faiss.data.shards.address import hide_secrets
from sop_faiss.errors import SopError
from sop_faiss.files import read_json
from sop_faiss.report.contact_sheet import SheetTable
from sop_faiss.report.plots import METRICS_FILE, Curve
from sop_faiss.report.run_panels import Panel, heading_of
from sop_faiss.train.log.bad_samples import BAD_SAMPLES_FILE
from sop_faiss.train.log.json_lines import read_lines
from sop_faiss.train.verdict import verdict_of

_REASONS_SHOWN = 20
_STOP_VALUES_SHOWN = 40
_LONGEST_VALUE = 300


def run_table(run: Path, config: Config, curves: Mapping[str, Curve], state: Mapping[str, Any]) -> SheetTable:
    """Tabulate the run's progress, data and network; `state` is its last checkpoint's, empty without one."""
    any_curve = max(curves.values(), key=lambda curve: float(curve.steps[-1]))
    step = float(any_curve.steps[-1])
    epoch = _last(curves, "epoch")
    minutes, total = config.train.minutes, state.get("decided_steps")
    of_all = _of_all(config, step, epoch) if not minutes else f" of {total:,}" if isinstance(total, int) else ""
    rows = [["steps", f"{step:,.0f}{of_all}"]]
    if epoch is not None:
        rows.append(["epochs", f"{epoch:,.2f}" if minutes else f"{epoch:,.2f} of {config.train.epochs:,g}"])
    if (images := _last(curves, "images")) is not None:
        rows.append(["images seen", f"{images:,.0f}"])
    rows += [
        ["trained on", hide_secrets(config.data.train)],
        ["backbone", config.model.backbone],
        ["batch size, seed", f"{config.train.batch_size:,}, {config.train.seed}"],
        ["last checkpoint", f"step {state['step']:,}" if "step" in state else "none yet"],
        ["last record", _date((run / METRICS_FILE).stat().st_mtime)],
    ]
    starts = len(list((run / "events").glob("events.out.tfevents.*")))  # each start opens one
    if starts:
        rows.append(["started", "once" if starts == 1 else f"{starts} times (resumed {starts - 1})"])
    rows += [[name, str(state[name])] for name in ("version", "commit") if name in state]
    return SheetTable(("run", ""), rows)


def _of_all(config: Config, step: float, epoch: float | None) -> str:
    """Say the total number of steps, if it follows from step and epoch."""
    if not epoch or not step:
        return ""
    total = max(1, round(config.train.epochs * step / epoch))
    stop = config.train.stop_after_steps
    return f" of {total:,}" + (f" (to stop after {stop:,})" if 0 < stop < total else "")


def _last(curves: Mapping[str, Curve], key: str) -> float | None:
    return float(curves[key].values[-1]) if key in curves else None


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _scores(panels: Sequence[Panel]) -> list[tuple[str, Curve]]:
    """Return name and curve of each score."""
    return [(panel.heading(name), curve) for panel in panels if panel.is_score for name, curve in panel.curves.items()]


def score_table(panels: Sequence[Panel]) -> SheetTable | None:
    """Tabulate each score at step 0, at its best and at the end; None without scores."""
    rows = []
    for name, curve in _scores(panels):
        best = int(curve.values.argmax())
        before = f"{curve.values[0]:.2f}" if curve.steps[0] == 0 else "not measured"
        rows.append(
            [name, before, f"{curve.values[best]:.2f} (step {curve.steps[best]:,.0f})", f"{curve.values[-1]:.2f}"]
        )
    return SheetTable(("score", "step 0", "best", "last"), rows) if rows else None


def say_verdict(panels: Sequence[Panel], state: Mapping[str, Any]) -> str:
    """Say whether training beat step 0, or why that is not known.

    Args:
        state: of its last checkpoint, empty without one.
    """
    verdict = verdict_of(state, heading_of)
    if verdict is not None:
        return f"{verdict.text[0].upper()}{verdict.text[1:]}."
    if not _scores(panels):
        return "Nothing was scored, so that it is not known whether training beat step 0: set evaluate.every_steps."
    return "It is not known yet whether training beats step 0: no later step was compared with it."


def score_notices(panels: Sequence[Panel]) -> list[str]:
    """Report each score that never rose above its value at step 0, or is below it now."""
    notices = []
    for name, curve in _scores(panels):
        if len(curve.steps) < 2 or curve.steps[0] != 0:
            continue
        before, best, now = (f"{value:.2f}" for value in (curve.values[0], curve.values[1:].max(), curve.values[-1]))
        if curve.values[1:].max() <= curve.values[0]:
            notices.append(f"{name}: no later value is above that of step 0 ({before}); the best is {best}.")
        elif curve.values[-1] < curve.values[0]:
            notices.append(f"{name}: the last value, {now}, is below that of step 0 ({before}).")
    return notices


def bad_sample_table(run: Path) -> SheetTable | None:
    """Tabulate bad images by reason; None if there were none."""
    counts: dict[str, int] = {}
    first: dict[str, str] = {}
    for line in read_lines(run / BAD_SAMPLES_FILE):
        reason = str(line.get("reason"))
        counts[reason] = counts.get(reason, 0) + 1
        first.setdefault(reason, str(line.get("key")))
    most = sorted(counts, key=lambda reason: -counts[reason])[:_REASONS_SHOWN]
    rows = [[_short(reason), f"{counts[reason]:,}", _short(first[reason])] for reason in most]
    return SheetTable(("images not read", "times", "first"), rows) if rows else None


def stop_table(run: Path) -> SheetTable | None:
    """Tabulate the single values of the `stopped.json` of a run that stopped itself; None without one."""
    path = run / "stopped.json"
    if not path.is_file():
        return None
    try:
        content = read_json(path)
    except SopError as error:
        return SheetTable(("stopped", ""), [["stopped.json", str(error)]])
    values = content if isinstance(content, dict) else {"": content}
    single = [[_short(key), _short(str(value))] for key, value in values.items() if not isinstance(value, dict | list)]
    return SheetTable(("the run stopped itself", ""), single[:_STOP_VALUES_SHOWN])


def settings_table(config: Config) -> SheetTable:
    """Tabulate the settings that are not the defaults."""
    defaults = flat_settings(Config())
    rows = [
        [name, _show(value), _show(defaults[name])]
        for name, value in flat_settings(config).items()
        if value != defaults[name]
    ]
    return SheetTable(("setting", "here", "default"), rows)


def _show(value: object) -> str:
    if isinstance(value, str):
        return _short(hide_secrets(value)) or "(empty)"
    if isinstance(value, tuple | list):
        return ", ".join(_show(entry) for entry in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
