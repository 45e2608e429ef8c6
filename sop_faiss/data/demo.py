"""The built-in demo set `digits`: scikit-learn's 1,797 scanned digits, as shards and as a retrieval set.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998
(CC BY 4.0), test part, as shipped with scikit-learn: no download.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64, Int64, UInt8
from PIL import Image

from sop_faiss.data.shards.shard_writer import Sample, ShardWriter, write_manifest
from sop_faiss.errors import DataError
from sop_faiss.files import atomic_directory, write_json

SIDE_PIXELS = 32
TEST_COUNT = 400
QUERIES_PER_DIGIT = 10
_DARKEST = 16.0  # of load_digits
_SHARD_SAMPLES = 500
_SPLIT_SEED = 0


@dataclass(frozen=True)
class DigitsSummary:
    """Where the demo set is, and the number of images in each part."""

    out: Path
    train: int
    test: int
    queries: int
    database: int


def write_digits(out: Path) -> DigitsSummary:
    """Write `train/` and `test/` (shards with labels) and `retrieval/` (queries and database from the test part).

    There are 1,397 training and 400 test images, stratified by digit. Ten test images of each digit are queries, the
    others are the database, in which images of the same digit are relevant. The images are RGB PNGs of 32 px; the
    bytes are always the same.

    Args:
        out: the folder to make; must be absent or empty.

    Raises:
        DataError: scikit-learn is not installed.
        SopError: `out` exists and is not empty.
    """
    images, labels = _load()
    train, test = split_stratified(labels, TEST_COUNT)
    with atomic_directory(out) as folder:
        pngs = [_png(image) for image in images]
        for name, part in (("train", train), ("test", test)):
            keys = [f"{position:04d}" for position in part]
            write_labeled_part(folder / name, "digits", [pngs[position] for position in part], labels[part], keys)
        queries = np.sort(np.concatenate([test[labels[test] == digit][:QUERIES_PER_DIGIT] for digit in range(10)]))
        database = np.setdiff1d(test, queries)
        write_retrieval_part(folder / "retrieval", pngs, labels, queries, database)
    return DigitsSummary(out, len(train), len(test), len(queries), len(database))


def _load() -> tuple[Float64[np.ndarray, "n 8 8"], Int64[np.ndarray, " n"]]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "scikit-learn, which contains the demo images, is not installed: pip install 'sop-faiss[demo]'"
        ) from None
    digits = load_digits()
    return digits.images, digits.target.astype(np.int64)


def split_stratified(
    labels: Int64[np.ndarray, " n"], test_count: int
) -> tuple[Int64[np.ndarray, " train"], Int64[np.ndarray, " test"]]:
    """Split the positions into a training and a test part, stratified by class (largest remainders), each sorted."""
    rng = np.random.Generator(np.random.Philox(_SPLIT_SEED))
    classes, counts = np.unique(labels, return_counts=True)
    exact = counts * test_count / len(labels)
    wanted = np.floor(exact).astype(np.int64)
    most_missing = np.argsort(wanted - exact, kind="stable")
    wanted[most_missing[: test_count - int(wanted.sum())]] += 1
    test = np.concatenate(
        [rng.permutation(np.flatnonzero(labels == c))[:count] for c, count in zip(classes, wanted, strict=True)]
    )
    test.sort()
    return np.setdiff1d(np.arange(len(labels)), test), test


def enlarge(image: Float64[np.ndarray, "h w"]) -> UInt8[np.ndarray, "32 32 3"]:
    """Enlarge a digit of values 0 to 16 to a smooth RGB image, white on black."""
    gray = Image.fromarray((image * (255.0 / _DARKEST)).astype(np.float32))
    smooth = np.asarray(gray.resize((SIDE_PIXELS, SIDE_PIXELS), Image.Resampling.BICUBIC))
    return np.repeat(np.clip(np.rint(smooth), 0, 255).astype(np.uint8)[:, :, None], 3, axis=2)


def _png(image: Float64[np.ndarray, "h w"]) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(enlarge(image)).save(stream, "PNG")
    return stream.getvalue()


def write_labeled_part(
    folder: Path, name: str, pngs: Sequence[bytes], labels: Int64[np.ndarray, " n"], keys: Sequence[str] = ()
) -> None:
    """Write a folder of shards with labels; without keys the images are numbered."""
    folder.mkdir()
    keys = keys or [f"{number:04d}" for number in range(len(pngs))]
    with ShardWriter(folder, f"{name}-{folder.name}", _SHARD_SAMPLES) as writer:
        for key, png, label in zip(keys, pngs, labels, strict=True):
            writer.write(Sample(key, "png", png, int(label)))
    classes = [str(label) for label in range(int(labels.max()) + 1)]
    write_manifest(folder, writer.entries, classes, labeled=len(labels))


def write_retrieval_part(
    folder: Path,
    pngs: Sequence[bytes],
    labels: Int64[np.ndarray, " n"],
    queries: Int64[np.ndarray, " q"],
    database: Int64[np.ndarray, " m"],
) -> None:
    """Write the revisited layout: `query/`, `database/`, `gnd.json` (`imlist`, `qimlist`, `gnd[i].ok` and `.junk`)."""
    names = {}
    for part, positions in (("query", queries), ("database", database)):
        (folder / part).mkdir(parents=True)
        names[part] = [f"{position:04d}_is_{labels[position]}.png" for position in positions]
        for name, position in zip(names[part], positions, strict=True):
            (folder / part / name).write_bytes(pngs[position])
    relevant = [np.flatnonzero(labels[database] == labels[query]).tolist() for query in queries]
    gnd = [{"ok": ok, "junk": []} for ok in relevant]
    write_json(folder / "gnd.json", {"imlist": names["database"], "qimlist": names["query"], "gnd": gnd})
