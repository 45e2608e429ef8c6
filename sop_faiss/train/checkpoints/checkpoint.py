"""Write checkpoints completely or not at all, and continue from them."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sop_faiss.config import TrainConfig
from sop_faiss.errors import CheckpointError
from sop_faiss.files import atomic_directory, remove_leftovers, sha256_file, write_file, write_json
from sop_faiss.model.checkpoint import FORMAT, checkpoint_directories, read_tensors
from sop_faiss.model.tensor_files import writing_tensors
from sop_faiss.train.parallel import copy_weights, like

_RECORDS = ("metrics.jsonl", "prototypes.jsonl", "bad_samples.jsonl", "stopped.json")
_ADAM_STATE = {"step", "exp_avg", "exp_avg_sq"}
"""What AdamW keeps for each parameter."""
_MUON_STATE = {"momentum_buffer"}
"""What Muon keeps for each matrix."""


def write_checkpoint(run: Path, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> Path:
    """Write `checkpoints/step_<step>/` and point `latest` at it.

    Args:
        run: the run directory.
        step: optimizer updates made so far.
        tensors: file name without suffix -> its tensors.
        state: JSON values for `state.json`.

    Raises:
        OSError: the disk is full or the folder cannot be written; earlier checkpoints stay.
    """
    path = run / "checkpoints" / f"step_{step:08d}"
    _write(path, step, tensors, state)
    write_file(run / "latest", path.name + "\n")  # for people; `find_checkpoint` looks for complete checkpoints
    return path


def write_best(run: Path, step: int, tensors: dict[str, dict[str, Tensor]], scores: dict[str, float]) -> None:
    """Write `best/`, the weights of the best score so far: encoders can be loaded from it, runs not resumed."""
    _write(run / "best", step, tensors, {"scores": scores})


def _write(path: Path, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
    with atomic_directory(path, overwrite=True) as temporary:
        checksums = {}
        for name, content in tensors.items():
            file = temporary / f"{name}.safetensors"
            with writing_tensors(file):
                save_file({key: value.detach().cpu().contiguous() for key, value in content.items()}, file)
            checksums[file.name] = sha256_file(file)
        write_json(temporary / "state.json", {"format": FORMAT, "step": step, **state, "sha256": checksums})


def clear_leftovers(run: Path, resumed_step: int) -> None:
    """Remove half-written files of a killed run, and checkpoints later than the resumed one, which are damaged."""
    for name in ("best", "latest", "config.yaml", *_RECORDS):
        remove_leftovers(run / name)
    for path in (run / "checkpoints").glob(".step_*"):
        if path.name.endswith((".tmp", ".old")):
            shutil.rmtree(path, ignore_errors=True)
    for path in checkpoint_directories(run):
        if int(path.name.removeprefix("step_")) > resumed_step:
            _remove(path)


def prune_checkpoints(run: Path, config: TrainConfig) -> None:
    """Keep the newest `keep_last` checkpoints and the multiples of `keep_every_steps`."""
    for path in checkpoint_directories(run)[config.keep_last :]:
        step = int(path.name.removeprefix("step_"))
        if not config.keep_every_steps or step % config.keep_every_steps:
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a checkpoint, so that a kill meanwhile leaves none that looks damaged."""
    doomed = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    path.rename(doomed)
    shutil.rmtree(doomed)


def flat_optimizer_state(optimizer: torch.optim.Optimizer, network: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's tensors under the names of their parameters."""
    return {
        f"{name}|{key}": value
        for name, parameter in network.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, network: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load what `flat_optimizer_state` returned.

    Raises:
        CheckpointError: the tensors belong to another network.
    """
    parameters = dict(network.named_parameters())
    matrices = {id(p) for group in optimizer.param_groups if group["is_matrix"] for p in group["params"]}
    wanted = {name: _MUON_STATE if id(p) in matrices else _ADAM_STATE for name, p in parameters.items()}
    optimizer.state.clear()
    for flat_name, value in tensors.items():
        name, _, key = flat_name.rpartition("|")
        if name not in parameters:
            raise CheckpointError(
                f"the checkpoint's optimizer has {name}, which this network does not have: use the same configuration"
            )
        parameter = parameters[name]
        if value.ndim and value.shape != parameter.shape:
            raise CheckpointError(
                f"the checkpoint's optimizer has {name} of shape {tuple(value.shape)}: use the same configuration"
            )
        if key not in wanted[name] or not value.is_floating_point() or (value.ndim == 0) != (key == "step"):
            raise CheckpointError(f"the checkpoint's optimizer has {flat_name} of another kind: it was changed")
        # In the parameter's memory layout, which a fused optimizer assumes.
        moment = torch.empty_like(parameter, dtype=value.dtype) if value.ndim else value.to(parameter.device)
        optimizer.state[parameter][key] = moment.copy_(like(parameter, value) if value.ndim else value)
    states = {name: optimizer.state[p].keys() for name, p in parameters.items() if p in optimizer.state}
    torn = next((name for name, keys in states.items() if keys != wanted[name]), None)
    if torn is not None:
        raise CheckpointError(f"the checkpoint's optimizer has only a part of the state of {torn}: it was changed")


def load_network(network: nn.Module, checkpoint: Path, name: str) -> None:
    """Load `student` or `teacher` weights into a network of the same shape.

    Raises:
        CheckpointError: names or shapes differ; the message names the first difference.
    """
    tensors, wanted = read_tensors(checkpoint, name), network.state_dict()
    differences = sorted(set(tensors) ^ set(wanted)) + [
        key for key in sorted(set(tensors) & set(wanted)) if tensors[key].shape != wanted[key].shape
    ]
    if differences:
        raise CheckpointError(
            f"checkpoint {checkpoint} is of another model ({len(differences)} tensors differ, first {differences[0]}): "
            "resume with the configuration it was made with"
        )
    copy_weights(network, tensors)
