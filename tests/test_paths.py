"""Pipes, devices and links that lead to themselves, in every place where a user names a path."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from sop_faiss.config import load_config
from sop_faiss.data.check import check
from sop_faiss.data.images.source import open_source
from sop_faiss.errors import SopError
from sop_faiss.evaluate.compare import compare_results
from sop_faiss.evaluate.sets.ground_truth import read_ground_truth
from sop_faiss.evaluate.sets.plain_sets import read_plain_set
from sop_faiss.features.store import FeatureStore
from sop_faiss.files import locked_directory, write_json
from sop_faiss.index.search import FeatureIndex
from sop_faiss.model.encoders.load import load_encoder
from sop_faiss.model.encoders.weights import read_weights
from sop_faiss.model.encoders.whitening import read_whitening
from sop_faiss.output_checks import refuse_occupied, require_writable
from sop_faiss.paths import path_state, plain_path, real_path
from sop_faiss.verbs.finding.query_files import open_images
from sop_faiss.verbs.output_paths import check_outputs, source_files
from sop_faiss.verbs.run_page.report import report_run
from tests.messages import assert_one_line

READERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "source": (open_source, ""),
    "list": (open_source, ".csv"),
    "shard": (open_source, ".tar"),
    "shards by a pattern": (lambda path: open_source(f"{path.with_suffix('')}*.tar"), ".tar"),
    "image": (open_source, ".jpg"),
    "check": (check, ".tar"),
    "query": (lambda path: open_images([path]), ".jpg"),
    "config": (lambda path: load_config(str(path)), ".yaml"),
    "weights": (read_weights, ".pth"),
    "weights in safetensors": (read_weights, ".safetensors"),
    "whitening": (read_whitening, ""),
    "model": (lambda path: load_encoder(str(path)), ""),
    "features": (FeatureStore.read, ""),
    "index": (FeatureIndex.open, ""),
    "ground truth": (read_ground_truth, ".json"),
    "groups": (read_plain_set, ".csv"),
    "results": (lambda path: compare_results([path, path]), ".json"),
    "run": (lambda path: report_run(path, path.parent / "page.html", lambda _: nullcontext()), ""),
    "output folder": (refuse_occupied, ""),
    "output file": (require_writable, ".json"),
    "output of a command": (lambda path: check_outputs({"--json": path}, source_files(str(path))), ".json"),
    "output in a folder": (lambda path: refuse_occupied(path / "below" / "out"), ""),
}


def make_pipe(path: Path) -> str:
    os.mkfifo(path)
    return "is a pipe"


def make_loop(path: Path) -> str:
    path.symlink_to(path.name)
    return "leads back to itself"


@pytest.mark.parametrize("make", [make_pipe, make_loop])
@pytest.mark.parametrize("name", READERS)
def test_what_stands_there_is_said(name: str, make: Callable[[Path], str], tmp_path: Path) -> None:
    reader, suffix = READERS[name]
    path = tmp_path / f"odd{suffix}"
    expected = make(path)
    with pytest.raises(SopError) as error:
        reader(path)
    assert_one_line(error, path.name, expected)
    assert os.path.lexists(path) and not path.is_file()


def test_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    Path("file").touch()
    Path("gone").symlink_to("nowhere")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    make_pipe(Path("pipe"))
    make_loop(Path("loop"))
    for path, state in (
        ("none", "does not exist"),
        ("file/x", "does not exist"),
        ("gone", "does not exist (a link to nowhere)"),
        ("a\0b", "is not a path"),
        ("x" * 300, "cannot be reached (file name too long)"),
        ("file", "is a file"),
        (".", "is a folder"),
        ("pipe", "is a pipe"),
        ("socket", "is a socket"),
        ("/dev/null", "is a device"),
        ("loop", "is a symbolic link that leads back to itself"),
        ("loop/x", "is a symbolic link that leads back to itself"),
    ):
        assert path_state(path) == state
    assert real_path("gone") == real_path(tmp_path) / "nowhere" and real_path("loop").name == "loop"


def test_a_pipe_blocks_no_lock_and_no_shard_of_a_folder(tmp_path: Path) -> None:
    make_pipe(tmp_path / "x.tar")
    with locked_directory(tmp_path / "x.tar"):
        pass
    with pytest.raises(SopError) as error:
        open_source(tmp_path)
    assert_one_line(error, "x.tar")


def test_a_link_to_itself_is_not_written_over(tmp_path: Path) -> None:
    make_loop(tmp_path / "out.json")
    with pytest.raises(SopError):
        require_writable(tmp_path / "out.json")
    (tmp_path / "out.json").unlink()
    (tmp_path / "out.json").symlink_to("elsewhere.json")  # to nowhere yet: replaced as before
    require_writable(tmp_path / "out.json")
    write_json(tmp_path / "out.json", [])


def test_a_path_without_dots_leads_to_the_same_place(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    assert plain_path(tmp_path / "a" / ".." / "c") == tmp_path / "c"
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    (tmp_path / "b").mkdir()
    behind = tmp_path / "link" / ".." / "b"  # a/b, not the b beside the link
    assert plain_path(behind) == behind
    assert plain_path(tmp_path / "no" / ".." / "such") == tmp_path / "no" / ".." / "such"
