"""Training images of a detector: boxes and masks follow the pixels when they are mirrored and cropped."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sop_faiss.data.images.decode import decode_image
from sop_faiss.errors import DataError
from sop_faiss.evaluate.sets.coco_set import CocoSet, open_coco
from sop_faiss.evaluate.trained.detect_choices import DetectChoices
from sop_faiss.evaluate.trained.detect_data import training_image
from tests.cocos import HEIGHT, WIDTH, write_coco


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> CocoSet:
    return open_coco(write_coco(tmp_path_factory.mktemp("coco")), "train")


@pytest.mark.parametrize(("flip", "crop"), [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.5, 0.5)])
def test_boxes_and_masks_follow_the_pixels(flip: float, crop: float, data: CocoSet) -> None:
    choices = DetectChoices(size=HEIGHT, flip=flip, crop=crop)
    shapes = set()
    for row in range(len(data)):
        pixels = decode_image(data.source.read(row))
        for epoch in range(6):
            image, target = training_image(data, choices, (0, epoch), pixels, row)
            again, _ = training_image(data, choices, (0, epoch), pixels, row)
            assert torch.equal(image, again)
            shapes.add(tuple(image.shape[1:]))
            assert target["masks"].shape[1:] == image.shape[1:] and target["boxes"].dtype == torch.float32
            for box, label, mask in zip(target["boxes"], target["labels"], target["masks"], strict=True):
                rows, columns = torch.nonzero(mask, as_tuple=True)
                bounds = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                assert box.tolist() == [float(value) for value in bounds]  # the masks are rectangles
                red, green, _ = image[:, mask == 1].mean(1)
                assert (red > green) == (label == 1)
            if not flip and not crop:
                assert np.array_equal((image * 255).round().byte().permute(1, 2, 0).numpy(), pixels)
    if crop:
        least = (384 * HEIGHT) // 800
        assert len(shapes) > 5 and all(least <= high <= HEIGHT and least <= wide <= WIDTH for high, wide in shapes)
    else:
        assert shapes == {(HEIGHT, WIDTH)}


def test_an_image_of_another_size(data: CocoSet) -> None:
    with pytest.raises(DataError, match="pixels"):
        training_image(data, DetectChoices(), (0,), np.zeros((10, 10, 3), np.uint8), 0)
