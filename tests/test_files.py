"""Whole or absent: atomic files and directories."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sop_faiss.data.check import check
from sop_faiss.data.pack import pack
from sop_faiss.errors import SopError
from sop_faiss.features.store import read_names
from sop_faiss.files import (
    atomic_directory,
    atomic_file,
    read_json,
    remove_leftovers,
    restore_directory,
    sha256_file,
    write_json,
)
from sop_faiss.model.encoders.weights import read_weights
from sop_faiss.model.encoders.whitening import read_whitening
from sop_faiss.neighbors.disk.faiss_files import load
from tests.images import write_folder
from tests.messages import assert_one_line
from tests.test_features_store import make_store


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


@pytest.fixture(params=[0o022, 0o002, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_files_have_the_mode_that_the_umask_asks_for(tmp_path, umask):
    def write_for_the_owner_alone(path: Path) -> None:
        """As some libraries do, in another file that is then renamed."""
        other = path.with_name(f"{path.name}.other")
        os.close(os.open(other, os.O_CREAT | os.O_WRONLY, 0o600))
        other.replace(path)

    with atomic_directory(tmp_path / "out") as temporary:
        (temporary / "deep").mkdir()
        write_for_the_owner_alone(temporary / "deep" / "a")
        write_for_the_owner_alone(temporary / "b")
        (temporary / "c").touch()
    with atomic_file(tmp_path / "d") as temporary:
        write_for_the_owner_alone(temporary)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4 and {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}


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
    for content in (b"{", b"\xff", b"[" * 100_000, b"9" * 5000, b'{"a": ' + b"9" * 5000 + b"}"):
        path.write_bytes(content)
        with pytest.raises(SopError, match="cannot be read as JSON") as caught:
            read_json(path)
        assert not [word for word in ("codec", "recursion", "sys.", "char ") if word in str(caught.value)]
    with pytest.raises(SopError, match="directory") as caught:
        read_json(tmp_path)
    assert "Errno" not in str(caught.value)
    with pytest.raises(SopError, match="does not exist"):
        read_json(tmp_path / "none.json")


def forbid(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """No file whose name ends so may be read; for the tests run as root, who may read everything."""
    really = io.open

    def guarded(file: Any, *args: Any, **kwargs: Any) -> Any:
        if str(file).endswith(ending):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return really(file, *args, **kwargs)

    monkeypatch.setattr(io, "open", guarded)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("a.json", read_json),
        ("a.safetensors", read_weights),
        ("a.pth", read_weights),
        ("whitening.safetensors", read_whitening),
        ("index.faiss", lambda path: load(path, mapped=True)),
    ],
)
def test_a_file_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, read: Callable[[Path], object]
) -> None:
    (tmp_path / name).write_bytes(b"")
    forbid(monkeypatch, name)
    with pytest.raises(SopError) as error:
        read(tmp_path / name)
    assert_one_line(error, str(tmp_path / name), "may not be read")
    assert "damaged" not in str(error.value)


def test_what_may_not_be_read_within_a_store_or_beside_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_store().write(tmp_path / "store")
    forbid(monkeypatch, ".parquet")
    with pytest.raises(SopError, match=r"parquet may not be read"):
        read_names(tmp_path / "store")
    photos = write_folder(tmp_path / "photos", classes=0, per_class=2)
    shards = tmp_path / "shards"
    pack(str(photos), shards)
    forbid(monkeypatch, "manifest.json")
    assert any("manifest.json may not be read" in problem for problem in check(f"{shards}/*.tar").problems)


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "disk" / "real").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to("disk/real")
    for overwrite in (False, True):
        with atomic_directory(link, overwrite=overwrite) as temporary:
            (temporary / "file").write_text(str(overwrite))
        assert link.is_symlink() and (tmp_path / "disk" / "real" / "file").read_text() == str(overwrite)
    (tmp_path / "disk" / "real").rename(tmp_path / "disk" / ".real.00000000.old")  # as a killed process leaves it
    restore_directory(link)
    assert (link / "file").read_text() == "True"
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real"]


def test_a_device_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SopError, match="is a pipe"), atomic_file(tmp_path / "pipe"):
        pytest.fail("not reached")
    assert (tmp_path / "pipe").is_fifo()


# errors are about the name that the user knows


def full(path: Path | None) -> OSError:
    return OSError(errno.ENOSPC, "some words", None if path is None else str(path))


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda temporary: full(temporary / "a.parquet"), "out/a.parquet"),
        (lambda temporary: full(temporary), "out"),
        (lambda temporary: full(None), "out"),
        (lambda temporary: full(temporary.parent / "other"), "other"),
        (lambda temporary: OSError(errno.EXDEV, "x", str(temporary), None, str(temporary.parent / "y")), "out"),
    ],
)
def test_errors_name_the_output_not_the_temporary(tmp_path, make, wanted):
    with pytest.raises(OSError) as caught, atomic_directory(tmp_path / "out") as temporary:
        raise make(temporary)
    assert caught.value.filename == str(tmp_path / wanted)
    assert list(tmp_path.iterdir()) == []


def test_errors_of_libraries_name_the_output_too(tmp_path):
    with pytest.raises(OSError) as caught, atomic_file(tmp_path / "a.faiss") as temporary:
        raise OSError(f"cannot write {temporary}: no room")
    assert str(caught.value) == f"cannot write {tmp_path / 'a.faiss'}: no room"


def test_errors_of_other_kinds_stay_as_they_are(tmp_path):
    error = OSError(errno.EIO, "Input/output error")  # of something that was read, perhaps
    with pytest.raises(OSError) as caught, atomic_file(tmp_path / "a"):
        raise error
    assert caught.value is error


# what kills leave

KILLED = """
import os, signal, sys
from pathlib import Path
from sop_faiss.files import atomic_directory, atomic_file
path = Path(sys.argv[2])
with (atomic_directory(path, overwrite=True) if sys.argv[1] == "directory" else atomic_file(path)) as temporary:
    (temporary / "half" if sys.argv[1] == "directory" else temporary).write_text("half")
    print("writing", flush=True)
    if sys.argv[3] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


def start(kind: str, path: Path, how: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", KILLED, kind, str(path), how]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    return process


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(tmp_path, kind):
    path = tmp_path / "out [1]"
    with start(kind, path, "kill") as killed:
        assert killed.wait() == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out [1].") and left.suffix == ".tmp"
    with start(kind, path, "wait") as living:
        (living_one,) = tmp_path.iterdir()
        assert living_one != left  # the next one to write has removed it
        remove_leftovers(path)
        assert living_one.exists()
        living.communicate()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out [1]"]


@pytest.mark.parametrize("kind", [atomic_file, atomic_directory])
@pytest.mark.parametrize("how", ["removed", "locked"])
def test_a_temporary_taken_for_a_leftover_is_made_once_more(tmp_path, monkeypatch, kind, how):
    """Another process may come by after it was made, and before it was locked."""
    made, other = [], []
    real = os.open

    def come_by(path: Path, flags: int, mode: int = 0o777, **options: int | None) -> int:
        if not made and not flags & os.O_CREAT:
            made.append(path)
            if how == "removed":
                remove_leftovers(tmp_path / "out")
            else:
                other.append(real(path, flags))
                fcntl.flock(other[0], fcntl.LOCK_EX)
        return real(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", come_by)
    with kind(tmp_path / "out") as temporary:
        assert temporary.exists() and temporary != made[0]
        remove_leftovers(tmp_path / "out")
        assert temporary.exists()
    assert (tmp_path / "out").exists()
    for descriptor in other:
        os.close(descriptor)


def test_files_of_other_names_are_no_leftovers(tmp_path):
    names = [".out.0123abcd.tmpx", ".out.0123abc.tmp", ".outer.0123abcd.tmp", "out.0123abcd.tmp"]
    for name in names:
        (tmp_path / name).write_text("")
    remove_leftovers(tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(names)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_directory_moved_aside_by_a_killed_process_comes_back(tmp_path, replaced):
    for name, content in ((".best.0123abcd.old", "before"), (".best.0123abcd.tmp", "after")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(content)
    if replaced:  # killed after the new one stood there
        (tmp_path / ".best.0123abcd.tmp").rename(tmp_path / "best")
    remove_leftovers(tmp_path / "best")
    assert (tmp_path / "best" / "a").read_text() == ("after" if replaced else "before")
    assert [entry.name for entry in tmp_path.iterdir()] == ["best"]


@pytest.mark.parametrize("stopped", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt("Ctrl-C")])
def test_a_directory_that_cannot_be_replaced_stays(tmp_path, monkeypatch, stopped):
    with atomic_directory(tmp_path / "best") as temporary:
        (temporary / "a").write_text("before")
    rename = Path.rename

    def no_room(self: Path, target: Path) -> Path:
        if self.suffix == ".tmp":
            raise stopped
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", no_room)
    with pytest.raises(type(stopped)), atomic_directory(tmp_path / "best", overwrite=True) as temporary:
        (temporary / "a").write_text("after")
    assert (tmp_path / "best" / "a").read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["best"]


def test_what_another_process_has_written_meanwhile_stays(tmp_path):
    with pytest.raises(SopError, match="not empty: choose"), atomic_directory(tmp_path / "out") as temporary:
        (temporary / "a").write_text("ours")
        with atomic_directory(tmp_path / "out") as other:
            (other / "a").write_text("theirs")
    assert (tmp_path / "out" / "a").read_text() == "theirs"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_links_in_a_directory_are_left_alone(tmp_path):
    (tmp_path / "foreign").touch(mode=0o600)
    with atomic_directory(tmp_path / "out") as temporary:
        (temporary / "deep").mkdir()
        (temporary / "deep" / "link").symlink_to(tmp_path / "foreign")
    assert (tmp_path / "out" / "deep" / "link").is_symlink()
    assert (tmp_path / "foreign").stat().st_mode & 0o777 == 0o600
