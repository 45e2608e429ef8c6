"""What is kept of a fine-tuning after each epoch: one file, from which the same command continues."""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.files import atomic_file, locked_directory, refuse_foreign

__all__ = ["FinetuneState", "open_state"]

_NAME = "finetune.pt"
_FORMAT = "sop_faiss finetune 1"


@dataclass
class FinetuneState:
    """Scores of the learning rates that were tried, and the training that is under way.

    Attributes:
        directory: where it is kept; None: nowhere.
        settings: of everything the training depends on.
        held_out_top1: of each learning rate that was tried to the end, percent.
    """

    directory: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    held_out_top1: dict[float, float] = field(default_factory=dict)
    _training: dict[str, Any] | None = None

    def restore(self, name: str, parts: Mapping[str, Any]) -> int:
        """Fill a training's parts, if this is the training that is under way; return how many epochs are done.

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
            return int(kept["epoch"])
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.directory}: its state does not fit the network ({str(error).splitlines()[0]}): remove it"
            ) from None

    def keep(self, name: str, epoch: int, parts: Mapping[str, Any]) -> None:
        """Write the state after an epoch."""
        if self.directory is not None:
            states = {key: part.state_dict() for key, part in parts.items()}
            self._write({"name": name, "epoch": epoch, "parts": states})

    def finish_trial(self, learning_rate: float, top1: float) -> None:
        """Write a learning rate's score."""
        self.held_out_top1[learning_rate] = top1
        if self.directory is not None:
            self._write(None)

    def _write(self, training: dict[str, Any] | None) -> None:
        assert self.directory is not None
        content = {
            "format": _FORMAT,
            "settings": self.settings,
            "held_out_top1": self.held_out_top1,
            "training": training,
        }
        with atomic_file(self.directory / _NAME) as temporary:
            torch.save(content, temporary)


@contextlib.contextmanager
def open_state(directory: Path | None, settings: dict[str, Any]) -> Iterator[FinetuneState]:
    """Read what is done, or begin; no other process can change it meanwhile.

    Args:
        directory: new, empty, or of the same fine-tuning; None: nothing is kept.
        settings: of everything the training depends on; text, numbers, None and lists.

    Raises:
        CheckpointError: the state is damaged.
        ConfigError: it is of other settings; the first is named.
        SopError: the directory has other files, or another process is changing it.
    """
    if directory is None:
        yield FinetuneState(None, settings)
        return
    refuse_foreign(directory, re.compile(rf"\.?{re.escape(_NAME)}.*"), "the state of a fine-tuning")
    directory.mkdir(parents=True, exist_ok=True)
    with locked_directory(directory):
        yield _read(directory, settings)


def _read(directory: Path, settings: dict[str, Any]) -> FinetuneState:
    file = directory / _NAME
    if not file.exists():
        return FinetuneState(directory, settings)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError):
        content = None
    kinds: dict[str, Any] = {"format": str, "settings": dict, "held_out_top1": dict, "training": dict | None}
    sound = isinstance(content, dict) and all(isinstance(content.get(name), kind) for name, kind in kinds.items())
    if not sound or content["format"] != _FORMAT or not all(isinstance(name, str) for name in content["settings"]):
        raise CheckpointError(
            f"{file} is damaged, or not the state of a fine-tuning: remove it, or name another folder"
        )
    old = content["settings"]
    for name in sorted({*old, *settings}):
        if old.get(name) != settings.get(name):
            raise ConfigError(
                f"{directory} has a fine-tuning with {name} = {old.get(name)}, not {settings.get(name)}: name another "
                "folder, or remove it"
            )
    return FinetuneState(directory, settings, dict(content["held_out_top1"]), content["training"])
