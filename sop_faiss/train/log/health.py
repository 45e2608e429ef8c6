"""What a logged step shows on the side: spread of embeddings and features, size of the update, peak of memory.

All of it comes from what the step computes anyway. `watching` looks on by hooks, so that the step itself stays as the
paper has it; on steps that are not logged it does nothing at all.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from sop_faiss import distributed
from sop_faiss.sop.memory import Memory
from sop_faiss.train.log.embedding_spread import mean_cosine, rankme, view_auc
from sop_faiss.train.state import RunState

__all__ = ["is_logged", "newest_rows", "watching"]

MAX_ROWS = 256
"""Of how many rows spread is told at most: the solver's time grows with their cube."""


def is_logged(state: RunState, step: int) -> bool:
    """Whether a step, counted from 1, writes a line: multiples of `log_every_steps`, the first and the last."""
    return step % state.config.train.log_every_steps == 0 or step in (1, state.schedules.total_steps)


def newest_rows(memory: Memory, count: int) -> Int64[Tensor, " rows"]:
    """Rows of the memory that were stored last, in the order of storing; fewer where it does not hold as many."""
    count = min(count, memory.stored, memory.capacity)
    places = torch.arange(memory.pointer - count, memory.pointer, device=memory.image_ids.device)
    return places % memory.capacity


@contextlib.contextmanager
def watching(state: RunState) -> Iterator[dict[str, float | int]]:
    """Look on while the state's next step is made.

    Yields:
        What was seen, the same on all ranks; filled in when the step is over, and left empty unless it is logged.
    """
    told: dict[str, float | int] = {}
    if not is_logged(state, state.step + 1):
        yield told
        return
    watch = _Watch(state)
    try:
        yield told
    finally:
        watch.end()
    told.update(watch.numbers())


class _Watch:
    """Hooks on the teacher's projector, for the features that go into it, and on the optimizer."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._features: list[Float[Tensor, "views b f"]] = []
        self._before: list[Tensor] = []
        self._update_norm = math.nan
        self._hooks = [
            state.teacher.projector.register_forward_pre_hook(self._see_features),
            state.optimizer.register_step_pre_hook(self._before_update),
            state.optimizer.register_step_post_hook(self._after_update),
        ]

    def end(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()

    def _see_features(self, projector: nn.Module, inputs: tuple[Float[Tensor, "rows f"]]) -> None:
        """Keep the features of at most two global views, which come before those of patches; copied."""
        config = self._state.config
        if self._state.cls is None:
            return  # nobody asks for them
        views = config.views.global_count
        images = config.train.batch_size // distributed.world_size() // config.train.accumulate
        features = inputs[0][: views * images].unflatten(0, (views, images))
        self._features.append(features[:2].detach().to(torch.float32, copy=True))

    def _learning(self) -> list[Tensor]:
        if self._state.is_sharded:
            return []  # a rank has parts of them only
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

    def numbers(self) -> dict[str, float | int]:
        """See docs/metrics.md. NaN is a number that there is none of."""
        memory = next(iter(self._state.levels.values())).memory  # of [CLS], unless its loss is off
        batch = newest_rows(memory, min(MAX_ROWS, self._state.config.train.batch_size))
        return {
            "embedding_cosine": mean_cosine(memory.embeddings[batch]),
            "embedding_rankme": rankme(memory.embeddings[newest_rows(memory, MAX_ROWS)]),
            **self._spread_of_features(),
            "update_norm": self._update_norm,
            "memory_peak_bytes": _memory_peak_bytes(self._state.device),
        }

    def _spread_of_features(self) -> dict[str, float]:
        """Of the batch's images; NaN where no feature of a whole view was computed."""
        names = ("feature_cosine", "feature_rankme", "view_auc")
        if not self._features:
            return dict.fromkeys(names, math.nan)
        features = _some_rows(distributed.gather_rows(torch.cat(self._features, 1).transpose(0, 1).contiguous()))
        features = F.normalize(features, dim=2)
        last, of_two_views = features[:, -1], features.shape[1] > 1
        auc = view_auc(features[:, 0], features[:, 1]) if of_two_views else math.nan
        return dict(zip(names, (mean_cosine(last), rankme(last), auc), strict=True))


def _some_rows(rows: Float[Tensor, "n views f"]) -> Float[Tensor, "m views f"]:
    """At most `MAX_ROWS` of them, evenly spaced: the same ones on any number of ranks."""
    count = min(MAX_ROWS, len(rows))
    return rows[torch.arange(count, device=rows.device) * len(rows) // count]


def _memory_peak_bytes(device: torch.device) -> int:
    """Most that a rank has held so far: of the device's memory on CUDA, of the process without its workers on a CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return int(distributed.gather_rows(torch.tensor([peak], device=device)).max())
