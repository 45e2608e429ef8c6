"""Sequences as DAVIS lays them out, and the ways in which they can be wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sop_faiss.errors import DataError
from sop_faiss.evaluate.sets.video_set import LIST, list_videos, open_video, palette_image, read_mask
from tests.messages import assert_one_line
from tests.videos import HEIGHT, WIDTH, frame_file, mask_file, write_davis


def test_objects_have_the_numbers_of_the_masks(tmp_path: Path) -> None:
    root = write_davis(tmp_path / "d")
    assert list_videos(root) == ["cat", "dog"]
    video = open_video(root, "dog")
    assert video.objects == 2 and len(video.frames) == len(video.masks) == 6
    assert np.unique(video.first).tolist() == [0, 1, 2]
    assert video.read_frame(3).shape == (HEIGHT, WIDTH, 3)
    assert len(open_video(root, "dog", 4).frames) == 4


def test_void_and_unknown_numbers_are_of_no_object(tmp_path: Path) -> None:
    root = write_davis(tmp_path / "d")
    for place, value in ((0, 255), (1, 255), (2, 7)):
        mask = read_mask(mask_file(root, "cat", place))
        mask[-1] = value
        Image.fromarray(mask).save(mask_file(root, "cat", place))
    video = open_video(root, "cat")
    assert video.objects == 2
    assert [int(video.read_mask(place)[-1].max()) for place in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("mode", ["L", "1"])
def test_white_masks_are_of_one_object(tmp_path: Path, mode: str) -> None:
    root = write_davis(tmp_path / "d", objects=1, white=True)
    for file in (root / "Annotations").rglob("*.png"):
        Image.open(file).convert(mode).save(file)
    video = open_video(root, "cat")
    assert video.objects == 1
    assert int((video.read_mask(5) == 1).sum()) == int((video.first == 1).sum()) == 26 * 26


def test_gaps_in_the_numbers_of_frames_are_fine(tmp_path: Path) -> None:
    root = write_davis(tmp_path / "d")
    frame_file(root, "cat", 2).unlink()
    mask_file(root, "cat", 2).unlink()
    assert [file.stem[-1] for file in open_video(root, "cat").frames] == ["0", "1", "3", "4", "5"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "empty"),
        ("\n \n", "empty"),
        ("cat\ncat\n", "twice"),
        ("../cat\n", "../cat"),
        (".\n", "names"),
        (None, "val.txt"),
    ],
)
def test_lists_that_cannot_be_used(tmp_path: Path, content: str | None, named: str) -> None:
    root = write_davis(tmp_path / "d")
    (root / LIST).unlink() if content is None else (root / LIST).write_text(content)
    with pytest.raises(DataError) as error:
        list_videos(root)
    assert_one_line(error, named)


def test_a_list_that_is_not_text(tmp_path: Path) -> None:
    root = write_davis(tmp_path / "d")
    (root / LIST).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not text"):
        list_videos(root)


def test_sequences_that_are_incomplete(tmp_path: Path) -> None:
    root = write_davis(tmp_path / "d", ("a", "b", "c", "d", "e"))
    mask_file(root, "a", 0).unlink()
    mask_file(root, "b", 3).unlink()
    frame_file(root, "c", 4).unlink()
    for place in range(2, 6):
        frame_file(root, "d", place).unlink()
        mask_file(root, "d", place).unlink()
    Image.new("L", (WIDTH, HEIGHT)).save(mask_file(root, "e", 0))
    cases = {
        "a": "first frame 00000",
        "b": "00003",
        "c": "00004",
        "d": "2 frames",
        "e": "no object",
        "f": "does not exist",
    }
    for name, named in cases.items():
        with pytest.raises(DataError) as error:
            open_video(root, name)
        assert_one_line(error, name, named)


def test_files_that_are_damaged_or_of_another_size(tmp_path: Path) -> None:
    root = write_davis(tmp_path / "d")
    good = mask_file(root, "cat", 1).read_bytes()
    mask_file(root, "cat", 1).write_bytes(good[: len(good) // 2])
    mask_file(root, "cat", 2).write_text("not a mask")
    Image.new("L", (WIDTH, HEIGHT + 1)).save(mask_file(root, "cat", 3))
    Image.new("RGB", (WIDTH, HEIGHT)).save(mask_file(root, "cat", 4))
    Image.new("RGB", (WIDTH - 1, HEIGHT)).save(frame_file(root, "cat", 1))
    frame_file(root, "cat", 2).write_bytes(b"")
    video = open_video(root, "cat")
    for place in (1, 2, 3, 4):
        with pytest.raises(DataError) as error:
            video.read_mask(place)
        assert_one_line(error, f"0000{place}.png")
    for place in (1, 2):
        with pytest.raises(DataError) as error:
            video.read_frame(place)
        assert_one_line(error, f"0000{place}.jpg")


def test_masks_are_written_in_the_colors_of_davis(tmp_path: Path) -> None:
    mask = np.arange(256, dtype=np.uint8).reshape(16, 16)
    palette_image(mask).save(tmp_path / "m.png")
    assert np.array_equal(read_mask(tmp_path / "m.png"), mask)
    colors = np.array(Image.open(tmp_path / "m.png").convert("RGB")).reshape(256, 3)
    assert colors[:5].tolist() == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0], [0, 0, 128]]
    assert colors[[8, 22, 255]].tolist() == [[64, 0, 0], [0, 192, 128], [224, 224, 192]]
