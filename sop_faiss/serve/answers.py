"""The JSON answers of the endpoints, from which the OpenAPI description is made."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Problem(BaseModel):
    """Why a request was refused."""

    error: str = Field(description="One line.")


class Label(BaseModel):
    """A label of the index."""

    name: str
    images: int = Field(description="Number of images with it.")


class IndexFacts(BaseModel):
    """What is served."""

    name: str = Field(description="Name of the index's directory.")
    images: int = Field(description="Images in the index.")
    dimension: int = Field(description="Length of a feature.")
    factory: str = Field(description="FAISS factory of the index; Flat is exact.")
    recall: float | None = Field(description="Fraction of the nearest that is found; null: exact or not measured.")
    encoder: str = Field(description="Name of the encoder that made the features, without its folders.")
    accepts_images: bool = Field(description="Whether you can search by an image that you send.")
    max_upload_bytes: int = Field(description="Largest image file that is accepted.")
    max_upload_pixels: int = Field(description="Largest image that is decoded, width times height.")
    max_k: int = Field(description="Largest number of neighbors of one search.")
    labels: list[Label] = Field(description="Sorted by name; empty if the index has none.")
    columns: list[str] = Field(
        description="What a condition may name: columns of the index, and of the server's table."
    )
    rerank: list[str] = Field(description="Methods of re-ranking that the index allows.")
    has_parts: bool = Field(description="Whether images can be found by parts of them.")
    shows_matches: bool = Field(description="Whether /api/images/{row}/match draws: there are tokens and an encoder.")
    version: str = Field(description="Changes with the index.")


class ImageFacts(BaseModel):
    """An image of the index."""

    row: int = Field(description="Its row, from 0.")
    key: str = Field(description="Its unique name.")
    label: str | None = Field(description="null for one without.")
    thumbnail: str = Field(description="Address of a small JPEG of the image.")


class ImageDetails(ImageFacts):
    """An image of the index with what is known of its file."""

    path: str = Field(description="The file, or shard and member, below the folder of the images.")
    folder: str = Field(description="Folder or shard that it is in, below the same; empty for that folder itself.")
    folder_images: int = Field(description="Images of the index in that folder.")
    width: int | None = Field(description="Pixels; null if the image cannot be read now.")
    height: int | None = Field(description="Pixels; null if the image cannot be read now.")
    file_bytes: int | None = Field(description="Length of the file; null if the image cannot be read now.")


class FoundImage(ImageFacts):
    """A neighbor."""

    rank: int = Field(description="1 is the nearest.")
    similarity: float = Field(description="Cosine.")
    box: list[float] | None = Field(
        description="Part that is as similar: left, top, right, bottom in shares of the sides; null without parts."
    )
    folded_count: int = Field(description="Number of near-duplicates that are left out for it.")
    folded: list[ImageFacts] = Field(description="The first 100 of these, nearest first.")


class SearchAnswer(BaseModel):
    """The neighbors of a query, nearest first unless re-ranked; equal similarities in order of rows."""

    query: ImageFacts | None = Field(description="The query image; null for one that was sent, or several.")
    plus: list[ImageFacts | None] = Field(description="The images searched by; null for one that was sent.")
    minus: list[ImageFacts | None] = Field(description="Those that are subtracted; null for one that was sent.")
    k: int = Field(description="Number of neighbors requested; fewer are found if there are no more.")
    label: str | None = Field(description="Only of this label.")
    threshold: float | None = Field(description="Only of at least this similarity.")
    folder: str | None = Field(description="Only of this folder.")
    where: str | None = Field(description="Only those that pass this condition.")
    unique: float | None = Field(description="Near-duplicates of this cosine similarity or more are folded.")
    rerank: str | None = Field(description="Method by which the first were put into a new order.")
    parts: bool = Field(description="Whether images were found by parts of them, too.")
    found: list[FoundImage]


class ImagePage(BaseModel):
    """Some images of the index, in order of rows unless mixed."""

    total: int = Field(description="Images of the index, or that pass the filters.")
    images: list[ImageFacts]
