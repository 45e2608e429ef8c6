"""Every error a user can cause, and how it is shown: commands print one line and exit with status 1."""

import re
from collections.abc import Callable

NO_MEMORY = re.compile(
    r"out of memory|not enough memory|can(?:'|no)t allocate memory|alloc(?:ation)?[_ ]fail|bad_alloc", re.IGNORECASE
)
"""How torch (on the CPU, CUDA and its libraries) and FAISS say in a plain RuntimeError that they got no memory."""


_ARGUMENT = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")


class SopError(Exception):
    """Base of all errors a user can cause; the message says what, got, wanted, and the remedy, in one line.

    A message names what the caller has given as `name` or `name=value`, in backquotes and as the library calls it.
    Commands show the options of these names, a run its configuration fields: see `spell_arguments`.
    """

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments that the message speaks of, in order."""
        return tuple(match[1] for match in _ARGUMENT.finditer(str(self)))


class ConfigError(SopError):
    """A configuration field is unknown, has the wrong type, or is impossible."""


class DataError(SopError):
    """Input images, shards, lists or ground truth are missing, damaged or unusable."""


class UnreachableError(DataError):
    """A whole shard cannot be fetched, or is not what it was; no other image can stand in for it."""


class WorkerDiedError(DataError):
    """A process that prepares images died; of several ranks, only the one that it worked for knows."""


class CheckpointError(SopError):
    """A checkpoint, export or weights file is missing, damaged or belongs to another model."""


class FeatureError(SopError):
    """A feature store or feature matrix is damaged, not finite, or not unit-norm."""


class IndexMismatchError(SopError):
    """An index was made by another encoder, preprocessing or pooling, or its files do not belong together."""


class RunStoppedError(SopError):
    """A run stopped itself: non-finite loss or collapse. Commands exit with status 3."""


def spell_arguments(message: str, spell: Callable[[str], str | None], between: str = "=") -> str:
    """Write the arguments in a message in the caller's terms.

    Args:
        message: of a `SopError`.
        spell: returns what an argument is called there; None leaves it as it is.
        between: stands between a name and its value.
    """

    def written(match: re.Match[str]) -> str:
        name = spell(match[1])
        if name is None:
            return match[0]
        return name if match[2] is None else f"{name}{between}{match[2]}"

    return _ARGUMENT.sub(written, message)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the machine or the device had too little memory, whoever says it."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error))))


def one_line(message: str) -> str:
    """The message without line breaks or control characters: names of files may hold them, and terminals obey them."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(message.split()))
