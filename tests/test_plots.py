"""Curves: what is read from metrics.jsonl, and that a figure of it is drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sop_faiss.errors import DataError
from sop_faiss.report import plots
from sop_faiss.report.plots import read_curves


def write_metrics(path: Path, steps: int = 30, level: float = 0.7, tail: str = "", **fixed: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for step in range(1, steps + 1):
        record = {
            "step": step,
            "epoch": 0,
            "loss": 5.0,
            "loss_cls_over_lnK": level + 1 / step,
            "loss_patch_over_lnK": level,
            "teacher_entropy_cls_over_lnK": level,
            "teacher_entropy_patch_over_lnK": level - 0.1,
        }
        if step % 10 == 0:
            record["knn_top1_k20"] = 30 + step
        lines.append(json.dumps(record | fixed))
    path.write_text("\n".join(lines) + "\n" + tail)
    return path


def test_every_number_is_read(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run" / "metrics.jsonl")
    curves = read_curves(tmp_path / "run")
    np.testing.assert_array_equal(curves["loss_cls_over_lnK"].steps, np.arange(1, 31))
    np.testing.assert_allclose(curves["loss_cls_over_lnK"].values, 0.7 + 1 / np.arange(1, 31))
    np.testing.assert_array_equal(curves["knn_top1_k20"].steps, [10, 20, 30])
    np.testing.assert_array_equal(curves["knn_top1_k20"].values, [40, 50, 60])


def test_a_resumed_run_counts_the_later_line(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": value} for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0), (3, 30.0))]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    np.testing.assert_array_equal(read_curves(path)["loss"].values, [1, 20, 30])


def test_a_cut_last_line_nulls_and_words_leave_no_point(tmp_path: Path) -> None:
    path = write_metrics(
        tmp_path / "metrics.jsonl", 3, loss_patch_over_lnK=None, note="x", flag=True, tail='{"step": 4, "lo'
    )
    curves = read_curves(path)
    assert "loss_patch_over_lnK" not in curves and "note" not in curves and "flag" not in curves
    assert len(curves["loss"].steps) == 3
    (tmp_path / "odd.jsonl").write_text('{"step": 1, "loss": NaN}\n\n{"step": 2, "loss": 1.5}\n')
    np.testing.assert_array_equal(read_curves(tmp_path / "odd.jsonl")["loss"].steps, [2])


@pytest.mark.parametrize(
    "line", ["{", "[]", "3", '{"loss": 1}', '{"step": "x"}', '{"step": null}', "\0" * 9, "[" * 100_000]
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(DataError, match="line 2 is damaged"):
        read_curves(path)
    left_out: list[int] = []
    np.testing.assert_array_equal(read_curves(path, left_out)["step"].steps, [1, 3])
    assert left_out == [2]


def test_no_metrics(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl does not exist"):
        read_curves(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    assert read_curves(tmp_path) == {}


def test_long_curves_are_drawn_as_means(tmp_path: Path) -> None:
    steps = np.arange(1000, dtype=np.float64)
    thinned = plots._thinned(plots.Curve(steps, 2 * steps))
    assert len(thinned.steps) == 400
    np.testing.assert_allclose(thinned.values, 2 * thinned.steps)
    assert thinned.steps[0] < 3 and thinned.steps[-1] > 996
