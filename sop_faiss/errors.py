"""Every error a user can cause, and how it is shown: commands print one line and exit with status 1."""

import re
from collections.abc import Callable
from typing import Any

NO_MEMORY = re.compile(
    r"out of memory|not enough memory|can(?:'|no)t allocate memory|alloc(?:ation)?[_ ]fail|bad_alloc", re.IGNORECASE
)
"""How torch (CPU, CUDA and its libraries) and FAISS report in a plain RuntimeError that they got no memory."""

_ARGUMENT = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")


class SopError(Exception):
    """Base of all errors a user can cause; the message says what, got, wanted, and the remedy, in one line.

    A message names arguments of the caller in backquotes, as `name` or `name=value`, with the library's names for them.
    Commands show these as their options (`spell_arguments`). Fields of the configuration have their dotted names.
    """

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the names of the arguments in the message, in order."""
        return tuple(match[1] for match in _ARGUMENT.finditer(str(self)))


class ConfigError(SopError):
    """A configuration field is unknown, has the wrong type, or is impossible."""


class DataError(SopError):
    """Input images, shards, lists or ground truth are missing, damaged or unusable."""


class NothingUsableError(DataError):
    """None of the images of a source can be used; `dropped` says why, as in the manifest of a feature store."""

    def __init__(self, message: str, dropped: dict[str, Any]) -> None:
        super().__init__(message)
        self.dropped = dropped


class UnreachableError(DataError):
    """A whole shard cannot be fetched, or has changed; no other image can take its place."""


class WorkerDiedError(DataError):
    """A process that prepares images died; of several ranks, only the one that it belongs to knows."""


class CheckpointError(SopError):
    """A checkpoint, export or weights file is missing, damaged or belongs to another model."""


class FeatureError(SopError):
    """A feature store or feature matrix is damaged, not finite, or not unit-norm."""


class IndexMismatchError(SopError):
    """An index has another encoder, preprocessing or pooling, or its files do not belong together."""


class RunStoppedError(SopError):
    """A run stopped itself: non-finite loss or collapse. Commands exit with status 3."""


class SavedError(SopError):
    """A signal has ended a training whose state is kept. Commands exit with status 75: the same command continues."""


def spell_arguments(message: str, spell: Callable[[str], str | None], between: str = "=") -> str:
    """Rewrite the arguments in a message in the caller's terms.

    Args:
        message: of a `SopError`.
        spell: returns the caller's name of an argument; None leaves the argument as it is.
        between: what to put between a name and its value.
    """

    def written(match: re.Match[str]) -> str:
        name = spell(match[1])
        if name is None:
            return match[0]
        return name if match[2] is None else f"{name}{between}{match[2]}"

    return _ARGUMENT.sub(written, message)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the machine or the device had too little memory, whichever library reports it."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error))))


def one_line(message: str) -> str:
    """Return a message without line breaks and control characters, which file names may contain and terminals obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(message.split()))
