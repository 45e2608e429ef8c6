"""Colors in uint8 against PIL's and torchvision's own functions, with stated tolerances, and what is drawn."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from PIL import Image, ImageFilter, ImageOps
from torchvision.transforms import functional as F

from sop_faiss.config import ViewsConfig
from sop_faiss.data.views.color import UNCHANGED, Colors, augment_colors, blur_reach, draw_colors
from sop_faiss.data.views.crops import view_generator
from tests.images import make_image

PHOTO = make_image(np.random.default_rng(2), (60, 80))


def changed(colors: Colors, image: np.ndarray = PHOTO) -> np.ndarray:
    view = image.copy()
    augment_colors(view, colors)
    return view


def difference(ours: np.ndarray, theirs: Image.Image | np.ndarray) -> float:
    return float(np.abs(ours.astype(float) - np.asarray(theirs)).mean())


def torchvision_jitter(image: np.ndarray, colors: Colors) -> Image.Image:
    """What ColorJitter does with these factors in this order; what changes nothing is left out."""
    image = Image.fromarray(image)
    adjust = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
    for which in map(int, colors[4:8]):
        if colors[which] != UNCHANGED[which]:
            image = adjust[which](image, colors[which])
    return image


def drawn_jitters(count: int) -> list[Colors]:
    config = ViewsConfig(jitter=1.0, gray=0.0, blur_global1=0.0)
    return [draw_colors(0, config, view_generator(0, 0, number, 0)) for number in range(count)]


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
@pytest.mark.parametrize("factor", [0.6, 0.95, 1.4])
def test_each_part_of_jitter_equals_pillow(name, factor):
    colors = UNCHANGED._replace(**{name: factor})
    assert difference(changed(colors), torchvision_jitter(PHOTO, colors)) < 0.2


@pytest.mark.parametrize("turns", [-0.5, -0.1, 0.03, 0.1, 0.5])
def test_hue_equals_pillow(turns):
    colors = UNCHANGED._replace(hue=turns)
    assert difference(changed(colors), torchvision_jitter(PHOTO, colors)) < 1.0  # 8-bit hues of two kinds


def test_jitter_as_drawn_equals_torchvision():
    differences = [difference(changed(colors), torchvision_jitter(PHOTO, colors)) for colors in drawn_jitters(100)]
    assert np.mean(differences) <= 1.0
    assert max(differences) < 2.0


def test_the_order_of_jitter_matters():
    forth = UNCHANGED._replace(brightness=1.4, saturation=0.6)
    back = forth._replace(first=3, second=2, third=1, fourth=0)
    assert difference(changed(forth), torchvision_jitter(PHOTO, forth)) < 0.2
    assert difference(changed(back), torchvision_jitter(PHOTO, back)) < 0.2
    assert not np.array_equal(changed(forth), changed(back))


def test_gray_and_solarize_equal_pillow():
    image = Image.fromarray(PHOTO)
    gray = changed(UNCHANGED._replace(gray=1))
    assert np.abs(gray.astype(int) - np.asarray(ImageOps.grayscale(image).convert("RGB"))).max() <= 1
    assert np.array_equal(gray[..., 0], gray[..., 2])
    assert np.array_equal(changed(UNCHANGED._replace(solarize=1)), np.asarray(ImageOps.solarize(image, threshold=128)))


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 2.0])
def test_blur_is_the_rounded_gaussian_and_near_pillows(sigma):
    blurred = changed(UNCHANGED._replace(blur_sigma=sigma))
    side = 2 * blur_reach(sigma) + 1
    exact = cv2.GaussianBlur(PHOTO.astype(np.float64), (side, side), sigma, borderType=cv2.BORDER_REPLICATE)
    assert np.abs(blurred - exact).max() <= 0.5 + 1e-3
    fixed_point = cv2.GaussianBlur(PHOTO, (0, 0), sigma, borderType=cv2.BORDER_REPLICATE)
    assert difference(blurred, fixed_point) < 0.2  # of the same reach
    assert (
        difference(blurred, Image.fromarray(PHOTO).filter(ImageFilter.GaussianBlur(sigma))) < 0.8
    )  # it is three boxes


def test_nothing_drawn_changes_nothing():
    assert np.array_equal(changed(UNCHANGED), PHOTO)


@pytest.mark.parametrize("size", [(1, 1), (2, 9)])
def test_tiny_views(size):
    image = np.full((*size, 3), 77, np.uint8)
    assert (changed(UNCHANGED._replace(blur_sigma=2.0, contrast=1.3), image) == 77).all()


def test_which_view_draws_which_blur_and_solarization():
    config = ViewsConfig(jitter=0.0, gray=0.0, blur_global1=1.0, blur_global2=0.0, blur_local=0.0, solarize_global2=1.0)
    drawn = [draw_colors(index, config, view_generator(0, 0, 0, index)) for index in range(3)]
    assert [colors.blur_sigma > 0 for colors in drawn] == [True, False, False]
    assert [bool(colors.solarize) for colors in drawn] == [False, True, False]


def test_probabilities_and_ranges_of_what_is_drawn():
    config, count = ViewsConfig(), 3000
    rows = np.array([draw_colors(1, config, view_generator(0, 0, number, 1)) for number in range(count)])
    table = dict(zip(Colors._fields, rows.T, strict=True))
    jittered = table["brightness"] != 1
    assert jittered.mean() == pytest.approx(0.8, abs=0.03)
    for name, strength in (("brightness", 0.4), ("contrast", 0.4), ("saturation", 0.2), ("hue", 0.1)):
        values = table[name][jittered] - UNCHANGED[Colors._fields.index(name)]
        assert abs(values).max() <= strength
        assert values.std() == pytest.approx(strength / 3**0.5, rel=0.05)
    assert table["gray"].mean() == pytest.approx(0.2, abs=0.03)
    assert (table["blur_sigma"] > 0).mean() == pytest.approx(0.1, abs=0.02)
    assert table["solarize"].mean() == pytest.approx(0.2, abs=0.03)
    orders = {tuple(row[4:8]) for row in rows[jittered]}
    assert len(orders) == 24
