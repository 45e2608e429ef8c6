"""A web server of a folder, in a thread of this process, that can be made to misbehave."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Server:
    """What the server was asked for, and how it shall answer."""

    address: str = ""
    bodies: Counter[str] = field(default_factory=Counter)  # GETs, by path without query
    fail: dict[str, int] = field(default_factory=dict)  # path -> how many more GETs to fail
    how: str = "status"  # "status" (503), or "cut" (half of the content)
    lengths: bool = True  # tell the length of files


class _Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def __init__(self, state: Server, *arguments: Any, **options: Any) -> None:
        self.state = state
        super().__init__(*arguments, **options)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.state.bodies[path] += 1
        if self.state.fail.get(path, 0) > 0:
            self.state.fail[path] -= 1
            if self.state.how == "status":
                self.send_error(503)
                return
            content = Path(self.translate_path(path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            return
        super().do_GET()

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Content-Length" or self.state.lengths:
            super().send_header(keyword, value)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """Serve a folder at `Server.address` (http://127.0.0.1:PORT), with a list of its files."""
    state = Server()
    handler = functools.partial(_Handler, state, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        state.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
