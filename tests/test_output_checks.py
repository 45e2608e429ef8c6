"""Where an output may be written: what is refused before the work."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from sop_faiss.errors import SopError
from sop_faiss.files import atomic_directory
from sop_faiss.output_checks import refuse_foreign, refuse_occupied, require_replaceable, require_writable


def test_occupied_outputs_are_refused(tmp_path):
    refuse_occupied(tmp_path / "new")
    refuse_occupied(tmp_path)
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file"):
        with pytest.raises(SopError, match="already exists and is not empty"):
            refuse_occupied(out)
    with pytest.raises(SopError, match=r"file/deep/new .*/file is a file"):
        refuse_occupied(tmp_path / "file" / "deep" / "new")


def test_a_directory_that_cannot_be_replaced_is_refused(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    require_replaceable(tmp_path / "full")
    require_replaceable(tmp_path / "new" / "deep")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path, state in ((tmp_path / "link", "a link to nowhere"), (tmp_path / "full" / "file", "is a file")):
        for refuse in (require_replaceable, refuse_occupied)[: 1 + path.is_symlink()]:
            with pytest.raises(SopError, match=f"{state}.*, wanted a folder"):
                refuse(path)
    access = os.access
    for locked in (tmp_path, tmp_path / "full"):
        monkeypatch.setattr(os, "access", lambda path, mode, locked=locked: Path(path) != locked and access(path, mode))
        with pytest.raises(SopError, match=f"full cannot be written: {locked} is not writable"):
            require_replaceable(tmp_path / "full")


def test_a_mount_point_is_refused_before_work(tmp_path, monkeypatch):
    (tmp_path / "volume").mkdir()
    (tmp_path / "link").symlink_to("volume")
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "volume")
    for out in (tmp_path / "volume", tmp_path / "link"):
        for overwrite in (False, True):
            wanted = "volume is a mount point, .*: name a folder in it, such as .*volume/out$"
            with pytest.raises(SopError, match=wanted), atomic_directory(out, overwrite=overwrite):
                pytest.fail("not reached")
    refuse_occupied(tmp_path / "volume" / "out")


def test_a_directory_is_named_from_outside(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    for out, overwrite in ((Path(), False), (Path(), True), (Path(".."), True)):
        with pytest.raises(SopError, match="has no name of its own"), atomic_directory(out, overwrite=overwrite):
            pytest.fail("not reached")
    with pytest.raises(SopError, match=r"^\. has no name of its own, .* as \.\./mine$"):
        refuse_occupied(Path())
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


def test_foreign_files_are_refused(tmp_path):
    place, ours = tmp_path / "place", re.compile(r"ours\..*")
    refuse_foreign(place, ours, "things")
    place.mkdir()
    (place / "ours.json").touch()
    refuse_foreign(place, ours, "things")
    (place / "notes.txt").touch()
    with pytest.raises(SopError, match=r"place is needed for things.*notes\.txt"):
        refuse_foreign(place, ours, "things")
    with pytest.raises(SopError, match="for things"):
        refuse_foreign(place / "notes.txt", ours, "things")


def test_places_that_cannot_be_written(tmp_path):
    require_writable(None)
    require_writable(tmp_path / "a" / "b" / "c.json")
    (tmp_path / "file").write_text("")
    require_writable(tmp_path / "file")
    with pytest.raises(SopError, match="is a directory"):
        require_writable(tmp_path)
    with pytest.raises(SopError, match=r"cannot be written: .*/file is a file"):
        require_writable(tmp_path / "file" / "x.json")
    with pytest.raises(SopError, match="is a device"):
        require_writable(Path(os.devnull))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(SopError, match="not writable"):
            require_writable(tmp_path / "x.json")
    finally:
        tmp_path.chmod(0o700)
