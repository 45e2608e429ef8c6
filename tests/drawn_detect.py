"""`sop-eval` that notes what detection draws: crops by epoch and image, sides by rank in the order of the steps."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from torchvision.models.detection.transform import GeneralizedRCNNTransform

from sop_faiss.cli.eval import main
from sop_faiss.evaluate.trained import detect

if __name__ == "__main__":
    notes, arguments = Path(sys.argv[1]), sys.argv[2:]
    crops: dict[str, str] = {}
    sides: list[int] = []
    real_image, real_choice = detect.training_image, GeneralizedRCNNTransform.torch_choice

    def training_image(data: Any, choices: Any, key: tuple[int, ...], pixels: Any, row: int) -> Any:
        made = real_image(data, choices, key, pixels, row)
        crops[f"{key} {row}"] = hashlib.sha256(made[0].numpy().tobytes()).hexdigest()
        return made

    def torch_choice(self: Any, sides_of_images: list[int]) -> int:
        sides.append(real_choice(self, sides_of_images))
        return sides[-1]

    detect.training_image = training_image
    GeneralizedRCNNTransform.torch_choice = torch_choice  # type: ignore[method-assign]
    main(arguments, standalone_mode=False)
    (notes / f"rank{os.environ.get('RANK', 0)}.json").write_text(json.dumps({"crops": crops, "sides": sides}))
