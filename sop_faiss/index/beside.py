"""What is beside an index's vectors, and known by key and content: tokens and parts. A changed index takes it over."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from sop_faiss.index.rerank import token_files
from sop_faiss.index.store import IDS_FILE, INDEX_FILE, MANIFEST_FILE, STATES_FILE

PARTS = "parts"
"""The folder of the parts of images, which is an index of them: see `parts`."""

_CARRIED = {
    token_files.FOLDER: (token_files.TOKENS, token_files.IMAGES, token_files.WHITENING, token_files.MANIFEST),
    PARTS: (INDEX_FILE, IDS_FILE, STATES_FILE, MANIFEST_FILE),
}


def carry_beside(old: Path, new: Path) -> None:
    """Take what is beside an index over into the directory that replaces it, as links to the same bytes if possible."""
    for folder, names in _CARRIED.items():
        if not (old / folder).is_dir():
            continue
        (new / folder).mkdir()
        for name in names:
            if not (old / folder / name).is_file():  # what is damaged stays so, until it is asked for
                continue
            try:
                os.link(old / folder / name, new / folder / name)
            except OSError:
                shutil.copyfile(old / folder / name, new / folder / name)
