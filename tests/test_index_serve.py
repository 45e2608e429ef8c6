"""sop-index serve as a user types it: what goes wrong is one line, Ctrl-C ends it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from click.testing import CliRunner, Result

from sop_faiss.cli.index import main
from sop_faiss.errors import ConfigError
from sop_faiss.serve.request_timeout import prompt_protocol
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
    assert_one_line_error(result, f"port {port} of 127.0.0.1 is in use: choose another --port")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
        (("--host", "192.0.2.1"), "cannot listen at 192.0.2.1"),
        (("--port", 70_000), "wanted 0"),
        (("--max-upload", "much"), "size 'much'"),
        (("--images-root", "/no/such/folder"), "is not a folder"),
        (("--threads", 0), "wanted 1 or more"),
        (("--table", "/no/such.csv", "--no-encoder", "--port", 0), "--table /no/such.csv"),
        (("--student",), "has another encoder than the index"),
        (("--no-encoder", "--student"), "leave --model and its options out"),
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


def test_answers_are_sent_at_once() -> None:
    async def no_delay() -> int:
        noted: asyncio.Queue[int] = asyncio.Queue()

        async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            noted.put_nowait(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        server = await asyncio.start_server(note, sock=listen("127.0.0.1", 0))
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
        return noted.get_nowait()

    assert asyncio.run(no_delay()) != 0


def test_served_and_ended_by_ctrl_c(place: Path) -> None:
    """Status 0, one line on stderr, nothing on stdout; a connection kept open does not hold it up."""
    with serve_index(place / "index") as (address, process):
        kept = socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1].strip("/"))))
        with urllib.request.urlopen(f"{address}api/index") as answer:
            assert json.load(answer)["images"] == 12
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=30)
        kept.close()
    assert (process.returncode, said, complained) == (0, "", "")


# clients that do not ask


HEADERS = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\n"
SECONDS = 0.4
PAUSE = 0.06
LONGEST = 30.0

Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]]


async def answer_slowly(_: Any, receive: Any, send: Any) -> None:
    """The body, sent back after a while."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await asyncio.sleep(1.5 * SECONDS)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def with_clients(*clients: Client, app: Any = answer_slowly) -> list[bytes]:
    """What each client says at its end, all at once."""
    config = uvicorn.Config(app, http=prompt_protocol(SECONDS), log_config=None, log_level="error", lifespan="off")
    config.load()
    state = uvicorn.server.ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: config.http_protocol_class(config=config, server_state=state, app_state={}),  # type: ignore[call-arg]
        "127.0.0.1",
        0,
    )

    async def run(client: Client) -> bytes:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            return await asyncio.wait_for(client(reader, writer), LONGEST)
        finally:
            writer.close()

    async with server:
        return await asyncio.gather(*map(run, clients))


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> bytes:
    return await until_closed(reader)


async def trickling(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """A letter now and then: with no end if it is not closed."""
    closed = asyncio.ensure_future(until_closed(reader))
    writer.write(b"GET / HTTP/1.1\r\n")
    while not closed.done():
        writer.write(b"x")
        await asyncio.sleep(PAUSE)
    return await closed


async def stopping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """A whole request, then a part of one."""
    writer.write(HEADERS + b"abcdef")
    answer = (await reader.readuntil(b"\r\n\r\n")) + await reader.readexactly(6)
    writer.write(HEADERS[:20])
    return answer + await until_closed(reader)


async def slow_but_asking(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Twice a whole request, whose body takes longer than headers may, on one connection."""
    bodies = b""
    for _ in range(2):
        writer.write(HEADERS)
        for letter in b"abcdef":
            await asyncio.sleep(2 * SECONDS / 6)
            writer.write(bytes([letter]))
        await reader.readuntil(b"\r\n\r\n")
        bodies += await reader.readexactly(6)
    return bodies


def test_connections_that_do_not_ask_are_closed_and_others_served() -> None:
    clients: list[Client] = [silent, trickling, stopping, *[slow_but_asking] * 50]
    silence, trickle, stopped, *bodies = asyncio.run(with_clients(*clients))
    assert silence == b""
    assert b"200 OK" not in trickle
    assert stopped.startswith(b"HTTP/1.1 200 OK") and stopped.endswith(b"abcdef")
    assert bodies == [b"abcdefabcdef"] * 50


# clients that break off their requests, or do not read


def answering(*parts: bytes, ended: asyncio.Event | None = None) -> Any:
    """An application that reads nothing and answers at once."""

    async def app(_: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})
        if ended is not None:
            ended.set()

    return app


CHUNK = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"


async def breaking(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """A body whose second chunk is none."""
    writer.write(CHUNK + b"zz\r\n")
    return await until_closed(reader)


async def breaking_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The same, after the answer."""
    writer.write(CHUNK)
    answer = await reader.readuntil(b"0\r\n\r\n")
    writer.write(b"zz\r\n")
    return answer + await until_closed(reader)


def test_broken_bodies_get_one_answer_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    at_once, late = asyncio.run(with_clients(breaking, breaking_late, app=answering(b"fine")))
    assert at_once.startswith(b"HTTP/1.1 400 ") and b"200 OK" not in at_once
    assert late.startswith(b"HTTP/1.1 200 ") and b"fine" in late and b" 400 " not in late
    assert [record.message for record in caplog.records] == []


def test_an_answer_that_nobody_reads_is_given_up() -> None:
    async def length_read() -> int:
        ended = asyncio.Event()

        async def not_reading(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await ended.wait()
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            return await until_closed(reader)

        (read,) = await with_clients(not_reading, app=answering(*[bytes(1_000_000)] * 40, ended=ended))
        return len(read)

    assert asyncio.run(length_read()) < 40_000_000
