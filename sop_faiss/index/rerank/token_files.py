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
