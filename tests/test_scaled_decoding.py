"""Scaled decoding: boxes of the whole image, never fewer pixels than the view has, and pixels near the whole's."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from sop_faiss.data.batch_writer import BatchWriter
from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.source import open_source
from sop_faiss.data.stream import Batches
from sop_faiss.data.views.crops import CropBox
from sop_faiss.data.views.multicrop import MultiCrop
from sop_faiss.data.views.scaled_decoding import decode_scaled, scale_box, scale_denominator, upright_jpeg_size
from sop_faiss.errors import ConfigError
from tests.images import encode, make_image
from tests.runs import tiny_config

PHOTO = make_image(np.random.default_rng(0), (203, 333))


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(PHOTO, exif=exif.tobytes())


@pytest.mark.parametrize("denominator", [2, 4, 8])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_fraction_is_pillows_draft_turned_upright(denominator, orientation):
    encoded = turned(orientation)
    size = upright_jpeg_size(encoded, 10**6)
    assert size == decode_image(encoded).shape[:2] == ((333, 203) if orientation > 4 else (203, 333))
    image = decode_scaled(encoded, size, denominator)
    assert image.shape == (-(-size[0] // denominator), -(-size[1] // denominator), 3)
    draft = Image.open(io.BytesIO(encoded))
    draft.draft("RGB", (333 // denominator, 203 // denominator))
    np.testing.assert_array_equal(image, np.asarray(ImageOps.exif_transpose(draft)))


def test_what_cannot_be_scaled_has_no_size():
    assert upright_jpeg_size(encode(PHOTO, "PNG"), 10**6) is None
    assert upright_jpeg_size(encode(PHOTO, progressive=True), 10**6) is None
    assert upright_jpeg_size(encode(PHOTO), 1000) is None
    assert upright_jpeg_size(encode(PHOTO)[:2000], 10**6) is None
    assert decode_scaled(encode(PHOTO), (333, 203), 2) is None  # not turned as expected


def test_no_crop_gets_fewer_pixels_than_its_view():
    generator = np.random.default_rng(1)
    seen = set()
    for _ in range(2000):
        height, width = (int(side) for side in generator.integers(50, 1000, 2))
        crops = []
        for _ in range(2):
            box_height, box_width = int(generator.integers(1, height + 1)), int(generator.integers(1, width + 1))
            top, left = generator.integers(height - box_height + 1), generator.integers(width - box_width + 1)
            crops.append((CropBox(int(top), int(left), box_height, box_width), int(generator.integers(8, 60))))
        denominator = scale_denominator(height, width, crops)
        seen.add(denominator)
        for larger in (2, 4, 8):
            scaled = (-(-height // larger), -(-width // larger))
            boxes = [scale_box(box, (height, width), scaled) for box, _ in crops]
            for box, (whole, _) in zip(boxes, crops, strict=True):
                assert 0 <= box.top <= scaled[0] - box.height and 0 <= box.left <= scaled[1] - box.width
                assert abs(box.top / scaled[0] - whole.top / height) <= 0.5 / scaled[0] + 1e-9
                assert abs(box.height / scaled[0] - whole.height / height) <= 1.0 / scaled[0] + 1e-9
            fits = all(min(box.height, box.width) >= side for box, (_, side) in zip(boxes, crops, strict=True))
            assert fits if larger == denominator else not fits or larger < denominator
    assert seen == {1, 2, 4, 8}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    for number in range(6):
        image = make_image(np.random.default_rng(number), (150 + 20 * number, 260))
        (folder / f"{number}.jpg").write_bytes(encode(image))
    (folder / "6.png").write_bytes(encode(PHOTO, "PNG"))
    (folder / "7.jpg").write_bytes(encode(make_image(np.random.default_rng(7), 20)))
    return folder


def test_views_are_those_of_the_whole_image(photos, tmp_path):
    settings = ("train.batch_size=8", "views.jitter=0", "views.blur_global1=0", "views.solarize_global2=0")
    source = open_source(photos)
    batches = [
        Batches(source, np.arange(8), tiny_config(tmp_path, *settings, f"data.scaled_decoding={scaled}"), 4)[0]
        for scaled in ("false", "true")
    ]
    whole, scaled = batches
    assert whole.image_ids.tolist() == scaled.image_ids.tolist()
    assert whole.masks.equal(scaled.masks)
    differences = (whole.global_views.float() - scaled.global_views.float()).abs().mean((0, 2, 3, 4))
    assert 0 < differences.max() < 10  # of 255; the images are fine stripes with noise
    for place, image_id in enumerate(whole.image_ids.tolist()):
        assert (differences[place] == 0) == (image_id >= 6), image_id  # neither a PNG nor a small image is scaled


def test_boxes_are_drawn_on_the_whole_image(photos, tmp_path):
    source, samples = open_source(photos), []
    for scaled in ("false", "true"):
        config = tiny_config(tmp_path, f"data.scaled_decoding={scaled}")
        multicrop = MultiCrop(config, config.views.local_count)
        samples.append(BatchWriter(source, np.arange(8), multicrop)._load(5, 3, [16, 16, 8]))
    (whole, drawn), (small, scaled_drawn) = samples
    assert small.shape[0] < whole.shape[0]
    for (view, _), (scaled_view, _), side in zip(drawn, scaled_drawn, (16, 16, 8), strict=True):
        assert scaled_view == view._replace(box=scale_box(view.box, whole.shape[:2], small.shape[:2]))
        assert min(scaled_view.box.height, scaled_view.box.width) >= side


def test_kept_images_cannot_be_scaled(tmp_path):
    with pytest.raises(ConfigError, match=r"scaled_decoding and data\.decoded_cache_bytes"):
        tiny_config(tmp_path, "data.scaled_decoding=true", "data.decoded_cache_bytes=1000")
