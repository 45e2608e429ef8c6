"""The index that is served: when its directory has been replaced, as `sop-index sync` does, the new one."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from typing import Any

from sop_faiss.data.images.decode import open_image
from sop_faiss.errors import DataError, SopError
from sop_faiss.index.beside import beside_state, file_state
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.store import MANIFEST_FILE, IndexManifest
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.serve.answers import FoundImage, ImageDetails, ImageFacts, IndexFacts, Label, SearchAnswer
from sop_faiss.serve.options import ServeOptions
from sop_faiss.serve.refused import Refused
from sop_faiss.serve.searcher import Hit, QueryImage, Searcher, Wanted
from sop_faiss.serve.thumbnails import Thumbnails

_log = logging.getLogger(__name__)

MAX_K = 500
"""Largest number of neighbors of one search."""
_SHOWN_FOLDED = 100


class Served:
    """An opened index with everything that answers about it need."""

    def __init__(self, index: FeatureIndex, encoder: Encoder | None, options: ServeOptions) -> None:
        self.searcher = Searcher(index, encoder, options.max_upload_pixels, options.table, options.images_root)
        self.index = index
        self.options = options
        self.thumbnails = Thumbnails(self.searcher.images, options.thumbnail_cache_bytes)
        self.version = _version_of(index.manifest)
        self.facts = self._facts()

    def _facts(self) -> IndexFacts:
        manifest, options = self.index.manifest, self.options
        return IndexFacts(
            name=self.index.directory.absolute().name,
            images=len(self.index),
            dimension=manifest.dimension,
            factory=manifest.factory,
            recall=manifest.search.get("recall"),
            encoder=manifest.encoder["name"].rpartition("/")[2],
            accepts_images=self.searcher.encoder is not None,
            max_upload_bytes=options.max_upload_bytes,
            max_upload_pixels=options.max_upload_pixels,
            max_k=MAX_K,
            labels=[Label(name=name, images=count) for name, count in self.searcher.labels.counts().items()],
            columns=self.searcher.conditions.names,
            rerank=self.searcher.methods,
            has_parts=self.searcher.parts is not None,
            shows_matches=self.searcher.tokens is not None and self.searcher.encoder is not None,
            version=self.version,
        )

    def image(self, row: int) -> dict[str, Any]:
        """Return the fields of `ImageFacts`."""
        labels = self.index.ids.labels
        return {
            "row": row,
            "key": self.index.ids.keys[row],
            "label": None if labels is None else self.index.class_name(int(labels[row])),
            "thumbnail": f"/api/images/{row}/thumbnail?version={self.version}",
        }

    def require_row(self, row: int, version: str | None) -> None:
        """Refuse a row that the index does not have, or that was meant in another version of it (404)."""
        if version is not None and version != self.version:
            raise Refused(404, "the index has changed: load the page again")
        if row >= len(self.index):
            raise Refused(404, f"row {row}: the index has {len(self.index)} images")

    def details(self, row: int) -> ImageDetails:
        """Return what is known of an image and of its file, which is read."""
        folders, ids = self.searcher.folders, self.index.ids
        folder = folders.folder_of(row)
        try:
            encoded = self.thumbnails.images.read(row)
            with open_image(encoded) as image:
                size: tuple[int | None, int | None] = image.size
        except DataError:
            encoded, size = b"", (None, None)
        return ImageDetails(
            **self.image(row),
            path="/".join(part for part in (ids.sources[row], ids.members[row]) if part),
            folder=folder,
            folder_images=len(folders.rows(folder)),
            width=size[0],
            height=size[1],
            file_bytes=len(encoded) or None,
        )

    def answer(
        self, wanted: Wanted, plus: Sequence[QueryImage], minus: Sequence[QueryImage], hits: list[Hit]
    ) -> SearchAnswer:
        """Return the answer to a search."""
        found = [
            FoundImage(
                rank=rank,
                similarity=hit.similarity,
                box=None if hit.box is None else [round(each, 4) for each in hit.box],
                folded_count=len(hit.folded),
                folded=[self._facts_of(row) for row in hit.folded[:_SHOWN_FOLDED]],
                **self.image(hit.row),
            )
            for rank, hit in enumerate(hits, 1)
        ]
        asked = [None if image.row is None else self._facts_of(image.row) for image in (*plus, *minus)]
        return SearchAnswer(
            query=asked[0] if len(asked) == 1 else None,
            plus=asked[: len(plus)],
            minus=asked[len(plus) :],
            found=found,
            **dataclasses.asdict(wanted),
        )

    def _facts_of(self, row: int) -> ImageFacts:
        return ImageFacts(**self.image(row))


class ServedNow:
    """What is served now. A request asks once, so that all of its answer is of one index.

    Args:
        index: the index to begin with.
        encoder: the one with which it was built, if images can be sent.
        options: limits, and where the images are.

    Raises:
        IndexMismatchError: the encoder is not the index's.
    """

    def __init__(self, index: FeatureIndex, encoder: Encoder | None, options: ServeOptions) -> None:
        self._beside = beside_state(index.directory)  # as it is at the latest when it is opened
        self._served = Served(index, encoder, options)
        self._opening = asyncio.Lock()
        self._seen: tuple[Any, ...] | None = None  # of the manifests that were looked at last

    async def get(self) -> Served:
        """Return the index, opened again if it, its parts or its tokens are new; if that fails, the one before."""
        directory = self._served.index.directory
        own = file_state(directory / MANIFEST_FILE)  # None in the moment of the replacement
        state = (own, beside_state(directory))
        if own is not None and state != self._seen:
            self._seen = state  # at once: the requests that come meanwhile do not wait
            async with self._opening:  # one after the other, so that the newest stays
                self._served = await asyncio.to_thread(self._opened)
        return self._served

    def _opened(self) -> Served:
        before = self._served
        directory = before.index.directory
        try:
            index, beside = before.index, beside_state(directory)
            if _version_of(IndexManifest.read(directory)) != before.version:
                index = FeatureIndex.open(directory, verify="sizes")  # its bytes were written just now
            elif beside == self._beside:
                return before
            self._beside = beside
            return Served(index, before.searcher.encoder, before.options)
        except (SopError, OSError) as error:
            _log.warning("the index has changed and cannot be served, start again: %s", error)
            return before


def _version_of(manifest: IndexManifest) -> str:
    sums = "".join(str(file["sha256"]) for file in manifest.files.values())
    return hashlib.sha256(sums.encode()).hexdigest()[:12]
