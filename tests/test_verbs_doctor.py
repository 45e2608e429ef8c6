"""The doctor: what each finding means, and one real examination."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from sop_faiss.cli import doctor as command
from sop_faiss.neighbors import selftest
from sop_faiss.neighbors.mirror import NearestRows, RingMirror
from sop_faiss.neighbors.selftest import find_problems
from sop_faiss.verbs import doctor
from sop_faiss.verbs.doctor import (
    Check,
    Diagnosis,
    Status,
    check_cards,
    check_faiss_packages,
    check_openmp,
    check_probe,
    check_requirements,
    check_space,
    find_faiss_packages,
    run_probe,
)
from sop_faiss.verbs.doctor_probe import find_openmp

CPU = torch.device("cpu")


def test_faiss_works_here() -> None:
    assert find_problems(CPU) == []


@pytest.mark.gpu
def test_faiss_works_on_the_gpu() -> None:
    assert find_problems(torch.device("cuda")) == []


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda found: NearestRows(found.similarities + 1e-3, found.rows), "differ by 0.001"),
        (lambda found: NearestRows(found.similarities, found.rows.roll(1, 0)), "differ by"),
        (lambda found: NearestRows(found.similarities, found.rows - 5000), "rows that do not exist"),
        (lambda found: NearestRows(found.similarities, found.rows[:, :1].expand(-1, 20)), "a row twice"),
        (lambda found: NearestRows(found.similarities * torch.nan, found.rows), "differ by nan"),
    ],
)
def test_wrong_searches_are_noticed(monkeypatch: pytest.MonkeyPatch, damage: Any, problem: str) -> None:
    search = RingMirror.search
    monkeypatch.setattr(RingMirror, "search", lambda self, queries, k: damage(search(self, queries, k)))
    problems = find_problems(CPU)
    assert len(problems) == 6 and all(problem in line for line in problems)


def test_a_memory_that_is_not_seen_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stale(RingMirror):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.kept: torch.Tensor | None = None

        def search(self, queries: torch.Tensor, k: int) -> NearestRows:
            self.kept = self.rows.clone() if self.kept is None else self.kept
            self.rows.copy_(self.kept)
            return super().search(queries, k)

    monkeypatch.setattr(selftest, "RingMirror", Stale)
    assert [line.partition(":")[0] for line in find_problems(CPU)] == [
        "search of overwritten rows by FAISS in float32",
        "search of overwritten rows by torch in float32",
        "search of overwritten rows by torch in bf16",
    ]


def distribution(folder: Path, name: str, version: str) -> importlib.metadata.Distribution:
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return importlib.metadata.Distribution.at(place)


def test_two_faiss_packages_are_broken(tmp_path: Path) -> None:
    names = ("faiss_cpu", "Faiss-GPU-cu12", "faissx", "torch")
    found = find_faiss_packages([distribution(tmp_path, name, "1.2") for name in names])
    assert found == {"faiss-cpu": "1.2", "faiss-gpu-cu12": "1.2"}
    check = check_faiss_packages(found)
    assert check.status is Status.BROKEN and check.remedy.startswith("pip uninstall -y faiss-cpu faiss-gpu-cu12 && ")
    assert check_faiss_packages({"faiss-cpu": "1.2"}).status is Status.OK
    assert check_faiss_packages({}).remedy.startswith("pip install faiss-")


def test_requirements() -> None:
    have = {"torch": "2.14.1+cu130", "numpy": "1.9", "click": "8.2.dev1", "jinja2": "3.1"}.get
    lines = [
        "torch>=2.9",
        "click>=8.1",
        "jinja2",
        "faiss-gpu>=1.15; sys_platform == 'linux'",
        'ray; extra == "cluster"',
    ]
    check = check_requirements(lines, have)
    assert check.status is Status.OK and check.detail == "all 3 requirements are installed"
    check = check_requirements([*lines, "numpy>=1.26", "timm>=1.0"], have)
    assert check.status is Status.BROKEN and check.remedy == "pip install --upgrade numpy timm"
    assert check.detail == "numpy is 1.9, wanted 1.26 or newer; timm is missing"


@pytest.mark.parametrize(
    ("code", "timeout", "problem"),
    [
        ("import os; os.abort()", 60.0, "was killed by signal 6"),
        ("raise ImportError('no libfaiss')", 60.0, "failed: ImportError: no libfaiss"),
        ("import sys; sys.exit(3)", 60.0, "failed: no message"),
        ("import time; time.sleep(60)", 0.5, "hung for"),
    ],
)
def test_a_self_test_that_dies_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, code: str, timeout: float, problem: str
) -> None:
    run = subprocess.run
    monkeypatch.setattr(doctor.subprocess, "run", lambda line, **options: run([sys.executable, "-c", code], **options))
    answer = run_probe("cpu", timeout)
    assert isinstance(answer, str) and problem in answer
    check = check_probe("cpu", answer)
    assert check.status is Status.BROKEN and check.remedy and "\n" not in check.detail


def test_what_answers_mean() -> None:
    assert check_probe("cpu", {"problems": []}).status is Status.OK
    by_faiss, by_torch = "exact search by FAISS in float32: wrong", "exact search by torch in bf16: wrong"
    check = check_probe("cuda:0", {"problems": [by_faiss, by_torch]})
    assert check.status is Status.BROKEN and "neighbors.engine=torch" in check.remedy
    assert "neighbors.engine=torch" in check_probe("cuda:0", "the self-test hung").remedy
    assert "install faiss again" in check_probe("cpu", {"problems": [by_faiss]}).remedy
    assert "install a torch" in check_probe("cuda:0", {"problems": [by_torch]}).remedy


def test_cards() -> None:
    assert check_cards(0, 0, False).status is Status.OK
    assert check_cards(2, 2, True).status is Status.OK
    assert "faiss-gpu" in check_cards(2, 0, True).remedy
    assert "nvidia-smi" in check_cards(0, 1, True).remedy


MAPS = """\
55d0-55d1 r-xp 00000000 fe:00 123                        /usr/bin/python3.11
7f00-7f01 r-xp 00000000 fe:00 124                        /site/torch/lib/libgomp.so.1
7f01-7f02 r--p 00000000 fe:00 124                        /site/torch/lib/libgomp.so.1
7f02-7f03 rw-p 00000000 00:00 0
7f03-7f04 r-xp 00000000 fe:00 125                        /a path/faiss_gpu.libs/libgomp-e985.so.1.0.0
7f04-7f05 r-xp 00000000 fe:00 126                        /site/libopenblas.so
7fff-8000 rw-p 00000000 00:00 0                          [stack]
"""


def test_openmp() -> None:
    runtimes = find_openmp(MAPS)
    assert runtimes == ["/a path/faiss_gpu.libs/libgomp-e985.so.1.0.0", "/site/torch/lib/libgomp.so.1"]
    assert check_openmp([]) == []
    (one,) = check_openmp(runtimes[:1])
    (two,) = check_openmp(runtimes)
    (mixed,) = check_openmp([*runtimes, "/conda/lib/libiomp5.so"])
    assert (one.status, two.status, mixed.status) == (Status.OK, Status.OK, Status.WARNING)
    assert "torch is imported before faiss" in two.detail
    assert "libgomp and libiomp5 are loaded together" in mixed.detail and "OMP_NUM_THREADS=1" in mixed.remedy


def test_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(1 << 40, 0, 1 << 20))
    low = check_space(tmp_path)
    assert all(check.status is Status.WARNING and check.remedy for check in low)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(1 << 40, 0, 1 << 39))
    assert all(check.status is Status.OK and not check.remedy for check in check_space(tmp_path))


def test_the_command_really(tmp_path: Path) -> None:
    result = CliRunner().invoke(command.main, ["--json", str(tmp_path / "doctor.json")])
    found = json.loads((tmp_path / "doctor.json").read_text())
    statuses = {check["name"]: check["status"] for check in found["checks"]}
    assert statuses["FAISS on cpu"] == "ok" and statuses["faiss package"] == "ok"
    assert found["healthy"] is (result.exit_code == 0) and found["devices"][0]["name"] == "cpu"
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert "FAISS and torch search exactly" in result.stdout and "testing FAISS" in result.stderr


def test_broken_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check("disk", Status.WARNING, "full", "free some"), Check("faiss package", Status.OK, "fine")]
    monkeypatch.setattr(command, "examine", lambda: Diagnosis({"torch": None}, [], checks))
    result = CliRunner().invoke(command.main, [])
    assert result.exit_code == 0 and "WARNING disk: full\n        -> free some" in result.stdout
    checks.append(Check("FAISS on cpu", Status.BROKEN, "wrong", "install again"))
    result = CliRunner().invoke(command.main, ["--json", "-"])
    assert result.exit_code == 1 and json.loads(result.stdout)["healthy"] is False
