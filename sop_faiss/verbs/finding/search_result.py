"""The result of a search: each query with its neighbors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sop_faiss.data.images.box import Box
from sop_faiss.data.images.source import Place


@dataclass(frozen=True)
class Found:
    """One neighbor of a query."""

    rank: int
    """1 is the nearest."""
    row: int
    """Row of the index."""
    key: str
    similarity: float
    """Cosine."""
    label: str | None
    """Class name, or its number where names are not known; None for an image without."""
    right: bool | None
    """Whether it is of the query's class; None where one of the two has none, or the two cannot be compared."""
    folded: list[str] | None = None
    """Keys of its near-duplicates that are left out; None where none were looked for."""
    box: Box | None = None
    """The part that is as similar, in shares of its sides; None where parts were not searched."""


@dataclass(frozen=True)
class SearchedQuery:
    """One query and its neighbors, nearest first."""

    key: str
    label: str | None
    found: list[Found]
    read: Callable[[], bytes]
    """Encoded bytes of the query's image; raises DataError."""
    place: Place | None = None
    """Where the query's image is, if known."""
    is_key: bool = False
    """Whether it is an image of the index itself."""


@dataclass(frozen=True)
class SearchResult:
    """A search."""

    queries: list[SearchedQuery]
    dropped: dict[str, int]
    """How many query images could not be used, by reason."""
    combined: int = 1
    """Of how many images each query is, those that are subtracted among them."""
