"""Check of this machine for training and search: versions, devices, FAISS against torch, conflicts, and remedies."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

_PACKAGES = (
    "sop-faiss",
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "webdataset",
    "opencv-python-headless",
    "pillow",
    "pyarrow",
    "safetensors",
)
_TIMEOUT_SECONDS = 300.0
_FREE_DISK_BYTES = 2 << 30
_SHARED_MEMORY_BYTES = 1 << 30


class Status(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """It works, but slower or less safely than it could."""
    BROKEN = "broken"
    """Results would be wrong or missing."""


@dataclass(frozen=True)
class Check:
    """One check and its result."""

    name: str
    status: Status
    detail: str
    """What was found, one line."""
    remedy: str = ""
    """What to do, one line; empty if nothing is wrong."""


@dataclass(frozen=True)
class Diagnosis:
    """The results of all checks."""

    versions: dict[str, str | None]
    """None for a package that is not installed."""
    devices: list[dict[str, str]]
    """`name` and `description` of each device torch sees."""
    checks: list[Check]

    @property
    def healthy(self) -> bool:
        """Whether nothing is broken."""
        return all(check.status is not Status.BROKEN for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values."""
        return {"command": "sop-doctor"} | asdict(self) | {"healthy": self.healthy}


def examine() -> Diagnosis:
    """Run all checks. What may crash or hang runs in a separate process."""
    faiss_packages = find_faiss_packages(importlib.metadata.distributions())
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {name: _version(name) for name in _PACKAGES} | faiss_packages
    checks = [check_requirements(_requirements(), _version), check_faiss_packages(faiss_packages)]
    answer = run_probe("cpu", _TIMEOUT_SECONDS)
    checks.append(check_probe("cpu", answer))
    devices: list[dict[str, str]] = []
    if isinstance(answer, dict):
        devices = answer["devices"]
        cards = [device["name"] for device in devices if device["name"].startswith("cuda")]
        checks += [check_probe(card, run_probe(card, _TIMEOUT_SECONDS)) for card in cards]
        checks += [check_cards(len(cards), answer["faiss_gpus"], Path("/dev/nvidia0").exists())]
        checks += check_openmp(answer["openmp"])
    checks += check_space(Path.cwd())
    return Diagnosis(versions, devices, checks)


def find_faiss_packages(distributions: Iterable[importlib.metadata.Distribution]) -> dict[str, str | None]:
    """Return name and version of each installed package that contains the module `faiss`."""
    found: dict[str, str | None] = {}
    for distribution in distributions:
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name == "faiss" or re.fullmatch(r"faiss-(cpu|gpu).*", name):
            found[name] = distribution.version
    return found


def check_faiss_packages(found: dict[str, str | None]) -> Check:
    """Check that exactly one package contains FAISS: two overwrite each other's files, and then work only by chance."""
    described = " and ".join(f"{name} {version}" for name, version in sorted(found.items()))
    wanted = "faiss-gpu" if sys.platform == "linux" and platform.machine() == "x86_64" else "faiss-cpu"
    if len(found) == 1:
        return Check("faiss package", Status.OK, described)
    if not found:
        return Check("faiss package", Status.BROKEN, "FAISS is not installed", f"pip install {wanted}")
    return Check(
        "faiss package",
        Status.BROKEN,
        f"{described} are installed together and overwrite each other's files",
        f"pip uninstall -y {' '.join(sorted(found))} && pip install --no-cache-dir {wanted}",
    )


def check_requirements(requirements: Iterable[str], version_of: Any) -> Check:
    """Compare installed packages with this package's requirements, except FAISS, which has its own check."""
    wrong, names = [], []
    for line in requirements:
        match = re.match(r"([A-Za-z0-9._-]+)\s*(?:>=\s*([0-9.]+))?", line)
        if match is None or ";" in line:  # extras, and what another platform needs
            continue
        name, least = match[1], match[2]
        got = version_of(name)
        names.append(name)
        if got is None:
            wrong.append((name, f"{name} is missing"))
        elif least is not None and _numbers(got) < _numbers(least):
            wrong.append((name, f"{name} is {got}, wanted {least} or newer"))
    if not wrong:
        return Check("packages", Status.OK, f"all {len(names)} requirements are installed")
    remedy = "pip install --upgrade " + " ".join(name for name, _ in wrong)
    return Check("packages", Status.BROKEN, "; ".join(problem for _, problem in wrong), remedy)


def run_probe(device: str, timeout_seconds: float) -> dict[str, Any] | str:
    """Run the self-test of a device in its own process; return its answer, or a sentence on why there is none."""
    command = [sys.executable, "-m", "sop_faiss.verbs.doctor_probe", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return f"the self-test hung for {timeout_seconds:.0f} s"
    if done.returncode == 0:
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return answer
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    ended = f"was killed by signal {-done.returncode}" if done.returncode < 0 else "failed"
    return f"the self-test {ended}: {last[:300]}"


def check_probe(device: str, answer: dict[str, Any] | str) -> Check:
    """Interpret the answer of a self-test."""
    name = f"FAISS on {device}"
    of_the_card = "install a faiss-gpu built for this card, or set neighbors.engine=torch"
    if isinstance(answer, str):
        remedy = "install torch and faiss again; if it hung, try OMP_NUM_THREADS=1" if device == "cpu" else of_the_card
        return Check(name, Status.BROKEN, answer, remedy)
    problems = answer["problems"]
    if not problems:
        return Check(name, Status.OK, "FAISS and torch search exactly; rows stored in a memory are found at once")
    remedy = "install faiss again; see the line `faiss package`" if device == "cpu" else of_the_card
    if all(" by torch in " in problem for problem in problems):
        remedy = "install a torch built for this device; until then set neighbors.engine=faiss"
    return Check(name, Status.BROKEN, "; ".join(problems), remedy)


def check_cards(torch_cards: int, faiss_cards: int, has_driver: bool) -> Check:
    """Check that torch and FAISS see the same GPUs."""
    detail = f"torch sees {torch_cards} CUDA devices, FAISS {faiss_cards}"
    if torch_cards == 0 and has_driver:
        remedy = "install a torch built for this driver's CUDA version (see `nvidia-smi`)"
        return Check("GPUs", Status.WARNING, f"{detail}, though an NVIDIA GPU is present", remedy)
    if faiss_cards < torch_cards:
        remedy = "pip uninstall -y faiss-cpu && pip install faiss-gpu; until then searches run in torch"
        return Check("GPUs", Status.WARNING, detail, remedy)
    return Check("GPUs", Status.OK, detail)


def check_openmp(runtimes: list[str]) -> list[Check]:
    """Check for several kinds of OpenMP in one process: they can deadlock or crash; copies of one kind cost threads."""
    if not runtimes:
        return []
    kinds = sorted({re.split(r"[-.]", Path(path).name)[0] for path in runtimes})
    owners = ", ".join(f"{Path(path).parent.name}/{Path(path).name}" for path in runtimes)
    if len(kinds) > 1:
        remedy = "install torch, numpy and faiss all by pip or all by conda; until then set OMP_NUM_THREADS=1"
        return [Check("OpenMP", Status.WARNING, f"{' and '.join(kinds)} are loaded together ({owners})", remedy)]
    if len(runtimes) == 1:
        return [Check("OpenMP", Status.OK, f"one runtime ({owners})")]
    note = "harmless when torch is imported before faiss, as everywhere here: do so in your own code"
    return [Check("OpenMP", Status.OK, f"{len(runtimes)} copies of {kinds[0]} ({owners}); {note}")]


def check_space(output: Path) -> list[Check]:
    """Check the free disk space for results and temporary files, and the shared memory for data workers."""
    checks = []
    for name, place in (("disk", output), ("temporary files", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(place).free
        low = free < _FREE_DISK_BYTES
        remedy = "free some space, or write elsewhere" if low else ""
        status = Status.WARNING if low else Status.OK
        checks.append(Check(name, status, f"{free / 2**30:.1f} GiB free in {place}", remedy))
    shared = Path("/dev/shm")
    if shared.is_dir():
        usage = shutil.disk_usage(shared)
        low = usage.free < _SHARED_MEMORY_BYTES
        remedy = "start the container with --shm-size=8g, or set data.workers=0" if low else ""
        status = Status.WARNING if low else Status.OK
        checks.append(Check("shared memory", status, f"{usage.free / 2**30:.1f} GiB free in {shared}", remedy))
    return checks


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("sop-faiss") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Parse the release numbers of a version: (2, 14, 1) of `2.14.1+cu130`."""
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
