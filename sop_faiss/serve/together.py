"""Queries of several images, as JSON."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sop_faiss.data.images.box import require_box
from sop_faiss.errors import ConfigError
from sop_faiss.serve.refused import Refused, refused_request
from sop_faiss.serve.searcher import QueryImage

MOST = 16
"""Images on either side."""


class OneOfSeveral(BaseModel):
    """An image of a query: by its key in the index, or sent."""

    model_config = ConfigDict(extra="forbid", strict=True)
    key: str | None = Field(None, max_length=4096, description="Name of an image of the index.")
    image: str | None = Field(None, description="The bytes of an image file in base64, if it has no key.")
    box: list[float] | None = Field(
        None,
        min_length=4,
        max_length=4,
        description="Only this part: left, top, right, bottom in pixels, or in shares of its sides.",
    )

    def query(self, row_of: Callable[[str], int], place: str) -> QueryImage:
        """Return what is searched by; `place` is for the message.

        Raises:
            Refused: as of `row_of`, or it is not one image (422).
        """
        if (self.key is None) == (self.image is None):
            raise Refused(422, f"{place}: wanted one of key and image")
        try:
            box = None if self.box is None else require_box(self.box, ",".join(f"{each:g}" for each in self.box))
            encoded = base64.b64decode(self.image or "", validate=True)
        except ConfigError as error:
            raise refused_request(error) from None
        except ValueError:
            raise Refused(422, f"{place}: image is not base64") from None
        if self.key is None and not encoded:
            raise Refused(400, f"{place}: empty: image has no bytes, wanted those of an image file")
        return QueryImage(None if self.key is None else row_of(self.key), encoded, box)


class Together(BaseModel):
    """Images that are searched by together."""

    model_config = ConfigDict(extra="forbid", strict=True)
    plus: list[OneOfSeveral] = Field(min_length=1, max_length=MOST)
    minus: list[OneOfSeveral] = Field([], max_length=MOST)


def read_together(body: bytes, row_of: Callable[[str], int]) -> tuple[list[QueryImage], list[QueryImage]]:
    """Parse a body: the images searched by, and those that are subtracted.

    Args:
        body: JSON as of `TOGETHER_BODY`.
        row_of: returns the row of a key.

    Raises:
        Refused: it is not such JSON, or a key is on both sides (422), or not in the index (404), or an image is empty
            (400).
    """
    try:
        asked = Together.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = " ".join(str(part)[:40] for part in first["loc"]) or "body"
        raise Refused(422, f"{where}: {first['msg'][:200]}") from None
    keys = {each.key for each in asked.plus} & {each.key for each in asked.minus} - {None}
    if keys:
        raise Refused(422, "minus: an image is in plus, too: name it once")
    plus = [each.query(row_of, f"plus {place}") for place, each in enumerate(asked.plus)]
    return plus, [each.query(row_of, f"minus {place}") for place, each in enumerate(asked.minus)]


def _side(least: int, what: str) -> dict[str, Any]:
    images = {"type": "array", "items": OneOfSeveral.model_json_schema(), "maxItems": MOST}
    return images | {"minItems": least, "description": what}


TOGETHER_BODY = {
    "requestBody": {
        "required": True,
        "description": "The images whose mean is searched by, and those of whose mean half is subtracted; each is "
        'named as {"key": "NAME"} or sent as {"image": "BASE64"}, and may have a "box" of four numbers.',
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "plus": _side(1, "Images to be near to."),
                        "minus": _side(0, "Images to be far from."),
                    },
                    "required": ["plus"],
                    "additionalProperties": False,
                }
            }
        },
    }
}
