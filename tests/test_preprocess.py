from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional
from torchvision import transforms

from sop_faiss.errors import ConfigError
from sop_faiss.model.encoders.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from tests.images import make_image

LARGEST_DIFFERENCE = 2  # of 255, in any pixel: torch's uint8 weights are rounded otherwise than PIL's
MEAN_DIFFERENCE = 0.02


def pillow_protocol(image: np.ndarray, preprocess: Preprocess) -> np.ndarray:
    """The k-NN protocol as DINO's evaluation has it, on PIL images."""
    steps = transforms.Compose(
        [
            transforms.Resize(preprocess.resize, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(preprocess.crop),
        ]
    )
    return np.asarray(steps(Image.fromarray(image)))


def assert_close_images(ours: np.ndarray, theirs: np.ndarray) -> None:
    difference = np.abs(ours.astype(int) - theirs.astype(int))
    assert difference.max() <= LARGEST_DIFFERENCE
    assert difference.mean() <= MEAN_DIFFERENCE


@pytest.mark.parametrize("shape", [(375, 500), (500, 333), (224, 224), (90, 61), (300, 256), (57, 400), (257, 256)])
@pytest.mark.parametrize("size", [224, 96, 32])
def test_crop_mode_is_the_pillow_protocol(shape: tuple[int, int], size: int) -> None:
    image = make_image(np.random.default_rng(0), shape)
    preprocess = Preprocess.square(size)
    ours = preprocess.apply(image)
    assert ours.shape == (size, size, 3) and ours.dtype == np.uint8 and ours.flags.c_contiguous
    assert_close_images(ours, pillow_protocol(image, preprocess))


def test_sizes_of_the_protocol() -> None:
    assert (Preprocess.square(224).resize, Preprocess.square(224).crop) == (256, 224)
    assert Preprocess.square(192).resize == 219
    assert Preprocess.square(32).resize == 32


def test_thumbnail_of_the_size_is_untouched() -> None:
    image = make_image(np.random.default_rng(0), 32)
    assert np.array_equal(Preprocess.square(32).apply(image), image)


def test_read_only_images_are_taken() -> None:
    image = make_image(np.random.default_rng(0), (50, 40))
    image.flags.writeable = False
    assert Preprocess.square(32).apply(image).shape == (32, 32, 3)


@pytest.mark.parametrize("shape", [(375, 500), (500, 333), (100, 100)])
def test_keep_aspect_is_pillow_without_a_crop(shape: tuple[int, int]) -> None:
    image = make_image(np.random.default_rng(1), shape)
    preprocess = Preprocess.square(224).keeping_aspect(200)
    ours = preprocess.apply(image)
    scale = 200 / max(shape)
    height, width = round(shape[0] * scale), round(shape[1] * scale)
    assert_close_images(ours, np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)))


@settings(deadline=None, max_examples=60)
@given(
    height=st.integers(1, 2000),
    width=st.integers(1, 2000),
    multiple=st.sampled_from([1, 8, 14, 16, 32]),
    count=st.integers(1, 20),
)
def test_keep_aspect_sides_are_multiples_near_the_aspect(height: int, width: int, multiple: int, count: int) -> None:
    size = multiple * count
    preprocess = Preprocess.square(size, multiple=multiple).keeping_aspect()
    rows, columns = preprocess.target_size(height, width)
    assert rows % multiple == columns % multiple == 0
    assert max(rows, columns) == size
    for side, before in ((rows, height), (columns, width)):
        exact = before * size / max(height, width)
        assert abs(side - exact) <= multiple / 2 + 1e-6 or side == multiple


def test_normalize_is_torchvisions() -> None:
    images = torch.from_numpy(np.stack([make_image(np.random.default_rng(seed), (8, 12)) for seed in range(3)]))
    ours = Preprocess.square(32).normalize(images)
    theirs = transforms.functional.normalize(
        images.permute(0, 3, 1, 2).float() / 255, list(IMAGENET_MEAN), list(IMAGENET_STD)
    )
    assert ours.shape == (3, 3, 8, 12)
    assert (ours - theirs).abs().max() < 1e-5


def test_size_that_patches_do_not_tile_names_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"200 is not divisible .* 16: take 192 or 208"):
        Preprocess.square(200, multiple=16)
    with pytest.raises(ConfigError, match="take 16"):
        Preprocess.square(10, multiple=16)


@pytest.mark.parametrize(
    "fields",
    [
        {"resize": 0, "crop": 0},
        {"resize": 10_000, "crop": 10_000},
        {"resize": 32, "crop": 64},
        {"resize": 64, "crop": 32, "keep_aspect": True},
        {"resize": 32, "crop": 32, "std": (0.0, 1.0, 1.0)},
        {"resize": 32, "crop": 32, "mean": (float("nan"), 0.0, 0.0)},
        {"resize": 32, "crop": 32, "interpolation": "nearest"},
        {"resize": 32, "crop": 32, "multiple": 0},
    ],
)
def test_impossible_values_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Preprocess(**fields)  # type: ignore[arg-type]


def test_a_long_image_is_not_blown_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the whole would become too large, the middle is taken first: the same image, but for its rim."""
    image = make_image(np.random.default_rng(2), (40, 400))
    preprocess = Preprocess.square(224)
    whole = preprocess.apply(image)
    resized: list[int] = []
    interpolate = functional.interpolate
    monkeypatch.setattr(
        functional, "interpolate", lambda *_, size, **o: resized.append(size) or interpolate(*_, size=size, **o)
    )
    monkeypatch.setattr("sop_faiss.model.encoders.preprocess.MOST_PIXELS", 256 * 300)
    assert np.abs(preprocess.apply(image).astype(int) - whole).mean() < 2 and resized == [(256, 256)]
    assert preprocess.apply(image.transpose(1, 0, 2)).shape == (224, 224, 3)
    assert preprocess.keeping_aspect().apply(np.zeros((1, 3000, 3), np.uint8)).shape == (1, 224, 3)
