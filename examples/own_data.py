"""An own data set: images of an array, as `ImageSource`. One of HDF5, a database or a bucket has the same members.

    python examples/own_data.py

Encoding, indices and `Batches` take such an object. What is missing: `data.train` and SRC of the commands name files
only; for these, write the images into a folder and pack it (`sop-data pack`).
"""

from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from training import train


@dataclass(frozen=True)
class ArraySource:
    images: np.ndarray  # (n, height, width, 3), uint8, RGB
    labels: np.ndarray | None = None  # (n,), int64; -1: none
    class_names: list[str] | None = None
    description: str = "an array"
    root: Path = Path("/")

    @property
    def keys(self) -> list[str]:
        return [f"{position:08d}" for position in range(len(self))]

    def __len__(self) -> int:
        return len(self.images)

    def read(self, position: int) -> bytes:
        return cv2.imencode(".png", self.images[position][..., ::-1])[1].tobytes()

    def source_of(self, position: int) -> str:
        return ""  # no shard

    def member_of(self, position: int) -> str:
        return self.keys[position]

    def offset_of(self, position: int) -> int:
        return 0


def random_images(count: int = 32, side: int = 40) -> ArraySource:
    return ArraySource(np.random.default_rng(0).integers(0, 256, (count, side, side, 3), np.uint8))


if __name__ == "__main__":
    print(train(random_images())[1])
