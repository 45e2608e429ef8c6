"""Ground truth of a retrieval data set, read from `gnd.json` or `gnd_*.pkl` and checked before anything is measured.

The shape is that of revisited Oxford/Paris: `imlist` (gallery names), `qimlist` (query names), and `gnd`, one entry per
query, whose lists are positions in `imlist`: `easy`/`hard`/`junk` (graded) or `ok`/`junk` (plain), with an optional box
`bbx` = [x1, y1, x2, y2] around the object, in pixels of the query image.

The published files are pickles. A pickle can run code and can ask for any amount of memory, so only one that consists
of built-in containers, text and numbers is read: other instructions are refused before the first one is carried out.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import pickle
import pickletools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Bool, Int64

from sop_faiss.errors import DataError
from sop_faiss.files import not_json
from sop_faiss.paths import path_state

MAX_FILE_BYTES = 64 * 2**20
"""A larger ground-truth file is refused (revisited Paris has 0.3 MB)."""

GRADED = ("easy", "hard", "junk")
"""The lists of a revisited data set."""

PLAIN = ("ok", "junk")
"""The lists of a plain data set."""

QueryBox = tuple[float, float, float, float]
"""x1, y1, x2, y2 in pixels, x1 < x2 and y1 < y2."""

_NOT_IN_NAMES = re.compile(r"[\0\\\ud800-\udfff]")
"""A zero byte, a backslash and a lone surrogate are in no image name."""

# fmt: off
_PLAIN_OPCODES = frozenset((
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "LONG", "BININT", "BININT1", "BININT2",
    "LONG1", "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2",
    "TUPLE3", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET",
    "BINGET", "LONG_BINGET",
))
# fmt: on
"""Pickle instructions that make built-in containers, text and numbers, and nothing else."""


NO_CLASS = -1
"""Of a query that shows nothing of the gallery."""


@dataclass(frozen=True)
class QueryTruth:
    """One query: its image, the box around its object (None: the whole image), and lists of gallery positions."""

    name: str
    box: QueryBox | None
    lists: Mapping[str, Int64[np.ndarray, " _"]]


@dataclass(frozen=True)
class Classes:
    """The class of every gallery image and query (or NO_CLASS), and which queries are for validation."""

    gallery: Int64[np.ndarray, " n"]
    queries: Int64[np.ndarray, " q"]
    validation: Bool[np.ndarray, " q"]


@dataclass(frozen=True)
class GroundTruth:
    """What is relevant to which query. `lists` names the lists of every query: GRADED, PLAIN, or those of a layout.

    `sha256` is of the file as it is; of a truth that was made from folders or a CSV, of the gnd.json it would be.
    `classes` is of sets whose queries are classified.
    """

    path: Path
    images: list[str]
    queries: list[QueryTruth]
    lists: tuple[str, ...]
    sha256: str = ""
    classes: Classes | None = None


def read_ground_truth(path: Path) -> GroundTruth:
    """Read and check a ground-truth file; nothing in it is executed.

    Args:
        path: a `.json` or `.pkl` file.

    Raises:
        DataError: the file is missing, too large, not of this format, or contradicts itself.
    """
    if path.is_dir():
        raise DataError(f"ground truth {path} is a directory: name the file in it, such as gnd.json")
    if not path.is_file():
        raise DataError(f"ground truth {path} {path_state(path)}: wanted a .json or .pkl file")
    if path.suffix not in (".json", ".pkl"):
        raise DataError(f"ground truth {path} has the ending {path.suffix!r}; wanted .json or .pkl")
    if (size_bytes := path.stat().st_size) > MAX_FILE_BYTES:
        raise DataError(f"ground truth {path} has {size_bytes} bytes; at most {MAX_FILE_BYTES} are read")
    encoded = path.read_bytes()
    content = _load_json(encoded, path) if path.suffix == ".json" else _load_pickle(encoded, path)
    return _checked(content, path, hashlib.sha256(encoded).hexdigest())


def make_ground_truth(
    content: dict[str, Any], origin: Path, lists: tuple[str, ...] = PLAIN, classes: Classes | None = None
) -> GroundTruth:
    """Check a content as of a gnd.json that was made, not read.

    Args:
        content: `imlist`, `qimlist` and `gnd`.
        origin: the folder or file it was made from, for messages.
        lists: of each query; one that is missing is empty.
        classes: of sets whose queries are classified.

    Raises:
        DataError: it contradicts itself.
    """
    digest = hashlib.sha256(encode_ground_truth(content))
    if classes is not None:
        digest.update(np.concatenate([classes.gallery, classes.queries, classes.validation]).astype("<i8").tobytes())
    return replace(_checked(content, origin, digest.hexdigest(), lists), classes=classes)


def encode_ground_truth(content: dict[str, Any]) -> bytes:
    """Write ground truth as the text of a gnd.json: one line per query."""
    head = ",\n".join(f" {json.dumps(name)}: {json.dumps(content[name])}" for name in ("qimlist", "imlist"))
    entries = ",\n".join(f"  {json.dumps(entry)}" for entry in content["gnd"])
    return f'{{\n{head},\n "gnd": [\n{entries}\n ]\n}}\n'.encode()


def _load_json(encoded: bytes, path: Path) -> Any:
    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise DataError(f"ground truth {path} has the key {twice[:30]!r} twice in one table: keep one of them")
        return made

    try:
        return json.loads(encoded, object_pairs_hook=table)
    except (ValueError, RecursionError) as error:
        reason = not_json(error)
        raise DataError(f"ground truth {path} is not JSON ({reason}): it is damaged or of another kind") from None


class _PlainUnpickler(pickle.Unpickler):
    """Refuses every class and function by name; the second lock behind `_require_plain_opcodes`."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _require_plain_opcodes(encoded: bytes) -> None:
    """Walk the instructions without carrying them out; only plain data, and no memo slot beyond the file's length."""
    for opcode, argument, _ in pickletools.genops(encoded):
        if opcode.name not in _PLAIN_OPCODES:
            raise pickle.UnpicklingError(f"it holds the instruction {opcode.name} {argument or ''}".rstrip())
        if opcode.name in ("PUT", "LONG_BINPUT") and not 0 <= int(argument or 0) <= len(encoded):
            raise pickle.UnpicklingError(f"its memo slot {argument} is impossible")


def _load_pickle(encoded: bytes, path: Path) -> Any:
    try:
        _require_plain_opcodes(encoded)
        return _PlainUnpickler(io.BytesIO(encoded)).load()
    except Exception as error:  # a damaged pickle can raise nearly any built-in exception
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise DataError(
            f"ground truth {path} is not a pickle of lists, dicts, text and numbers ({reason}): "
            "it is damaged, or would run code, and is not loaded; convert a trusted file to gnd.json"
        ) from None


def _checked(content: Any, path: Path, sha256: str, made_lists: tuple[str, ...] | None = None) -> GroundTruth:
    """Build a GroundTruth from untrusted builtins; what was made, not read, may leave out lists."""
    if not isinstance(content, dict) or not {"imlist", "qimlist", "gnd"} <= content.keys():
        raise DataError(f"ground truth {path} is not a table with imlist, qimlist and gnd")
    _require_known(content, ("imlist", "qimlist", "gnd"), f"ground truth {path}")
    images = _checked_names(content["imlist"], "imlist", path)
    names = _checked_names(content["qimlist"], "qimlist", path)
    if twice := [name for name, count in Counter(images).items() if count > 1]:
        raise DataError(f"ground truth {path}: imlist names {twice[0]!r} twice; every image may appear once")
    entries = content["gnd"]
    if not isinstance(entries, (list, tuple)) or len(entries) != len(names):
        got = f"{len(entries)} entries" if isinstance(entries, (list, tuple)) else type(entries).__name__
        raise DataError(f"ground truth {path}: gnd has {got}, qimlist {len(names)} names; wanted one entry per query")
    lists = made_lists or (GRADED if isinstance(entries[0], dict) and "easy" in entries[0] else PLAIN)
    if made_lists is not None:
        entries = [dict.fromkeys(lists, ()) | entry for entry in entries]
    queries = [
        _checked_query(entry, name, lists, len(images), f"ground truth {path}: gnd[{i}]")
        for i, (entry, name) in enumerate(zip(entries, names, strict=True))
    ]
    if again := [key for key, count in Counter((query.name, query.box) for query in queries).items() if count > 1]:
        raise DataError(f"ground truth {path}: qimlist asks {again[0][0]!r} twice with the same box")
    return GroundTruth(path, images, queries, lists, sha256)


def _require_known(keys: Iterable[Any], known: Sequence[str], where: str) -> None:
    """Refuse a key that nothing reads: a misspelled list would change the scores silently."""
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key).lower()[:30], known, n=1)
            nearest = f" (did you mean {near[0]!r}?)" if near else ""
            raise DataError(f"{where} has the key {str(key)[:30]!r}{nearest}: wanted {', '.join(known)} alone")


def _checked_names(names: Any, field: str, path: Path) -> list[str]:
    """Return a non-empty list of relative file names that stay inside the image folder."""
    if not isinstance(names, (list, tuple)) or not names:
        raise DataError(f"ground truth {path}: {field} is not a list with at least one name")
    for i, name in enumerate(names):
        if not isinstance(name, str) or not name or _NOT_IN_NAMES.search(name):
            raise DataError(f"ground truth {path}: {field}[{i}] is not an image name")
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise DataError(f"ground truth {path}: {field}[{i}] = {name[:100]!r} leaves the image folder")
    return list(names)


def _checked_query(entry: Any, name: str, lists: tuple[str, ...], image_count: int, where: str) -> QueryTruth:
    if not isinstance(entry, dict):
        raise DataError(f"{where} is not a table of lists")
    if missing := [field for field in lists if field not in entry and (lists, field) != (PLAIN, "junk")]:
        got = ", ".join(sorted(str(key)[:20] for key in entry)) or "nothing"
        raise DataError(f"{where} lacks {missing[0]!r} (it has {got}); wanted easy/hard/junk or ok/junk, as in gnd[0]")
    _require_known(entry, (*lists, "bbx"), where)
    positions = {field: _checked_positions(entry.get(field, ()), image_count, f"{where}[{field!r}]") for field in lists}
    together = np.concatenate(list(positions.values()))
    values, counts = np.unique(together, return_counts=True)
    if (counts > 1).any():
        raise DataError(f"{where} lists image {values[counts > 1][0]} twice; each image has one role per query")
    box = entry.get("bbx")
    return QueryTruth(name, None if box is None else _checked_box(box, where), positions)


def _checked_positions(positions: Any, image_count: int, where: str) -> Int64[np.ndarray, " _"]:
    if not isinstance(positions, (list, tuple)):
        raise DataError(f"{where} is not a list of positions in imlist")
    for position in positions:
        if type(position) is not int or not 0 <= position < image_count:
            got = str(position)[:30] if isinstance(position, (bool, int, float)) else type(position).__name__
            raise DataError(f"{where} holds {got}; wanted positions in imlist, 0 to {image_count - 1}")
    return np.array(positions, dtype=np.int64)


def _checked_box(box: Any, where: str) -> QueryBox:
    numbers = isinstance(box, (list, tuple)) and all(type(value) in (int, float) for value in box)
    if not numbers or len(box) != 4 or not all(abs(value) < 2**31 for value in box):
        raise DataError(f"{where}['bbx'] is not four numbers x1, y1, x2, y2")
    x1, y1, x2, y2 = (float(value) for value in box)
    if not (0 <= x1 < x2 and 0 <= y1 < y2):
        raise DataError(f"{where}['bbx'] = {[x1, y1, x2, y2]} is not a box; wanted 0 <= x1 < x2 and 0 <= y1 < y2")
    return x1, y1, x2, y2
