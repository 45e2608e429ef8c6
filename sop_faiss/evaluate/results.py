"""The JSON that every measuring command writes: what was measured, how, on what, and the numbers."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from typing import Any

FAISS_PACKAGES = ("faiss-gpu", "faiss-cpu", "faiss-gpu-cu12", "faiss-gpu-cu11")
"""PyPI packages that install the module faiss."""


def environment() -> dict[str, str | int | None]:
    """Return versions, platform, number of CPUs, GPU and date; neither host name nor paths.

    Keys: sop_faiss, python, numpy, torch, timm, faiss (versions; None where absent), platform, cpus, gpu (its name, or
    None), date (UTC, ISO 8601).
    """
    faiss_versions = (_version(package) for package in FAISS_PACKAGES)
    return {
        "sop_faiss": _version("sop-faiss"),
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "torch": _version("torch"),
        "timm": _version("timm"),
        "faiss": next((version for version in faiss_versions if version is not None), None),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpu": _gpu_name(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def result_content(
    command: str,
    dataset: str,
    protocol: Mapping[str, Any],
    metrics: Mapping[str, float],
    encoder: Mapping[str, str],
    seconds: float,
    details: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return one measurement as JSON values.

    Args:
        command: as `sop-knn`.
        dataset: as the user named it.
        protocol: every choice that changes the numbers.
        metrics: plain numbers, in percent where the field uses percent.
        encoder: `name` and `fingerprint`.
        seconds: wall-clock time of the measurement.
        details: further keys, such as `per_class` or `per_query`, after the others.
    """
    return {
        "command": command,
        "dataset": dataset,
        "protocol": dict(protocol),
        "metrics": dict(metrics),
        "encoder": {"name": encoder["name"], "fingerprint": encoder["fingerprint"]},
        "environment": environment(),
        "seconds": round(seconds, 3),
        **(details or {}),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
