"""The part of the doctor that may crash: it runs in a separate process and writes one line of JSON to stdout.

`python -m sop_faiss.verbs.doctor_probe [DEVICE]` imports what training imports, tests FAISS on the device, and says
which devices and OpenMP runtimes there are.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

_MAPS = Path("/proc/self/maps")
_OPENMP = ("libgomp", "libiomp5", "libomp")


def find_openmp(maps: str) -> list[str]:
    """Find the paths of the OpenMP runtimes in the text of `/proc/PID/maps`; links to one file count once."""
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    named = (path for path in paths if Path(path).name.startswith(_OPENMP))
    return sorted({os.path.realpath(path) for path in named})


def probe(device_name: str) -> dict[str, Any]:
    """Test one device.

    Returns:
        `problems` (sentences), `devices` (name and description of each that torch sees), `faiss_gpus` (count), and
        `openmp` (paths of the runtimes loaded; empty where the system does not say).
    """
    import cv2  # noqa: F401  (used by the data stream; it loads further libraries)
    import torch

    from sop_faiss.neighbors.selftest import count_faiss_gpus, find_problems

    devices = [{"name": "cpu", "description": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"}]
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(number)
        description = f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, compute {facts.major}.{facts.minor}"
        devices.append({"name": f"cuda:{number}", "description": description})
    if torch.backends.mps.is_available():
        devices.append({"name": "mps", "description": "Apple GPU; FAISS searches on the CPU"})
    return {
        "problems": find_problems(torch.device(device_name)),
        "devices": devices,
        "faiss_gpus": count_faiss_gpus(),
        "openmp": find_openmp(_MAPS.read_text(errors="replace")) if _MAPS.exists() else [],
    }


def main() -> None:
    """Answer for the device named on the command line, the CPU by default."""
    answer = probe(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
