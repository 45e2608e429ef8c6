"""Find, verify and read checkpoints: a directory of safetensors files and `state.json` with their checksums."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sop_faiss.errors import CheckpointError, SopError
from sop_faiss.files import read_json, sha256_file

__all__ = ["FORMAT", "checkpoint_directories", "find_checkpoint", "read_state", "read_tensors", "run_directory"]

_log = logging.getLogger(__name__)
FORMAT = "sop_faiss checkpoint 1"
_STEP_NAME = re.compile(r"step_\d{8}")


def read_state(checkpoint: Path, verify: bool = True) -> dict[str, Any]:
    """`state.json` of a checkpoint, with the checksums of its files compared.

    Raises:
        CheckpointError: it is missing, of another format, or a file is damaged.
    """
    try:
        state = read_json(checkpoint / "state.json")
    except SopError as error:
        raise CheckpointError(f"checkpoint {checkpoint}: {error}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT or not isinstance(state.get("sha256"), dict):
        raise CheckpointError(f"checkpoint {checkpoint} is not of the format {FORMAT!r}")
    for name, wanted in state["sha256"].items() if verify else ():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {checkpoint} lacks {name}: it is incomplete")
        if sha256_file(path) != wanted:
            raise CheckpointError(f"checkpoint file {path} is damaged (its checksum differs): use an earlier one")
    return state


def checkpoint_directories(run: Path) -> list[Path]:
    """The checkpoints of a run, newest first; those still being written are left out."""
    found = (run / "checkpoints").glob("step_*")
    return sorted((path for path in found if _STEP_NAME.fullmatch(path.name)), reverse=True)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names: itself, or the newest whole one of a run.

    A damaged one is passed over, with one line in the log.

    Raises:
        CheckpointError: there is none that can be used.
    """
    if (path / "state.json").is_file():
        read_state(path)
        return path
    found = checkpoint_directories(path)
    for checkpoint in found:
        try:
            read_state(checkpoint)
        except CheckpointError as error:
            _log.warning("%s; using the checkpoint before it", error)
            continue
        return checkpoint
    if found:
        raise CheckpointError(f"none of the {len(found)} checkpoints of {path} is whole: train again")
    raise CheckpointError(f"{path} is neither a checkpoint nor a run with checkpoints: wanted a sop-train --output")


def run_directory(checkpoint: Path) -> Path:
    """The run that a checkpoint belongs to."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent


def read_tensors(checkpoint: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint.

    Args:
        checkpoint: the directory.
        name: `student`, `teacher`, `optimizer` or `memories`.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = checkpoint / f"{name}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read: {str(error).splitlines()[0]}") from None
