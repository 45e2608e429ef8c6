"""ImageNet-9: the same objects before other backgrounds, in the layout of the backgrounds challenge.

Source: Xiao et al. 2020, "Noise or Signal: The Role of Image Backgrounds in Object Recognition", and their
`backgrounds_challenge` repository.
"""

from __future__ import annotations

from pathlib import Path

from sop_faiss.errors import DataError
from sop_faiss.paths import path_state

SETS = (
    "original",
    "mixed_same",
    "mixed_rand",
    "mixed_next",
    "only_fg",
    "no_fg",
    "only_bg_b",
    "only_bg_t",
)
"""The folders of the sets. Foregrounds before a background of the same, of a random, and of the next class; before
black; and blacked out as a shape, as a box, and as a box filled with tiled background."""
_NEEDED = ("original", "mixed_same", "mixed_rand")


def find_sets(directory: Path) -> dict[str, str]:
    """Return the folder of each set's images, which has a folder for each class.

    Sets that are not there are left out, except those that the gap is computed of.

    Raises:
        DataError: the directory or a needed set is missing.
    """
    found = {name: directory / name / "val" for name in SETS if (directory / name / "val").is_dir()}
    missing = [name for name in _NEEDED if name not in found]
    if missing:
        state = path_state(directory) if not directory.is_dir() else f"has no {missing[0]}/val/"
        raise DataError(
            f"{directory} {state}: wanted ImageNet-9 as the backgrounds challenge lays it out, SET/val/CLASS/IMAGE "
            f"with the sets {', '.join(SETS)}"
        )
    return {name: str(folder) for name, folder in found.items()}


def find_training_images(directory: Path) -> str:
    """Return the folder of ImageNet-9's unchanged training images, if it is beside the sets.

    Raises:
        DataError: it is not.
    """
    folder = directory / "original" / "train"
    if not folder.is_dir():
        raise DataError(f"{directory} has no original/train/: name the training images by `train`")
    return str(folder)
