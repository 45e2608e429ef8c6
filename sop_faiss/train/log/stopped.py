"""When a run stops itself: `stopped.json` has what led to it. Checkpoints stay as they are."""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from sop_faiss import distributed
from sop_faiss.errors import RunStoppedError
from sop_faiss.files import write_json
from sop_faiss.model.checkpoint import checkpoint_directories
from sop_faiss.objectives.objective import Watched
from sop_faiss.train.parallel import here, is_sharded
from sop_faiss.train.state import RunState

_log = logging.getLogger(__name__)

STOPPED_FILE = "stopped.json"
_ANCHORS, _NEIGHBORS = 4, 8  # the file lists this many neighbors of this many rows
# Up to the first number in a parameter's name, as in backbone.blocks.3.
_BLOCK = re.compile(r".*?\.\d+(?=\.)")


def check_finite(state: RunState, metrics: Mapping[str, float | int], run: Path) -> None:
    """Stop the run if its loss or gradient is not finite.

    Args:
        state: the run.
        metrics: of the step, the same on all ranks.
        run: the run directory.

    Raises:
        RunStoppedError: the loss or the gradient's norm is NaN or infinite.
    """
    what = next((name for name in ("loss", "gradient_norm") if not math.isfinite(metrics[name])), None)
    if what is not None:
        _stop_not_finite(state, metrics, run, f"{what} is {metrics[what]}")


def check_weights(state: RunState, run: Path) -> None:
    """Stop before saving weights that are not finite: an update can overflow even if loss and gradients did not.

    Each rank checks its own part, and all ranks stop if one finds such a weight.

    Raises:
        RunStoppedError: a weight is NaN or infinite.
    """
    norms = torch.stack(torch._foreach_norm([here(parameter) for parameter in state.student.parameters()]))
    not_finite = distributed.average((~norms.isfinite()).any().float())
    if not_finite > 0:
        _stop_not_finite(state, {"step": state.step}, run, "a weight of the student is not finite")


def _stop_not_finite(state: RunState, metrics: Mapping[str, float | int], run: Path, what: str) -> NoReturn:
    remedy = "start a run with another `output` and a lower optim.base_lr, or with train.precision=float32"
    _stop(
        state,
        metrics,
        run,
        "non_finite",
        f"{what} at step {state.step}: nothing of this step was saved, {STOPPED_FILE} has what led here; {remedy}",
    )


def check_alarms(state: RunState, metrics: Mapping[str, float | int], run: Path) -> None:
    """Check the alarms of a logged step: log those that go off, and stop the run if `train.stop_on` says so.

    Raises:
        RunStoppedError: an alarm stops the run.
    """
    for alarm in state.alarms.observe(state.step, metrics):
        if alarm.stops:
            last = next((path.name for path in checkpoint_directories(run)), "none")
            _stop(
                state,
                metrics,
                run,
                alarm.name,
                f"{alarm.name} at step {state.step}: {alarm.message}; {STOPPED_FILE} has what led here, the last "
                f"checkpoint is {last}; start a run with another `output`, or continue with `resume` and a laxer "
                "train.stop_on",
            )
        if alarm.is_logged and distributed.is_main():
            _log.warning("alarm %s at step %d: %s", alarm.name, state.step, alarm.message)


def _stop(state: RunState, metrics: Mapping[str, float | int], run: Path, reason: str, message: str) -> NoReturn:
    gradient_norms = _norms_by_block(state.student)  # of shards, all ranks must call it
    if distributed.is_main():
        why = {"reason": reason, "message": message, "step": state.step, "metrics": dict(metrics)}
        write_json(run / STOPPED_FILE, _finite_json({**why, **_last_batch(state, gradient_norms)}))
    raise RunStoppedError(message)


def _last_batch(state: RunState, gradient_norms: dict[str, float]) -> dict[str, Any]:
    """Return images and norms of the last step, and neighbors of its first images in the memories."""
    watched = state.objective.watched(state.config.train.batch_size)
    newest = next(iter(watched.values()))
    return {
        "image_ids": newest.image_ids.tolist(),
        "embedding_norms": newest.embeddings.norm(dim=1).tolist(),
        "gradient_norms": gradient_norms,  # after clipping
        "neighbors": {name: _neighbors(term) for name, term in watched.items()},
    }


def _norms_by_block(network: nn.Module) -> dict[str, float]:
    """Return the norm of the gradients of each block: names up to the first number, else without the last word.

    For a sharded network (FSDP2) all ranks must call it.
    """
    squares: dict[str, float] = defaultdict(float)
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            numbered = _BLOCK.match(name)
            block = numbered[0] if numbered else name.rpartition(".")[0]
            squares[block] += float(here(parameter.grad).double().square().sum())
    if is_sharded(network):
        parts = distributed.gather_objects(dict(squares))
        squares = {block: sum(part[block] for part in parts) for block in squares}
    return {block: math.sqrt(square) for block, square in squares.items()}


def _neighbors(watched: Watched) -> list[dict[str, Any]]:
    """Return the nearest other rows of some rows, without the memory's own search, which may fail at NaN."""
    listed = []
    for row in watched.rows[:_ANCHORS].tolist():
        similarities = watched.gallery @ watched.gallery[row]
        nearest = similarities.argsort(descending=True)
        nearest = nearest[nearest != row][:_NEIGHBORS]
        listed.append(
            {
                "row": row,
                "image_id": int(watched.gallery_ids[row]),
                "neighbor_rows": nearest.tolist(),
                "neighbor_image_ids": watched.gallery_ids[nearest].tolist(),
                "similarities": similarities[nearest].tolist(),
            }
        )
    return listed


def _finite_json(value: Any) -> Any:
    """Return the same value with `"nan"` and `"inf"` as text: JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: _finite_json(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite_json(entry) for entry in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
