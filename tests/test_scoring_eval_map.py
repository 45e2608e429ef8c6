"""Maps of features: which images, where, and what cannot be drawn."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.plane import points_of
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.report.map_figure import MapPanel, draw_maps
from sop_faiss.verbs.scoring.eval_map import MapOptions, draw_map
from tests.images import write_folder
from tests.test_cli_knn import write_store

SMALL = EncoderSpec("timm:test_resnet", random_weights=0, size=32)


def size_of(figure: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(figure)).size


def groups(count: int) -> np.ndarray:
    generator = np.random.default_rng(0)
    rows = np.repeat(np.eye(3), count, axis=0) + 0.05 * generator.normal(size=(3 * count, 3))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def test_principal_components_keep_the_distances_of_a_plane() -> None:
    rows = groups(10)
    points = points_of(rows, "pca")
    centered = (rows - rows.mean(0)).astype(np.float64)
    _, _, axes = np.linalg.svd(centered)
    expected = centered @ axes[:2].T
    np.testing.assert_allclose(np.abs(points), np.abs(expected), atol=1e-5)  # a component has no sign


def test_tsne_keeps_groups_together_and_repeats() -> None:
    rows = groups(15)
    points = points_of(rows, perplexity=5.0)
    distances = np.linalg.norm(points[:, None] - points[None], axis=2) + np.diag(np.full(45, np.inf))
    assert (distances.argmin(1) // 15 == np.arange(45) // 15).all()
    np.testing.assert_array_equal(points, points_of(rows, perplexity=5.0))


def test_any_name_of_a_class_can_be_drawn() -> None:
    labels = np.arange(30) % 3
    points = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32)
    names = ["_hidden", "$\\frac{$", "b" * 99]
    covered, apart = MapPanel("", points, labels), MapPanel("", points + 9 * labels[:, None].astype(np.float32), labels)
    one, three = (size_of(draw_maps(panels, names, "")) for panels in ([covered], [covered, apart, covered]))
    assert three[0] == 3 * one[0]


def test_copies_are_one_point() -> None:
    for method in ("tsne", "pca"):
        np.testing.assert_array_equal(points_of(np.repeat(groups(1)[:1], 12, axis=0), method, perplexity=4.0), 0)


def test_images_and_stores_are_drawn(tmp_path: Path) -> None:
    labels = np.arange(12) % 3
    store = write_store(tmp_path / "one", 1, labels, 12)
    shutil.copytree(store, tmp_path / "two")
    one = size_of(draw_map([str(store)]))
    both = size_of(draw_map([str(store), str(tmp_path / "two")], options=MapOptions("pca")))
    assert both[0] == 2 * one[0] and both[1] == one[1]
    folder = write_folder(tmp_path / "photos", per_class=3, seed=0)
    next((folder / "class_0").iterdir()).write_bytes(b"broken")  # is left out
    figure = draw_map([str(folder)], SMALL, MapOptions("pca", show_images=True))
    assert size_of(figure)[0] == 2 * one[0]
    assert figure == draw_map([str(folder)], SMALL, MapOptions("pca", show_images=True))


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    labels = np.arange(12) % 3
    store = str(write_store(tmp_path / "one", 1, labels, 12))
    folder = str(write_folder(tmp_path / "photos", per_class=3, seed=0))
    for changes, named in (
        ({"method": "nope"}, "method"),
        ({"limit": 2}, "limit"),
        ({"perplexity": float("nan")}, "perplexity"),
        ({"seed": -1}, "seed"),
        ({"show_images": True}, "show_images"),
    ):
        with pytest.raises(ConfigError) as raised:
            draw_map([store], options=MapOptions(**changes))
        assert named in (raised.value.arguments or str(raised.value))
    with pytest.raises(ConfigError, match="model"):
        draw_map([folder])
    with pytest.raises(ConfigError, match="model"):
        draw_map([store], SMALL)
    with pytest.raises(DataError, match="0 images in common"):
        draw_map([store, folder], SMALL)
    with pytest.raises(DataError, match="3 or more"):
        points_of(groups(1)[:2])
    with pytest.raises(ConfigError, match="perplexity"):
        points_of(groups(3), perplexity=5.0)
