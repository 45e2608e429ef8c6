"""An index in memory, to be changed, and several joined: ids, classes, states and what is left out."""

from __future__ import annotations

import functools
import operator
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import numpy as np
from jaxtyping import Int64

from sop_faiss.errors import ConfigError
from sop_faiss.features.file_states import FileStates
from sop_faiss.index.encoder_doubts import random_pairs_cosine
from sop_faiss.index.left_out import LeftOut
from sop_faiss.index.store import IdTable, IndexManifest, read_left_out, read_states, read_verified, write_index
from sop_faiss.index.vectors import read_vectors
from sop_faiss.neighbors.disk.factories import VectorIndex


@dataclass
class IndexContents:
    """An index in memory, to be changed."""

    manifest: IndexManifest
    ids: IdTable
    vectors: VectorIndex | None
    states: FileStates
    left_out: list[LeftOut] = field(default_factory=list)

    @classmethod
    def read(cls, directory: Path) -> IndexContents:
        """Read an index, every byte verified."""
        return cls.read_rest(directory, *read_verified(directory))

    @classmethod
    def read_rest(cls, directory: Path, manifest: IndexManifest, ids: IdTable) -> IndexContents:
        """Read an index of which `read_verified` has returned these."""
        vectors = read_vectors(directory, manifest, mapped=False)
        return cls(manifest, ids, vectors, read_states(directory, manifest), read_left_out(directory, manifest))

    def write(self, directory: Path) -> IndexManifest:
        """Write the files; the manifest has the new count, checksums, and mean cosine of random pairs.

        An approximate index keeps the cosine it has: reading its rows needs a map, which would be written too.
        """
        assert self.vectors is not None
        count, search = len(self.ids.keys), self.manifest.search
        if self.manifest.exact:
            search = search | {"mean_cosine": random_pairs_cosine(count, self.vectors.features)}
        described = replace(self.manifest, count=count, search=search)
        states = self.states if any(self.states.digests) else None
        present = set(zip(self.ids.sources, self.ids.members, strict=True)) if self.left_out else set()
        left_out = [each for each in self.left_out if (each.source, each.member) not in present]
        return write_index(directory, described, self.vectors.write, self.ids, states, left_out)


def join_contents(indices: Sequence[IndexContents], names: Sequence[str]) -> IndexContents:
    """Join ids, states and manifests of several indices; all else is from the first one's manifest.

    Args:
        indices: one or more, without their vectors.
        names: what they are called in errors.

    Raises:
        ConfigError: a key occurs twice, or some indices have class names and others only numbers.
    """
    keys = [key for index in indices for key in index.ids.keys]
    repeated = [key for key, times in Counter(keys).items() if times > 1]
    if repeated:
        raise ConfigError(
            f"{len(repeated)} keys are in more than one of {', '.join(names)} (first {repeated[0]!r}): remove them "
            "from all but one"
        )
    root = os.path.commonpath([index.manifest.root for index in indices])
    sources, members, left_out = [], [], []
    for index in indices:
        below = PurePosixPath(os.path.relpath(index.manifest.root, root))
        places = zip(index.ids.sources, index.ids.members, strict=True)
        for source, member in (_below(below, *place) for place in places):
            sources.append(source)
            members.append(member)
        for each in index.left_out:
            source, member = _below(below, each.source, each.member)
            left_out.append(replace(each, source=source, member=member))
    class_names, labels = _join_classes(indices, names)
    dropped: Counter[str] = Counter()
    for index in indices:
        dropped.update(index.manifest.dropped)
    first = indices[0].manifest
    folder = first.folder if first.folder == root else None  # else some are not below it
    states = functools.reduce(operator.add, [index.states for index in indices])
    manifest = replace(first, root=root, folder=folder, class_names=class_names, dropped=dict(dropped))
    return IndexContents(manifest, IdTable(keys, sources, members, labels), None, states, left_out)


def _below(folder: PurePosixPath, source: str, member: str) -> tuple[str, str]:
    """Return the place of an image relative to a folder above."""
    return (str(folder / source), member) if source else ("", str(folder / member))


def _join_classes(
    indices: Sequence[IndexContents], names: Sequence[str]
) -> tuple[list[str] | None, Int64[np.ndarray, " n"] | None]:
    """Join the names of the classes, the first index's first, and number each image's label among them."""
    labeled = [index for index in indices if index.ids.labels is not None]
    if not labeled:
        return None, None
    named = [index.manifest.class_names is not None for index in labeled]
    if any(named) != all(named):
        raise ConfigError(f"of {', '.join(names)} some have names of their classes and others numbers: name all")
    classes: dict[str, int] = {}
    parts = []
    for index in indices:
        if index.ids.labels is None:
            parts.append(np.full(len(index.ids.keys), -1, np.int64))
        elif index.manifest.class_names is None:
            parts.append(index.ids.labels)
        else:
            numbers = [classes.setdefault(name, len(classes)) for name in index.manifest.class_names]
            parts.append(np.array([*numbers, -1], np.int64)[index.ids.labels])
    return (list(classes) if any(named) else None), np.concatenate(parts)
