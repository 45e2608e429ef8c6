"""Nearest rows kept from step to step instead of searched again (paper section 3.2; docs/method.md, 2 and 3).

A step overwrites B of a memory's n rows, so nearly all neighbors of an anchor stay the same. Every row has a list of
its nearest other rows and a bound, with one invariant: *the list contains every row above its bound and none below it*.
Overwritten rows are removed from all lists and lose their own; a new row enters the lists whose bound it exceeds, which
takes one (n, B) product; a list that overflows drops its last rows and raises its bound to the best of these. As long
as a list has k rows above its bound, its best k are the k nearest of the memory, with all that tie with the k-th. A
list with fewer, or not yet made, is made by a search when it is needed.

Similarities come from two products (a search's and a store's), which round differently, by about 1e-7: a list equals a
full search except for rows that are this close to the k-th. The lists are part of the memory's state, so that a resumed
run has the same numbers as a run that never stopped.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from sop_faiss.neighbors.mirror import NearestRows, RingMirror, in_fixed_order

_BLOCK_ELEMENTS = 2**22  # similarities computed at a time by a store: 16 MiB
_SMALL_SEARCH = 2**28  # multiply-adds that a CPU does in a few milliseconds
_EMPTY = -math.inf


def most_rows_of_an_image(image_ids: Int64[Tensor, " n"]) -> int:
    """Return how many rows the image with the most rows has; id -1 is not an image."""
    _, counts = image_ids[image_ids >= 0].unique(return_counts=True)
    return int(counts.max()) if len(counts) else 0


def keeping_pays(anchors: int, stored: int, capacity: int, dim: int, device: torch.device) -> bool:
    """Return whether kept lists are cheaper than a full search, by the multiply-adds of a step.

    A full search multiplies each anchor with all rows. Lists multiply each stored row about three times: to enter the
    others' lists, to find its own, and to make up for a list that ran short. With the bookkeeping, both take the same
    time at about B = T * K / 5 (measured on 2 CPU cores, n from 4096 to 65536). If the search takes a few milliseconds,
    the bookkeeping costs more than it saves. Other devices than CPUs were not measured, so there the answer is no.

    Args:
        anchors: anchors per step, T * K.
        stored: rows stored per step, B.
        capacity: rows of the memory, n.
        dim: d.
        device: where the memory is stored.
    """
    return device.type == "cpu" and 5 * stored < anchors and anchors * capacity * dim > _SMALL_SEARCH


def lists_bytes(k: int, capacity: int) -> int:
    """Return the bytes of `NeighborLists`: a row number and a similarity for each entry, a bound for each list."""
    return capacity * (12 * _width(k, capacity) + 4)


def _width(k: int, capacity: int) -> int:
    """Return the entries of a list: spare ones, so that losses rarely leave fewer than k."""
    return min(2 * k + 16, capacity - 1)


class NeighborLists:
    """The nearest other rows of each row of a mirror, exact after every store.

    Memory: see `lists_bytes`.

    Args:
        mirror: the rows, and what searches them.
        image_ids: the image of each row, kept up to date by the owner; -1 is not an image.
        k: how many neighbors are needed; lists are longer.
        exclude_same_image: leave rows of the same image out.
    """

    def __init__(
        self, mirror: RingMirror, image_ids: Int64[Tensor, " n"], k: int, exclude_same_image: bool = False
    ) -> None:
        self._mirror = mirror
        self._image_ids = image_ids
        self.k = k
        self.exclude_same_image = exclude_same_image
        self.width = _width(k, len(mirror.rows))
        """Entries of a list."""
        self.searched = 0
        """Number of lists made by a search since the start."""
        shape, device = (len(mirror.rows), self.width), mirror.rows.device
        self._rows: Int64[Tensor, "n w"] = torch.zeros(shape, dtype=torch.int64, device=device)
        self._similarities: Float32[Tensor, "n w"] = torch.full(shape, _EMPTY, device=device)
        # +infinity for a list not yet made, which no row can enter; -infinity for a list with all rows.
        self._bounds: Float32[Tensor, " n"] = torch.full(shape[:1], math.inf, device=device)

    @torch.no_grad()
    def nearest(self, rows: Int64[Tensor, " q"]) -> NearestRows:
        """Return the k nearest other rows of each row, ties by rising row.

        If a row has fewer than k permitted others, the rest have similarity -infinity; a memory with fewer than k other
        rows returns all of them.
        """
        left = (self._similarities[rows] > self._bounds[rows].unsqueeze(1)).sum(dim=1)
        short = rows[left < self.k].unique()
        if len(short):
            self._search(short)
        found = in_fixed_order(self._similarities[rows], self._rows[rows])
        return NearestRows(found.similarities[:, : self.k], found.rows[:, : self.k])

    @torch.no_grad()
    def renew(self, rows: Int64[Tensor, " b"]) -> None:
        """Record that these rows (all different) have new embeddings and image ids."""
        self._similarities[rows] = _EMPTY
        self._bounds[rows] = math.inf
        if len(rows) == 0 or bool(self._bounds.isposinf().all()):
            return
        gone = torch.zeros_like(self._bounds, dtype=torch.bool)
        gone[rows] = True
        self._similarities.masked_fill_(gone[self._rows], _EMPTY)
        for block in rows.split(max(1, _BLOCK_ELEMENTS // len(self._rows))):
            self._enter(block)

    def forget(self) -> None:
        """Discard all lists, because the memory's contents were replaced."""
        self._similarities.fill_(_EMPTY)
        self._bounds.fill_(math.inf)

    def _enter(self, new: Int64[Tensor, " b"]) -> None:
        """Add new rows to the lists whose bound they exceed."""
        similarities = self._mirror.rows @ self._mirror.rows[new].T  # (n, b)
        exceed = similarities > self._bounds.unsqueeze(1)
        lists = exceed.any(dim=1).nonzero().squeeze(1)
        candidates = new.expand(len(lists), -1)
        refused = ~exceed[lists] | self._excluded(lists, candidates)
        self._keep_best(
            lists,
            torch.cat([self._rows[lists], candidates], dim=1),
            torch.cat([self._similarities[lists], similarities[lists].masked_fill(refused, _EMPTY)], dim=1),
            self._bounds[lists],
        )

    def _search(self, lists: Int64[Tensor, " a"]) -> None:
        """Make lists by a search of the memory for more rows than can be excluded."""
        self.searched += len(lists)
        capacity = len(self._rows)
        excluded = 1 + (most_rows_of_an_image(self._image_ids) if self.exclude_same_image else 0)
        wanted = min(capacity, self.width + excluded)
        found = self._mirror.search(self._mirror.rows[lists], wanted)
        bounds = found.similarities[:, -1] if wanted < capacity else torch.full_like(found.similarities[:, -1], _EMPTY)
        similarities = found.similarities.masked_fill(self._excluded(lists, found.rows), _EMPTY)
        self._keep_best(lists, found.rows, similarities, bounds)

    def _keep_best(
        self,
        lists: Int64[Tensor, " a"],
        rows: Int64[Tensor, "a c"],
        similarities: Float32[Tensor, "a c"],
        bounds: Float32[Tensor, " a"],
    ) -> None:
        """Fill lists with the best of c candidates, which include all rows above the bounds; c exceeds the width."""
        best = similarities.topk(self.width + 1, dim=1)
        self._rows[lists] = rows.gather(1, best.indices[:, :-1])
        self._similarities[lists] = best.values[:, :-1]
        self._bounds[lists] = torch.maximum(bounds, best.values[:, -1])

    def _excluded(self, lists: Int64[Tensor, " a"], candidates: Int64[Tensor, "a c"]) -> Bool[Tensor, "a c"]:
        """Return which candidates may not be in a list: its own row and, if excluded, rows of its image."""
        excluded = candidates == lists.unsqueeze(1)
        if self.exclude_same_image:
            ids = self._image_ids[lists].unsqueeze(1)
            excluded |= (self._image_ids[candidates] == ids) & (ids >= 0)
        return excluded

    def state_dict(self) -> dict[str, Tensor]:
        """Return the lists, since similarities of lists made again could differ in the last bit."""
        return {
            "neighbor_rows": self._rows.clone(),
            "neighbor_similarities": self._similarities.clone(),
            "neighbor_bounds": self._bounds.clone(),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from saved lists; without lists of this width, they are made when they are needed."""
        rows = state.get("neighbor_rows")
        if rows is None or rows.shape != self._rows.shape:
            self.forget()
            return
        self._rows.copy_(rows)
        self._similarities.copy_(state["neighbor_similarities"])
        self._bounds.copy_(state["neighbor_bounds"])
