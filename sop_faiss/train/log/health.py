"""Health of a logged step: spread of embeddings and features, size of the update, peak of memory.

Everything comes from what the step computes in any case. `watching` uses hooks, so that the step itself stays as in the
paper; in steps that are not logged it does nothing.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from sop_faiss import distributed
from sop_faiss.objectives.objective import Learned
from sop_faiss.train.log.embedding_spread import mean_cosine, rankme, view_auc
from sop_faiss.train.state import RunState

MAX_ROWS = 256
"""The most rows whose spread is measured: the solver's time grows with their cube."""


def is_logged(state: RunState, step: int) -> bool:
    """Return whether a step, counted from 1, is logged: multiples of `log_every_steps`, the first and the last."""
    return step % state.config.train.log_every_steps == 0 or step in (1, state.schedules.total_steps)


@contextlib.contextmanager
def watching(state: RunState) -> Iterator[Watch]:
    """Watch the state's next step.

    Yields:
        The watch; ask it for its numbers after the step.
    """
    watch = Watch(state)
    try:
        yield watch
    finally:
        watch.end()


class Watch:
    """Watches one step by hooks on the optimizer, if the step is logged.

    Args:
        state: before the step.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._is_logged = is_logged(state, state.step + 1)
        self._before: list[Tensor] = []
        self._update_norm = math.nan
        self._hooks = []
        if self._is_logged:
            self._hooks = [
                state.optimizer.register_step_pre_hook(self._before_update),
                state.optimizer.register_step_post_hook(self._after_update),
            ]

    def end(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _learning(self) -> list[Tensor]:
        if self._state.is_sharded:
            return []  # a rank has only parts of them
        return [p.detach() for p in self._state.student.parameters() if p.grad is not None]

    def _before_update(self, *unused: Any) -> None:
        self._before = [parameter.clone() for parameter in self._learning()]

    def _after_update(self, *unused: Any) -> None:
        if not self._before:
            return
        change = torch._foreach_norm(torch._foreach_sub(self._learning(), self._before))
        before = torch._foreach_norm(self._before)
        self._before = []
        self._update_norm = float(torch.stack(change).norm() / torch.stack(before).norm())

    def numbers(self, learned: Sequence[Learned]) -> dict[str, float | int]:
        """Return health numbers (docs/metrics.md), the same on all ranks; NaN where there is no such number.

        Args:
            learned: what the parts of the step returned.

        Returns:
            An empty dict unless the step is logged.
        """
        if not self._is_logged:
            return {}
        batch_size = self._state.config.train.batch_size
        newest = next(iter(self._state.objective.watched(max(MAX_ROWS, batch_size)).values())).embeddings
        return {
            "embedding_cosine": mean_cosine(newest[-min(MAX_ROWS, batch_size) :]),
            "embedding_rankme": rankme(newest[-MAX_ROWS:]),
            **_spread_of_features([part.features for part in learned if part.features is not None]),
            "update_norm": self._update_norm,
            "memory_peak_bytes": _memory_peak_bytes(self._state.device),
        }


def _spread_of_features(parts: Sequence[Float[Tensor, "G b f"]]) -> dict[str, float]:
    """Return the spread of at most two global views' features; NaN if no feature of an unmasked view was computed."""
    names = ("feature_cosine", "feature_rankme", "view_auc")
    if not parts:
        return dict.fromkeys(names, math.nan)
    here = torch.cat([part[:2].float() for part in parts], 1)
    features = _some_rows(distributed.gather_equal_rows(here.transpose(0, 1).contiguous()))
    features = F.normalize(features, dim=2)
    last, of_two_views = features[:, -1], features.shape[1] > 1
    auc = view_auc(features[:, 0], features[:, 1]) if of_two_views else math.nan
    return dict(zip(names, (mean_cosine(last), rankme(last), auc), strict=True))


def _some_rows(rows: Float[Tensor, "n views f"]) -> Float[Tensor, "m views f"]:
    """Return at most `MAX_ROWS` rows, evenly spaced: the same ones on any number of ranks."""
    count = min(MAX_ROWS, len(rows))
    return rows[torch.arange(count, device=rows.device) * len(rows) // count]


def _memory_peak_bytes(device: torch.device) -> int:
    """Return the peak of a rank's memory so far: the device's on CUDA, else the process's without its workers."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB elsewhere
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return int(distributed.gather_equal_rows(torch.tensor([peak], device=device)).max())
