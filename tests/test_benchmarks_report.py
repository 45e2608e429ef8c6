"""benchmarks/report.py and bench_step.py: mistakes are one line, and results are not lost; nothing is measured."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from sop_faiss.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def report(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which the module sets
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("report")


def test_json_is_written_into_a_new_folder(report, tmp_path):
    file = tmp_path / "new" / "rows.json"
    report.finish("nothing", [report.Row("one", "other", 1.0, "", None)], json_file=file, record=False)
    assert json.loads(file.read_text())["rows"][0]["ratio"] == 1.0


def test_mistakes_are_one_line_and_faults_keep_their_traceback(report, capsys):
    for error, wanted in ((ConfigError("no such run"), "error: no such run\n"), (KeyError("x"), "KeyError: 'x'\n")):
        report._mistakes_are_one_line(type(error), error, error.__traceback__)
        assert capsys.readouterr().err == wanted


def test_a_wrong_checkout_is_named_before_anything_is_measured(report, tmp_path):
    with pytest.raises(SystemExit, match=r"has no main_ibot\.py: wanted a checkout"):
        importlib.import_module("bench_step").ibot_rows(tmp_path, quick=True, batch_size=None)
