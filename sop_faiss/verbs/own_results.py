"""Which files are results of these commands, known by their content, and which directories are wholes of ours."""

from __future__ import annotations

import re
from pathlib import Path

from sop_faiss.files import GENERATOR
from sop_faiss.paths import real_path

__all__ = ["is_own_result", "whole_above"]

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
_EXPORTED = b"sop_faiss"  # the key of the metadata in a Parquet file of `sop-index export`; stores have none
_KINDS = (
    ("an index", "manifest.json", ("index.faiss",)),
    ("a feature store", "manifest.json", ("features-*.parquet",)),
    ("a folder of shards", "manifest.json", ("*.tar",)),
    ("a run", "config.yaml", ("checkpoints", "best", "latest", "metrics.jsonl", ".lock")),
    ("a checkpoint", "state.json", ("*.safetensors",)),
    ("an export", "config.json", ("*.safetensors", "model.onnx", "model.pt2")),
    ("a part of a cache", "key.json", ("part-*.safetensors",)),
)
"""What a directory is, by one file and one of some others."""


def is_own_result(path: Path) -> bool:
    """Whether a command wrote this file as a result, so that it may be written again; an empty file is nobody's.

    Raises:
        OSError: it cannot be read.
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


def whole_above(path: Path) -> tuple[Path, str] | None:
    """The nearest directory above a path that is a store, an index, a folder of shards, a run or an export, and which.

    Links are followed: neither the place of the file nor of a link to it may be in one.
    """
    for start in (real_path(path.parent), real_path(path).parent):
        for directory in (start, *start.parents):
            for kind, first, others in _KINDS:
                if (directory / first).exists() and any(any(directory.glob(pattern)) for pattern in others):
                    return directory, kind
    return None
