"""A trained index without a row, kept beside what is built until that is whole: a kill does not cost the training."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from sop_faiss.errors import SopError
from sop_faiss.files import atomic_directory, refuse_foreign
from sop_faiss.index.build_steps import read_made, write_made
from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex, read_approximate_index

__all__ = ["forget_training", "trained_once"]

_INDEX, _MADE_OF = "trained.faiss", "trained.json"
_OURS = re.compile(rf"{re.escape(_INDEX)}|{re.escape(_MADE_OF)}")


def trained_once(index: ApproximateIndex, rows: Float32[np.ndarray, "m d"], out: Path) -> ApproximateIndex:
    """An empty index trained on these rows: the one that a killed build of `out` has kept, or this one, then kept.

    Raises:
        ConfigError: the rows are too few for this factory.
        SopError: what is in the place is not ours.
        OSError: the disk is full.
    """
    directory, made_of = _directory(out), _digest(index, rows)
    refuse_foreign(directory, _OURS, "what was trained")
    kept = _kept(directory, made_of, index)
    if kept is not None:
        return kept
    index.train(rows)
    with atomic_directory(directory, overwrite=True) as temporary:
        index.write(temporary / _INDEX)
        write_made(temporary, _MADE_OF, _INDEX, made_of)
    return index


def forget_training(out: Path) -> None:
    """Remove what `trained_once` has kept for `out`; what others have put there stays."""
    with contextlib.suppress(SopError):
        refuse_foreign(_directory(out), _OURS, "what was trained")
        shutil.rmtree(_directory(out), ignore_errors=True)


def _directory(out: Path) -> Path:
    return out.with_name(f".{out.name}.trained")


def _digest(index: ApproximateIndex, rows: Float32[np.ndarray, "m d"]) -> str:
    """Of all that training depends on."""
    digest = hashlib.sha256(f"{index.factory} {rows.shape} ".encode())
    digest.update(np.ascontiguousarray(rows).data)
    return digest.hexdigest()


def _kept(directory: Path, made_of: str, index: ApproximateIndex) -> ApproximateIndex | None:
    """What is there, if it is whole and was trained on the same."""
    if read_made(directory, _MADE_OF, _INDEX, made_of) is None:
        return None
    try:
        return read_approximate_index(directory / _INDEX, index.factory, index.dimension, 0, mapped=False)
    except (SopError, OSError):
        return None
