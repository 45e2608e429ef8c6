"""Dropped patches and shuffled tiles against loops over pixels, and what classifiers see of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.source import open_source
from sop_faiss.evaluate.attention import look
from sop_faiss.evaluate.robustness import (
    Distortions,
    Point,
    drop_patches,
    dropped_count,
    right_predictions,
    salient_first,
    shuffle_tiles,
)
from sop_faiss.model.encoders.load import load_encoder
from tests.images import make_image, write_folder

SIDE = 32


def image() -> torch.Tensor:
    return torch.randn(3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)) + 5  # no pixel is 0


def patch_values(pixels: np.ndarray, rows: int) -> list[np.ndarray]:
    side = SIDE // rows
    return [
        pixels[:, row * side : (row + 1) * side, column * side : (column + 1) * side]
        for row in range(rows)
        for column in range(rows)
    ]


@pytest.mark.parametrize("rows", [1, 2, 8, SIDE])
def test_dropped_patches_are_exactly_the_first_of_the_order(rows: int) -> None:
    order = np.random.default_rng(0).permutation(rows**2)
    for share in (0.0, 0.3, 0.5, 1.0):
        count = dropped_count(share, rows**2)
        changed = patch_values(drop_patches(image(), order, count).numpy(), rows)
        for number, (before, after) in enumerate(zip(patch_values(image().numpy(), rows), changed, strict=True)):
            expected = np.zeros_like(before) if number in order[:count].tolist() else before
            np.testing.assert_array_equal(after, expected)


def test_a_share_is_rounded_down_as_ibot_does() -> None:
    assert [dropped_count(tenths / 10, 196) for tenths in range(10)] == [n * 196 // 10 for n in range(10)]
    assert dropped_count(0.29, 100) == 29 and dropped_count(1.0, 49) == 49


@pytest.mark.parametrize("rows", [1, 2, 4, 16])
def test_shuffling_moves_tiles_and_keeps_all_pixels(rows: int) -> None:
    places = np.random.default_rng(1).permutation(rows**2)
    shuffled = shuffle_tiles(image(), places)
    before, after = patch_values(image().numpy(), rows), patch_values(shuffled.numpy(), rows)
    for number, place in enumerate(places):
        np.testing.assert_array_equal(after[number], before[place])
    assert torch.equal(shuffled.flatten().sort().values, image().flatten().sort().values)
    assert torch.equal(shuffle_tiles(shuffled, np.argsort(places)), image())


@pytest.mark.parametrize("model", ["timm:test_vit", "timm:test_resnet"])
def test_salient_patches_have_the_most_attention_or_the_largest_norm(model: str) -> None:
    encoder = load_encoder(model, random_weights=0)
    pixels = make_image(np.random.default_rng(0), encoder.preprocess.crop)
    looked = look(encoder, encoder.preprocess.normalize(torch.from_numpy(pixels)[None])[0])
    found = np.linalg.norm(looked.patches, axis=2) if looked.heads is None else looked.heads.mean(0)
    order, what = salient_first(encoder, pixels, len(found))  # the same grid: nothing is resized
    assert ("norm" in what) == (looked.heads is None)
    values = found.ravel()[order]
    assert (np.diff(values) <= 0).all() and sorted(order) == list(range(found.size))
    finer, _ = salient_first(encoder, pixels, 2 * len(found))
    assert sorted(finer) == list(range(4 * found.size))


def distortions(judge: object) -> Distortions:
    kinds = ("random", "salient", "non_salient")
    points = [Point(kind, share) for kind in kinds for share in (0.25, 0.5)] + [Point("shuffled", 4)]
    return Distortions(points, 8, 0, judge)  # type: ignore[arg-type]


def test_each_point_is_its_own_change() -> None:
    judge = load_encoder("timm:test_vit", random_weights=0)
    pixels = make_image(np.random.default_rng(0), judge.preprocess.crop)
    order, _ = salient_first(judge, pixels, 8)
    changed = distortions(judge).apply(image(), pixels, 3)
    dropped = [(each == 0).all(0)[::4, ::4].flatten().numpy() for each in changed]
    assert [int(each.sum()) for each in dropped] == [16, 32, 16, 32, 16, 32, 0]
    assert set(np.flatnonzero(dropped[2])) == set(order[:16]) and set(np.flatnonzero(dropped[5])) == set(order[32:])
    assert (dropped[0] <= dropped[1]).all()  # a larger share drops the same ones, and more
    again, other = (distortions(judge).apply(image(), pixels, number) for number in (3, 4))
    assert torch.equal(changed, again) and not torch.equal(changed[0], other[0])
    assert not torch.equal(changed[6], other[6]) and torch.equal(changed[2], other[2])


def test_predictions_are_of_the_changed_images(tmp_path: Path) -> None:
    encoder = load_encoder("timm:test_vit", random_weights=0)
    source = open_source(write_folder(tmp_path / "photos", classes=2, per_class=2, size=64))
    (tmp_path / "photos" / "class_1" / "0000.jpg").write_bytes(b"nothing")
    seen: list[np.ndarray] = []

    def predict(features: np.ndarray) -> np.ndarray:
        seen.append(features)
        return np.arange(len(features)) % 7 // 6  # class 0 at all points but the last

    assert source.labels is not None
    change = distortions(encoder)
    right = right_predictions(encoder, source, source.labels, change, predict, max_bad_fraction=0.25)
    np.testing.assert_array_equal(right, [[1] * 6 + [0], [1] * 6 + [0], [0] * 6 + [1]])
    pixels = encoder.preprocess.apply(decode_image(source.read(1)))
    normalized = encoder.preprocess.normalize(torch.from_numpy(pixels)[None])[0]
    with torch.no_grad():
        expected = encoder.eval()(change.apply(normalized, pixels, 1))
    expected = torch.nn.functional.normalize(expected, dim=1).numpy()
    np.testing.assert_allclose(np.concatenate(seen)[7:14], expected, atol=1e-5)
