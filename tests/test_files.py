"""Whole or absent: atomic files and directories."""

from __future__ import annotations

import hashlib
import os

import pytest

from sop_faiss.errors import SopError
from sop_faiss.files import (
    atomic_directory,
    atomic_file,
    read_json,
    refuse_occupied,
    require_writable,
    sha256_file,
    write_json,
)


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    with atomic_file(path) as temporary:
        temporary.write_text("one")
        assert not path.exists()
    assert path.read_text() == "one"
    with pytest.raises(RuntimeError), atomic_file(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "one"
    assert [entry.name for entry in path.parent.iterdir()] == ["a.txt"]


def test_a_directory_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out"
    with pytest.raises(RuntimeError), atomic_directory(path) as temporary:
        (temporary / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with atomic_directory(path) as temporary:
        (temporary / "a").write_text("1")
    assert (path / "a").read_text() == "1"
    with pytest.raises(SopError, match="not empty"), atomic_directory(path):
        pytest.fail("entered")
    with atomic_directory(path, overwrite=True) as temporary:
        (temporary / "b").write_text("2")
    assert [entry.name for entry in path.iterdir()] == ["b"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_json_and_checksums(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": [1, 2.5, None]})
    assert read_json(path) == {"a": [1, 2.5, None]}
    assert sha256_file(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": [1, 2.5, None]}
    for content in (b"{", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(SopError, match="cannot be read as JSON"):
            read_json(path)
    with pytest.raises(SopError, match="does not exist"):
        read_json(tmp_path / "none.json")


def test_occupied_outputs_are_refused(tmp_path):
    refuse_occupied(tmp_path / "new")
    refuse_occupied(tmp_path)
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file"):
        with pytest.raises(SopError, match="already exists and is not empty"):
            refuse_occupied(out)


def test_places_that_cannot_be_written(tmp_path):
    require_writable(None)
    require_writable(tmp_path / "a" / "b" / "c.json")
    (tmp_path / "file").write_text("")
    require_writable(tmp_path / "file")
    with pytest.raises(SopError, match="is a directory"):
        require_writable(tmp_path)
    with pytest.raises(SopError, match="cannot be written"):
        require_writable(tmp_path / "file" / "x.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(SopError, match="not writable"):
            require_writable(tmp_path / "x.json")
    finally:
        tmp_path.chmod(0o700)
