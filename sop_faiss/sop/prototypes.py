"""Self-organizing prototypes: anchors drawn from the memory, their supports, and contributions (paper section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from sop_faiss.config import TermConfig
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.neighbors.incremental import most_rows_of_an_image
from sop_faiss.sop.memory import Memory

_FIXED = {"random": set(), "fixed_rows": {"fixed_rows"}, "fixed_vectors": {"fixed_rows", "fixed_vectors", "fixed_ids"}}
"""What a saved state holds, by kind of anchors."""


@dataclass(frozen=True)
class Prototypes:
    """The prototypes of one step: T tasks of K prototypes with S = k + 1 members, the anchor first.

    A task is one independent draw of K prototypes from the same memory; the loss is the mean over tasks. Members are
    kept as row indices into the memory, and their embeddings are gathered for one task at a time; the memory must not
    change before the last loss of the step has been computed.
    """

    memory: Memory
    anchors: Float32[Tensor, "T K d"]
    anchor_rows: Int64[Tensor, "T K"]
    """Rows that the anchors were drawn from; `fixed_vectors` (see `PrototypeMaker`) may have left them since."""
    holds_anchor: Bool[Tensor, "T K"]
    """Whether these rows still hold their anchors."""
    support_rows: Int64[Tensor, "T K k"]
    support_similarities: Float32[Tensor, "T K k"]
    contributions: Float32[Tensor, "T K S"]
    """w, the fraction of each member's probability that its own prototype gets."""

    @property
    def tasks(self) -> int:
        """Return T."""
        return len(self.anchors)

    @property
    def count(self) -> int:
        """Return K, the prototypes per task."""
        return self.anchors.shape[1]

    def empty_members(self) -> Float32[Tensor, "S K d"]:
        """Return memory for the members of one task, which a loss uses for each of its tasks.

        New memory costs a CPU a quarter of the [CLS] loss at the paper's size: 38 MB of page faults per task.
        """
        _, count, dim = self.anchors.shape
        return self.anchors.new_empty(self.contributions.shape[2], count, dim)

    def members(self, task: int, out: Float32[Tensor, "S K d"] | None = None) -> Float32[Tensor, "K S d"]:
        """Return D, the members' embeddings of one task, with the strides of (S, K, d), which `MemberWeights` reads.

        Args:
            task: number of the task.
            out: where to write them (`empty_members`); None: new memory.
        """
        members = self.empty_members() if out is None else out
        rows = torch.cat([self.anchor_rows[task].unsqueeze(0), self.support_rows[task].T])
        torch.index_select(self.memory.embeddings, 0, rows.flatten(), out=members.flatten(0, 1))
        members[0] = self.anchors[task]  # `fixed_vectors` may have left their rows
        return members.transpose(0, 1)

    def health(self) -> dict[str, Float32[Tensor, ""]]:
        """Return metrics of the prototypes and of their memory (docs/metrics.md), without another search.

        `memory_fill`: fraction of rows that were stored; `memory_age`: their mean age in steps. `distinct_rows`:
        different rows that are members, as a fraction of the memory. With supports `support_similarity`: their mean
        similarity to the anchor. With several supports `one_image_share`: the fraction of anchors whose supports all
        come from one image. With an approximate search `neighbor_recall`: the fraction of nearest rows that it found
        when its index was last built.
        """
        used = torch.zeros(self.memory.capacity, device=self.anchors.device)
        # A row that lost its anchor is not a member.
        used[self.anchor_rows.flatten()] = self.holds_anchor.flatten().float()
        used[self.support_rows.flatten()] = 1.0
        metrics = {
            "memory_fill": used.new_full((), self.memory.fill),
            "memory_age": self.memory.mean_age(),
            "distinct_rows": used.mean(),
        }
        if self.support_rows.shape[2] > 0:
            metrics["support_similarity"] = self.support_similarities.mean()
        if self.memory.neighbor_recall is not None:
            metrics["neighbor_recall"] = torch.tensor(self.memory.neighbor_recall, device=self.anchors.device)
        if self.support_rows.shape[2] > 1:
            images = self.memory.image_ids[self.support_rows]
            of_one_image = ((images == images[..., :1]) & (images >= 0)).all(-1)
            metrics["one_image_share"] = of_one_image.float().mean()
        return metrics


def contributions(support_similarities: Float32[Tensor, "T K k"], kind: str, eps: float) -> Float32[Tensor, "T K S"]:
    """Return w, the fraction of a member's probability that its own prototype gets; each other gets (1 - w)/(K - 1).

    `similarity`: the anchor gives 1 - eps, a support its similarity to the anchor, clamped to [1/K, 1]. `smooth`: all
    members give 1 - eps, as in the paper's pseudo-code. `one_hot`: all give 1.
    Departs: the released code does not clamp, so that a support may give less than nothing. Departs: in the paper's
    figure the anchor gives 1.
    """
    tasks, count, _ = support_similarities.shape
    if kind == "one_hot":
        return torch.cat([support_similarities.new_ones(tasks, count, 1), torch.ones_like(support_similarities)], 2)
    anchor = support_similarities.new_full((tasks, count, 1), 1.0 - eps)
    if kind == "smooth":
        return torch.cat([anchor, torch.full_like(support_similarities, 1.0 - eps)], 2)
    if kind == "similarity":
        return torch.cat([anchor, support_similarities.clamp(1.0 / count, 1.0)], 2)
    raise ConfigError(f"sop.contributions = {kind!r}: wanted similarity, smooth or one_hot")


class PrototypeMaker:
    """Draws the anchors of each step and finds their supports, for all tasks at once.

    Args:
        memory: where anchors and supports come from.
        term: K, k and T.
        contributions: `similarity`, `smooth` or `one_hot`.
        eps: see `contributions`.
        anchors: `random`: drawn again every step; `fixed_rows`: the rows of the first draw, whose contents the FIFO
            overwrites; `fixed_vectors`: the embeddings of the first draw.
        exclude_same_image: leave rows of the anchor's own image out of its supports.
        generator: draws the anchors; the same on all ranks. It is the memory's, which drew the first contents.
        incremental: take supports from the lists of nearest rows that the memory keeps from step to step, instead of
            searching in each step. `fixed_vectors`, which may no longer be rows, are searched for in any case.
    """

    def __init__(
        self,
        memory: Memory,
        term: TermConfig,
        *,
        contributions: str,
        eps: float,
        anchors: str,
        exclude_same_image: bool,
        generator: torch.Generator,
        incremental: bool = False,
    ) -> None:
        self.memory = memory
        self.term = term
        self.contributions = contributions
        self.eps = eps
        self.anchors = anchors
        self.exclude_same_image = exclude_same_image
        self.generator = generator
        self.incremental = incremental and anchors != "fixed_vectors" and term.num_supports > 0
        if self.incremental:
            memory.keep_neighbors(term.num_supports, exclude_same_image)
        self._fixed_rows: Int64[Tensor, "T K"] | None = None
        self._fixed_vectors: Float32[Tensor, "T K d"] | None = None
        self._fixed_ids: Int64[Tensor, "T K"] | None = None

    @torch.no_grad()
    def draw(self) -> Prototypes:
        """Draw the prototypes of the next step (point 1 of the step; section 3.2; docs/method.md, 3).

        Raises:
            ConfigError: too few rows are left for the supports.
        """
        rows = self._fixed_rows if self._fixed_rows is not None else self._draw_rows()
        vectors, ids = self.memory.embeddings[rows], self.memory.image_ids[rows]
        holds_anchor = torch.ones_like(rows, dtype=torch.bool)
        if self.anchors != "random":
            self._fixed_rows = rows
        if self.anchors == "fixed_vectors":
            if self._fixed_vectors is None or self._fixed_ids is None:
                self._fixed_vectors, self._fixed_ids = vectors, ids
            holds_anchor = (vectors == self._fixed_vectors).all(-1)  # until the FIFO overwrites the row
            vectors, ids = self._fixed_vectors, self._fixed_ids
        if self.incremental:
            support_rows, similarities = self._kept_supports(rows)
        else:
            support_rows, similarities = self._supports(vectors, rows, ids, holds_anchor)
        weights = contributions(similarities, self.contributions, self.eps)
        return Prototypes(self.memory, vectors, rows, holds_anchor, support_rows, similarities, weights)

    def _draw_rows(self) -> Int64[Tensor, "T K"]:
        """Draw K rows for each task, uniformly. Departs: for [CLS] the released code draws K and keeps K/2."""
        draws = [self.memory.sample(self.term.num_anchors, self.generator) for _ in range(self.term.tasks)]
        return torch.stack(draws)

    def _kept_supports(self, rows: Int64[Tensor, "T K"]) -> tuple[Int64[Tensor, "T K k"], Float32[Tensor, "T K k"]]:
        """Return each anchor's k nearest other rows from the lists that the memory keeps."""
        found = self.memory.nearest_others(rows.flatten())
        k = self.term.num_supports
        if found.rows.shape[1] < k or bool(found.similarities[:, -1].isneginf().any()):
            raise self._too_few_rows()
        return found.rows.reshape(*rows.shape, k), found.similarities.reshape(*rows.shape, k)

    def _supports(
        self,
        vectors: Float32[Tensor, "T K d"],
        rows: Int64[Tensor, "T K"],
        ids: Int64[Tensor, "T K"],
        holds_anchor: Bool[Tensor, "T K"],
    ) -> tuple[Int64[Tensor, "T K k"], Float32[Tensor, "T K k"]]:
        """Search for each anchor's k nearest other rows, which are never the anchor's own row, even among duplicates.

        Departs: the released code also leaves out the task's other anchors; here a row may serve several prototypes.
        """
        tasks, count, dim = vectors.shape
        k = self.term.num_supports
        if k == 0:
            return rows.new_empty(tasks, count, 0), vectors.new_empty(tasks, count, 0)
        same_image = most_rows_of_an_image(self.memory.image_ids) if self.exclude_same_image else 0
        wanted = min(self.memory.capacity, k + 1 + same_image)
        found = self.memory.search(vectors.reshape(-1, dim), wanted)
        excluded = (found.rows == rows.reshape(-1, 1)) & holds_anchor.reshape(-1, 1)
        if self.exclude_same_image:
            anchor_ids = ids.reshape(-1, 1)
            excluded |= (self.memory.image_ids[found.rows] == anchor_ids) & (anchor_ids >= 0)
        # The nearest rows that are not excluded: a stable sort keeps them in order, before the excluded ones.
        order = excluded.to(torch.uint8).argsort(dim=1, stable=True)[:, :k]
        if wanted - int(excluded.sum(dim=1).max()) < k:
            raise self._too_few_rows()
        shape = (tasks, count, k)
        return found.rows.gather(1, order).reshape(shape), found.similarities.gather(1, order).reshape(shape)

    def _too_few_rows(self) -> ConfigError:
        among, remedy = "rows", "lower num_supports or use more images"
        if self.exclude_same_image:
            among, remedy = "rows of other images", f"{remedy}, or set neighbors.exclude_same_image=never"
        return ConfigError(
            f"an anchor has fewer than {self.term.num_supports} {among} among the memory's {self.memory.capacity}: "
            f"{remedy}"
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the generator, and the fixed anchors if there are any."""
        state = {"generator": self.generator.get_state()}
        for name in ("rows", "vectors", "ids"):
            value = getattr(self, f"_fixed_{name}")
            if value is not None:
                state[f"fixed_{name}"] = value.clone()
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a saved state.

        Raises:
            CheckpointError: the state was made with other settings.
        """
        fixed = {name for name in state if name.startswith("fixed_")}
        if fixed != _FIXED[self.anchors]:
            raise CheckpointError(f"the checkpoint was made with other anchors than sop.anchors = {self.anchors}")
        self.generator.set_state(state["generator"])
        device = self.memory.embeddings.device
        for name in ("rows", "vectors", "ids"):
            value = state.get(f"fixed_{name}")
            setattr(self, f"_fixed_{name}", None if value is None else value.to(device))
