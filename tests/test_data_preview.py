"""The preview shows what training gets: the same pixels, the boxes they were cut from, the masks."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from sop_faiss.config import load_config
from sop_faiss.data.images.source import open_source
from sop_faiss.data.stream import Batches
from sop_faiss.report.views_figure import ViewedImage, overlay_mask, plot_views
from sop_faiss.verbs.training import data_preview as preview
from sop_faiss.verbs.training.data_preview import draw_preview
from tests.images import make_image, write_shards
from tests.runs import tiny_config

PLAIN = (
    "views.jitter=0", "views.gray=0", "views.blur_global1=0", "views.blur_global2=0", "views.blur_local=0",
    "views.solarize_global2=0",
)  # fmt: skip


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[ViewedImage]:
    """What was handed to the drawing."""
    seen: list[ViewedImage] = []

    def keep(images: list[ViewedImage], path: Path, title: str) -> None:
        seen.extend(images)
        plot_views(images, path, title)

    monkeypatch.setattr(preview, "plot_views", keep)
    return seen


def test_views_are_those_of_training(tmp_path: Path, drawn: list[ViewedImage]) -> None:
    shards = write_shards(tmp_path / "set", classes=2, per_class=10, size=(20, 30))
    config = tiny_config(tmp_path, f"data.train={shards}", "train.seed=4", "views.local_count=2")
    result = draw_preview(config, tmp_path / "views.png", images=3, epoch=2)
    source = open_source(shards)
    batches = Batches(source, np.arange(20), config, 4)
    batch = batches.make(2 * batches.steps_per_epoch)  # of 6 images, as in training
    assert result.keys == [source.keys[i] for i in batch.image_ids[:3]] and result.views == 4
    for number, image in enumerate(drawn):
        np.testing.assert_array_equal(image.global_views, batch.global_views[:, number].numpy())
        np.testing.assert_array_equal(image.local_views, batch.local_views[:, number].numpy())
        np.testing.assert_array_equal(image.masks, batch.masks[:, number].numpy())
        assert image.image.shape == (20, 30, 3)
    assert not np.array_equal(drawn[0].global_views, drawn[1].global_views)
    draw_preview(
        replace(config, views=replace(config.views, color="device")), tmp_path / "views.png", images=1, epoch=2
    )
    np.testing.assert_array_equal(drawn[3].global_views, drawn[0].global_views)  # colored, though a device would do it


@pytest.mark.parametrize(("scaled", "tolerance"), [("false", 0.5), ("true", 4.0)])
def test_boxes_are_where_the_views_were_cut(
    tmp_path: Path, drawn: list[ViewedImage], scaled: str, tolerance: float
) -> None:
    """Colors off: each view is its box, resized, mirrored or not."""
    shards = write_shards(tmp_path / "set", classes=1, per_class=6, size=(60, 80))
    settings = (f"data.train={shards}", f"data.scaled_decoding={scaled}", *PLAIN)
    draw_preview(tiny_config(tmp_path, *settings), tmp_path / "views.png", images=6)
    for image in drawn:
        assert len(image.boxes) == 3
        for box, view in zip(image.boxes, [*image.global_views, *image.local_views], strict=True):
            crop = image.image[box.top : box.top + box.height, box.left : box.left + box.width]
            expected = np.asarray(Image.fromarray(crop).resize(view.shape[:2], Image.Resampling.BICUBIC)).astype(int)
            off = min(np.abs(expected - one).mean() for one in (view, cv2.flip(view, 1)))
            assert off < tolerance, (image.key, box)


def test_an_epoch_has_the_sizes_of_its_phase(tmp_path: Path, drawn: list[ViewedImage]) -> None:
    shards = write_shards(tmp_path / "set", classes=1, per_class=6, size=20)
    config = tiny_config(tmp_path, f"data.train={shards}", "train.phases=[{until: 0.5, global_size: 8}]")
    for epoch, side, patches in ((2, 8, 4), (3, 16, 16)):  # of six
        draw_preview(config, tmp_path / "views.png", images=1, epoch=epoch)
        assert drawn[-1].global_views.shape[1] == side and drawn[-1].masks.shape[-1] == patches


def test_no_boxes_where_the_image_is_turned(tmp_path: Path, drawn: list[ViewedImage]) -> None:
    shards = write_shards(tmp_path / "set", classes=1, per_class=2, size=20)
    config = tiny_config(tmp_path, f"data.train={shards}", "views.max_rotation_degrees=20", "train.batch_size=2")
    draw_preview(config, tmp_path / "views.png")
    assert [image.boxes for image in drawn] == [[], []]


def test_a_configuration_that_wants_weights_is_drawn_without_them(tmp_path: Path, drawn: list[ViewedImage]) -> None:
    shards = write_shards(tmp_path / "set", classes=1, per_class=2, size=40)
    config = load_config("continue_conv", [f"data.train={shards}"])
    assert config.model.init and not config.model.weights
    draw_preview(config, tmp_path / "views.png", images=1)
    assert drawn[0].global_views.shape[1:3] == (config.views.global_size, config.views.global_size)


def test_a_mask_covers_its_patches() -> None:
    view = make_image(np.random.default_rng(0), 16)
    mask = np.zeros(16, bool)
    mask[[1, 6]] = True  # of 4 x 4: first line second, second line third
    changed = (overlay_mask(view, mask) != view).any(axis=2)
    expected = np.zeros((16, 16), bool)
    expected[0:4, 4:8] = expected[4:8, 8:12] = True
    np.testing.assert_array_equal(changed, expected)


@pytest.mark.parametrize(("views", "locals_"), [(1, 1), (2, 0), (3, 5)])
def test_any_number_of_views_and_any_name(tmp_path: Path, views: int, locals_: int) -> None:
    rng = np.random.default_rng(0)
    images = [
        ViewedImage(
            key=key,
            image=make_image(rng, (30, 40)),
            global_views=np.stack([make_image(rng, 16) for _ in range(views)]),
            local_views=np.zeros((locals_, 8, 8, 3), np.uint8),
            masks=rng.random((views, 16)) < 0.5,
            boxes=[],
        )
        for key in ("$x_{", "写真\n" * 50)
    ]
    plot_views(images, tmp_path / "deep" / "views.png", "title " * 40)
    image = Image.open(io.BytesIO((tmp_path / "deep" / "views.png").read_bytes()))
    assert image.format == "PNG" and image.size[1] > 300
