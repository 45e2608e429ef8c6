"""The demo set: its counts, its ground truth, and that it is always the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from sop_faiss.data.check import check
from sop_faiss.data.demo import enlarge, split_stratified, write_digits
from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.source import open_source
from sop_faiss.errors import DataError, SopError


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "digits"
    summary = write_digits(out)
    assert (summary.train, summary.test, summary.queries, summary.database) == (1397, 400, 100, 300)
    return out


def test_parts(demo: Path) -> None:
    train, test = open_source(demo / "train"), open_source(demo / "test")
    assert not set(train.keys) & set(test.keys)
    assert sorted(train.keys + test.keys) == [f"{number:04d}" for number in range(1797)]
    targets = load_digits().target
    for source in (train, test):
        assert source.labels is not None and source.class_names is None
        np.testing.assert_array_equal(source.labels, targets[[int(key) for key in source.keys]])
        shares = np.bincount(source.labels) / len(source) - np.bincount(targets) / 1797
        assert np.abs(shares).max() < 1 / len(source)
    for part in ("train", "test"):
        assert check(demo / part).problems == []


def test_images_are_the_digits(demo: Path) -> None:
    train = open_source(demo / "train")
    images = load_digits().images
    for position in (0, 700, 1396):
        image = decode_image(train.read(position))
        assert image.shape == (32, 32, 3) and (image[..., 0] == image[..., 2]).all()
        small = image[..., 0].reshape(8, 4, 8, 4).mean((1, 3)) / 255 * 16
        assert np.corrcoef(small.ravel(), images[int(train.keys[position])].ravel())[0, 1] > 0.98


def test_enlarging_is_smooth_and_keeps_the_range() -> None:
    image = np.zeros((8, 8))
    image[:, 4:] = 16
    row = enlarge(image)[16, :, 0].astype(int)
    assert row[0] == 0 and row[-1] == 255 and (np.abs(np.diff(row)) < 100).all()


def test_retrieval_ground_truth(demo: Path) -> None:
    folder = demo / "retrieval"
    gnd = json.loads((folder / "gnd.json").read_text())
    assert {path.name for path in (folder / "query").iterdir()} == set(gnd["qimlist"])
    assert {path.name for path in (folder / "database").iterdir()} == set(gnd["imlist"])
    test = open_source(demo / "test")
    assert {name[:4] for name in gnd["qimlist"] + gnd["imlist"]} == set(test.keys)
    targets = load_digits().target
    assert np.bincount([targets[int(name[:4])] for name in gnd["qimlist"]]).tolist() == [10] * 10
    for query, truth in zip(gnd["qimlist"], gnd["gnd"], strict=True):
        same = [n for n, name in enumerate(gnd["imlist"]) if targets[int(name[:4])] == targets[int(query[:4])]]
        assert truth == {"ok": same, "junk": []} and len(same) >= 20
    image = test.read(test.keys.index(gnd["qimlist"][0][:4]))
    assert (folder / "query" / gnd["qimlist"][0]).read_bytes() == image


def test_always_the_same(demo: Path, tmp_path: Path) -> None:
    write_digits(tmp_path / "again")
    files, again = (
        sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix != ".index")
        for folder in (demo, tmp_path / "again")
    )
    assert files == again
    assert all((demo / file).read_bytes() == (tmp_path / "again" / file).read_bytes() for file in files)


def test_split_stratified() -> None:
    labels = np.repeat(np.arange(3), [10, 20, 71])
    train, test = split_stratified(labels, 10)
    assert np.bincount(labels[test]).tolist() == [1, 2, 7]
    np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(101))


def test_what_can_go_wrong(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SopError, match="not empty"):
        write_digits(demo)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'sop-faiss\[demo\]'"):
        write_digits(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
