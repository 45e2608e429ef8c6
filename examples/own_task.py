"""An own evaluation task: whether an image without its colors finds itself among the colored ones.

    python examples/own_task.py photos/

A task has `names` and `measure`. What is missing: `evaluate` of a run and `sop-eval` know the package's tasks only;
to score while training, see docs/code.md, "Another evaluation task".
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

import sop_faiss
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.neighbors.exact import nearest_rows


class FoundWithoutColors:
    names = ("gray_recall_at_1",)

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def measure(self, encoder: Encoder) -> dict[str, float]:
        colored = [Image.open(path).convert("RGB") for path in self.paths]
        gray = [image.convert("L").convert("RGB") for image in colored]
        found = nearest_rows(encoder.encode(gray), encoder.encode(colored), 1).rows[:, 0]
        return {self.names[0]: 100 * float((found == np.arange(len(found))).mean())}


if __name__ == "__main__":
    photos = sorted(path for path in Path(sys.argv[1]).rglob("*") if path.suffix in {".jpg", ".png"})
    if not photos:
        sys.exit(f"error: {sys.argv[1]} has no .jpg or .png images: wanted a folder with some")
    print(FoundWithoutColors(photos[:50]).measure(sop_faiss.load_encoder("lite0")))
