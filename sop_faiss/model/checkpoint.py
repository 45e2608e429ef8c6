"""Find, verify and read checkpoints: a directory of safetensors files and `state.json` with their checksums."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sop_faiss.config import Config, LoraConfig, load_run_config
from sop_faiss.errors import CheckpointError, SopError
from sop_faiss.files import read_json, sha256_file
from sop_faiss.model.low_rank import check_low_rank, merged, split_low_rank

_log = logging.getLogger(__name__)
FORMAT = "sop_faiss checkpoint 1"
_STEP_NAME = re.compile(r"step_(\d{8,})")
_FILE_NAME = re.compile(r"[A-Za-z0-9_-]+\.safetensors")
_OF_ANY = {"teacher.safetensors"}
"""What every checkpoint has, `best/` too."""
_OF_A_STEP = {"student.safetensors", "teacher.safetensors", "optimizer.safetensors", "objective.safetensors"}
"""What a run continues from."""
_OF_VERSION_0_1 = {"objective.safetensors": "memories.safetensors"}
"""Files that had another name in checkpoints up to version 0.1."""
_FIELDS_OF_A_STEP = {"step", "images_seen", "bad_samples", "best_score"}
"""What it continues from besides tensors; scores of older checkpoints are unknown."""


def read_state(checkpoint: Path, verify: bool = True) -> dict[str, Any]:
    """Read and check `state.json` of a checkpoint, and compare the checksums of its files.

    Args:
        checkpoint: the directory. One that is called `step_` and a number holds all that a run continues from;
            any other, such as `best/`, at least a teacher.
        verify: whether to compare the checksums.

    Raises:
        CheckpointError: it is missing, of another format, changed by hand, or a file is damaged.
    """
    try:
        state = read_json(checkpoint / "state.json")
    except SopError as error:
        raise CheckpointError(f"checkpoint {checkpoint}: {error}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT or not isinstance(state.get("sha256"), dict):
        raise CheckpointError(f"checkpoint {checkpoint} is not of the format {FORMAT!r}")
    _check_fields(checkpoint, state)
    for name, wanted in state["sha256"].items() if verify else ():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {checkpoint} lacks {name}: it is incomplete")
        if sha256_file(path) != wanted:
            raise CheckpointError(f"checkpoint file {path} is damaged (its checksum differs): use an earlier one")
    return state


def _check_fields(checkpoint: Path, state: dict[str, Any]) -> None:
    """Check every field of a `state.json`: it may have been edited."""
    named = _STEP_NAME.fullmatch(checkpoint.name)
    files, step = state["sha256"], state.get("step")
    odd = next((name for name in files if not _FILE_NAME.fullmatch(name)), None)
    present = files.keys() | {new for new, old in _OF_VERSION_0_1.items() if old in files}
    missing = (_OF_ANY if named is None else _OF_A_STEP) - present
    sound = {
        "sha256": odd is None and not missing,
        "step": _is_count(step) and (named is None or step == int(named[1])),
        "images_seen": named is None or _is_count(state.get("images_seen")),
        "bad_samples": named is None or _is_count(state.get("bad_samples")),
        "best_score": _is_score(state.get("best_score")),
        "first_score": _is_score(state.get("first_score")),
        **{
            name: state.get(name) is None or _is_count(state[name])
            for name in ("best_step", "measured_step", "kept_step", "newest_scored_step")
        },
        **{name: _is_count(state.get(name, 0)) for name in ("later_scores", "comparisons")},
        "best_by": isinstance(state.get("best_by", ""), str),
        "scored_on": isinstance(state.get("scored_on", ""), str),
        "difference": _is_interval(state.get("difference")),
    }
    for field, is_sound in sound.items():
        if not is_sound or (named is not None and field in _FIELDS_OF_A_STEP and field not in state):
            raise CheckpointError(f"checkpoint {checkpoint}: {field} in state.json is missing or was changed")


def _is_score(value: object) -> bool:
    """Return whether this is None or a number, but not NaN."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63)


def _is_interval(value: object) -> bool:
    """Return whether this is None, or mean, low and high."""
    return value is None or (
        isinstance(value, list) and len(value) == 3 and None not in value and all(_is_score(each) for each in value)
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def checkpoint_directories(run: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first; those still being written are left out."""
    found = (run / "checkpoints").glob("step_*")
    named = [(match, path) for path in found if (match := _STEP_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named, key=lambda pair: int(pair[0][1]), reverse=True)]


def find_checkpoint(path: Path) -> Path:
    """Find the checkpoint that a path names: itself, or the newest undamaged one of a run.

    A damaged one is skipped, with one line in the log.

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
        raise CheckpointError(f"none of the {len(found)} checkpoints of {path} is undamaged: train again")
    raise CheckpointError(f"{path} is neither a checkpoint nor a run with checkpoints: wanted a sop-train --output")


def refuse_missing_best(path: Path) -> None:
    """Refuse `best/` of a run that has none, and say what to name instead.

    Raises:
        CheckpointError: it is one.
    """
    if path.name == "best" and not path.exists() and checkpoint_directories(path.parent):
        raise CheckpointError(
            f"{path} does not exist: it has the teacher with the best score, and this run was trained without scores; "
            f"name {path.parent}, whose newest teacher is taken, or train with evaluate.every_steps=100"
        )


def run_directory(checkpoint: Path) -> Path:
    """Return the run that a checkpoint belongs to."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent


def scores_of_run(checkpoint: Path) -> dict[str, Any] | None:
    """Return a run's scores until a checkpoint: `best_by`, `first_score` of step 0, `best_score` of later steps.

    `difference` is of the two, as mean, low and high; None in runs of versions before 0.2.
    `best/` does not record what came before it; the newest checkpoint of its run does. None where a score is unknown.
    """
    for place in (checkpoint, *checkpoint_directories(run_directory(checkpoint))):
        try:
            state = read_state(place, verify=False)
        except CheckpointError:
            continue
        if "best_score" in state:
            scores = {name: state.get(name) for name in ("best_by", "first_score", "best_score")}
            return None if None in scores.values() else {**scores, "difference": state.get("difference")}
    return None


def read_tensors(checkpoint: Path, name: str) -> dict[str, Tensor]:
    """Read the tensors of one file of a checkpoint.

    Args:
        checkpoint: the directory.
        name: `student`, `teacher`, `optimizer` or `objective`.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = checkpoint / f"{name}.safetensors"
    old = _OF_VERSION_0_1.get(path.name)
    if old is not None and not path.exists() and (checkpoint / old).exists():
        path = checkpoint / old
    try:
        return {re.sub(r"^projector\.", "heads.shared.", key): value for key, value in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read: {str(error).splitlines()[0]}") from None


def config_of_run(checkpoint: Path) -> Config:
    """Read the configuration of the run that a checkpoint belongs to.

    Raises:
        CheckpointError: it is missing.
        ConfigError: it is damaged.
    """
    config_file = run_directory(checkpoint) / "config.yaml"
    if not config_file.is_file():
        raise CheckpointError(f"{config_file} is missing: a checkpoint is read with the config of its run")
    return load_run_config(config_file)


def read_backbone(checkpoint: Path, *, student: bool = False) -> dict[str, Tensor]:
    """Read the backbone's tensors in a checkpoint by its own names: the teacher's, or with `student` the student's.

    Low-rank additions are merged into the weights.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    base, added, lora = read_low_rank(checkpoint, student=student)
    return merged(base, added, lora.scale) if added else base


def read_low_rank(
    checkpoint: Path, *, student: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor], LoraConfig]:
    """Read the backbone's tensors in a checkpoint, what was added to them, and how; see `split_low_rank`.

    Raises:
        CheckpointError: the file is missing or damaged, or has other additions than the configuration of its run.
    """
    tensors = read_tensors(checkpoint, "student" if student else "teacher")
    prefix = "backbone."
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    base, added = split_low_rank(own)
    lora = config_of_run(checkpoint).model.lora if added else LoraConfig()
    if added:
        check_low_rank(base, added, lora, f"checkpoint {checkpoint}")
    return base, added, lora
