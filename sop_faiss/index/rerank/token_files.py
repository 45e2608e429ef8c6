"""Where the tokens of an index are: the folder `tokens` in its directory; needs neither torch nor FAISS.

    tokens.f16             float16, (tokens, dimension), one image after the other; or
    tokens.pq              codes of a product quantizer and a float16 weight, (tokens, bytes)
    images.parquet         key, sha256 of the image's bytes, first token, number of tokens, and their crc32
    whitening.safetensors  of the tokens, for queries; and the centroids of the product quantizer
    manifest.json          encoder, preprocessing, checksums of the others

Images are known by key and content, not by row: when an index is changed the folder is taken over as it is, and only
images that are new or have changed need tokens.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from safetensors import SafetensorError

from sop_faiss.errors import IndexMismatchError, SopError
from sop_faiss.files import read_json, sha256_file
from sop_faiss.index.rerank.settings import TokenSettings
from sop_faiss.paths import path_state

FOLDER = "tokens"
TOKENS, CODES, IMAGES, WHITENING, MANIFEST = (
    "tokens.f16",
    "tokens.pq",
    "images.parquet",
    "whitening.safetensors",
    "manifest.json",
)
FORMAT = {"format": "sop_faiss.tokens", "format_version": 1}


def has_tokens(directory: Path) -> bool:
    """Return whether an index directory has tokens."""
    return (directory / FOLDER).is_dir()


def content_file(settings: TokenSettings) -> str:
    """Return the name of the file of the tokens themselves."""
    return CODES if settings.code_bytes else TOKENS


def read_manifest(index: Path, *, every_byte: bool = False) -> tuple[dict[str, Any], TokenSettings]:
    """Read how the tokens of an index were made, and compare their files with that.

    Args:
        index: the directory of the index.
        every_byte: compare every byte of the tokens themselves with the checksum, not only their length. Of the other
            files, which are small, every byte is.

    Raises:
        IndexMismatchError: they are damaged.
    """
    folder = index / FOLDER
    with damage_named(index):
        if not (folder / MANIFEST).is_file():
            raise ValueError(f"{MANIFEST} {path_state(folder / MANIFEST)}")
        manifest = read_json(folder / MANIFEST)
        if {name: manifest[name] for name in FORMAT} != FORMAT:
            raise ValueError("of another format")
        manifest |= {"encoder": str(manifest["encoder"]), "preprocess": dict(manifest["preprocess"])}
        settings = TokenSettings(**manifest["settings"])
        content = content_file(settings)
        for name in (content, IMAGES, WHITENING):
            path, wanted = folder / name, manifest["files"][name]
            compares = every_byte or name != content
            if path.stat().st_size != wanted["bytes"] or (compares and sha256_file(path) != wanted["sha256"]):
                raise ValueError(f"{name} was changed")
        return manifest, settings


@contextlib.contextmanager
def damage_named(index: Path) -> Iterator[None]:
    """Raise what is wrong with a file of the tokens of an index as one error with its remedy."""
    try:
        yield
    except (SopError, KeyError, TypeError, ValueError, OSError, SafetensorError, pa.ArrowException) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise IndexMismatchError(
            f"{index / FOLDER} is damaged ({reason}): remove it, and {how_to_make(index)}"
        ) from None


def how_to_make(index: Path) -> str:
    """Return the remedy where tokens are missing."""
    return f"make them with `sop-index tokens {shlex.quote(str(index))}`"
