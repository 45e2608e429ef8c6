"""An index with its images and its run, and `sop-index serve` over it in a process of its own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sop_faiss.data.images.source import open_source
from sop_faiss.features.extract import extract_features
from sop_faiss.index.build import build_index
from sop_faiss.model.encoders.load import load_encoder
from tests.encoders import write_run
from tests.images import write_folder

__all__ = ["serve_index", "write_served"]


def write_served(root: Path, classes: int = 3, per_class: int = 12) -> Path:
    """Write `run`, `photos/class_N/` and `index` below `root`."""
    write_run(root / "run")
    write_folder(root / "photos", classes=classes, per_class=per_class)
    store = extract_features(load_encoder(str(root / "run")), open_source(root / "photos"))
    build_index(store, root / "index")
    return root


@contextlib.contextmanager
def serve_index(*arguments: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The page's address, and the process; it is ended by Ctrl-C."""
    words = [sys.executable, "-m", "sop_faiss.cli.index", "serve", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = ""
        while "http://" not in line:
            line = process.stderr.readline()
            assert line, f"the server ended with status {process.wait()}"
        yield line.split()[0], process
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(30)
    finally:
        process.kill()
        process.communicate()
