"""benchmarks/bench_index_peers.py: what is read from a curve of recall and speed, and the table; no index is built."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("bench_index_peers")


def points(peers, *values):
    return [peers.Point(*each) for each in values]


def test_frontier_is_what_nothing_beats(peers):
    curve = points(peers, (1, 0.5, 100.0), (2, 0.4, 90.0), (4, 0.9, 50.0), (8, 0.9, 40.0), (16, 0.99, 10.0))
    assert [each.setting for each in peers.frontier(curve)] == [1, 4, 16]
    assert peers.frontier([]) == []
    for point in curve:  # the oracle: all pairs
        is_beaten = any(
            other.recall >= point.recall and other.per_second >= point.per_second and other != point for other in curve
        )
        assert (point in peers.frontier(curve)) != is_beaten


def test_speed_between_settings(peers):
    curve = points(peers, (1, 0.5, 400.0), (2, 0.9, 200.0), (4, 1.0, 50.0))
    assert peers.speed_at(curve, 0.95) == pytest.approx(100.0)  # the geometric mean, half way
    assert peers.speed_at(curve, 0.9) == 200.0
    assert peers.speed_at(curve, 0.3) == 400.0, "every setting finds more"
    assert peers.speed_at(curve[:2], 0.95) is None and peers.speed_at([], 0.5) is None
    assert (peers.setting_at(curve, 0.6), peers.setting_at(curve, 0.95), peers.setting_at(curve[:2], 0.95)) == (2, 4, 2)


def test_table_says_who_wins_and_what_is_missing(peers):
    def figures(speed, megabytes, among):
        return {
            "curve": points(peers, (1, 0.5, 2 * speed), (8, 0.95, speed)),
            "among": {"at_random": among if isinstance(among, str) else peers.Point(8, among, 10.0)},
            "resident_megabytes": megabytes,
            **dict.fromkeys(("disk_megabytes", "build_core_seconds", "build_seconds", "open_seconds"), 1.0),
            "made": "made",
            "version": "1",
        }

    table = peers.rows_of(
        "set",
        {
            "ours A": figures(100.0, 30.0, 1.0),
            "ours B": figures(50.0, 10.0, 0.9),
            "other": figures(300.0, 20.0, 0.8),
            "slow": figures(25.0, 40.0, "it has none"),
            "missing": {"not measured": "is not installed"},
        },
    )
    ratios = {row.what: row.ratio for row in table}
    assert list(ratios.values()) == [1.0, 0.5, 3.0, 0.25, None, 0.5, 1.25]
    assert [row.met for row in table[-2:]] == [True, True]
    assert table[3].detail["among 1 % at_random"] == "it has none"
    assert table[4].detail == {"not measured": "is not installed"}
    alone = peers.rows_of("set", {"ours A": figures(100.0, 30.0, 1.0)})
    assert [row.ratio for row in alone] == [1.0, None, None] and alone[-1].met is None
