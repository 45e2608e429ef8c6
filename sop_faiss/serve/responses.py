"""Security headers on every answer, and one line of JSON for every refusal."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import MutableMapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sop_faiss.errors import one_line
from sop_faiss.serve.refused import Refused

_log = logging.getLogger(__name__)

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class SecureApp:
    """An application with security headers on all its answers, including errors.

    Args:
        app: the application.
        local_only: answer only requests that name this machine. A page of another site can make its own name point to
            127.0.0.1 and read what is served there; the browser still sends that name.
    """

    def __init__(self, app: ASGIApp, *, local_only: bool) -> None:
        self._app = app
        self._local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_secured(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        if self._local_only and not is_loopback(_host_of(scope)):
            answer = _problem(400, "served to this machine only: open http://127.0.0.1, or start it with another host")
            await answer(scope, receive, send_secured)
            return
        await self._app(scope, receive, send_secured)


def is_loopback(host: str) -> bool:
    """Return whether a host name is this machine's own, reachable from it only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, such as 127.0.0.1.example.org
        return host.lower() == "localhost"


def _host_of(scope: Scope) -> str:
    """Return the host that a request names, without port and brackets."""
    host = Headers(scope=scope).get("host", "").strip()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def answer_problems_in_one_line(app: FastAPI) -> None:
    """Make an application answer all errors as `{"error": "..."}`."""

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        headers = {503: {"Retry-After": "2"}, 408: {"Connection": "close"}}  # 408: the rest would be waited for
        return _problem(error.status, str(error), headers.get(error.status, {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = " ".join(str(part) for part in first["loc"][1:]) or "request"
        return _problem(422, f"{where}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def failed(request: Request, error: HTTPException) -> JSONResponse:
        headers = {"Allow": ", ".join(_allowed(request))} if error.status_code == 405 else dict(error.headers or {})
        return _problem(error.status_code, str(error.detail), headers)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> JSONResponse:
        _log.error("a request failed: %r", error)
        return _problem(500, "the server failed at this request; see its log")


def _allowed(request: Request) -> list[str]:
    """Return the methods of a path; Starlette itself names those of its first route only."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    found = [route.methods or set() for route in routes if route.matches(request.scope)[0] != Match.NONE]
    return sorted(set().union(*found))


def _problem(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": one_line(message)}, status, headers)
