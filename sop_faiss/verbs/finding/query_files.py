"""Query images that are named one by one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sop_faiss.data.images.listing import FileSource, open_files
from sop_faiss.data.shards.shard_source import common_folder
from sop_faiss.errors import DataError
from sop_faiss.paths import path_state


def open_images(files: Sequence[Path]) -> FileSource:
    """Open image files as a source, in the order given; a file that is named twice counts once.

    Raises:
        DataError: a file is missing or is a folder.
    """
    paths = [Path(os.path.normpath(Path(file).absolute())) for file in dict.fromkeys(files)]
    for path in paths:
        if path.is_dir():
            raise DataError(f"{path} is a folder, wanted an image: name a folder with `data`")
        if not path.is_file():
            raise DataError(f"image {path} {path_state(path)}")
    root = common_folder([path.parent for path in paths])
    description = f"{len(paths)} images" if len(paths) != 1 else str(paths[0])
    return open_files(description, root, [path.relative_to(root).as_posix() for path in paths], None, None)
