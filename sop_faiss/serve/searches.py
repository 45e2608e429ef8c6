"""The endpoints that search: by an image of the index, by one that is sent, or by several; and where images match."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response

from sop_faiss.data.images.box import Box, parse_box
from sop_faiss.errors import ConfigError
from sop_faiss.serve.answers import SearchAnswer
from sop_faiss.serve.parameters import IMAGE_BODY, BoxText, Key, Row, Version, drawn, refusals, wanted
from sop_faiss.serve.refused import refused_request
from sop_faiss.serve.searcher import QueryImage, Wanted
from sop_faiss.serve.served import Served, ServedNow
from sop_faiss.serve.together import TOGETHER_BODY, read_together
from sop_faiss.serve.uploads import UploadReader
from sop_faiss.serve.work_queue import WorkQueue

_Wishes = Annotated[Wanted, Depends(wanted)]
_ALL = (400, 404, 408, 409, 413, 415, 422, 503)


def add_searches(app: FastAPI, now: ServedNow, searches: WorkQueue, uploads: UploadReader) -> None:
    """Add the endpoints of searches to an application.

    Args:
        app: the application.
        now: what is served.
        searches: where searches wait for their turn.
        uploads: reads the images that are sent.
    """

    @app.get("/api/search", summary="Search by an image of the index", responses=refusals(*_ALL))
    async def by_key(key: Key, wishes: _Wishes, box: BoxText = None) -> SearchAnswer:
        served = await now.get()
        query = QueryImage(served.searcher.row_of(key), box=_box(box))
        return await searches.run(lambda: _answer(served, wishes, [query], []))

    @app.post(
        "/api/search",
        summary="Search by an image that you send",
        responses=refusals(*_ALL),
        openapi_extra=IMAGE_BODY,
    )
    async def by_image(request: Request, wishes: _Wishes, box: BoxText = None) -> SearchAnswer:
        served = await now.get()
        served.searcher.require_encoder()
        part = _box(box)
        async with uploads.read(request) as encoded:
            query = QueryImage(None, encoded, part)
            return await searches.run(lambda: _answer(served, wishes, [query], []))

    @app.post(
        "/api/search/together",
        summary="Search by several images",
        responses=refusals(*_ALL),
        openapi_extra=TOGETHER_BODY,
    )
    async def by_several(request: Request, wishes: _Wishes) -> SearchAnswer:
        served = await now.get()
        async with uploads.read(request, several=True) as body:
            return await searches.run(lambda: _answer(served, wishes, *read_together(body, served.searcher.row_of)))

    _add_matches(app, now, searches, uploads)


def _add_matches(app: FastAPI, now: ServedNow, searches: WorkQueue, uploads: UploadReader) -> None:
    @app.get(
        "/api/images/{row}/match",
        summary="Draw where it matches an image of the index",
        response_class=Response,
        responses=drawn("png") | refusals(*_ALL),
    )
    async def match_of_key(row: Row, key: Key, box: BoxText = None, version: Version = None) -> Response:
        served = await now.get()
        served.require_row(row, version)
        query = QueryImage(served.searcher.row_of(key), box=_box(box))
        return _png(await searches.run(lambda: served.searcher.draw_match(query, row)))

    @app.post(
        "/api/images/{row}/match",
        summary="Draw where it matches an image that you send",
        response_class=Response,
        responses=drawn("png") | refusals(*_ALL),
        openapi_extra=IMAGE_BODY,
    )
    async def match_of_image(request: Request, row: Row, box: BoxText = None, version: Version = None) -> Response:
        served = await now.get()
        served.require_row(row, version)
        served.searcher.require_encoder()
        part = _box(box)
        async with uploads.read(request) as encoded:
            query = QueryImage(None, encoded, part)
            return _png(await searches.run(lambda: served.searcher.draw_match(query, row)))


def _answer(served: Served, wishes: Wanted, plus: list[QueryImage], minus: list[QueryImage]) -> SearchAnswer:
    return served.answer(wishes, plus, minus, served.searcher.find(wishes, plus, minus))


def _box(text: str | None) -> Box | None:
    try:
        return None if text is None else parse_box(text)
    except ConfigError as error:
        raise refused_request(error) from None


def _png(content: bytes) -> Response:
    return Response(content, media_type="image/png", headers={"Cache-Control": "no-store"})
