"""What a killed build does not do again.

Each step leaves a file in a directory of its own, with a note of what it was made of. A trained index without a row is
kept next to the index that is built, until that is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from sop_faiss.errors import SopError
from sop_faiss.files import atomic_directory, read_json, sha256_file, write_json
from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from sop_faiss.neighbors.disk.from_factory import read_approximate_index
from sop_faiss.output_checks import refuse_foreign

_INDEX, _MADE_OF = "trained.faiss", "trained.json"
_OURS = re.compile(rf"{re.escape(_INDEX)}|{re.escape(_MADE_OF)}")


def trained_once(index: ApproximateIndex, rows: Float32[np.ndarray, "m d"], out: Path) -> ApproximateIndex:
    """Return an empty index trained on these rows: one that a killed build of `out` kept, or this one, then kept.

    Raises:
        ConfigError: the rows are too few for this factory.
        SopError: something else is in the place.
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
    """Return what is there, if it is complete and was trained on the same."""
    if read_made(directory, _MADE_OF, _INDEX, made_of) is None:
        return None
    try:
        return read_approximate_index(directory / _INDEX, index.factory, index.dimension, 0, mapped=False)
    except (SopError, OSError):
        return None


def write_made(directory: Path, note: str, file: str, made_of: str, **more: Any) -> None:
    """Write the note of a file, in a directory that is renamed when complete.

    Args:
        directory: of both.
        note: name of the note.
        file: name of what was made.
        made_of: checksum of what went in.
        more: JSON values for the note, too.
    """
    write_json(directory / note, {"made_of": made_of, **more, "sha256": sha256_file(directory / file)})


def read_made(directory: Path, note: str, file: str, made_of: str) -> dict[str, Any] | None:
    """Read the note of a file that is complete and made of the same, else None."""
    if not (directory / note).is_file():
        return None
    try:
        found: dict[str, Any] = read_json(directory / note)
        return found if found["made_of"] == made_of and found["sha256"] == sha256_file(directory / file) else None
    except (SopError, KeyError, TypeError, OSError):
        return None
