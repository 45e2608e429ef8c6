"""The parameters of the endpoints, and their refusals, for the OpenAPI description."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path, Query

from sop_faiss.serve.answers import Problem
from sop_faiss.serve.searcher import Wanted
from sop_faiss.serve.served import MAX_K

_NAME_LENGTH = 4096
_REASONS = {
    400: "The image is empty or damaged.",
    404: "No such image, label or folder.",
    408: "The image took too long to arrive.",
    409: "Served without an encoder, or tokens or parts are needed and the index has none.",
    413: "The image has too many bytes or pixels.",
    415: "The body is not an image of a known format.",
    422: "A parameter is missing, out of range, or not what it should be, as a condition or a box.",
    503: "Too many searches are waiting, or the server's table cannot be read; try again.",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the descriptions of these statuses."""
    return {status: {"model": Problem, "description": _REASONS[status]} for status in statuses}


Row = Annotated[int, Path(ge=0, description="Row of the image in the index.")]
Size = Annotated[Literal["small", "large"], Query(description="At most 240 or 800 pixels per side.")]
K = Annotated[int, Query(ge=1, le=MAX_K, description="Number of neighbors to find.")]
LabelName = Annotated[str | None, Query(max_length=_NAME_LENGTH, description="Only images of this label.")]
Folder = Annotated[
    str | None, Query(max_length=_NAME_LENGTH, description="Only images of this folder, as /api/images/{row} names it.")
]
Where = Annotated[
    str | None,
    Query(
        max_length=_NAME_LENGTH,
        description="Only images that pass this condition on the columns of /api/index, as label = 'shoe'.",
    ),
]
Threshold = Annotated[
    float | None, Query(ge=-1, le=1, allow_inf_nan=False, description="Only of at least this cosine similarity.")
]
Unique = Annotated[
    float | None,
    Query(
        ge=-1,
        le=1,
        allow_inf_nan=False,
        description="Fold an image into a nearer one from this cosine similarity between the two on.",
    ),
]
Method = Annotated[
    Literal["global", "local", "diffusion"] | None,
    Query(description="Put the nearest 400 into a new order; local compares parts of images and needs tokens."),
]
Parts = Annotated[bool, Query(description="Find images by parts of them, too; needs parts (sop-index parts).")]
BoxText = Annotated[
    str | None,
    Query(
        max_length=200,
        description="Search by this part of the image: left,top,right,bottom in pixels, or in shares of its sides.",
    ),
]
Version = Annotated[
    str | None, Query(max_length=64, description="Of the index, as /api/index has it; another one is refused.")
]
Key = Annotated[str, Query(max_length=_NAME_LENGTH, description="Name of an image of the index.")]

BINARY = {"schema": {"type": "string", "format": "binary"}}
IMAGE_BODY = {
    "requestBody": {
        "required": True,
        "description": "The bytes of an image file: JPEG, PNG, WebP, GIF, BMP, TIFF, PPM, AVIF or HEIC.",
        "content": {"application/octet-stream": BINARY, "image/*": BINARY},
    }
}


def drawn(kind: str) -> dict[int | str, dict[str, Any]]:
    """Return the description of an answer that is an image of a kind, as `jpeg`."""
    return {200: {"description": f"A {kind.upper()}.", "content": {f"image/{kind}": BINARY}}}


async def wanted(
    k: K = 24,
    label: LabelName = None,
    threshold: Threshold = None,
    folder: Folder = None,
    where: Where = None,
    unique: Unique = None,
    rerank: Method = None,
    parts: Parts = False,
) -> Wanted:
    """Return what to find, as the parameters of a search say."""
    return Wanted(k, label, threshold, folder, where, unique, rerank, parts)
