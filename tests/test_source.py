"""How sources are named: patterns, what is refused, and keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sop_faiss.data.images.keys import split_name, unique_keys
from sop_faiss.data.images.source import find_shards, open_source
from sop_faiss.errors import DataError
from tests.images import encode, make_image, write_shards, write_tar
from tests.messages import assert_one_line

IMAGE = encode(make_image(np.random.default_rng(0), 8))


def test_every_way_to_name_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path / "set", shards=3)
    monkeypatch.chdir(tmp_path)
    keys = open_source("set").keys
    for name in ("set/photos-{000000..000002}.tar", "set/photos-*.tar", "set/photos-00000{0,1,2}.tar", "./set/*.tar"):
        assert open_source(name).keys == keys
    assert open_source("set/photos-00000{0..1}.tar").keys == keys[:8]
    assert open_source("set/photos-00000[2].tar").keys == keys[8:]
    assert open_source("set/photos-000001.tar").keys == keys[4:8]
    assert open_source("set").root == tmp_path / "set"
    assert find_shards("set")[0] == Path("set/photos-000000.tar")


def test_a_pattern_with_a_missing_shard(tmp_path: Path) -> None:
    write_shards(tmp_path)
    with pytest.raises(DataError) as error:
        open_source(f"{tmp_path}/photos-{{000000..000002}}.tar")
    assert_one_line(error, "photos-000002.tar", "does not exist")
    with pytest.raises(DataError, match="no shard matches"):
        open_source(f"{tmp_path}/nothing-*.tar")
    for pattern in ("x-{000000..999999999}.tar", "x-{5..1}.tar", "x-{0..9999}{0..9999}.tar"):
        with pytest.raises(DataError, match="wanted 1 to"):
            open_source(pattern)
    with pytest.raises(DataError, match="twice"):
        open_source(f"{tmp_path}/photos-00000{{0,0}}.tar")
    (tmp_path / "a.jpg").write_bytes(IMAGE)
    with pytest.raises(DataError, match=r"only \.tar"):
        open_source(f"{tmp_path}/*.jpg")


@pytest.mark.parametrize(
    "name",
    [
        "pipe:touch MARK",
        " pipe:cat x.tar; touch MARK",
        "touch MARK |",
        "x.tar; touch MARK",
        "$(touch MARK).tar",
        "`touch MARK`.tar",
        "x-{000..001}.tar && touch MARK",
        "file:///etc/passwd",
        "",
        " ",
        "a\0b.tar",
    ],
)
def test_commands_are_refused_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as error:
        open_source(name.replace("MARK", str(tmp_path / "mark")))
    assert_one_line(error)
    assert list(tmp_path.iterdir()) == []


def test_missing_and_unknown_sources(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        open_source(tmp_path / "nothing")
    assert_one_line(error, "nothing does not exist", "wanted")
    (tmp_path / "x.parquet").write_bytes(b"x")
    with pytest.raises(DataError, match="unknown kind"):
        open_source(tmp_path / "x.parquet")
    odd = tmp_path / "a;b|c.tar"
    write_tar(odd, [("a.jpg", IMAGE)])
    assert len(open_source(odd)) == 1  # a file that exists is a file, whatever its name


def test_split_name() -> None:
    cases = {"a.b.jpg": ("a.b", ".jpg"), "d.x/a": ("d.x/a", ""), ".hidden": (".hidden", ""), "d/.a": ("d/.a", "")}
    assert {name: split_name(name) for name in cases} == cases


def test_unique_keys_fall_back_to_the_longest() -> None:
    stems, longest = ["a", "a", "x/a"], ["x/a", "y/a", "z/a"]
    keys = unique_keys(stems, lambda position: longest[position])
    assert keys == longest
    with pytest.raises(DataError, match="unique"):
        unique_keys(["a", "a"], lambda _: "b")
