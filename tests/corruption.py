"""Damages index directories by seed and opens them: `python -m tests.corruption FOLDER PLACE FIRST LAST`.

Each case damages a copy of one of several indices: bytes flipped, files cut, grown, blanked, emptied, removed, or
exchanged with each other or with those of another index. It must be refused in one line, or answer as the whole one
does. FAISS must not have looked at what is refused. The last line printed is a JSON object of counts.
"""

from __future__ import annotations

import collections
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sop_faiss.errors import IndexMismatchError
from sop_faiss.index import vectors as vectors_module
from sop_faiss.index.build import IndexOptions, build_index
from sop_faiss.index.search import FeatureIndex
from tests.test_search import DIMENSION, FILES, blank, cut, flip, grow, make_store

KINDS = ("Flat", "IVF4,Flat", "IVF4,SQ8", "HNSW8")
QUERY_ROWS = [0, 7, 31]


def build_all(folder: Path) -> None:
    """Two indices of each kind, of the same encoder, dimension and count."""
    for kind in KINDS:
        for seed in range(2):
            build_index(make_store(seed), folder / f"{kind}-{seed}", IndexOptions(kind, recall=0.5))


def answers(index: FeatureIndex) -> str:
    """What an index says: of its own rows, their nearest, and all above a similarity."""
    features = index.features(QUERY_ROWS)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    found, above = index.search(unit, 9), index.search_above(unit, 0.5)
    lines = [found.rows, found.similarities, found.labels, features, *(each.rows for each in above)]
    answered = [line.tolist() for line in lines if line is not None]
    return json.dumps(
        [answered, found.keys, list(index.ids.sources), list(index.ids.members), index.manifest.class_names]
    )


def empty(content: bytes, rng: np.random.Generator) -> bytes:
    return b""


def move_bytes(content: bytes, rng: np.random.Generator) -> bytes:
    """Two blocks of equal length change places."""
    size = int(rng.integers(1, max(2, len(content) // 3)))
    one = int(rng.integers(0, len(content) - 2 * size + 1))
    two = int(rng.integers(one + size, len(content) - size + 1))
    return (
        content[:one] + content[two : two + size] + content[one + size : two] + content[one : one + size]
        + content[two + size :]
    )  # fmt: skip


DAMAGES: tuple[Callable[[bytes, np.random.Generator], bytes], ...] = (flip, flip, cut, grow, blank, empty, move_bytes)


class Bench:
    """The indices with their files in memory, and a directory of each that is damaged and mended."""

    def __init__(self, folder: Path, place: Path) -> None:
        self.whole = {path.name: {name: (path / name).read_bytes() for name in FILES} for path in folder.iterdir()}
        self.answers = {name: answers(FeatureIndex.open(folder / name)) for name in self.whole}
        self.place = place
        for name in self.whole:
            shutil.copytree(folder / name, place / name)

    def case(self, seed: int) -> str:
        """Damage, open, mend. What happened."""
        rng = np.random.default_rng(seed)
        name = f"{KINDS[seed % len(KINDS)]}-0"
        content = self.whole[name]
        damaged = self._damage(name, rng)
        directory = self.place / name
        for file, data in damaged.items():
            if data is None:
                (directory / file).unlink()
            else:
                (directory / file).write_bytes(data)
        before = read_calls[0]
        try:
            answered = answers(FeatureIndex.open(directory))
        except IndexMismatchError as error:
            message = str(error)
            assert message and "\n" not in message, f"case {seed}: {message!r}"
            assert read_calls[0] == before, f"case {seed}: FAISS read it"
            return "refused"
        finally:
            for file in damaged:
                (directory / file).write_bytes(content[file])
        # Indices of two kinds of the same images may have the same ids: their other two files are all of an index.
        same = [other for other, files in self.whole.items() if files == content | damaged]
        assert same, f"case {seed}: {sorted(map(str, damaged))} of {name} were believed"
        assert answered == self.answers[same[0]], f"case {seed}: answers of {name} are others"
        return "whole"

    def _damage(self, name: str, rng: np.random.Generator) -> dict[str, bytes | None]:
        content = self.whole[name]
        files = list(rng.permutation(FILES)[: int(rng.integers(1, 3))])
        way = int(rng.integers(0, 10))
        if way == 0:  # the twin of the same kind, which has the same sizes, or an index of another kind
            others = [each for each in self.whole if each != name]
            other = f"{name[:-1]}1" if rng.random() < 0.5 else others[int(rng.integers(len(others)))]
            return {file: self.whole[other][file] for file in files}
        if way == 1:
            one, two = rng.permutation(FILES)[:2]
            return {one: content[two], two: content[one]}
        if way == 2:
            return dict.fromkeys(files)
        return {file: DAMAGES[int(rng.integers(len(DAMAGES)))](content[file], rng) for file in files}


read_calls = [0]
_read_index = vectors_module.read_index


def counting_read(*args: object, **kwargs: object) -> object:
    read_calls[0] += 1
    return _read_index(*args, **kwargs)


def run_cases(folder: Path, place: Path, first: int, last: int) -> dict[str, int]:
    """Cases first to last - 1; raises AssertionError at the first that is silently wrong."""
    vectors_module.read_index = counting_read
    try:
        bench = Bench(folder, place)
        return dict(collections.Counter(bench.case(seed) for seed in range(first, last)))
    finally:
        vectors_module.read_index = _read_index


def main() -> None:
    folder, place, first, last = sys.argv[1:]
    assert DIMENSION == 12
    print(json.dumps(run_cases(Path(folder), Path(place), int(first), int(last))))  # noqa: T201


if __name__ == "__main__":
    main()
