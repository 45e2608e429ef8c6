"""Results compared on the same queries, and what cannot be compared."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from sop_faiss.cli.retrieve import main
from sop_faiss.errors import DataError
from sop_faiss.evaluate.compare import compare_results
from sop_faiss.report.comparison_figure import draw_comparison
from tests.messages import command_fails


def write_result(path: Path, scores: list[float | None], name: str, **changes: Any) -> Path:
    content: dict[str, Any] = {
        "command": "sop-retrieve",
        "protocol": {"name": "dino", "ground_truth_sha256": "a" * 64, "pooling": "cls"},
        "encoder": {"name": name, "fingerprint": name},
        "per_query": {
            "queries": [f"q{place}" for place in range(len(scores))],
            "AP_medium": scores,
            "AP_hard": [None if value is None else value / 2 for value in scores],
        },
    }
    for key, value in changes.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    first = rng.uniform(10, 90, 30)
    better = first + rng.uniform(0, 4, 30)
    return [
        write_result(tmp_path / "a.json", [*first.tolist(), None], "plain"),
        write_result(tmp_path / "b.json", [*better.tolist(), None], "better", protocol={"pooling": "gem"}),
    ]


def test_means_and_differences(files: list[Path]) -> None:
    comparison = compare_results(files)
    assert comparison.names == ["plain", "better"]
    assert [(setup.metric, setup.queries) for setup in comparison.setups] == [("mAP_medium", 30), ("mAP_hard", 30)]
    medium, hard = comparison.setups
    scores = [json.loads(file.read_text())["per_query"]["AP_medium"][:30] for file in files]
    assert [each.mean for each in medium.scores] == pytest.approx([np.mean(each) for each in scores])
    (paired,) = medium.differences
    assert paired.difference.mean == pytest.approx(np.mean(scores[1]) - np.mean(scores[0]))
    assert paired.difference.low > 0 and (paired.better, paired.worse) == (30, 0)
    assert hard.differences[0].difference.mean == pytest.approx(paired.difference.mean / 2)
    assert comparison.notes == ["better: pooling gem (first: cls)"]


def test_names_that_are_alike(files: list[Path], tmp_path: Path) -> None:
    again = write_result(tmp_path / "c.json", json.loads(files[0].read_text())["per_query"]["AP_medium"], "plain")
    assert compare_results([files[0], again]).names == ["a", "c"]
    assert len(set(compare_results([files[0], files[0]]).names)) == 2


def test_the_command(files: list[Path], tmp_path: Path) -> None:
    plot = tmp_path / "gain.png"
    result = CliRunner().invoke(main, ["--compare", *map(str, files), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert "mAP_medium, 30 queries" in result.stdout and "30/0" in result.stdout and "pooling gem" in result.stdout
    assert "…" not in result.stdout  # also where a table is wider than the 80 columns of a pipe
    assert result.stderr == f"plot: {plot}\n"
    assert min(Image.open(io.BytesIO(plot.read_bytes())).size) > 200
    assert "is read by this command" in command_fails(main, "--compare", *files, "--plot", files[0])
    assert CliRunner().invoke(main, [str(files[0])]).exit_code == 2  # without --compare


def test_the_plot_of_many_results_and_odd_names(files: list[Path], tmp_path: Path) -> None:
    more = [write_result(tmp_path / f"{n}.json", [*np.linspace(n, 90, 30), None], f"$x_{n}$" * 20) for n in range(6)]
    assert min(Image.open(io.BytesIO(draw_comparison(compare_results([*files, *more])))).size) > 300


def test_what_cannot_be_compared(files: list[Path], tmp_path: Path) -> None:
    scores = json.loads(files[0].read_text())["per_query"]["AP_medium"]
    other = tmp_path / "other.json"
    for changes, message in (
        ({"protocol": {"ground_truth_sha256": "b"}}, "different ground truth"),
        ({"protocol": {"name": "revisitop"}}, "different protocol"),
        ({"per_query": {"queries": [str(n) for n in range(31)]}}, "different queries"),
        ({"per_query": {"AP_medium": [1.0] * 31}}, "different counted queries"),
        ({"per_query": {"AP_easy": scores}}, "different difficulties"),
        ({"per_query": {"AP_hard": ["x"] * 31}}, "no scores of its queries"),
        ({"per_query": {"AP_hard": [1.0]}}, "no scores of its queries"),
        ({"per_query": {"AP_hard": [float("nan")] * 31}}, "other.json"),
        ({"per_query": None}, "no scores of its queries"),
        ({"command": "sop-knn"}, "not a result of sop-retrieve"),
    ):
        write_result(other, scores, "other", **changes)
        with pytest.raises(DataError, match=message):
            compare_results([files[0], other])
    with pytest.raises(DataError, match="two or more"):
        compare_results(files[:1])
    with pytest.raises(DataError, match="does not exist"):
        compare_results([files[0], tmp_path / "nowhere.json"])
    with pytest.raises(DataError, match="is a directory: name the file in it"):
        compare_results([files[0], tmp_path])
    other.write_text("{")
    with pytest.raises(DataError, match=r"other\.json"):
        compare_results([files[0], other])
