"""What is beside an index's vectors, and known by key and content: tokens and parts. A changed index takes it over."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from sop_faiss.index.rerank import token_files

PARTS = "parts"
"""The folder of the parts of images, which is an index of them: see `parts`."""


def carry_beside(old: Path, new: Path) -> None:
    """Take what is beside an index over into the directory that replaces it, as links to the same bytes if possible.

    What is damaged stays so, until it is asked for.
    """
    for folder in (token_files.FOLDER, PARTS):
        if not (old / folder).is_dir():
            continue
        (new / folder).mkdir()
        for file in (old / folder).iterdir():
            if not file.is_file():
                continue
            try:
                os.link(file, new / folder / file.name)
            except OSError:
                shutil.copyfile(file, new / folder / file.name)
