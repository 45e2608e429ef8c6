"""The loss terms of SOP: each has a memory of teacher embeddings and a maker of prototypes."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sop_faiss import distributed
from sop_faiss.config import Config
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.neighbors.approximate import index_bytes, index_pays
from sop_faiss.neighbors.incremental import keeping_pays, lists_bytes
from sop_faiss.sop.memory import Memory
from sop_faiss.sop.prototypes import PrototypeMaker

_log = logging.getLogger(__name__)


@dataclass
class Term:
    """One loss term: its memory, and the maker that draws prototypes from it."""

    memory: Memory
    maker: PrototypeMaker

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the state of memory and maker, its keys under `name`."""
        return {
            **{f"{name}.memory.{key}": value for key, value in self.memory.state_dict().items()},
            **{f"{name}.maker.{key}": value for key, value in self.maker.state_dict().items()},
        }

    def load_tensors(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Continue from what `tensors` returned.

        Raises:
            CheckpointError: `tensors` has no such term.
        """
        for part, prefix in ((self.memory, f"{name}.memory."), (self.maker, f"{name}.maker.")):
            state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            if not state:
                raise CheckpointError(
                    f"the checkpoint has no {name} memory: resume with the same sop.cls.weight and sop.patch.weight"
                )
            part.load_state_dict(state)


def open_term(config: Config, name: str, device: torch.device, images: int) -> Term:
    """Make a term's memory, filled with random unit vectors, and its prototype maker.

    Args:
        name: `cls` or `patch`.
        device: where the memory is stored and searched.
        images: number of training images.

    Raises:
        ConfigError: settings do not fit this number of images.
    """
    sop, neighbors = config.sop, config.neighbors
    term = sop.terms()[name]
    capacity, exclude_same_image = fit_memory(config, name, images)
    seed = distributed.derive_seed("memory", name, config.train.seed)
    generator = torch.Generator().manual_seed(seed)
    search = (neighbors.engine, neighbors.precision)
    if device.type == "cuda" and term.num_supports == 0:
        search = "torch", "float32"  # never searched, so FAISS need not reserve memory on the device
    memory = Memory(capacity, config.model.embedding_dim, generator, device, *search)
    maker = PrototypeMaker(
        memory,
        term,
        contributions=sop.contributions,
        eps=sop.eps,
        anchors=sop.anchors,
        exclude_same_image=exclude_same_image,
        generator=generator,
        incremental=keeps_neighbors(config, name, capacity, device),
    )
    if term.num_supports and neighbors.index != "exact":
        memory.use_index(neighbors, term.num_supports)
    if term.num_supports and distributed.is_main():
        _log_how_neighbors_are_found(config, name, maker)
    return Term(memory, maker)


def _log_how_neighbors_are_found(config: Config, name: str, maker: PrototypeMaker) -> None:
    settings, rows = config.neighbors, maker.memory.capacity
    how = "kept from step to step" if maker.incremental else "searched for every step"
    because = f"neighbors.refresh={settings.refresh}, neighbors.index={settings.index}"
    if config.sop.anchors == "fixed_vectors":
        because += ", sop.anchors=fixed_vectors are not rows of the memory"
    _log.info("%s neighbors are %s (%s)", name, how, because)
    if settings.index != "exact" and not index_pays(settings, rows):
        _log.info("neighbors.index=%s cannot save time in the %d rows of the %s memory", settings.index, rows, name)


def fit_memory(config: Config, name: str, images: int) -> tuple[int, bool]:
    """Return the rows of a term's memory, and whether rows of an anchor's own image are left out of its supports.

    Args:
        name: `cls` or `patch`.
        images: number of training images.

    Raises:
        ConfigError: the memory becomes too small for the anchors or supports.
    """
    term = config.sop.terms()[name]
    asked = term.capacity
    capacity = memory_rows(f"sop.{name}", asked, images)
    exclude = config.neighbors.exclude_same_image
    exclude_same_image = exclude == "always" or (exclude == "auto" and images < 2 * asked)
    # In a memory of at most one epoch an image has two rows where one epoch ends and the next begins.
    other_rows = capacity - (2 if exclude_same_image else 1)
    for setting, value, most in (
        ("num_anchors", term.num_anchors, capacity),
        ("num_supports", term.num_supports, other_rows),
    ):
        if value > most:
            # the fewest anchors that `SopConfig` allows: 2, and more than 1 / (1 - eps)
            fewest = max(2, math.floor(1 / (1 - config.sop.eps)) + 1) if setting == "num_anchors" else 0
            few = f"; for few images set sop.{name}.{setting}={max(fewest, capacity // 4)}" if fewest else ", lower it"
            remedy = f"wanted at most {most}{few}, or use more images"
            raise ConfigError(
                f"sop.{name}.{setting} = {value} is too much for a memory of {capacity} rows ({images} training "
                f"images, sop.{name}.capacity = {asked}): "
                + (remedy if most >= fewest else f"these are too few for any: use {fewest} images or more")
            )
    return capacity, exclude_same_image


def memory_rows(section: str, asked: int, images: int) -> int:
    """Return the rows of a memory: no more than there are training images, and the log says so.

    More would be older copies of the same images.

    Args:
        section: of the configuration, whose `capacity` it is.
        asked: that capacity.
        images: number of training images.
    """
    if images < asked and distributed.is_main():
        _log.info(
            "%s.capacity: %d of the %d rows in the configuration, since there are only %d training images",
            section,
            images,
            asked,
            images,
        )
    return min(asked, images)


def keeps_neighbors(config: Config, name: str, capacity: int, device: torch.device) -> bool:
    """Return whether a term's memory keeps its rows' neighbors from step to step, according to `neighbors.refresh`.

    Args:
        name: `cls` or `patch`.
        capacity: rows of the memory; see `fit_memory`.
        device: where it is stored.

    Raises:
        ConfigError: `incremental` with anchors that are not rows of the memory.
    """
    term = config.sop.terms()[name]
    refresh = config.neighbors.refresh
    is_exact = config.neighbors.index == "exact" and config.neighbors.precision == "float32"
    if refresh == "full" or term.num_supports == 0 or not is_exact:
        return False
    if config.sop.anchors == "fixed_vectors":
        if refresh == "incremental":
            raise ConfigError(
                "neighbors.refresh = incremental keeps the neighbors of a memory's rows, and sop.anchors = "
                "fixed_vectors are copies outside it: set neighbors.refresh=full or auto, or sop.anchors=fixed_rows"
            )
        return False
    anchors, stored = term.tasks * term.num_anchors, config.train.batch_size
    return refresh == "incremental" or keeping_pays(anchors, stored, capacity, config.model.embedding_dim, device)


def sizes_of_terms(config: Config, device: torch.device, images: int) -> dict[str, Any]:
    """Return the rows of the memories, and the bytes that they and their searches take on each rank.

    Args:
        device: of a rank.
        images: number of training images.

    Raises:
        ConfigError: settings do not fit this number of images.
    """
    dim = config.model.embedding_dim
    terms = config.sop.terms()
    rows = {name: fit_memory(config, name, images)[0] for name in terms}
    lists, indices, members = 0, 0, 0
    for name, term in terms.items():
        if keeps_neighbors(config, name, rows[name], device):
            lists += lists_bytes(term.num_supports, rows[name])
        if config.neighbors.index != "exact" and term.num_supports:
            indices += index_bytes(config.neighbors.index, rows[name], dim)
        members = max(members, term.num_anchors * (term.num_supports + 1) * dim * 4)
    return {
        "memory_rows": rows,
        # embeddings in float32; image ids and steps in int64
        "memories_bytes": sum(rows.values()) * (dim * 4 + 16),
        # lists kept from step to step, if neighbors.refresh keeps them on this device
        "neighbor_lists_bytes": lists,
        # of an approximate index, in addition to the rows
        "neighbor_index_bytes": indices,
        # D is gathered for one task at a time: the larger of both terms
        "gathered_members_bytes": members,
    }
