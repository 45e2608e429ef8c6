"""Curves: what is read from metrics.jsonl, and that a figure of it is drawn."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sop_faiss.errors import DataError
from sop_faiss.report import plots
from sop_faiss.report.plots import plot_training, read_curves


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


def drawn(png: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(png))
    assert image.format == "PNG"
    return np.asarray(image.convert("RGB"), np.int64)


def has_color(image: np.ndarray, color: str) -> bool:
    rgb = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return bool((np.abs(image - rgb).max(axis=2) < 12).any())


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
    with pytest.raises(DataError, match="no metrics to draw yet"):
        plot_training({"run": tmp_path})
    with pytest.raises(DataError, match="no metrics to draw yet"):
        plot_training({})


def test_several_runs_with_seeds_have_a_color_each(tmp_path: Path) -> None:
    runs = {
        name: [
            write_metrics(tmp_path / name / str(seed) / "metrics.jsonl", level=0.3 + 0.2 * number + seed / 20)
            for seed in (0, 1)
        ]
        for number, name in enumerate(("random", "fixed rows", "fixed vectors"))
    }
    png = plot_training(runs, tmp_path / "deep" / "curves.png", title="Anchors")
    assert (tmp_path / "deep" / "curves.png").read_bytes() == png
    image = drawn(png)
    assert image.shape[1] > 2 * image.shape[0]
    for color in plots.COLORS[:3]:
        assert has_color(image, color)
    assert not has_color(image, plots.COLORS[3])


def test_panels_without_numbers_are_left_out(tmp_path: Path) -> None:
    whole = drawn(plot_training({"": write_metrics(tmp_path / "a.jsonl")}))
    without_knn = drawn(plot_training({"": write_metrics(tmp_path / "b.jsonl", 5)}))
    assert without_knn.shape[1] < whole.shape[1]
    single = drawn(plot_training({"": write_metrics(tmp_path / "c.jsonl", 1)}))
    assert has_color(single, plots.COLORS[0])


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    path = write_metrics(tmp_path / "metrics.jsonl")
    assert plot_training({"a": path}) == plot_training({"a": path})


def test_any_name_can_stand_in_the_legend(tmp_path: Path) -> None:
    path = write_metrics(tmp_path / "metrics.jsonl", 3)
    names = ("$x_{", "_hidden", "日本語", "<b>", "a\nb", "%s {0}", " ")
    drawn(plot_training(dict.fromkeys(names, path), title="$y_{"))


def test_more_runs_than_colors(tmp_path: Path) -> None:
    path = write_metrics(tmp_path / "metrics.jsonl", 3)
    drawn(plot_training({f"run {number}": path for number in range(9)}))


def test_long_curves_are_drawn_as_means(tmp_path: Path) -> None:
    steps = np.arange(1000, dtype=np.float64)
    thinned = plots._thinned(plots.Curve(steps, 2 * steps))
    assert len(thinned.steps) == 400
    np.testing.assert_allclose(thinned.values, 2 * thinned.steps)
    assert thinned.steps[0] < 3 and thinned.steps[-1] > 996
    drawn(plot_training({"long": write_metrics(tmp_path / "metrics.jsonl", 1500)}))
