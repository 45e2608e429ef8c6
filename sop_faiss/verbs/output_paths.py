"""Where a command's result may be written: not over its inputs, nor over files that are not results of a command."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from sop_faiss.data.images.heif import HEIF_SUFFIXES
from sop_faiss.data.images.keys import IMAGE_SUFFIXES
from sop_faiss.errors import ConfigError
from sop_faiss.files import GENERATOR
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.output_checks import require_writable
from sop_faiss.paths import real_path

STDOUT = Path("-")
"""Stands for stdout."""

_IMAGES = "*"
"""In a folder that is read: its images, but nothing else."""
_ALL_IMAGE_SUFFIXES = (*IMAGE_SUFFIXES, *HEIF_SUFFIXES)
_DATA_SUFFIXES = (*_ALL_IMAGE_SUFFIXES, *(".tar", ".parquet", ".safetensors", ".pth", ".pt", ".bin", ".faiss", ".pkl"))
"""Suffixes of data files, for messages."""
_DATA_FILES = ("features-*.parquet", "*.tar", "state.json")
"""A directory with such a file belongs together with its manifest: nothing is written into it."""
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
    "adapter.json",
)
"""The files of a run, an export or an adapter; no result replaces one of them."""

_HEAD_BYTES = 4096
_MAKER = re.escape(GENERATOR.encode())
_OWN_HEADS = re.compile(
    b"|".join(
        (
            rb'\{\s*"command": "sop-',  # JSON: the first key of every result
            rb"\x89PNG\r\n\x1a\n.{25}.{0,512}?tEXtSoftware\0" + _MAKER,
            rb'<!DOCTYPE html>.{0,1024}?<meta name="generator" content="' + _MAKER + rb'"',
            rb"class,images,right,top1\r?\n",  # the headings of tables
            rb"query,file,relevant\w*,AP",
            rb"query,query_label,rank,row,key,similarity",
            rb"group,size,row,key,similarity_to_first",
        )
    ),
    re.DOTALL,
)
_PARQUET = b"PAR1"
_EXPORTED = b"sop_faiss"  # the metadata key in a Parquet file of `sop-index export`; stores do not have it
_KINDS = (
    ("an index", "manifest.json", ("index.faiss",)),
    ("a feature store", "manifest.json", ("features-*.parquet",)),
    ("a folder of shards", "manifest.json", ("*.tar",)),
    ("a run", "config.yaml", ("checkpoints", "best", "latest", "metrics.jsonl", ".lock")),
    ("a checkpoint", "state.json", ("*.safetensors",)),
    ("an export", "config.json", ("*.safetensors", "model.onnx", "model.pt2")),
    ("an adapter", "adapter.json", ("*.safetensors",)),
    ("a part of a cache", "key.json", ("part-*.safetensors",)),
)
"""The kinds of directories, each recognized by one file and one of some others."""


def check_outputs(
    outputs: Mapping[str, Path | None],
    inputs: Iterable[Path],
    *,
    to_stdout: Collection[str] = (),
    figures: Collection[str] = (),
    force: bool = False,
    expected: Path | None = None,
) -> None:
    """Check the places of a command's results before any work.

    Args:
        outputs: the file of each option; None if it is not given.
        inputs: files and directories that are read; no output may be or be inside one of them.
        to_stdout: options for which `-` means stdout.
        figures: options whose file is a PNG, with that suffix.
        force: let an output replace a file that is not a result of a command, or be inside a store, index, shard
            folder, run or export.
        expected: a place inside a run where an output may always be written.

    Raises:
        ConfigError: an output is or is inside an input, equals another output, is a figure with another suffix, or,
            without `force`, would replace a file that is not a result, or be inside a store, index, run and so on.
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
            what = "is" if hit == place else f"is inside {hit}, which is"
            raise ConfigError(f"{option} {path} {what} read by this command: name another file")
        among_images = any(each / _IMAGES in read for each in place.parents)
        if among_images and path.suffix.lower() in _ALL_IMAGE_SUFFIXES and path.exists() and not is_own_result(path):
            raise ConfigError(f"{option} {path} is an image that is read by this command: name another file")
        if not force and path != expected:
            _refuse_others(option, path)
        if option in figures and path.suffix.lower() != ".png":
            raise ConfigError(f"{option} {path} would be a PNG: wanted a name that ends in .png")


def _refuse_others(option: str, path: Path) -> None:
    """Refuse to replace a file that is not a result, and to write into a store, index, shard folder, run or export."""
    if (found := _enclosing_result(path)) is not None:
        directory, kind = found
        raise ConfigError(f"{option} {path} is inside {directory}, {kind}: name a file elsewhere, or give `force`")
    if path.exists() and not is_own_result(path):
        data = path.suffix.lower() in _DATA_SUFFIXES
        what = "has the suffix of data" if data else "is not a result of a command"
        raise ConfigError(f"{option} {path} exists and {what}: name another file, or give `force` to replace it")


def is_own_result(path: Path) -> bool:
    """Return whether a command wrote this file as a result, so that it may be replaced; so may an empty file.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
        if not head or _OWN_HEADS.match(head):
            return True
        if not head.startswith(_PARQUET):
            return False
        end = path.stat().st_size - 8  # the length of the footer, and PAR1 again
        stream.seek(max(0, end))
        stream.seek(max(0, end - int.from_bytes(stream.read(4), "little")))
        return _EXPORTED in stream.read()


def _enclosing_result(path: Path) -> tuple[Path, str] | None:
    """Find the nearest directory above a path that is a store, index, shard folder, run or export, and its kind.

    Links are followed: neither the file nor a link to it may be in one.
    """
    for start in (real_path(path.parent), real_path(path).parent):
        for directory in (start, *start.parents):
            for kind, first, others in _KINDS:
                if (directory / first).exists() and any(any(directory.glob(pattern)) for pattern in others):
                    return directory, kind
    return None


def source_files(src: str | None) -> list[Path]:
    """List what `check_outputs` protects of a source or a feature store: a file, or the images, shards or features."""
    if src is None:
        return []
    path = Path(src)
    if path.is_dir() and not any(any(path.glob(pattern)) for pattern in _DATA_FILES):
        return [path / _IMAGES]
    return [path] if path.exists() else []


def encoder_files(encoder: EncoderSpec | None) -> list[Path]:
    """List what `check_outputs` protects of an encoder: its weights, or its run's checkpoints and records."""
    if encoder is None:
        return []
    place = Path(encoder.place)
    of_run = [place / name for name in _RUN_FILES]
    files = [file for file in (encoder.weights, encoder.whitening, encoder.cache) if file is not None]
    found = [*source_files(encoder.place), *of_run, *files]
    return [path for path in found if path.exists()]


def ground_truth_files(dataset: str, data_root: Path | None, gnd: Path | None) -> list[Path]:
    """List what `check_outputs` protects of a retrieval data set: its ground truth; suffixes protect its images."""
    place = (data_root or Path()) / dataset
    found = [place] if place.is_file() else [*place.glob("gnd*")]
    return [*found, *([gnd] if gnd is not None else [])]
