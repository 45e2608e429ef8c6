"""FAISS's indices inside each other: rotations and refinements around one with lists, a graph or plain codes."""

from __future__ import annotations

from typing import Any

import faiss


def layers_of(index: Any) -> list[tuple[str, int]]:
    """List the kinds of an index and of those inside it, each with its bytes per row or number of lists."""
    layers = []
    while index is not None:
        kind = "IndexFlat" if isinstance(index, faiss.IndexFlat) else type(index).__name__  # IndexFlatIP until written
        size = next((int(getattr(index, name)) for name in ("nlist", "code_size") if hasattr(index, name)), 0)
        layers.append((kind, size))
        index = inside(index)
    return layers


def inside(index: Any) -> Any:
    """Return the index inside a rotation or a refinement, or that keeps the rows of a graph; else None."""
    if isinstance(index, faiss.IndexPreTransform):
        return faiss.downcast_index(index.index)
    if isinstance(index, faiss.IndexRefine):
        return faiss.downcast_index(index.base_index)
    return faiss.downcast_index(index.storage) if isinstance(index, faiss.IndexHNSW) else None


def innermost(index: Any) -> Any:
    """Return the index inside rotations and refinements."""
    while isinstance(index, faiss.IndexPreTransform | faiss.IndexRefine):
        index = inside(index)
    return index
