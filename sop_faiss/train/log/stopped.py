"""When a run stops itself, and what it leaves: `stopped.json` tells what led there. Checkpoints stay as they are."""

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

__all__ = ["STOPPED_FILE", "check_finite", "check_weights", "heed_alarms"]

_log = logging.getLogger(__name__)

STOPPED_FILE = "stopped.json"
_ANCHORS, _NEIGHBORS = 4, 8  # of which, and how many, the file lists
_BLOCK = re.compile(r".*?\.\d+(?=\.)")


def check_finite(state: RunState, metrics: Mapping[str, float | int], run: Path) -> None:
    """Stop at a loss or gradient that is not finite.

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
    """Stop before weights that are not finite are saved: an update can overflow though loss and gradients did not.

    Each rank looks at what it holds, and all of them stop where one finds something.

    Raises:
        RunStoppedError: a weight is NaN or infinite.
    """
    norms = torch.stack(torch._foreach_norm([here(parameter) for parameter in state.student.parameters()]))
    spoiled = distributed.average((~norms.isfinite()).any().float())
    if spoiled > 0:
        _stop_not_finite(state, {"step": state.step}, run, "a weight of the student is not finite")


def _stop_not_finite(state: RunState, metrics: Mapping[str, float | int], run: Path, what: str) -> NoReturn:
    remedy = "start a run with another `output` and a lower optim.base_lr, or with train.precision=float32"
    _stop(
        state,
        metrics,
        run,
        "non_finite",
        f"{what} at step {state.step}: nothing of this step was saved, {STOPPED_FILE} tells what led here; {remedy}",
    )


def heed_alarms(state: RunState, metrics: Mapping[str, float | int], run: Path) -> None:
    """Take in a logged step, tell of alarms that go off, and stop the run where `train.stop_on` says so.

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
                f"{alarm.name} at step {state.step}: {alarm.message}; {STOPPED_FILE} tells what led here, the last "
                f"checkpoint is {last}; start a run with another `output`, or go on with `resume` and a laxer "
                "train.stop_on",
            )
        if alarm.is_told and distributed.is_main():
            _log.warning("alarm %s at step %d: %s", alarm.name, state.step, alarm.message)


def _stop(state: RunState, metrics: Mapping[str, float | int], run: Path, reason: str, message: str) -> NoReturn:
    gradient_norms = _norms_by_block(state.student)  # of shards all ranks together
    if distributed.is_main():
        why = {"reason": reason, "message": message, "step": state.step, "metrics": dict(metrics)}
        write_json(run / STOPPED_FILE, _finite_json({**why, **_last_batch(state, gradient_norms)}))
    raise RunStoppedError(message)


def _last_batch(state: RunState, gradient_norms: dict[str, float]) -> dict[str, Any]:
    """Images and norms of the last step, and the neighbors of its first images among the newest embeddings."""
    watched = state.objective.watched(state.config.train.batch_size)
    newest = next(iter(watched.values()))
    return {
        "image_ids": newest.image_ids.tolist(),
        "embedding_norms": newest.embeddings.norm(dim=1).tolist(),
        "gradient_norms": gradient_norms,  # after clipping
        "neighbors": {name: _neighbors(term) for name, term in watched.items()},
    }


def _norms_by_block(network: nn.Module) -> dict[str, float]:
    """Norm of the gradients of each block: up to the first number in the names, else but for their last word.

    Of a network in shards (FSDP2) all ranks must ask.
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
    """The nearest other rows of some rows; not by the memory's own search, which NaN may upset."""
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
    """The same with `"nan"` and `"inf"` as text: JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: _finite_json(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite_json(entry) for entry in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
