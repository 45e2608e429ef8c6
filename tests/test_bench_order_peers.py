"""benchmarks/bench_order_peers.py: how an epoch with stops is compared with one without; no loader is run."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("bench_order_peers")


def test_epoch_with_stops_is_compared_step_by_step(bench, monkeypatch):
    monkeypatch.setattr(bench, "IMAGES", 8)
    whole = [[0, 1], [2, 3], [4, 5], [6, 7]]

    def found(ids):
        return list(bench.compared(whole, ids).values())

    assert found(whole) == [4, 4, 4, 0, 0]
    assert found([[0, 1], [3, 2], [5, 4], [6, 7]]) == [4, 2, 4, 0, 0], "another sequence, the same images"
    assert found([[0, 1], [4, 5], [2, 3], [6, 7]]) == [2, 2, 4, 0, 0], "steps change places"
    assert found([[0, 1], [0, 1], [2, 3], [4, 5]]) == [1, 1, 4, 2, 2], "a step is repeated"
    assert found([[0, 1], [2, 3]]) == [2, 2, 2, 0, 4], "the epoch ends early"
    assert found([*whole, [6, 7]]) == [4, 4, 5, 2, 0], "the epoch ends late"


def test_failed_rank_is_one_line(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(bench.sys, "executable", "false")
    with pytest.raises(RuntimeError, match=r"^no output$"):
        bench.run_phase("ours", tmp_path, 2, 0, None, ("", str(tmp_path)))
