"""The seam between training and what is learned: the loop calls an objective, which never sees the run.

One step of the loop (`train/loop.py`) is: `begin_step`, `look_ahead` if the batch has several parts, `learn` once for
each part, the optimizer, the teacher's update, `end_step`. A method is one file with one class that has these methods;
`choose.py` names them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor, nn

from sop_faiss.config import Config
from sop_faiss.data.batch import Batch
from sop_faiss.data.stream import Batches, batch_loader
from sop_faiss.model.networks import Embedded, Networks
from sop_faiss.progress import Stage, silent_stage
from sop_faiss.sop.prototype_sample import PrototypeSample


class StepSettings(NamedTuple):
    """Scheduled values of one step; see `train/schedules.py`."""

    learning_rate: float
    weight_decay: float
    momentum: float
    teacher_temp: float
    backbone_lr_scale: float = 1.0
    """The backbone's learning rate divided by the projector's: 0 while the backbone is frozen, then rising; see
    `optim.projector_warmup_epochs`."""


@dataclass
class Learned:
    """What the end of the step needs from one part of a batch."""

    sums: dict[str, Float[Tensor, " sums"]]
    """By loss term, or by what else an objective averages: numbers that are added up over parts and averaged over
    ranks."""
    to_store: dict[str, Float[Tensor, "b _"]]
    """By loss term: one teacher embedding of each image; distillation also has the `student`'s."""
    features: Float[Tensor, "G b f"] | None
    """The teacher's features of the unmasked global views, without gradient (distillation: the student's); None if
    none were computed."""


class Watched(NamedTuple):
    """The newest embeddings of a loss term, the oldest of them first, and what they can be compared with."""

    embeddings: Float32[Tensor, "n d"]
    image_ids: Int64[Tensor, " n"]
    rows: Int64[Tensor, " n"]
    """Their rows in `gallery`."""
    gallery: Float32[Tensor, "m d"]
    gallery_ids: Int64[Tensor, " m"]


def watch_newest(embeddings: Float32[Tensor, "m d"], image_ids: Int64[Tensor, " m"], count: int) -> Watched:
    """Return at most `count` of a step's embeddings, for objectives that have no memory of earlier ones."""
    rows = torch.arange(max(0, len(embeddings) - count), len(embeddings), device=embeddings.device)
    return Watched(embeddings[rows], image_ids[rows], rows, embeddings, image_ids)


class Needs(NamedTuple):
    """What an objective needs from the networks and of the device's memory; `sop-train --dry-run` adds it up."""

    cls: bool
    """Whether it projects whole views; if not, local views are not computed."""
    patches: bool
    """Whether it projects masked patches."""
    target_columns: dict[str, int]
    """By loss term: length of the teacher's distribution (K)."""
    sizes: dict[str, Any]
    """Rows and bytes that the objective keeps, as the dry run shows them; among them `memories_bytes` and
    `neighbor_lists_bytes`, 0 if it has none, which checkpoints hold."""
    keeps_logits: bool = False
    """Whether the K logits of all rows of a part are in memory at once, with their gradients."""


@runtime_checkable
class Objective(Protocol):
    """What is learned from a part of a batch."""

    def heads(self, feature_dim: int) -> nn.ModuleDict:
        """Make the heads of a network, see `Network`; weights from torch's global generator.

        Args:
            feature_dim: width of the backbone's features.
        """

    def open(self, device: torch.device, images: int) -> None:
        """Allocate what lives as long as the run: memories, centers, generators.

        Args:
            device: of this rank.
            images: number of training images.

        Raises:
            ConfigError: settings do not fit this number of images.
        """

    def begin_step(self, settings: StepSettings, images: int, patches: int) -> None:
        """Draw what all parts of the step need.

        Args:
            settings: of the step.
            images: of this rank.
            patches: tokens of a global view.
        """

    def look_ahead(self, networks: Networks, parts: list[Batch]) -> None:
        """See the parts of a step that has several before the first is learned, for losses that are not sums over them.

        Drop path draws for a part what it will draw for it in `learn`, if the student is given the same views in the
        same order.

        Args:
            networks: student and teacher; nothing changes them here.
            parts: of this rank's images, on the device.
        """

    def learn(self, networks: Networks, part: Batch, settings: StepSettings, share: float) -> Learned:
        """Add a part's gradients to the student: views, embeddings, losses, backward pass.

        Args:
            networks: student and teacher.
            part: some of the step's images, on the device; the parts come in order.
            settings: of the step.
            share: the fraction of the step's images that are in this part, a factor of its loss.
        """

    def end_step(self, learned: list[Learned], image_ids: Int64[Tensor, " b"]) -> dict[str, Tensor]:
        """Store the step's embeddings, once, after the teacher's update; all ranks together.

        Args:
            learned: of each part, in order.
            image_ids: of this rank's images.

        Returns:
            The step's metrics as scalars, which the device may still be computing: `loss`, for each term `loss_<term>`
            and `loss_<term>_over_lnK`, and metrics of the method's own.
        """

    def fill(self, networks: Networks, batches: Batches, stage: Stage = silent_stage) -> None:
        """Fill memories that must not start at random, before the first step, as a stage of work of its own."""

    def watched(self, count: int) -> dict[str, Watched]:
        """Return at most `count` of the newest embeddings of each term; health reads the first term."""

    def prototypes(self, step: int) -> PrototypeSample | None:
        """Return some of the step's prototypes for a report, before `end_step`; None if the method has none."""

    def floors(self) -> dict[str, float]:
        """Return ln K of each loss term: its cross-entropy where the teacher's distribution is uniform."""

    def needs(self, device: torch.device, images: int) -> Needs:
        """Return what a run would need, without allocating anything. Arguments and errors are those of `open`."""

    def digests(self) -> dict[str, str]:
        """Return one line of text for each thing that must be the same on all ranks."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that later steps depend on."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a saved state.

        Raises:
            CheckpointError: it was made with other settings.
        """


def studied(
    networks: Networks,
    config: Config,
    global_views: Float[Tensor, "G b 3 h w"],
    local_views: Float[Tensor, "L b 3 s s2"],
    masks: Bool[Tensor, "G b n"],
    masked: Int64[Tensor, " m"] | None = None,
    *,
    whole: bool = True,
) -> Iterator[tuple[bool, Embedded]]:
    """Compute what the student makes of all views together, or of the local ones first (`train.views_apart`).

    Args:
        networks: of the run.
        global_views: normalized.
        local_views: normalized.
        masks: of the global views.
        masked: the patches of the global views to embed; None: none.
        whole: whether complete views are embedded, without which local views are not shown.

    Yields:
        Whether the global views are among those that were shown, and what the student makes of them.
    """
    shown = [(global_views, local_views)]
    if config.train.views_apart and whole and len(local_views):
        shown = [(global_views[:0], local_views), (global_views, local_views[:0])]
    for of_globals, of_locals in shown:
        with_globals = len(of_globals) > 0
        hidden = masks if with_globals and config.masks.hides else None
        yield with_globals, networks.study(of_globals, of_locals, hidden, masked if with_globals else None, whole)


def batches_to_fill(batches: Batches, rows: int, config: Config, device: torch.device, stage: Stage) -> Iterator[Batch]:
    """Yield as many batches as fill a memory of this many rows, and report their images as a stage of work."""
    size = config.train.batch_size
    steps = range(-(-rows // size))
    with stage("filling the memories", "images") as progress:
        for done, batch in enumerate(batch_loader(batches, steps, pin_memory=device.type == "cuda"), 1):
            yield batch
            progress(min(done * size, rows), rows)
