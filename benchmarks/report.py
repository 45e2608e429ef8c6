"""The parts shared by all benchmarks: interleaved timing, one table, JSON, and the record in RESULTS.md.

A row is a ratio measured in one run, on one machine, against what a user would otherwise use.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sop_faiss.data.ordered_map import processors
from sop_faiss.errors import SopError

__all__ = ["Row", "environment", "extra_peak_bytes", "finish", "interleaved_medians", "meets", "vector_flags"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
PACKAGES = ("torch", "torchvision", "timm", "faiss-gpu", "faiss-cpu", "numpy")


def _mistakes_are_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a mistake of the user without a traceback, as the commands do."""
    if isinstance(error, OSError) and error.filename is not None:
        print(f"error: {error.strerror}: {error.filename}", file=sys.stderr)
    elif isinstance(error, SopError):
        print(f"error: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _mistakes_are_one_line


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table."""

    what: str
    against: str
    ratio: float | None
    """None: not measured; `detail` says why."""
    target: str
    """`>= 5` or `<= 0.5`; empty where there is none."""
    met: bool | None
    """See `meets`."""
    detail: dict[str, Any] = field(default_factory=dict)
    """Figures behind the ratio, with units in their names."""


def meets(ratio: float | None, target: str) -> bool | None:
    """Return whether a ratio meets `>= x` or `<= x`; None without a ratio or a target."""
    if ratio is None or not target:
        return None
    sign, value = target.split()
    if sign not in (">=", "<="):
        raise ValueError(f"target {target!r}: wanted '>= x' or '<= x'")
    return bool(ratio >= float(value) if sign == ">=" else ratio <= float(value))


def interleaved_medians(
    functions: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    warm_up: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the median seconds per call of each function; all run once per round, so that a slow minute affects all.

    Args:
        functions: what to time, by name; called in this order in every round.
        repeats: number of timed rounds, 1 or more.
        warm_up: run one round untimed first.
        clock: seconds; `time.process_time` for processor time, independent of other work on the machine.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(-1 if warm_up else 0, repeats):
        for name, function in functions.items():
            _wait_for_device()
            started = clock()
            function()
            _wait_for_device()
            if repeat >= 0:
                seconds[name].append(clock() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def extra_peak_bytes(work: Callable[[], object]) -> int:
    """Return how far resident memory rises during a piece of work above what was there before; Linux alone."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    before = _resident_bytes("VmRSS")
    work()
    return _resident_bytes("VmHWM") - before


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def environment() -> dict[str, Any]:
    """Return where and with what the numbers were measured; no host name and no path."""
    versions = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "command": _command(),
        "machine": f"{_processor()}, {processors()} cores" + (f", {cuda}" if cuda else ""),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **versions},
    }


def finish(topic: str, rows: list[Row], *, json_file: Path | None, record: bool) -> None:
    """Print the table, write the JSON, append to RESULTS.md."""
    where = environment()
    table = Table("what", "against", "ratio", "target", "met", title=f"{topic} ({where['machine']})")
    for row in rows:
        table.add_row(row.what, row.against, *_cells(row))
    console = Console()
    console.print(table)
    for row in rows:
        console.print(f"{row.what}: {_details(row)}", markup=False, highlight=False)
    if json_file is not None:
        content = {"environment": where, "rows": [asdict(row) for row in rows]}
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(content, indent=2) + "\n")
    if record:
        with RESULTS.open("a") as file:
            file.write(_record(topic, rows, where))


def _record(topic: str, rows: list[Row], where: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    lines = [
        "",
        f"## Benchmark: {topic} ({where['date']}, commit {where['commit']})",
        "",
        f"    {where['command']}",
        "",
        f"{where['machine']}, {where['threads']} threads, {where['system']}; {versions}.",
        "",
        "| what | against | ratio | target | met | detail |",
        "|---|---|---|---|---|---|",
        *(f"| {row.what} | {row.against} | {' | '.join(_cells(row))} | {_details(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> tuple[str, str, str]:
    met = {True: "yes", False: "NO", None: "-"}[row.met]
    return ("-" if row.ratio is None else _short(row.ratio), row.target or "-", met)


def _details(row: Row) -> str:
    return "; ".join(f"{name} {_short(value)}" for name, value in row.detail.items())


def _short(value: object) -> str:
    """Three significant digits, never in exponents above one."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _commit() -> str:
    try:
        changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/RESULTS.md")  # which `--record` itself changes
        return _git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _command() -> str:
    """The command line, without the folders of this machine."""
    words = [Path(word).name if word.startswith(("/", "~")) else word for word in sys.argv[1:]]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def vector_flags() -> str:
    """Return which vector instructions the processor has, as Linux names them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return " ".join(flag for flag in flags if flag.startswith(("avx", "fma", "f16c", "amx", "popcnt", "asimd", "sve")))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
