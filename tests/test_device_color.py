"""Colors of batches in torch against the uint8 path, which is the reference, and against PIL's own functions."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from sop_faiss.config import ViewsConfig
from sop_faiss.data.views.color import UNCHANGED, Colors, draw_colors
from sop_faiss.data.views.crops import view_generator
from sop_faiss.data.views.device_color import augment_colors_on_device, colors_on_device, normalize
from tests.images import make_image
from tests.test_color import changed, drawn_jitters, torchvision_jitter

PHOTOS = np.stack([make_image(np.random.default_rng(seed), 48) for seed in range(4)])


def on_device(images: np.ndarray, colors: list[Colors], device: str = "cpu") -> np.ndarray:
    pixels = torch.from_numpy(images).to(device).float()
    return augment_colors_on_device(pixels, torch.tensor(colors, dtype=torch.float32)).cpu().numpy()


def differences(colors: list[Colors], device: str = "cpu") -> np.ndarray:
    """Mean absolute difference from the uint8 path, of each view."""
    images = PHOTOS[np.arange(len(colors)) % len(PHOTOS)]
    ours = on_device(images, colors, device)
    assert ours.min() >= 0 and ours.max() <= 255.001
    reference = np.stack([changed(row, image) for row, image in zip(colors, images, strict=True)])
    return np.abs(ours - reference).mean((1, 2, 3))


def check_all(device: str) -> None:
    config = ViewsConfig()
    drawn = [draw_colors(number % 3, config, view_generator(0, 0, number, number % 3)) for number in range(90)]
    assert len({bool(row.solarize) for row in drawn}) == len({bool(row.gray) for row in drawn}) == 2
    assert differences(drawn, device).max() < 1.5
    assert differences(drawn, device).mean() < 0.5


def test_whole_augmentation_agrees_with_the_uint8_path():
    check_all("cpu")


@pytest.mark.gpu
def test_whole_augmentation_agrees_on_cuda():
    check_all("cuda")


def test_jitter_agrees_with_the_uint8_path_and_with_torchvision():
    drawn = drawn_jitters(60)
    assert differences(drawn).mean() < 0.5  # uint8 has 8 bits for the hue
    images = PHOTOS[np.arange(60) % 4]
    ours = on_device(images, drawn)
    theirs = np.stack([torchvision_jitter(image, row) for image, row in zip(images, drawn, strict=True)])
    assert np.abs(ours - theirs).mean() <= 0.5


@pytest.mark.parametrize("turns", [-0.5, -0.1, 0.0, 0.1, 0.25])
def test_hue_turns_as_in_hsv(turns):
    pixels = np.random.default_rng(0).integers(0, 256, (1, 8, 8, 3), dtype=np.uint8)
    pixels[0, 0] = 77  # gray has no hue
    ours = on_device(pixels, [UNCHANGED._replace(hue=turns or 1e-9)])[0]
    for row in range(8):
        for column in range(8):
            hue, saturation, value = colorsys.rgb_to_hsv(*(pixels[0, row, column] / 255))
            turned = (hue + int(turns * 255) / 255) % 1
            exact = np.array(colorsys.hsv_to_rgb(turned, saturation, value)) * 255
            np.testing.assert_allclose(ours[row, column], exact, atol=0.501)  # whole levels


def test_gray_and_solarize_are_exact_but_for_ties():
    for colors in (UNCHANGED._replace(gray=1), UNCHANGED._replace(solarize=1)):
        assert differences([colors] * 4).max() < 0.03


@pytest.mark.parametrize("sigma", [0.1, 0.7, 2.0, 9.0])
def test_blur_agrees_with_the_uint8_path(sigma):
    colors = UNCHANGED._replace(blur_sigma=sigma)
    assert differences([colors] * 4).max() <= 0.26  # it rounds: a quarter of a level
    theirs = np.asarray(Image.fromarray(PHOTOS[0]).filter(ImageFilter.GaussianBlur(sigma)))
    assert np.abs(on_device(PHOTOS[:1], [colors])[0] - theirs).mean() < 1.0  # three boxes in place of a Gaussian


def test_views_of_one_batch_do_not_touch_each_other():
    drawn = drawn_jitters(4)
    drawn[1] = UNCHANGED
    drawn[2] = drawn[2]._replace(blur_sigma=1.0, gray=1)
    together = on_device(PHOTOS, drawn)
    assert np.array_equal(together[1], PHOTOS[1])
    for number in range(4):
        alone = on_device(PHOTOS[number : number + 1], drawn[number : number + 1])[0]
        np.testing.assert_allclose(together[number], alone, atol=1e-3)


def test_normalize_colors_only_where_a_table_is_given():
    config = ViewsConfig(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    views = torch.from_numpy(PHOTOS).view(2, 2, 48, 48, 3)
    plain = normalize(views, torch.empty(2, 2, 0), config, torch.device("cpu"))
    expected = (views.double() / 255 - torch.tensor(config.mean)) / torch.tensor(config.std)
    torch.testing.assert_close(plain.double(), expected.movedim(-1, 2), rtol=1e-5, atol=1e-5)
    unchanged = torch.tensor(UNCHANGED).expand(2, 2, -1)
    assert torch.equal(normalize(views, unchanged, config, torch.device("cpu")), plain)
    bright = unchanged.clone()
    bright[1, 0, 0] = 0.5
    other = normalize(views, bright, config, torch.device("cpu"))
    assert [torch.equal(other[v, b], plain[v, b]) for v in range(2) for b in range(2)] == [True, True, False, True]
    assert normalize(views[:, :0], torch.empty(2, 0, 0), config, torch.device("cpu")).shape == (2, 0, 3, 48, 48)
    assert normalize(views[:0], bright[:0], config, torch.device("cpu")).shape == (0, 2, 3, 48, 48)


def test_where_colors_are_done():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [colors_on_device(ViewsConfig(color="auto"), device) for device in (cpu, cuda)] == [False, True]
    assert [colors_on_device(ViewsConfig(color="cpu"), device) for device in (cpu, cuda)] == [False, False]
    assert [colors_on_device(ViewsConfig(color="device"), device) for device in (cpu, cuda)] == [True, True]
