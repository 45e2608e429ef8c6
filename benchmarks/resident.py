"""How much of a mapped file is in the memory of this process, as Linux counts it."""

from __future__ import annotations

from pathlib import Path


def resident(path: Path) -> int:
    """Return the bytes of a mapped file that are in memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total
