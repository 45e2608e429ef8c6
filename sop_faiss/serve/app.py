"""The web application: one page, and JSON endpoints for the same."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import AsyncIterator
from importlib.metadata import version as package_version
from importlib.resources import files
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.responses import HTMLResponse, Response

from sop_faiss.index.search import FeatureIndex
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.report.page import page_part
from sop_faiss.serve.answers import ImageDetails, ImageFacts, ImagePage, IndexFacts
from sop_faiss.serve.api_page import api_page
from sop_faiss.serve.options import ServeOptions
from sop_faiss.serve.parameters import Folder, LabelName, Row, Size, Version, Where, drawn, refusals
from sop_faiss.serve.responses import SecureApp, answer_problems_in_one_line, is_loopback
from sop_faiss.serve.searches import add_searches
from sop_faiss.serve.served import MAX_K, ServedNow
from sop_faiss.serve.uploads import UploadReader
from sop_faiss.serve.work_queue import WorkQueue

__all__ = ["MAX_K", "create_app"]

_MAX_PAGE = 200
_PAGE = ("page.html", "page.css", "page.svg", "part.js", "query.js", "results.js", "page.js")


def create_app(index: FeatureIndex, encoder: Encoder | None = None, options: ServeOptions | None = None) -> SecureApp:
    """Make the application that serves an opened index, and what later replaces it in its directory.

    Args:
        index: the index to search.
        encoder: the one with which the index was built; None: only images of the index can be queries.

    Raises:
        IndexMismatchError: the encoder is not the index's.
    """
    options = options or ServeOptions()
    return SecureApp(_application(ServedNow(index, encoder, options), options), local_only=is_loopback(options.host))


def _application(now: ServedNow, options: ServeOptions) -> FastAPI:
    searches = WorkQueue(options.threads, options.max_waiting)
    drawings = WorkQueue(options.threads, max(options.max_waiting, 1000))  # a page requests many at once

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        searches.close()
        drawings.close()

    app = FastAPI(
        title="sop-index serve",
        description="Search an index of images by one of them, or by an image that you send.",
        version=package_version("sop-faiss"),
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page loads its script from another site
        redoc_url=None,
        redirect_slashes=False,
    )
    answer_problems_in_one_line(app)
    _add_page(app)
    _add_images(app, now, drawings)
    add_searches(app, now, searches, UploadReader(options))
    return app


def _add_page(app: FastAPI) -> None:
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    folder = files("sop_faiss.serve")
    parts = {name: folder.joinpath(name).read_bytes() for name in _PAGE}
    parts |= {name: page_part(name).encode() for name in ("viewer.css", "viewer.js")}
    for name, content in parts.items():
        kind = types[name.rpartition(".")[2]]
        path = "/" if name == "page.html" else f"/{name}"
        app.add_route(path, functools.partial(_static, content, kind), ["GET"], include_in_schema=False)
    icon = functools.partial(_static, parts["page.svg"], types["svg"])
    app.add_route("/favicon.ico", icon, ["GET"], include_in_schema=False)  # for pages that name no icon

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(api_page(app.openapi()))


async def _static(content: bytes, kind: str, _: Request) -> Response:
    return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})


def _add_images(app: FastAPI, now: ServedNow, drawings: WorkQueue) -> None:
    @app.get("/api/index", summary="What is served")
    async def about() -> IndexFacts:
        return (await now.get()).facts

    @app.get("/api/images", summary="Look through the index", responses=refusals(404, 422, 503))
    async def images(
        offset: Annotated[int, Query(ge=0, description="Images to skip.")] = 0,
        limit: Annotated[int, Query(ge=1, le=_MAX_PAGE, description="Number of images to list.")] = 48,
        mixed: Annotated[
            bool, Query(description="In an order whose first images come from all parts of the index.")
        ] = False,
        label: LabelName = None,
        folder: Folder = None,
        where: Where = None,
    ) -> ImagePage:
        served = await now.get()
        find = functools.partial(served.searcher.rows, label, folder, where)
        chosen = find() if folder is None and where is None else await drawings.run(find)
        rows = range(len(served.index)) if chosen is None else chosen
        step = _mixing_step(len(rows)) if mixed else 1
        places = range(min(offset, len(rows)), min(offset + limit, len(rows)))
        part = [int(rows[place * step % len(rows)]) for place in places]
        return ImagePage(total=len(rows), images=[ImageFacts(**served.image(row)) for row in part])

    @app.get("/api/images/{row}", summary="What is known of an image", responses=refusals(404, 422, 503))
    async def details(row: Row, version: Version = None) -> ImageDetails:
        served = await now.get()
        served.require_row(row, version)
        return await drawings.run(lambda: served.details(row))

    @app.get(
        "/api/images/{row}/thumbnail",
        summary="An image of the index",
        response_class=Response,
        responses=drawn("jpeg") | refusals(404, 422, 503),
    )
    async def thumbnail(row: Row, size: Size = "small", version: Version = None) -> Response:
        served = await now.get()
        served.require_row(row, version)
        jpeg = served.thumbnails.kept(row, size)
        if jpeg is None:
            jpeg = await drawings.run(lambda: served.thumbnails.make(row, size))
        cache = "private, max-age=604800, immutable" if version else "no-cache"
        return Response(jpeg, media_type="image/jpeg", headers={"Cache-Control": cache})


def _mixing_step(count: int) -> int:
    """Find a step near the golden ratio of `count`: modulo `count` it visits each place once, distant ones first."""
    return next(step for step in range(max(1, round(count * 0.618)), 2 * count + 2) if math.gcd(step, count) == 1)
