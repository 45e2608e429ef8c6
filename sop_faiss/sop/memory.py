"""The FIFO memory of teacher embeddings: store, sample, search (paper section 3.1; docs/method.md, 2)."""

from __future__ import annotations

import logging

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.nn import functional as F

from sop_faiss.config import NeighborsConfig
from sop_faiss.distributed import checksum
from sop_faiss.errors import CheckpointError
from sop_faiss.neighbors.approximate import ApproximateSearch
from sop_faiss.neighbors.incremental import NeighborLists
from sop_faiss.neighbors.mirror import NearestRows, RingMirror, ring_segments

_log = logging.getLogger(__name__)
_UNKNOWN = -1  # `stored_at` of a row whose age is not known


class Memory:
    """A ring of unit-norm embeddings, each with the id of its image, mirrored into a FAISS flat index.

    It starts with random unit vectors (id -1), as in the paper; `Objective.fill` may replace them before step 1.

    Args:
        capacity: number of rows, n (the paper's N_C or N_P).
        dim: dimension d of an embedding.
        generator: draws the first contents (a CPU generator, the same on all ranks), and later the anchors.
        device: where the rows are stored and searched.
        engine: what searches: `auto`, `faiss` or `torch`.
        precision: of the search: `float32`, or `bf16` with candidates scored again in float32.
    """

    image_ids: Int64[Tensor, " n"]
    stored_at: Int64[Tensor, " n"]
    """Step in which each row was stored; -1 where that is unknown (random rows, and rows of older checkpoints)."""

    def __init__(
        self,
        capacity: int,
        dim: int,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
        engine: str = "auto",
        precision: str = "float32",
    ) -> None:
        device = torch.device(device)
        self._mirror = RingMirror(capacity, dim, device, engine, precision)
        self._mirror.rows.copy_(F.normalize(torch.randn(capacity, dim, generator=generator), dim=1))
        self.image_ids = torch.full((capacity,), -1, dtype=torch.int64, device=device)
        self.stored_at = torch.full_like(self.image_ids, _UNKNOWN)
        self._lists: NeighborLists | None = None
        self._approximate: ApproximateSearch | None = None
        self.pointer = 0
        """Row that the next embedding overwrites."""
        self.stored = 0
        """Number of embeddings stored since the start."""
        self.steps = 0
        """Number of training steps that have stored."""

    @property
    def embeddings(self) -> Float32[Tensor, "n d"]:
        """Return the rows themselves, which the FAISS index searches; not a copy."""
        return self._mirror.rows

    @property
    def capacity(self) -> int:
        """Return the number of rows, n."""
        return len(self._mirror.rows)

    @property
    def fill(self) -> float:
        """Return the fraction of rows with stored embeddings instead of the random ones of the start."""
        return min(1.0, self.stored / self.capacity)

    def mean_age(self) -> Float32[Tensor, ""]:
        """Return the mean age of the stored rows in steps, where rows of the last step are 1 step old.

        It is the number of updates by which the teacher that made them is behind. Random rows of the start have no age;
        NaN if no row has a known age.
        """
        known = self.stored_at != _UNKNOWN
        return (self.steps - self.stored_at).where(known, 0).sum().float() / known.sum()

    def newest_rows(self, count: int) -> Int64[Tensor, " rows"]:
        """Return the rows that were stored last, the oldest of them first; fewer if fewer have been stored."""
        count = min(count, self.stored, self.capacity)
        places = torch.arange(self.pointer - count, self.pointer, device=self.image_ids.device)
        return places % self.capacity

    def digest(self) -> str:
        """Return a text that is the same for two memories with the same contents."""
        return f"{checksum(self.embeddings)} {checksum(self.image_ids)} {self.stored}"

    @property
    def engine(self) -> str:
        """Return the search engine, `faiss` or `torch`; `auto` until the first search on CUDA has timed both."""
        return self._mirror.engine

    @property
    def neighbor_recall(self) -> float | None:
        """Return the measured recall of an approximate search, see `ApproximateSearch.recall`; None if exact."""
        return None if self._approximate is None else self._approximate.recall

    @torch.no_grad()
    def store(
        self, embeddings: Float[Tensor, "b d"], image_ids: Int64[Tensor, " b"], *, ends_step: bool = True
    ) -> None:
        """Overwrite the oldest rows, in order (section 3.1); of more rows than the capacity, the last ones stay.

        Departs: the released code takes only batches that divide the capacity.

        Args:
            embeddings: new rows of unit norm (not checked).
            image_ids: the image of each.
            ends_step: a training step ends here, so that all rows become one step older; False while filling.
        """
        count = len(embeddings)
        start = (self.pointer + max(0, count - self.capacity)) % self.capacity
        embeddings, image_ids = embeddings[-self.capacity :], image_ids[-self.capacity :]
        self._mirror.write(start, embeddings)
        for ring, part in ring_segments(start, len(image_ids), self.capacity):
            self.image_ids[ring].copy_(image_ids[part])
            self.stored_at[ring] = self.steps
        for follower in (self._lists, self._approximate):
            if follower is not None:
                follower.renew((start + torch.arange(len(embeddings), device=self.image_ids.device)) % self.capacity)
        self.pointer = (self.pointer + count) % self.capacity
        self.stored += count
        self.steps += ends_step

    def sample(self, count: int, generator: torch.Generator) -> Int64[Tensor, " k"]:
        """Draw `count` different rows, at most all, uniformly; the same on all ranks if their generators agree."""
        return torch.randperm(self.capacity, generator=generator)[:count].to(self.image_ids.device)

    def search(self, queries: Float32[Tensor, "q d"], k: int) -> NearestRows:
        """Return the k rows of largest inner product with each query, ties by rising row.

        Exact, except for candidates that bf16 or an approximate index (`use_index`) misses.
        """
        return (self._approximate or self._mirror).search(queries, k)

    def use_index(self, settings: NeighborsConfig, k: int) -> None:
        """Make `search` approximate from now on, by the index that the settings name, and measure its recall@k.

        The index follows `store` and `load_state_dict` only, not direct writes to `embeddings`.

        Raises:
            ConfigError: the memory is not on the CPU.
        """
        self._approximate = ApproximateSearch(self._mirror, settings, k)

    def keep_neighbors(self, k: int, exclude_same_image: bool) -> None:
        """Keep each row's k nearest other rows up to date from now on, for `nearest_others`.

        The lists follow `store` and `load_state_dict` only, not direct writes to `embeddings`.
        """
        self._lists = NeighborLists(self._mirror, self.image_ids, k, exclude_same_image)

    def nearest_others(self, rows: Int64[Tensor, " q"]) -> NearestRows:
        """Return the k nearest other rows of each row; see `NeighborLists.nearest`.

        Raises:
            RuntimeError: `keep_neighbors` has not been called.
        """
        if self._lists is None:
            raise RuntimeError("nearest_others needs keep_neighbors first")
        return self._lists.nearest(rows)

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that later answers depend on."""
        return {
            "embeddings": self.embeddings.clone(),
            "image_ids": self.image_ids.clone(),
            "stored_at": self.stored_at.clone(),
            "position": torch.tensor([self.pointer, self.stored, self.steps], dtype=torch.int64),
            **self._mirror.state_dict(),
            **({} if self._lists is None else self._lists.state_dict()),
            **({} if self._approximate is None else self._approximate.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a saved state.

        Raises:
            CheckpointError: the state is of a memory of another shape.
        """
        if state["embeddings"].shape != self.embeddings.shape:
            got, wanted = tuple(state["embeddings"].shape), tuple(self.embeddings.shape)
            raise CheckpointError(
                f"the checkpoint's memory is {got}, this run's is {wanted}: resume with the same capacity, dimension "
                "and number of training images (a memory holds no more rows than there are)"
            )
        if state["position"].numel() not in (2, 3):
            raise CheckpointError("the checkpoint's memory does not say which row comes next: use another checkpoint")
        self.embeddings.copy_(state["embeddings"])
        self.image_ids.copy_(state["image_ids"])
        self.pointer, self.stored, *steps = (int(value) for value in state["position"])
        self.steps = steps[0] if steps else 0
        if "stored_at" in state:
            self.stored_at.copy_(state["stored_at"])
        else:
            self.stored_at.fill_(_UNKNOWN)
            _log.warning("the checkpoint does not say how old the rows of its memory are: ages are counted from here")
        self._mirror.load_state_dict(state)
        if self._lists is not None:
            self._lists.load_state_dict(state)
        if self._approximate is not None:
            self._approximate.load_state_dict(state)
