"""Which exact engine is faster at a run's sizes: found by trying both once (neighbors.engine = auto on CUDA).

Neither is faster everywhere (facebookresearch/faiss#3621). Both are exact, but they round differently, so the choice is
part of the run's state, and the same on all ranks.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sop_faiss import distributed
from sop_faiss.errors import CheckpointError

_log = logging.getLogger(__name__)
ENGINES = ("faiss", "torch")
_ROUNDS = 5  # an odd number, for the median


class EngineTrial:
    """Chooses an engine at the first search.

    Args:
        has_faiss: whether FAISS can search on this rank's device.
        wait: returns when the device has finished all its work.
        clock: returns seconds.
    """

    def __init__(
        self, has_faiss: bool, wait: Callable[[], object], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._has_faiss = has_faiss
        self._wait = wait
        self._clock = clock
        self._winner: str | None = None  # of a trial, in this process or before a resume
        self.engine = "auto"
        """`faiss` or `torch`; `auto` before the first search."""

    def choose(self, searches: Mapping[str, Callable[[], object]], sizes: str) -> str:
        """Return the engine, the same from the first call on, which all ranks must make together.

        Args:
            searches: by engine, the search that is needed now.
            sizes: of the search, for the log.
        """
        if self.engine == "auto":
            if all(distributed.gather_objects(self._has_faiss)):
                if self._winner is None:
                    self._winner = distributed.decide(lambda: self._try(searches, sizes))
                elif distributed.is_main():
                    _log.info("neighbors.engine=auto stays at %s, which the run has chosen earlier", self._winner)
                self.engine = self._winner
            else:  # the log has this rank's reason, from when its memory was made
                self.engine = "torch"
                if self._has_faiss:
                    _log.warning("FAISS cannot search on another rank's device: using exact torch search on all")
        return self.engine

    def _try(self, searches: Mapping[str, Callable[[], object]], sizes: str) -> str:
        """Time both engines once in each round, after one untimed round, and compare the medians."""
        seconds: dict[str, list[float]] = {name: [] for name in ENGINES}
        for timed in [False] + [True] * _ROUNDS:
            for name in ENGINES:
                self._wait()
                started = self._clock()
                searches[name]()
                self._wait()
                duration = self._clock() - started
                if timed:
                    seconds[name].append(duration)
        medians = {name: statistics.median(seconds[name]) for name in ENGINES}
        winner = min(ENGINES, key=medians.__getitem__)
        _log.info(
            "neighbors.engine=auto takes %s: FAISS %.3g ms, torch %.3g ms (%s)",
            winner,
            1000 * medians["faiss"],
            1000 * medians["torch"],
            sizes,
        )
        return winner

    def state_dict(self) -> dict[str, Tensor]:
        """Return the choice of a trial, as a position in `ENGINES`; nothing before a trial."""
        return {} if self._winner is None else {"neighbor_engine": torch.tensor(ENGINES.index(self._winner))}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the choice of an earlier trial; without one there will be a trial.

        Raises:
            CheckpointError: the choice is not one of the engines.
        """
        code = state.get("neighbor_engine")
        if code is not None and (code.numel() != 1 or code.item() not in range(len(ENGINES))):
            raise CheckpointError("the checkpoint's neighbor_engine names no engine: it was changed")
        self._winner = None if code is None else ENGINES[int(code)]
        self.engine = "auto"
