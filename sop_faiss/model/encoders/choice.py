"""The choice of an encoder and its settings in a small JSON file, which `--model` takes: what `sop-index tune` writes.

    {"command": "sop-index tune", "format": ..., "encoder": {...}, "fingerprint": ..., "measured": {...}}

`encoder` is as an index remembers it (see `remembered`); the fingerprint shows whether its weights are still the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from sop_faiss.errors import CheckpointError, SopError
from sop_faiss.files import read_json, write_json
from sop_faiss.model.encoders.remembered import recalled_spec, with_relative_places
from sop_faiss.model.encoders.spec import EncoderSpec

FORMAT = "sop_faiss encoder choice 1"
_MOST_BYTES = 2**20
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class Choice(NamedTuple):
    """What a file says."""

    spec: EncoderSpec
    fingerprint: str
    """Of the encoder that was chosen."""


def is_choice(model: str) -> bool:
    """Return whether a model's name is that of a file of this kind, sound or not."""
    return model.endswith(".json") and Path(model).is_file()


def read_choice(file: Path, given: EncoderSpec) -> Choice:
    """Read a choice.

    Args:
        file: a JSON file of `write_choice`, which may be anyone's.
        given: options in place of its own.

    Raises:
        CheckpointError: it is not a choice, damaged, of another version, or what it names is not there.
    """
    wanted = "wanted what sop-index tune wrote"
    if file.stat().st_size > _MOST_BYTES:
        raise CheckpointError(f"model {file} is too large for a choice of an encoder: {wanted}")
    try:
        content = read_json(file)
    except SopError as error:
        raise CheckpointError(f"model {file}: {error}") from None
    found = content.get("format") if isinstance(content, dict) else None
    if not isinstance(content, dict) or found != FORMAT:
        of = f"of the format {str(found)[:60]!r}" if found is not None else "not a choice of an encoder"
        raise CheckpointError(f"model {file} is {of}: {wanted} ({FORMAT})")
    encoder, fingerprint = content.get("encoder"), content.get("fingerprint")
    if not isinstance(encoder, dict) or not isinstance(fingerprint, str) or not _FINGERPRINT.fullmatch(fingerprint):
        raise CheckpointError(f"model {file} lacks `encoder` or `fingerprint`, or one is damaged: {wanted}")
    spec = recalled_spec(encoder, file.parent, replace(given, model=""), file)
    if is_choice(spec.model):
        raise CheckpointError(f"model {file} names another choice, {spec.model}, as its encoder: {wanted}")
    return Choice(spec, fingerprint)


def write_choice(file: Path, remembered: Mapping[str, Any], fingerprint: str, measured: Mapping[str, Any]) -> None:
    """Write a choice, atomically.

    Args:
        file: ends in `.json`.
        remembered: how the encoder is opened, as of `remembered_spec`.
        fingerprint: of the encoder.
        measured: why it was chosen, as JSON values.
    """
    content = {
        "command": "sop-index tune",
        "format": FORMAT,
        "encoder": with_relative_places(remembered, file.parent),
        "fingerprint": fingerprint,
        "measured": dict(measured),
    }
    write_json(file, content)
