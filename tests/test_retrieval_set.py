"""Retrieval data sets on disk: images by name, query boxes, and what is said when something is missing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sop_faiss.data.images.box import crop_to_box
from sop_faiss.data.images.decode import decode_image
from sop_faiss.errors import DataError
from sop_faiss.evaluate.sets.retrieval_set import open_retrieval_set
from tests.ground_truths import GRADED_GND, PLAIN_GND, REAL_GND, changed, needs_real_gnd, write_json, write_pickle
from tests.images import encode, make_image


def write_set(root: Path, content: dict[str, Any], *, folders: tuple[str, str], ending: str = ".jpg") -> Path:
    """Small images for every name, in the folders of queries and gallery, and gnd.json."""
    rng = np.random.default_rng(0)
    for folder, names in zip(folders, (content["qimlist"], content["imlist"]), strict=True):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            file = root / folder / (name if "." in name else name + ending)
            if not file.exists():
                file.write_bytes(encode(make_image(rng, (20, 24)), "PNG" if ending == ".png" else "JPEG"))
    write_json(root / "gnd.json", content)
    return root


@pytest.mark.parametrize("ending", [".jpg", ".jpeg", ".png", ".JPG"])
@pytest.mark.parametrize("folders", [("jpg", "jpg"), ("query", "database")])
def test_names_without_ending_are_found(tmp_path: Path, ending: str, folders: tuple[str, str]) -> None:
    root = write_set(tmp_path / "set", GRADED_GND, folders=folders, ending=ending)
    found = open_retrieval_set(str(root))
    assert found.gallery.keys == GRADED_GND["imlist"]
    assert [found.gallery.member_of(i) for i in range(5)] == [f"{folders[1]}/{name}{ending}" for name in "abcde"]
    assert found.queries.member_of(1) == f"{folders[0]}/q1{ending}"
    assert found.gallery.read(2) == (root / folders[1] / f"c{ending}").read_bytes()


def test_same_name_in_query_and_database_is_two_images(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", PLAIN_GND, folders=("query", "database"))
    found = open_retrieval_set("set", tmp_path)
    assert found.queries.read(0) == (root / "query/a.jpg").read_bytes() != found.gallery.read(0)


def test_a_query_to_which_its_own_file_is_relevant(tmp_path: Path) -> None:
    """It would find itself first. Names alone say nothing: in query/ and database/ they are two files."""
    own = changed(PLAIN_GND, imlist=["a", "b"], qimlist=["./b"], gnd=[{"ok": [0, 1]}])
    with pytest.raises(DataError, match=r"gnd\[0\]\['ok'\] holds 1"):
        open_retrieval_set(str(write_set(tmp_path / "one", own, folders=("jpg", "jpg"))))
    open_retrieval_set(str(write_set(tmp_path / "two", own, folders=("query", "database"))))
    junk = changed(own, gnd=[{"ok": [0], "junk": [1]}])
    open_retrieval_set(str(write_set(tmp_path / "junk", junk, folders=("jpg", "jpg"))))
    boxed = changed(own, gnd=[{"ok": [0, 1], "bbx": [0, 0, 5, 5]}])  # as the first Oxford set: a crop, and its photo
    open_retrieval_set(str(write_set(tmp_path / "boxed", boxed, folders=("jpg", "jpg"))))
    graded = changed(own, gnd=[{"easy": [0], "hard": [1], "junk": [], "bbx": [0, 0, 5, 5]}])
    with pytest.raises(DataError, match=r"gnd\[0\]\['hard'\] holds 1"):
        open_retrieval_set(str(write_set(tmp_path / "graded", graded, folders=("jpg", "jpg"))))


def test_a_image_asked_for_two_boxes_is_two_queries(tmp_path: Path) -> None:
    gnd = [{"ok": [0], "bbx": [0, 0, 8, 8]}, {"ok": [1], "bbx": [8, 8, 16, 16]}]
    root = write_set(tmp_path, changed(PLAIN_GND, qimlist=["q.jpg", "q.jpg"], gnd=gnd), folders=("query", "database"))
    found = open_retrieval_set(str(root))
    assert len(set(found.queries.keys)) == 2
    assert not np.array_equal(decode_image(found.queries.read(0)), decode_image(found.queries.read(1)))


def test_crop_rounds_and_clips() -> None:
    image = np.arange(20 * 24 * 3, dtype=np.uint8).reshape(20, 24, 3)
    assert np.array_equal(crop_to_box(image, (1.0, 2.0, 11.6, 12.4)), image[2:12, 1:12])
    assert np.array_equal(crop_to_box(image, (20.0, 15.0, 99.0, 99.0)), image[15:, 20:])
    with pytest.raises(DataError, match="outside"):
        crop_to_box(image, (24.0, 0.0, 30.0, 10.0))
    with pytest.raises(DataError, match="outside"):
        crop_to_box(image, (1.0, 0.0, 1.2, 10.0))  # no whole pixel


def test_query_is_cropped_after_decoding_and_without_loss(tmp_path: Path) -> None:
    root = write_set(tmp_path, GRADED_GND, folders=("jpg", "jpg"))
    found = open_retrieval_set(str(root))
    whole = decode_image((root / "jpg/q0.jpg").read_bytes())
    assert np.array_equal(decode_image(found.queries.read(0)), whole[2:12, 1:12])
    assert found.whole_queries.read(0) == (root / "jpg/q0.jpg").read_bytes()


def test_query_is_cropped_upright(tmp_path: Path) -> None:
    root = write_set(tmp_path, GRADED_GND, folders=("jpg", "jpg"))
    turned = Image.fromarray(make_image(np.random.default_rng(1), (30, 40)))
    exif = turned.getexif()
    exif[0x0112] = 6
    (root / "jpg/q1.jpg").write_bytes(encode(turned, exif=exif))
    upright = decode_image((root / "jpg/q1.jpg").read_bytes())
    assert upright.shape == (40, 30, 3)
    assert np.array_equal(decode_image(open_retrieval_set(str(root)).queries.read(1)), upright[:16, :16])


def test_missing_images_are_counted_in_one_line(tmp_path: Path) -> None:
    root = write_set(tmp_path, GRADED_GND, folders=("query", "database"))
    for name in "bd":
        (root / "database" / f"{name}.jpg").unlink()
    with pytest.raises(DataError, match=r"2 of 5 database images are missing .*first: b\); nothing is downloaded"):
        open_retrieval_set(str(root))
    shutil.rmtree(root / "query")
    with pytest.raises(DataError, match="images are missing"):
        open_retrieval_set(str(root))


def test_which_ground_truth(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", GRADED_GND, folders=("jpg", "jpg"))
    other = write_json(tmp_path / "other.json", changed(GRADED_GND, qimlist=["q1", "q0"]))
    assert open_retrieval_set(str(root), gnd=other).queries.keys == ["q1", "q0"]
    write_pickle(root / "gnd_set.pkl", GRADED_GND)
    with pytest.raises(DataError, match=r"gnd\.json, gnd_set\.pkl; wanted one ground-truth file"):
        open_retrieval_set(str(root))
    (root / "gnd.json").unlink()
    assert open_retrieval_set(str(root)).truth.path.name == "gnd_set.pkl"
    (root / "gnd_set.pkl").unlink()
    with pytest.raises(DataError, match="`gnd`"):
        open_retrieval_set(str(root))


def test_directories_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data root .* is not a directory"):
        open_retrieval_set("roxford5k", tmp_path / "nowhere")
    with pytest.raises(DataError, match="`data_root`"):
        open_retrieval_set("roxford5k", tmp_path)


def test_known_set_with_another_ground_truth(tmp_path: Path) -> None:
    root = write_set(tmp_path / "roxford5k", GRADED_GND, folders=("jpg", "jpg"))
    with pytest.raises(DataError, match=r"gnd_roxford5k\.pkl does not exist"):
        open_retrieval_set("roxford5k", tmp_path)
    own = write_pickle(root / "gnd_roxford5k.pkl", GRADED_GND)
    with pytest.raises(DataError, match=r"not the published ground truth of roxford5k .*`gnd`"):
        open_retrieval_set("roxford5k", tmp_path)
    assert len(open_retrieval_set("roxford5k", tmp_path, own).queries) == 2


@needs_real_gnd
@pytest.mark.parametrize(("name", "images"), [("roxford5k", 4993), ("rparis6k", 6322)])
def test_methods_ground_truth_is_recognized(tmp_path: Path, name: str, images: int) -> None:
    (tmp_path / name / "jpg").mkdir(parents=True)
    shutil.copy(REAL_GND / f"gnd_{name}.pkl", tmp_path / name)
    wanted = rf"{images} of {images} database images are missing .*revisitop"
    with pytest.raises(DataError, match=wanted):
        open_retrieval_set(name, tmp_path)
