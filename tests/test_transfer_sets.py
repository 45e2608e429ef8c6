"""The sets of the transfer table: each layout is read, and damaged or hostile files are one line."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sop_faiss.data.images.decode import decode_image
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.sets.transfer_sets import find_set, open_set
from tests.messages import assert_one_line
from tests.transfers import COLORS, write_cars, write_cifar, write_flowers, write_inat

LAYOUTS: dict[str, tuple[str, Callable[[Path], Path], int, int]] = {
    "cifar10, pickled": ("cifar10", write_cifar, 30, 6),
    "cifar10, binary": ("cifar10", lambda root: write_cifar(root, binary=True), 30, 6),
    "cifar100, pickled": ("cifar100", lambda root: write_cifar(root, hundred=True), 6, 6),
    "cifar100, binary": ("cifar100", lambda root: write_cifar(root, hundred=True, binary=True), 6, 6),
    "inat18": ("inat18", lambda root: write_inat(root, 2018), 9, 3),
    "inat19": ("inat19", lambda root: write_inat(root, 2019), 9, 3),
    "flowers": ("flowers", write_flowers, 7, 2),
    "cars": ("cars", lambda root: write_cars(root, devkit=False), 4, 4),
    "cars, devkit": ("cars", lambda root: write_cars(root, devkit=True), 4, 4),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_layout_is_read(layout: str, tmp_path: Path) -> None:
    """Every image has the color of its label, in both parts, from the folder itself and from the one above."""
    name, write, *counts = LAYOUTS[layout]
    root = write(tmp_path / "above" / "set")
    assert find_set(root) == find_set(tmp_path / "above") == name
    for source, count in zip(open_set(tmp_path / "above", name), counts, strict=True):
        assert len(source) == count == len(set(source.keys)) and source.labels is not None
        assert source.class_names is not None and len(source.class_names) == 3
        for row in range(count):
            mean = decode_image(source.read(row)).mean((0, 1))
            assert np.abs(np.array(COLORS) - mean).sum(1).argmin() == source.labels[row]


def test_pixels_are_those_of_the_file(tmp_path: Path) -> None:
    train, _ = open_set(write_cifar(tmp_path / "c"), "cifar10")
    content = pickle.loads((tmp_path / "c" / "data_batch_2").read_bytes())
    assert np.array_equal(decode_image(train.read(7)), content["data"][1].reshape(3, 32, 32).transpose(1, 2, 0))


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("stolen"),))  # type: ignore[return-value]


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as unknown:
        open_set(tmp_path, "mnist")
    assert "name" in unknown.value.arguments
    for place in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DataError) as error:
            find_set(place)
        assert_one_line(error, "data")
    root = write_cifar(tmp_path / "c" / "cifar")
    write_flowers(tmp_path / "c" / "flowers")
    with pytest.raises(DataError, match="several"):
        find_set(tmp_path / "c")
    good = (root / "data_batch_3").read_bytes()
    short = pickle.dumps({"labels": [0, 1], "data": np.zeros((3, 3072), np.uint8)})
    many = pickle.dumps({"labels": [0, 9], "data": np.zeros((2, 3072), np.uint8)})
    pixels = np.zeros((2, 3072), np.uint8)
    large, broken = (pickle.dumps({"labels": [0, last], "data": pixels}) for last in (10**30, 1.7))
    for content in (b"", good[:100], pickle.dumps(Hostile()), pickle.dumps([]), short, many, large, broken):
        (root / "data_batch_3").write_bytes(content)
        with pytest.raises(DataError) as error:
            open_set(root, "cifar10")
        assert_one_line(error, str(root))
    assert not Path("stolen").exists()
    (root / "data_batch_3").unlink()
    with pytest.raises(DataError, match="data_batch_3"):
        open_set(root, "cifar10")
    binary = write_cifar(tmp_path / "b", binary=True)
    (binary / "test_batch.bin").write_bytes(bytes(3074))
    with pytest.raises(DataError, match="3074"):
        open_set(binary, "cifar10")
    flowers = tmp_path / "c" / "flowers"
    (flowers / "setid.mat").write_bytes(b"MATLAB")
    with pytest.raises(DataError, match="setid"):
        open_set(flowers, "flowers")
    (flowers / "setid.mat").unlink()
    with pytest.raises(DataError, match="setid"):
        open_set(flowers, "flowers")
    for content in (
        b"[" * 100_000,
        b'{"images": [{"id": 1, "file_name": "a"}], "annotations": [{"image_id": 1, "category_id": 1e999}]}',
    ):
        (write_inat(tmp_path / f"i{len(content)}", 2018) / "train2018.json").write_bytes(content)
        with pytest.raises(DataError) as error:
            open_set(tmp_path / f"i{len(content)}", "inat18")
        assert_one_line(error, "inat18")
    inat = write_inat(tmp_path / "i", 2018)
    text = (inat / "train2018.json").read_text()
    for changed in ("", "[]", text.replace("train_val2018", "/etc"), text.replace("train_val2018/", "../"), "{"):
        (inat / "train2018.json").write_text(changed)
        with pytest.raises(DataError):
            open_set(inat, "inat18")
    (inat / "train2018.json").write_text(text)
    content = json.loads((inat / "val2018.json").read_text())
    content["annotations"][0]["category_id"] = 99  # not in the training set
    (inat / "val2018.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="99"):
        open_set(inat, "inat18")
