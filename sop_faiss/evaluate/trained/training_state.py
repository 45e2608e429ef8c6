"""What is kept of a training after each epoch and on a signal: one file, from which the same command continues.

Of several ranks the first reads and writes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64

from sop_faiss.data.images.source import ImageSource
from sop_faiss.distributed import decide, is_main
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.files import atomic_file, locked_directory
from sop_faiss.output_checks import refuse_foreign
from sop_faiss.train.stop import StopRequest


@dataclass
class TrainingState:
    """Scores of the learning rates that were tried, and the training that is under way.

    Attributes:
        directory: where it is kept; None: nowhere.
        settings: of everything the training depends on.
        held_out_top1: of each learning rate that was tried to the end, percent.
        task: the command after `sop-eval`; it names the file.
    """

    directory: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    held_out_top1: dict[float, float] = field(default_factory=dict)
    task: str = "finetune"
    _training: dict[str, Any] | None = None

    @property
    def format(self) -> str:
        """What its file says that it is."""
        return f"sop_faiss {self.task} 2"

    def restore(self, name: str, parts: Mapping[str, Any]) -> int:
        """Fill a training's parts, if this is the training that is under way; return how many steps are done.

        Args:
            name: of the training.
            parts: whatever has a `state_dict`.

        Raises:
            CheckpointError: the state is of other parts.
        """
        kept, self._training = self._training, None
        if kept is None or kept.get("name") != name:
            return 0
        try:
            for key, part in parts.items():
                part.load_state_dict(kept["parts"][key])
            return int(kept["steps"])
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.directory}: its state does not fit the network ({str(error).splitlines()[0]}): remove it"
            ) from None

    def keep(self, name: str, steps: int, parts: Mapping[str, Any]) -> None:
        """Write the state after this many steps of a training."""
        if self.directory is not None and is_main():
            states = {key: part.state_dict() for key, part in parts.items()}
            self._write({"name": name, "steps": steps, "parts": states})

    def finish_trial(self, learning_rate: float, top1: float) -> None:
        """Write a learning rate's score."""
        self.held_out_top1[learning_rate] = top1
        if self.directory is not None and is_main():
            self._write(None)

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest | None]:
        """Handle the signals that ask to stop while a training is kept; yields None where it is not."""
        if self.directory is None or threading.current_thread() is not threading.main_thread():
            yield None
            return
        with StopRequest().listening() as stop:
            yield stop

    def _write(self, training: dict[str, Any] | None) -> None:
        assert self.directory is not None
        content = {
            "format": self.format,
            "settings": self.settings,
            "held_out_top1": self.held_out_top1,
            "training": training,
        }
        with atomic_file(self.directory / f"{self.task}.pt") as temporary:
            torch.save(content, temporary)


@contextlib.contextmanager
def open_state(directory: Path | None, settings: dict[str, Any], task: str = "finetune") -> Iterator[TrainingState]:
    """Read what is done, or begin; no other process can change it meanwhile.

    Args:
        directory: new, empty, or of the same training; None: nothing is kept.
        settings: of everything the training depends on; text, numbers, None and lists.
        task: the command after `sop-eval`.

    Raises:
        CheckpointError: the state is damaged.
        ConfigError: it is of other settings; the first is named.
        SopError: the directory has other files, or another process is changing it.
    """
    state = TrainingState(directory, settings, task=task)
    if directory is None:
        yield state
        return
    with contextlib.ExitStack() as stack:
        decide(lambda: _open(directory, state, stack))
        state.held_out_top1, state._training = decide(lambda: (state.held_out_top1, state._training))
        yield state


def _open(directory: Path, state: TrainingState, lock: contextlib.ExitStack) -> None:
    refuse_foreign(directory, re.compile(rf"\.?{re.escape(state.task)}\.pt.*"), f"the state of sop-eval {state.task}")
    directory.mkdir(parents=True, exist_ok=True)
    lock.enter_context(locked_directory(directory))
    _read(directory, state)


def _read(directory: Path, state: TrainingState) -> None:
    """Fill a state from its file, if there is one."""
    file, settings = directory / f"{state.task}.pt", state.settings
    if not file.exists():
        return
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (PermissionError, MemoryError):
        raise
    except Exception:  # a damaged file makes torch's reader fail in any way
        content = None
    kinds: dict[str, Any] = {"format": str, "settings": dict, "held_out_top1": dict, "training": dict | None}
    sound = isinstance(content, dict) and all(isinstance(content.get(name, ...), kind) for name, kind in kinds.items())
    sound = sound and all(isinstance(part, int | float) for item in content["held_out_top1"].items() for part in item)
    if not sound or content["format"] != state.format or not all(isinstance(name, str) for name in content["settings"]):
        raise CheckpointError(
            f"{file} is damaged, or not the state of sop-eval {state.task}: remove it, or name another folder"
        )
    old = content["settings"]
    for name in sorted({*old, *settings}):
        if old.get(name) != settings.get(name):
            raise ConfigError(
                f"{directory} has a training with {name} = {old.get(name)}, not {settings.get(name)}: name another "
                "folder, or remove it"
            )
    state.held_out_top1, state._training = dict(content["held_out_top1"]), content["training"]


def digest_of_images(images: ImageSource, labels: Int64[np.ndarray, " n *more"]) -> str:
    """Return what changes with the names, order or labels of the images."""
    text = "\n".join([*images.keys, *map(str, labels.tolist())])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
