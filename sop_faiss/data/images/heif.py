"""HEIC photos of phones, through pillow-heif, which `sop-faiss[heic]` installs."""

from __future__ import annotations

import io
import re
from importlib.util import find_spec

from PIL import Image

from sop_faiss.errors import DataError

HEIF_SUFFIXES = (".heic", ".heif", ".hif")
"""HEIC files of a folder, in lower case."""
READS_HEIF = find_spec("pillow_heif") is not None
"""Whether they can be read."""
HEIF_REMEDY = "pip install 'sop-faiss[heic]'"
"""What to do where they cannot."""

_BRANDS = re.compile(rb"he(ic|ix|im|is|vc|vx|vm|vs)")  # of images that are compressed with HEVC
_ANY_BRANDS = (b"mif1", b"msf1")  # of images of any compression; AVIF is read by PIL


def is_heif(encoded: bytes) -> bool:
    """Return whether the first bytes are those of a HEIC file."""
    length = int.from_bytes(encoded[:4], "big")
    if encoded[4:8] != b"ftyp":
        return False
    main, others = encoded[8:12], encoded[16 : min(length, 256)]
    return _BRANDS.fullmatch(main) is not None or (main in _ANY_BRANDS and b"avi" not in others)


def open_heif(encoded: bytes) -> Image.Image:
    """Read the header of a HEIC file, whose turns and mirrorings are applied when it is decoded, and not in its EXIF.

    Raises:
        DataError: `no-heic-reader`, as pillow-heif is not installed.
        SyntaxError: the file is damaged.
    """
    try:
        from pillow_heif import HeifImageFile

        return HeifImageFile(io.BytesIO(encoded))
    except ImportError:
        raise DataError(f"no-heic-reader: the image is HEIC, which needs pillow-heif: {HEIF_REMEDY}") from None
