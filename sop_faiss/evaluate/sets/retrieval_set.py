"""A retrieval data set on disk: its ground truth, and the image file of every query and gallery name.

Images are in `jpg/` (queries and gallery together, as in Oxford and Paris), in `query/` and `database/`, or next to
the ground truth. Without a ground truth, class folders and CSV files are read as `plain_sets.py` says, and the folders
of a protocol with a layout of its own as `published_layouts.py` says. Nothing is downloaded: a missing image is an
error that says how many are missing and from where.
"""

from __future__ import annotations

import io
import posixpath
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from PIL import Image

from sop_faiss.data.images.box import crop_to_box
from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.listing import FileSource
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.sets.ground_truth import PLAIN, GroundTruth, QueryBox, make_ground_truth, read_ground_truth
from sop_faiss.evaluate.sets.plain_sets import read_plain_set
from sop_faiss.evaluate.sets.published_layouts import LAYOUTS, RADIUS_METERS, read_layout
from sop_faiss.files import sha256_file
from sop_faiss.paths import path_state

KNOWN_SETS = {
    "roxford5k": "ba7967754bd2d7d2210a5799f9c45ad5835e269a80ef9d3eba44caa35816c471",
    "rparis6k": "d2e729a5293dda7dda8a15c8383424a42e4964a2c4cfea2f32fa85d11d2df499",
}
"""The benchmark's data sets, and the sha256 of their published `gnd_NAME.pkl`."""

BENCHMARK_PAGE = "https://github.com/filipradenovic/revisitop"
ENDINGS = ("", ".jpg", ".jpeg", ".png", ".webp", ".JPG", ".JPEG", ".PNG")
"""What may follow a name of imlist or qimlist; the unchanged name comes first."""


@dataclass(eq=False)
class CroppedFiles(FileSource):
    """Image files of which only the part inside a box is seen."""

    boxes: list[QueryBox | None]
    """Per image; None keeps the whole image."""
    top_value: float = 0.0
    """As of `decode_image`, for the cropped ones: they are encoded with 8 bits."""

    def read(self, position: int) -> bytes:
        """Return the encoded bytes of one image; a cropped one is encoded again, without loss.

        Raises:
            DataError: as of FileSource and `decode_image`, or `outside:` the box is not in the image.
        """
        encoded = super().read(position)
        box = self.boxes[position]
        if box is None:
            return encoded
        cropped = io.BytesIO()
        Image.fromarray(crop_to_box(decode_image(encoded, top_value=self.top_value), box)).save(
            cropped, "PNG", compress_level=1
        )
        return cropped.getvalue()


@dataclass(frozen=True)
class RetrievalSet:
    """A data set whose every image file is there.

    Attributes:
        name: as the user named it.
        truth: what is relevant to which query.
        gallery: the images of `truth.images`, in that order.
        queries: the images of `truth.queries`, in that order, cropped to the queries' boxes.
        whole_queries: the same images, not cropped.
        query_rows: the gallery position of each query, where all of them are whole images of the gallery; else None.
        choices: of the layout that was read, for the result file.
    """

    name: str
    truth: GroundTruth
    gallery: FileSource
    queries: CroppedFiles
    whole_queries: FileSource
    query_rows: Int64[np.ndarray, " q"] | None = None
    choices: dict[str, Any] = field(default_factory=dict)


def open_retrieval_set(
    dataset: str,
    data_root: Path | None = None,
    gnd: Path | None = None,
    protocol: str | None = None,
    radius: float = RADIUS_METERS,
) -> RetrievalSet:
    """Find ground truth and images of a data set.

    Args:
        dataset: `roxford5k`, `rparis6k`, a directory, or a CSV file of groups, pairs or (protocol `place`) places.
        data_root: the directory that holds the data set's directory; the current one if not given.
        gnd: another ground-truth file than the data set's own.
        protocol: one of `LAYOUTS` if its layout is to be read; others change nothing here.
        radius: of protocol `place`, in meters.

    Raises:
        ConfigError: `gnd` is given for a protocol with a layout, or the radius is impossible.
        DataError: directory, ground truth or images are missing or damaged, or the ground truth of a known data set
            is not the published one.
    """
    place = (data_root if data_root is not None else Path()) / dataset
    if protocol in LAYOUTS:
        if gnd is not None:
            raise ConfigError(f"`gnd={gnd}`: protocol {protocol} reads the data set's own lists; leave it out")
        layout = read_layout(protocol, place, radius)
        truth = make_ground_truth(layout.content, place, layout.lists, layout.classes)
        files = [_listed_images(layout.root, names) for names in (truth.images, [q.name for q in truth.queries])]
        return _opened(dataset, truth, layout.root, files[0], files[1], layout.choices)
    if gnd is None and (place.suffix.lower() == ".csv" or _is_classes(place)):
        plain = read_plain_set(place)
        root, truth = plain.root, make_ground_truth(plain.content, place)
        folders = plain.query_folder, plain.gallery_folder
    else:
        root = _directory(dataset, data_root)
        truth = read_ground_truth(gnd if gnd is not None else _own_ground_truth(root, dataset))
        folders = ("jpg", "jpg") if (root / "jpg").is_dir() else _own_folders(root)
    gallery = _find_images(root, folders[1], "database", truth.images, dataset)
    queries = _find_images(root, folders[0], "query", [query.name for query in truth.queries], dataset)
    return _opened(dataset, truth, root, gallery, queries, {})


def _opened(
    dataset: str,
    truth: GroundTruth,
    root: Path,
    gallery: list[str],
    queries: list[str],
    choices: dict[str, Any],
) -> RetrievalSet:
    _refuse_own_relevance(truth, queries, gallery)
    root, keys, boxes = root.absolute(), _unique_keys(truth), [query.box for query in truth.queries]
    return RetrievalSet(
        name=dataset,
        truth=truth,
        gallery=FileSource(f"{dataset} (database)", truth.images, None, None, root, gallery),
        queries=CroppedFiles(f"{dataset} (queries)", keys, None, None, root, queries, boxes),
        whole_queries=FileSource(f"{dataset} (queries)", keys, None, None, root, queries),
        query_rows=_rows_in_gallery(queries, gallery) if not any(boxes) else None,
        choices=choices,
    )


def _is_classes(root: Path) -> bool:
    """Whether a directory without any ground truth may hold class folders."""
    if root.name in KNOWN_SETS or not root.is_dir() or (root / "jpg").is_dir():
        return False
    if any(root.glob("gnd*")):
        return False
    places = [root / "query", root / "database"]
    return all(any(entry.is_dir() for entry in place.iterdir()) for place in places if place.is_dir()) and any(
        entry.is_dir() for entry in root.iterdir()
    )


def _own_folders(root: Path) -> tuple[str, str]:
    """Where queries and gallery are: `query/` and `database/`, or next to the ground truth."""
    return ("query", "database") if (root / "query").is_dir() or (root / "database").is_dir() else ("", "")


def _refuse_own_relevance(truth: GroundTruth, queries: Sequence[str], gallery: Sequence[str]) -> None:
    """Refuse a query to which its own file is relevant: it finds itself first, and the scores say nothing.

    A box out of the query's image, in a plain set, is the protocol of the first Oxford and Paris sets.
    """
    positions = {posixpath.normpath(file): position for position, file in enumerate(gallery)}
    for number, (query, file) in enumerate(zip(truth.queries, queries, strict=True)):
        own = positions.get(posixpath.normpath(file))
        relevant = (name for name in truth.lists if name != "junk" and own in query.lists[name])
        if own is None or (truth.lists == PLAIN and query.box is not None) or (name := next(relevant, None)) is None:
            continue
        raise DataError(
            f"ground truth {truth.path}: gnd[{number}][{name!r}] holds {own}, which is the query {query.name} itself: "
            "move it to junk"
        )


def _rows_in_gallery(queries: Sequence[str], gallery: Sequence[str]) -> Int64[np.ndarray, " q"] | None:
    positions = {file: position for position, file in enumerate(gallery)}
    if not all(file in positions for file in queries):
        return None
    return np.array([positions[file] for file in queries], dtype=np.int64)


def _directory(dataset: str, data_root: Path | None) -> Path:
    above = data_root if data_root is not None else Path()
    if not above.is_dir():
        raise DataError(f"data root {above} is not a directory")
    root = above / dataset
    if not root.is_dir():
        names = ", ".join(KNOWN_SETS)
        raise DataError(
            f"data set {dataset!r}: {root} is not a directory; wanted {names} inside `data_root`, or a directory with "
            "gnd.json and images"
        )
    return root


def _own_ground_truth(root: Path, dataset: str) -> Path:
    if dataset in KNOWN_SETS:
        return _published_ground_truth(root / f"gnd_{dataset}.pkl", dataset)
    found = sorted([*root.glob("gnd.json"), *root.glob("gnd_*.pkl")])
    if len(found) != 1:
        got = ", ".join(path.name for path in found) or "neither gnd.json nor gnd_*.pkl"
        raise DataError(
            f"{root} holds {got}; wanted one ground-truth file (name one with `gnd`), or a folder for each thing"
        )
    return found[0]


def _published_ground_truth(path: Path, dataset: str) -> Path:
    if not path.is_file():
        raise DataError(f"ground truth {path} {path_state(path)}: get it from {BENCHMARK_PAGE}, or name one with `gnd`")
    if (got := sha256_file(path)) != KNOWN_SETS[dataset]:
        raise DataError(
            f"{path} is not the published ground truth of {dataset} (sha256 {got[:12]}..., wanted "
            f"{KNOWN_SETS[dataset][:12]}...): fetch it again, or name it with `gnd` to use it all the same"
        )
    return path


def _find_images(root: Path, folder: str, what: str, names: Sequence[str], dataset: str) -> list[str]:
    """File of each name relative to root, in `folder`; "" is root itself."""
    files = [_first_existing(root, f"{folder}/{name}" if folder else name) for name in names]
    missing = [name for name, file in zip(names, files, strict=True) if file is None]
    if not (root / folder).is_dir() or (not folder and len(missing) == len(names)):
        raise DataError(
            f"{root} has neither jpg/ nor {what}/, nor images next to the ground truth: the images are missing"
            + _where_from(dataset, root / "jpg")
        )
    if missing:
        raise DataError(
            f"{len(missing)} of {len(names)} {what} images are missing in {root / folder} (first: {missing[0]})"
            + _where_from(dataset, root / folder)
        )
    return [file for file in files if file is not None]


def _listed_images(root: Path, names: Sequence[str]) -> list[str]:
    """Return the names, which are files below root, with the endings they have."""
    files = [_first_existing(root, name) for name in names]
    if missing := [name for name, file in zip(names, files, strict=True) if file is None]:
        raise DataError(
            f"{len(missing)} of {len(names)} images of the data set's lists are missing in {root} (first: "
            f"{missing[0]}); nothing is downloaded, put them there"
        )
    return [file for file in files if file is not None]


def _first_existing(root: Path, file: str) -> str | None:
    return next((file + ending for ending in ENDINGS if (root / (file + ending)).is_file()), None)


def _where_from(dataset: str, place: Path) -> str:
    if dataset not in KNOWN_SETS:
        return "; nothing is downloaded, put them there"
    return f"; nothing is downloaded, put the photos of {dataset} into {place} (links: {BENCHMARK_PAGE})"


def _unique_keys(truth: GroundTruth) -> list[str]:
    """Query names; an image that is asked for several boxes gets the box added."""
    times = Counter(query.name for query in truth.queries)
    return [
        query.name if times[query.name] == 1 else f"{query.name}@{query.box}".replace(" ", "")
        for query in truth.queries
    ]
