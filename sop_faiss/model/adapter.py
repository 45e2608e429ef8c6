"""Adapters: a directory with what a run with `model.lora` has learned, without the weights that it was added to.

adapter.safetensors  the thin matrices by layer, and a ViT's position embeddings at the size of the run's views
adapter.json         network, rank, alpha, layers, size and pooling; name and fingerprint of the weights it belongs to

Nothing in it names a place: those weights are a packaged encoder's, or are named by whoever opens the adapter. The
position embeddings are in it because resampling them depends on the machine in the last bits, and fingerprints do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sop_faiss.config import Config, config_of
from sop_faiss.errors import CheckpointError, SopError
from sop_faiss.files import read_json, sha256_file, write_json
from sop_faiss.model.encoders.encoder import fingerprint_of
from sop_faiss.model.encoders.spec import ADAPTER_FILE, EncoderSpec
from sop_faiss.model.export import settings_of_encoder
from sop_faiss.model.tensor_files import writing_tensors

TENSORS_FILE = "adapter.safetensors"
FORMAT = "sop_faiss adapter 1"
POSITIONS = "trunk.pos_embed"
_RUN = "run:"
"""Before the name of a run whose teacher an adapter belongs to."""
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Adapter:
    """What the files of an adapter say."""

    config: Config
    """Of the encoder; `model.init` is the name of the weights that it belongs to, without their place."""
    base_fingerprint: str
    tensors: dict[str, Tensor]
    """The thin matrices, as of `split_low_rank`."""
    positions: dict[str, Tensor]
    """A ViT's position embeddings, by their name; empty for other networks."""


def base_fingerprint(architecture: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Return the fingerprint of the weights that an adapter belongs to, without their position embeddings."""
    return fingerprint_of(architecture, {name: value for name, value in tensors.items() if name != POSITIONS})


def base_name(init: str) -> str:
    """Return `model.init` without folders: `lite0`, `timm:NAME`, `dino:FILE`, or `run:NAME`."""
    spec = EncoderSpec(init)
    if spec.kind in ("packaged", "timm"):
        return init
    return f"{_RUN if spec.kind == 'run' else 'dino:'}{Path(spec.place).absolute().name}"


def write_adapter(
    directory: Path,
    config: Config,
    base: Mapping[str, Tensor],
    added: Mapping[str, Tensor],
    architecture: Mapping[str, Any],
    pooling: str,
) -> None:
    """Write an adapter's two files into an existing directory.

    Args:
        config: of the run.
        base: as of `read_low_rank`.
        added: as of `read_low_rank`.
        architecture: of the encoder.
        pooling: the encoder's own.
    """
    tensors = {name: value for name, value in base.items() if name == POSITIONS} | dict(added)
    file = directory / TENSORS_FILE
    with writing_tensors(file):
        save_file({name: value.contiguous() for name, value in tensors.items()}, file)
    settings = settings_of_encoder(config)
    name = base_name(config.model.init)
    settings["model"] |= {"init": name, "by_position": config.model.by_position, "lora": asdict(config.model.lora)}
    content = {
        "format": FORMAT,
        "tensors_sha256": sha256_file(file),
        "base": {"name": name, "fingerprint": base_fingerprint(architecture, base)},
        "pooling": pooling,
        **settings,
    }
    write_json(directory / ADAPTER_FILE, content)


def read_adapter(directory: Path) -> Adapter:
    """Read and check an adapter's files, which may be anyone's.

    Raises:
        CheckpointError: a file is missing, damaged, of another format, or was changed.
    """
    file, weights = directory / ADAPTER_FILE, directory / TENSORS_FILE
    try:
        content = read_json(file)
    except SopError as error:
        raise CheckpointError(f"adapter {directory}: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not of the format {FORMAT!r}: wanted what sop-export --adapter wrote")
    fingerprint = base.get("fingerprint") if isinstance(base := content.get("base"), dict) else None
    if not isinstance(fingerprint, str) or not _FINGERPRINT.fullmatch(fingerprint):
        raise CheckpointError(f"{file} does not say what it belongs to: its section base was changed; export it again")
    config = _config_in(content, file)
    if not weights.is_file():
        raise CheckpointError(f"adapter {directory} lacks {TENSORS_FILE}: it is incomplete; export it again")
    if sha256_file(weights) != content.get("tensors_sha256"):
        raise CheckpointError(f"{weights} is damaged or was changed (its checksum differs): export it again")
    try:
        tensors = load_file(weights)
    except SafetensorError as error:
        raise CheckpointError(f"{weights} cannot be read: {str(error).splitlines()[0]}") from None
    positions = {name: tensors.pop(name) for name in list(tensors) if name == POSITIONS}
    return Adapter(config, fingerprint, tensors, positions)


def _config_in(content: dict[str, Any], file: Path) -> Config:
    """Return the configuration of the encoder alone."""
    sections = {name: content.get(name) for name in ("model", "views", "data")}
    if not all(isinstance(section, dict) for section in sections.values()):
        raise CheckpointError(f"{file} was changed: it has no model, views or data; export it again")
    try:
        config = config_of({**sections, "sop": {"patch": {"weight": 0.0}}}, str(file))
    except SopError as error:
        raise CheckpointError(f"{error}: export it again") from None
    init = config.model.init
    if not config.model.lora.rank or (init != base_name(init) and not init.startswith(_RUN)):
        raise CheckpointError(f"{file} was changed: it has no rank, or no weights to belong to; export it again")
    return config
