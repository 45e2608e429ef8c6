"""`Encoder.encode`: the features of a feature store, from whatever a user has in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sop_faiss import load_encoder
from sop_faiss.data.images.source import open_source
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.features.extract import extract_features
from sop_faiss.model.encoders.encoder import Encoder
from tests.encoders import write_run
from tests.images import encode, make_image
from tests.messages import assert_one_line

TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return load_encoder(str(write_run(tmp_path_factory.mktemp("runs") / "photos")))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine images of two shapes, in the order of their names."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(9):
        image = make_image(rng, (40, 60) if number % 2 else (48, 48))
        (folder / f"{number}.png").write_bytes(encode(image, "PNG"))
    return folder


@pytest.mark.parametrize("whole", [False, True])
def test_files_have_the_features_of_the_feature_store(encoder: Encoder, photos: Path, whole: bool) -> None:
    preprocess = encoder.preprocess.keeping_aspect() if whole else None
    store = extract_features(encoder, open_source(photos), preprocess=preprocess)
    calls: list[tuple[int, int]] = []
    paths = sorted(photos.iterdir())
    features = encoder.encode(
        paths, batch_size=4, preprocess=preprocess, progress=lambda done, total: calls.append((done, total))
    )
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, store.features, atol=TOLERANCE, rtol=0)
    assert calls[-1] == (9, 9) and [done for done, _ in calls] == sorted({done for done, _ in calls})
    reversed_paths = (str(path) for path in reversed(paths))
    np.testing.assert_allclose(
        encoder.encode(reversed_paths, preprocess=preprocess), store.features[::-1], atol=TOLERANCE, rtol=0
    )


def test_one_image_and_batches_in_any_form(encoder: Encoder, photos: Path) -> None:
    path = photos / "0.png"
    expected = encoder.encode([path])
    assert expected.shape == (1, encoder.feature_dim)
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    array = np.array(image)
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    batches: list[Any] = [np.stack([array] * 3), torch.stack([tensor] * 3), [path, image, tensor], iter([array] * 3)]
    for one in (path, str(path), image, array, tensor, tensor.float() / 255):
        np.testing.assert_allclose(encoder.encode(one), expected, atol=TOLERANCE, rtol=0)
    for batch in batches:
        np.testing.assert_allclose(encoder.encode(batch), expected.repeat(3, 0), atol=TOLERANCE, rtol=0)
    transformed = encoder(encoder.transform(path)[None])
    np.testing.assert_allclose(torch.nn.functional.normalize(transformed, dim=1), expected, atol=TOLERANCE, rtol=0)


def test_nothing_gives_no_rows(encoder: Encoder) -> None:
    assert encoder.encode([]).shape == (0, encoder.feature_dim)


def test_an_unusable_image_is_named_and_nothing_is_returned(encoder: Encoder, photos: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(encode(make_image(np.random.default_rng(1), 40))[:200])
    for bad in (broken, tmp_path / "missing.jpg", tmp_path):
        with pytest.raises(DataError) as found:
            encoder.encode([photos / "0.png", bad, photos / "1.png"])
        assert_one_line(found, str(bad))
    array = make_image(np.random.default_rng(1), 40)
    with pytest.raises(DataError) as found:
        encoder.encode([array, array[..., 0]])
    assert_one_line(found, "image 1", "(40, 40)")


@pytest.mark.parametrize("shape", [(), (32,), (32, 32), (1, 2, 32, 32, 3)])
def test_arrays_that_are_not_images_are_refused(encoder: Encoder, shape: tuple[int, ...]) -> None:
    for values in (np.zeros(shape, np.uint8), torch.zeros(shape)):
        with pytest.raises(DataError) as found:
            encoder.encode(values)
        assert_one_line(found, str(shape))


@pytest.mark.parametrize("batch_size", [0, -1, 10**9])
def test_an_impossible_batch_size_is_refused(encoder: Encoder, photos: Path, batch_size: int) -> None:
    with pytest.raises(ConfigError) as found:
        encoder.encode(photos / "0.png", batch_size=batch_size)
    assert found.value.arguments == ("batch_size",)


def test_the_mode_and_autocast_of_the_caller_change_nothing(encoder: Encoder, photos: Path) -> None:
    expected = encoder.encode(photos / "0.png")
    encoder.train()
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            features = encoder.encode(photos / "0.png")
        assert encoder.training
    finally:
        encoder.eval()
    assert np.array_equal(features, expected)
