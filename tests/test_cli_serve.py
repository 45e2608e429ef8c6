"""sop-index serve as a user types it: what goes wrong is one line, Ctrl-C ends it."""

from __future__ import annotations

import json
import signal
import socket
import sys
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sop_faiss.cli.index import main
from sop_faiss.errors import ConfigError
from sop_faiss.serve.run import address_of, listen
from tests.servers_of_indices import serve_index, write_served


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("place"), per_class=4)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["serve", *map(str, arguments)])


def assert_one_line_error(result: Result, message: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stdout == "" and result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ") and message in result.stderr


def test_a_port_in_use(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = invoke(place / "index", "--port", port)
    assert_one_line_error(result, f"port {port} of 127.0.0.1 is in use: take another with --port")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "no.such.host.invalid"), "no address of this machine"),
        (("--host", "192.0.2.1"), "cannot listen at 192.0.2.1"),
        (("--port", 70_000), "wanted 0"),
        (("--max-upload", "much"), "size 'much'"),
        (("--images-root", "/no/such/folder"), "is not a folder"),
        (("--threads", 0), "wanted 1 or more"),
        (("--student",), "no --model"),
        (("--model", "/no/such/run", "--port", 0), "does not exist"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(place: Path, arguments: tuple[object, ...], message: str) -> None:
    assert_one_line_error(invoke(place / "index", *arguments), message)


def test_no_index(tmp_path: Path) -> None:
    assert_one_line_error(invoke(tmp_path / "none", "--port", 0), "make one with `sop-index build`")


def test_another_encoder(place: Path) -> None:
    result = invoke(place / "index", "--model", place / "run", "--student", "--port", 0)
    assert_one_line_error(result, "search with the same weights")


def test_without_the_extra(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("sop_faiss.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert_one_line_error(invoke(place / "index"), "pip install 'sop-faiss[serve]'")


def test_addresses() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert address_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}/"
        with pytest.raises(ConfigError, match="in use"):
            listen("127.0.0.1", listener.getsockname()[1])
    with listen("0.0.0.0", 0) as listener:
        assert address_of(listener).startswith("http://127.0.0.1:")


def test_served_and_ended_by_ctrl_c(place: Path) -> None:
    """Status 0, one line on stderr, nothing on stdout; a connection kept open does not hold it up."""
    with serve_index(place / "index") as (address, process):
        kept = socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1].strip("/"))))
        with urllib.request.urlopen(f"{address}api/index") as answer:
            assert json.load(answer)["pictures"] == 12
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=30)
        kept.close()
    assert (process.returncode, said, complained) == (0, "", "")
