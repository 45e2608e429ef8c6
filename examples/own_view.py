"""An own augmentation: a square of each global view becomes gray, by draws that follow those that are there.

    python examples/own_view.py

The generator of a view depends on seed, epoch, image and view alone, so that a resumed run draws the same. What is
missing: `sop-train` makes its `MultiCrop` itself; an augmentation to keep belongs into `data/views/`, with a field in
`ViewsConfig`.
"""

from collections.abc import Iterable

import numpy as np
from own_data import random_images
from training import train

from sop_faiss.data.batch import Buffers
from sop_faiss.data.views.multicrop import DrawnView, MultiCrop, Pixels


class WithGraySquares(MultiCrop):
    def write(
        self,
        image: Pixels,
        drawn: list[DrawnView],
        out: Buffers,
        place: int,
        epoch: int,
        numbers: Iterable[int] | None = None,
    ) -> None:
        chosen = list(range(len(drawn)) if numbers is None else numbers)
        super().write(image, drawn, out, place, epoch, chosen)
        for number in chosen:
            if number < self.config.views.global_count:
                view = out.global_views[number, place]
                side = len(view) // 3
                row, column = drawn[number].generator.integers(0, len(view) - side, 2)
                view[row : row + side, column : column + side] = np.uint8(128)


if __name__ == "__main__":
    print(train(random_images(), views=WithGraySquares)[1])
