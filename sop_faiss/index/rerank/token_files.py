"""Where the tokens of an index are: the folder `tokens` in its directory; needs neither torch nor FAISS.

    tokens.f16             float16, (tokens, dimension), one image after the other; or
    tokens.pq              codes of a product quantizer and a float16 weight, (tokens, bytes)
    images.parquet         key, sha256 of the image's bytes, first token, number of tokens
    whitening.safetensors  of the tokens, for queries; and the centroids of the product quantizer
    manifest.json          encoder, preprocessing, checksums of the others

Images are known by key and content, not by row: when an index is changed the folder is taken over as it is, and only
images that are new or have changed need tokens.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

FOLDER = "tokens"
TOKENS, CODES, IMAGES, WHITENING, MANIFEST = (
    "tokens.f16",
    "tokens.pq",
    "images.parquet",
    "whitening.safetensors",
    "manifest.json",
)


def has_tokens(directory: Path) -> bool:
    """Return whether an index directory has tokens."""
    return (directory / FOLDER).is_dir()


def carry_tokens(old: Path, new: Path) -> None:
    """Take the tokens of an index over into the directory that replaces it, as links to the same bytes if possible."""
    if not has_tokens(old):
        return
    (new / FOLDER).mkdir()
    for name in (TOKENS, CODES, IMAGES, WHITENING, MANIFEST):
        if not (old / FOLDER / name).is_file():  # what is damaged stays so, until tokens are asked for
            continue
        try:
            os.link(old / FOLDER / name, new / FOLDER / name)
        except OSError:
            shutil.copyfile(old / FOLDER / name, new / FOLDER / name)
