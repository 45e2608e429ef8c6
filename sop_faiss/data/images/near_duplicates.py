"""Duplicates in a set of images: exact (the same bytes) and near (nearly the same image).

Near duplicates have 64-bit difference hashes (dHash: is each of 8 x 8 gray cells darker than its right neighbor?) that
differ in 3 bits at most, and mean colors that are equal or adjacent in steps of 16 levels. Of two hashes that differ
in 3 bits, one of four 16-bit parts is equal (pigeonhole), so only images that share a part are compared: all pairs
are found, without comparing all.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int8, Int64, UInt64
from PIL import Image

NEAR_BITS = 3
"""Hashes of near duplicates differ in at most this many bits; with four parts one more would miss pairs."""

_COLOR_STEP = 16  # levels of 255; near duplicates differ by one step at most: flat images have equal hashes
_PARTS = 4
_HASH_BITS = 64
_LARGE_GROUP = 2048  # larger ones are split by a second pigeonhole over the bits outside the shared part

_Pairs = tuple[Int64[np.ndarray, " p"], Int64[np.ndarray, " p"]]
_Groups = tuple[Int64[np.ndarray, " s"], Int64[np.ndarray, " s"]]  # members, and where the group of each ends


class Signature(NamedTuple):
    """The facts about an image by which duplicates are found."""

    digest: bytes  # sha256 of the encoded bytes
    dhash: int  # 64 bits
    color: tuple[int, int, int]  # mean of the image, 0 to 255


def image_signature(encoded: bytes, image: Image.Image) -> Signature:
    """Return the signature of an image: of its bytes, and of the pixels that they decode to (mode RGB)."""
    # 4 x 4 pixels per cell are averaged without rounding: resized to 9 x 8 at once, copies of another size differ more
    small = image.resize((9 * 4, 8 * 4), Image.Resampling.BILINEAR, reducing_gap=2.0)
    gray = np.asarray(small.convert("L"), np.float32).reshape(8, 4, 9, 4).mean(axis=(1, 3))
    bits = np.packbits(gray[:, :-1] < gray[:, 1:])
    red, green, blue = (round(float(mean)) for mean in np.asarray(small).mean(axis=(0, 1)))
    return Signature(hashlib.sha256(encoded).digest(), int.from_bytes(bits.tobytes(), "big"), (red, green, blue))


@dataclass
class Duplicates:
    """A collector of signatures that finds the duplicates among them."""

    names: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    signatures: list[Signature] = field(default_factory=list)
    _first: dict[bytes, int] = field(default_factory=dict)
    _copies: dict[int, list[int]] = field(default_factory=dict)

    def add(self, name: str, label: int, signature: Signature) -> bool:
        """Add one image; return whether an earlier one has the same bytes.

        Args:
            name: its name in the report.
            label: class number, -1 for none.
            signature: of the image.
        """
        position = len(self.names)
        self.names.append(name)
        self.labels.append(label)
        self.signatures.append(signature)
        first = self._first.setdefault(signature.digest, position)
        if first != position:
            self._copies.setdefault(first, []).append(position)
        return first != position

    def report(self) -> dict[str, Any]:
        """Return the groups of exact and of near duplicates as plain JSON types, each group in order of the images.

        Of exact duplicates only the first can be in a near group. A near group has all images that are joined by near
        pairs, so two of them may differ in more bits. `labels_differ` marks groups whose labels contradict each other.
        """
        exact = [[first, *copies] for first, copies in sorted(self._copies.items())]
        firsts = list(self._first.values())
        near = [[firsts[member] for member in group] for group in find_near([self.signatures[i] for i in firsts])]
        return {
            "images": len(self.names),
            "exact": self._summary(exact),
            "near": {"differing_bits": NEAR_BITS, **self._summary(near)},
        }

    def _summary(self, groups: Sequence[Sequence[int]]) -> dict[str, Any]:
        return {
            "groups": len(groups),
            "images_beyond_the_first": sum(len(group) - 1 for group in groups),
            "found": [
                {
                    "images": [self.names[position] for position in group],
                    "labels_differ": len({self.labels[position] for position in group} - {-1}) > 1,
                }
                for group in groups
            ],
        }


def find_near(signatures: Sequence[Signature], *, large_group: int = _LARGE_GROUP) -> list[list[int]]:
    """Find groups of near duplicates, joined by near pairs; positions are sorted in a group, groups by their first.

    Args:
        large_group: images that share a part of their hash are compared with each other up to this many; more are
            split again, which is faster.
    """
    if len(signatures) < 2:
        return []
    steps = [(s.dhash, *(level // _COLOR_STEP for level in s.color)) for s in signatures]
    distinct, group_of = np.unique(np.array(steps, dtype=np.uint64), axis=0, return_inverse=True)
    hashes, colors = distinct[:, 0].copy(), distinct[:, 1:].astype(np.int8)
    lowest = np.arange(len(distinct))
    for ones, twos in _near_pairs(hashes, colors, large_group):
        join_groups(lowest, ones, twos)
    groups: dict[int, list[int]] = {}
    for position, group in enumerate(lowest[group_of.ravel()].tolist()):
        groups.setdefault(group, []).append(position)
    return [group for group in groups.values() if len(group) > 1]


def join_groups(lowest: Int64[np.ndarray, " u"], ones: Int64[np.ndarray, " p"], twos: Int64[np.ndarray, " p"]) -> None:
    """Join the groups of each pair, in place; `lowest` has the lowest member of the group of each image."""
    while True:
        first, second = lowest[ones], lowest[twos]
        apart = first != second
        if not apart.any():
            return
        np.minimum.at(lowest, np.maximum(first, second)[apart], np.minimum(first, second)[apart])
        while (lowest[lowest] != lowest).any():
            lowest[:] = lowest[lowest]


def _near_pairs(
    hashes: UInt64[np.ndarray, " u"], colors: Int8[np.ndarray, "u 3"], large_group: int
) -> Iterator[_Pairs]:
    """Yield all pairs that are near, some more than once."""
    everyone = np.arange(len(hashes))
    bits = range(_HASH_BITS)
    for part in _split(bits):
        small, large = _sharing(hashes, everyone, part, large_group)
        groups = [small]
        for group in large:
            rest = [bit for bit in bits if bit not in part]
            groups += [_sharing(hashes, group, smaller, len(group))[0] for smaller in _split(rest)]
        for members, ends in groups:
            for ones, twos in _pairs_within(members, ends):
                alike = _differ_little(hashes[ones] ^ hashes[twos])
                ones, twos = ones[alike], twos[alike]
                alike = np.abs(colors[ones] - colors[twos]).max(axis=1, initial=0) <= 1
                if alike.any():
                    yield ones[alike], twos[alike]


def _split(bits: Sequence[int]) -> list[Sequence[int]]:
    size = len(bits) // _PARTS
    return [bits[i * size : (i + 1) * size] for i in range(_PARTS)]


def _sharing(
    hashes: UInt64[np.ndarray, " u"], members: Int64[np.ndarray, " m"], bits: Sequence[int], largest: int
) -> tuple[_Groups, list[Int64[np.ndarray, " g"]]]:
    """Group members whose hashes agree in these bits: groups up to `largest`, concatenated, and each larger one."""
    keys = hashes[members] & np.uint64(sum(1 << bit for bit in bits))
    order = np.argsort(keys, kind="stable")
    members, keys = members[order], keys[order]
    starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    sizes = np.diff(np.append(starts, len(keys)))
    is_large = np.repeat(sizes > largest, sizes)
    large = [members[start : start + size] for start, size in zip(starts, sizes, strict=True) if size > largest]
    kept = sizes[sizes <= largest]
    return (members[~is_large], np.repeat(np.cumsum(kept), kept)), large


def _pairs_within(members: Int64[np.ndarray, " m"], ends: Int64[np.ndarray, " m"]) -> Iterator[_Pairs]:
    """Yield all pairs of members of one group: each with the next, then with the second next, and so on.

    Args:
        members: the groups, concatenated.
        ends: where the group of each ends.
    """
    place = np.arange(len(members))
    for offset in itertools.count(1):
        place = place[place + offset < ends[place]]
        if not len(place):
            return
        yield members[place], members[place + offset]


def _differ_little(difference: UInt64[np.ndarray, " p"]) -> Bool[np.ndarray, " p"]:
    """Return whether at most `NEAR_BITS` bits are set: none remains after clearing that many."""
    for _ in range(NEAR_BITS):
        difference = difference & (difference - np.uint64(1))
    return difference == 0
