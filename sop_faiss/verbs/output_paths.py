"""Where a command's result may be written: never over what it reads, nor over what no command wrote as a result."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from sop_faiss.data.images.keys import IMAGE_SUFFIXES
from sop_faiss.errors import ConfigError
from sop_faiss.files import require_writable
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.paths import real_path
from sop_faiss.verbs.own_results import is_own_result, whole_above

__all__ = ["STDOUT", "check_outputs", "encoder_files", "ground_truth_files", "source_files"]

STDOUT = Path("-")
"""Stands for stdout."""

_DATA_SUFFIXES = (*IMAGE_SUFFIXES, ".tar", ".parquet", ".safetensors", ".pth", ".pt", ".bin", ".faiss", ".pkl")
"""Endings of files that are data, for messages."""
_DATA_FILES = ("features-*.parquet", "*.tar", "state.json")
"""A directory with such a file is a whole, with its manifest: nothing is written into it."""
_RUN_FILES = (
    "checkpoints",
    "best",
    "latest",
    ".lock",
    "config.yaml",
    "metrics.jsonl",
    "prototypes.jsonl",
    "bad_samples.jsonl",
    "stopped.json",
    "config.json",
)
"""What a run or an export keeps in its directory; no result replaces one of them."""


def check_outputs(
    outputs: Mapping[str, Path | None],
    inputs: Iterable[Path],
    *,
    to_stdout: Collection[str] = (),
    figures: Collection[str] = (),
    force: bool = False,
    expected: Path | None = None,
) -> None:
    """Check before any work where its results shall be written.

    Args:
        outputs: the file of each option; None where it is not given.
        inputs: files and directories that are read; no output may be one of them, or lie in one.
        to_stdout: options of which `-` stands for stdout.
        figures: options whose file is a PNG, and must end so.
        force: let an output replace what is no result of a command, and lie inside a store, index, shard folder, run or
            export.
        expected: an output's proper place inside a run, where it may always be written.

    Raises:
        ConfigError: an output is an input or in one, or another output too, or a figure of another ending, or, without
            `force`, would replace what is no result, or lie inside what is a whole.
        SopError: an output cannot be written.
    """
    read = {real_path(path) for path in inputs}
    taken: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        if path == STDOUT and option not in to_stdout:
            raise ConfigError(f"{option} - would be stdout, where this result does not go: name a file")
        place = real_path(path)
        if place in taken:
            raise ConfigError(f"{taken[place]} and {option} are both {path}: name two")
        taken[place] = option
        if path == STDOUT:
            continue
        require_writable(path)
        hit = next((other for other in (place, *place.parents) if other in read), None)
        if hit is not None:
            what = "is" if hit == place else f"lies in {hit}, which is"
            raise ConfigError(f"{option} {path} {what} read by this command: name another file")
        if not force and path != expected:
            _refuse_others(option, path)
        if option in figures and path.suffix.lower() != ".png":
            raise ConfigError(f"{option} {path} would be a PNG: wanted a name that ends in .png")


def _refuse_others(option: str, path: Path) -> None:
    """Refuse to replace what no command wrote as a result, and to write into what is a whole."""
    if (found := whole_above(path)) is not None:
        directory, kind = found
        raise ConfigError(f"{option} {path} lies in {directory}, {kind}: name a file elsewhere, or give `force`")
    if path.exists() and not is_own_result(path):
        data = path.suffix.lower() in _DATA_SUFFIXES
        what = "is data by its ending" if data else "is no result of such a command"
        raise ConfigError(f"{option} {path} exists and {what}: name another file, or give `force` to replace it")


def source_files(src: str | None) -> list[Path]:
    """What `check_outputs` shall guard of a SRC or a feature store: a file, or a directory with shards or features."""
    if src is None:
        return []
    path = Path(src)
    if path.is_dir() and not any(any(path.glob(pattern)) for pattern in _DATA_FILES):
        return []  # images, which are guarded by their endings
    return [path] if path.exists() else []


def encoder_files(encoder: EncoderSpec | None) -> list[Path]:
    """What `check_outputs` shall guard of an encoder: its weights, or its run's checkpoints and records."""
    if encoder is None:
        return []
    place = Path(encoder.place)
    of_run = [place / name for name in _RUN_FILES]
    files = [file for file in (encoder.weights, encoder.whitening, encoder.cache) if file is not None]
    found = [*source_files(encoder.place), *of_run, *files]
    return [path for path in found if path.exists()]


def ground_truth_files(dataset: str, data_root: Path | None, gnd: Path | None) -> list[Path]:
    """What `check_outputs` shall guard of a retrieval data set: its ground truth; images are by their endings."""
    place = (data_root or Path()) / dataset
    found = [place] if place.is_file() else [*place.glob("gnd*")]
    return [*found, *([gnd] if gnd is not None else [])]
