"""benchmarks/report.py and bench_step.py: mistakes are one line, and results are not lost; nothing is measured."""

from __future__ import annotations

import errno
import importlib
import json
import re
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
    for error, wanted in (
        (ConfigError("no such run"), "error: no such run\n"),
        (FileNotFoundError(errno.ENOENT, "No such file", "photos"), "error: No such file: photos\n"),
        (KeyError("x"), "KeyError: 'x'\n"),
        (OSError("odd"), "OSError: odd\n"),
    ):
        report._mistakes_are_one_line(type(error), error, error.__traceback__)
        assert capsys.readouterr().err == wanted


def test_a_wrong_checkout_is_named_before_anything_is_measured(report, tmp_path):
    with pytest.raises(SystemExit, match=r"has no main_ibot\.py: wanted a checkout"):
        importlib.import_module("bench_step").ibot_rows(tmp_path, quick=True, batch_size=None)


def test_every_script_reports_mistakes_so():
    files = [path for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "index_peers"]  # NumPy alone
    scripts = {path.name: text for path in files if '__name__ == "__main__"' in (text := path.read_text())}
    reporting = re.compile(r"^ *(from|import) (report|bench_index)\b|^@run_command", re.MULTILINE)
    assert len(scripts) > 30 and [name for name, text in scripts.items() if not reporting.search(text)] == []
