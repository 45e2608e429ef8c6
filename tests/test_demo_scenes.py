"""The demo set of scenes: its counts, that training and test share no thing, and that it is always the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sop_faiss.data import demo_scenes
from sop_faiss.data.check import check
from sop_faiss.data.demo_scenes import photograph, write_scenes
from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.source import open_source
from sop_faiss.errors import DataError, SopError


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "scenes"
    summary = write_scenes(out)
    assert (summary.train, summary.train_things) == (1416, 177)
    assert (summary.known, summary.asked, summary.test_things) == (304, 152, 76)
    return out


@pytest.mark.parametrize(("part", "count", "things"), [("train", 8, 177), ("known", 4, 76), ("asked", 2, 76)])
def test_parts(scenes: Path, part: str, count: int, things: int) -> None:
    source = open_source(scenes / part)
    assert source.labels is not None
    np.testing.assert_array_equal(source.labels, np.repeat(np.arange(things), count))
    assert decode_image(source.read(0)).shape == (48, 48, 3)
    assert check(scenes / part).problems == []


def test_every_query_has_the_known_photographs_of_its_thing(scenes: Path) -> None:
    gnd = json.loads((scenes / "retrieval" / "gnd.json").read_text())
    assert (len(gnd["qimlist"]), len(gnd["imlist"])) == (152, 304)
    for query, truth in zip(gnd["qimlist"], gnd["gnd"], strict=True):
        thing = query.partition("_")[2]
        assert [gnd["imlist"][row].partition("_")[2] for row in truth["ok"]] == [thing] * 4


def test_things_do_not_overlap_and_are_not_plain() -> None:
    things = demo_scenes._things()
    assert len(things) == 253 and {thing.size for thing in things} == {(72, 72)}
    assert len({thing.tobytes() for thing in things}) == len(things)
    assert min(np.asarray(thing.convert("L"), float).std() for thing in things) >= 18


def test_a_photograph_stays_inside_its_thing_and_a_seed_gives_it_again() -> None:
    red = Image.new("RGB", (72, 72), (200, 40, 40))
    for seed in range(20):
        shown, again = (photograph(red, np.random.default_rng(seed)) for _ in range(2))
        np.testing.assert_array_equal(shown, again)
        corners = shown[[0, 0, -1, -1], [0, -1, 0, -1]].astype(float)
        assert np.abs(corners - shown.mean((0, 1))).max() < 40  # no black edge


def test_what_can_go_wrong(scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SopError, match="not empty"):
        write_scenes(scenes)
    monkeypatch.setattr(demo_scenes, "_PHOTOS", (("no_such_package.data", "china.jpg"),))
    with pytest.raises(DataError, match=r"pip install 'sop-faiss\[demo\]'"):
        write_scenes(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_settings_are_chosen_on_other_things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The things of the test are neither trained on nor scored while settings are chosen."""
    asked: list[set[int]] = []

    def take(things: object, chosen: np.ndarray, count: int) -> tuple[list[bytes], np.ndarray]:
        asked.append(set(chosen))
        return [b"no image"] * len(chosen) * count, np.repeat(np.arange(len(chosen)), count)

    monkeypatch.setattr(demo_scenes, "_photograph", take)
    monkeypatch.setattr(demo_scenes, "write_labeled_part", lambda *_: None)
    monkeypatch.setattr(demo_scenes, "write_retrieval_part", lambda *_: None)
    write_scenes(tmp_path / "test")
    write_scenes(tmp_path / "choosing", for_choosing=True)
    (train, test), (smaller, chosen_on) = asked[:2], asked[2:]
    assert smaller | chosen_on == train and not train & test and not smaller & chosen_on
