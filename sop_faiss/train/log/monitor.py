"""Records of a run: `metrics.jsonl`, TensorBoard events, and bad images."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from sop_faiss.train.log.bad_samples import BadSampleLog
from sop_faiss.train.log.json_lines import keep_lines_until, read_lines
from sop_faiss.train.log.wandb_log import WandbLog


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl` as they were written: a score may come after later steps (`scoring`).

    A last line that a kill has cut is left out.
    """
    return read_lines(run / "metrics.jsonl")


class Monitor:
    """Writes the run's records; only the main rank has one.

    Args:
        run: the run directory.
        resumed_step: records of later steps are dropped, since these steps will be made again; 0: all.
        measured_step: a step whose score will be measured again, so that its line is dropped.
        wandb: gets every line as well.
    """

    def __init__(
        self, run: Path, resumed_step: int = 0, measured_step: int | None = None, wandb: WandbLog | None = None
    ) -> None:
        self.run = run
        self._wandb = wandb
        keep_lines_until(run / "metrics.jsonl", resumed_step, measured_step)
        self.bad_samples = BadSampleLog(run, resumed_step)
        (run / "stopped.json").unlink(missing_ok=True)
        self._stream = (run / "metrics.jsonl").open("a", encoding="utf-8")
        self._board = SummaryWriter(run / "events", purge_step=resumed_step + 1 if resumed_step else 0)
        self._started, self._waited = time.monotonic(), 0.0
        self._images = 0

    def waited(self, seconds: float) -> None:
        """Add time that the loop spent waiting for data."""
        self._waited += seconds

    def log(self, metrics: Mapping[str, float | int]) -> None:
        """Write one line. NaN means that there is no such number: null in the file, no point in TensorBoard.

        There is no mean over the masked patches of a batch without any, no age of an empty memory, and no speed in the
        first line; with NaN all lines of steps have the same keys.
        """
        line = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()
        for key, value in line.items():
            if value is not None and key not in ("step", "epoch", "images"):
                self._board.add_scalar(key, value, int(metrics["step"]))
        if self._wandb is not None:
            self._wandb.log(line)

    def speed(self, images: int) -> dict[str, float]:
        """Return images per second and the fraction of time spent waiting for data, since the last call."""
        now = time.monotonic()
        seconds = max(1e-9, now - self._started)
        result = {
            "images_per_second": (images - self._images) / seconds if self._images else math.nan,
            "data_wait_share": self._waited / seconds,
        }
        self._started, self._waited, self._images = now, 0.0, images
        return result

    def close(self) -> None:
        """Flush everything to disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.close()
