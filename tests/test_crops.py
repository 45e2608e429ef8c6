"""Views against PIL and torchvision, with stated tolerances, and as pure functions of their key."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from sop_faiss.config import ViewsConfig
from sop_faiss.data.views import crops as views_module
from sop_faiss.data.views.crops import CropBox, draw_crop, draw_view, view_generator, write_view
from tests.images import make_image

PLAIN = ViewsConfig(
    global_size=32, local_size=16, local_count=2, flip=0.0, jitter=0.0, gray=0.0, blur_global1=0.0, blur_global2=0.0,
    blur_local=0.0, solarize_global2=0.0,
)  # fmt: skip


def photo(seed: int = 0, size: tuple[int, int] = (60, 80)) -> np.ndarray:
    return make_image(np.random.default_rng(seed), size)


def make_view(image: np.ndarray, index: int, config: ViewsConfig, key: tuple[int, ...], out: np.ndarray) -> None:
    view = draw_view(*image.shape[:2], index, config, view_generator(*key))
    write_view(image, view, out)


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(float) - b.astype(float)).mean())


@pytest.mark.parametrize("size", [(60, 80), (17, 23), (200, 31)])
def test_crops_equal_pillow_bicubic(size):
    image = photo(1, size)
    for number in range(20):
        box = draw_crop(*size, (0.05, 1.0), (0.75, 4 / 3), view_generator(0, 0, number, 0))
        out = np.empty((32, 32, 3), np.uint8)
        views_module._resize_into(image, box, out)
        corners = (box.left, box.top, box.left + box.width, box.top + box.height)
        reference = Image.fromarray(image).crop(corners).resize((32, 32), Image.Resampling.BICUBIC)
        assert difference(out, np.asarray(reference)) < 0.3  # the two round half a level differently
        assert np.abs(out.astype(int) - np.asarray(reference).astype(int)).max() <= 2


def test_crop_boxes_lie_inside_and_have_the_asked_area_and_aspect():
    shares, ratios = [], []
    for number in range(2000):
        box = draw_crop(300, 400, (0.05, 0.25), (0.75, 4 / 3), view_generator(0, 0, number, 5))
        assert 0 <= box.top <= 300 - box.height
        assert 0 <= box.left <= 400 - box.width
        shares.append(box.height * box.width / 120000)
        ratios.append(box.width / box.height)
    assert 0.049 < min(shares) < 0.06
    assert 0.24 < max(shares) < 0.252
    assert np.mean(shares) == pytest.approx(0.15, abs=0.005)
    assert np.mean(np.log(ratios)) == pytest.approx(0.0, abs=0.02)
    assert min(ratios) > 0.73
    assert max(ratios) < 1.37


def test_a_crop_that_never_fits_is_the_largest_central_one():
    assert draw_crop(10, 400, (1.0, 1.0), (0.75, 4 / 3), view_generator(0, 0, 0, 0)) == CropBox(0, 193, 10, 13)


def test_flip():
    image = photo(6, (32, 32))
    whole = replace(PLAIN, global_scale=(1.0, 1.0), aspect=(1.0, 1.0), flip=1.0)
    out = np.empty((32, 32, 3), np.uint8)
    make_view(image, 0, whole, (0, 0, 0, 0), out)
    assert difference(out, image[:, ::-1]) < 0.1


def test_rotation_turns_about_the_center():
    image = np.zeros((33, 33, 3), np.uint8)
    image[16, 16] = 255
    image[14:19, 16] = 255
    config = replace(PLAIN, global_size=33, global_scale=(1.0, 1.0), aspect=(1.0, 1.0), max_rotation_degrees=80.0)
    out = np.empty((33, 33, 3), np.uint8)
    for seed in range(5):
        make_view(image, 0, config, (seed, 0, 0, 0), out)
        assert out[16, 16, 0] > 100
        assert out.astype(float).sum() == pytest.approx(image.astype(float).sum(), rel=0.25)


def test_a_view_is_a_pure_function_of_seed_epoch_image_and_view():
    image, config = photo(7), ViewsConfig(global_size=32, local_size=16)

    def view(*key: int) -> bytes:
        out = np.empty((32, 32, 3), np.uint8)
        make_view(image, 0, config, key, out)
        return out.tobytes()

    base = (1, 2, 3, 0)
    assert view(*base) == view(*base)
    assert len({view(1, 2, 3, 0), view(2, 2, 3, 0), view(1, 3, 3, 0), view(1, 2, 4, 0), view(1, 2, 3, 1)}) == 5


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (3, 2)])
def test_tiny_images_make_views(size):
    image = np.full((*size, 3), 77, np.uint8)
    out = np.zeros((32, 32, 3), np.uint8)
    for number in range(10):
        make_view(image, 0, replace(PLAIN, max_rotation_degrees=10.0), (0, 0, number, 0), out)
        assert (out == 77).all()
