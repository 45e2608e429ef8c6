"""MaSSL: views of an image agree in their similarities to random blocks of a memory (arXiv 2407.17486).

Read it next to the paper. It is SOP with one member in each prototype: in each step the memory of [CLS] embeddings is
cut into disjoint random blocks, each row of a block is a prototype of its own, and a view's assignment is the softmax
of its similarities to the rows of a block. So the mathematics is that of `sop_faiss/sop/`.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from sop_faiss import distributed
from sop_faiss.config import Config
from sop_faiss.data.batch import Batch
from sop_faiss.data.stream import Batches
from sop_faiss.distributed import generator_digest
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.model.networks import Networks
from sop_faiss.model.projector import Projector
from sop_faiss.objectives.objective import Learned, Needs, StepSettings, Watched, batches_to_fill, studied
from sop_faiss.objectives.regularizers import koleo
from sop_faiss.objectives.sop_terms import memory_rows
from sop_faiss.objectives.term_metrics import averaged_sums, no_sums, term_metrics
from sop_faiss.progress import Stage, silent_stage
from sop_faiss.sop.loss import cls_loss
from sop_faiss.sop.memory import Memory
from sop_faiss.sop.prototype_sample import PrototypeSample
from sop_faiss.sop.prototypes import Prototypes


class MasslObjective:
    """MaSSL for [CLS] tokens.

    Args:
        config: of the run.
    """

    memory: Memory

    def __init__(self, config: Config) -> None:
        self.config = config
        self.settings = config.massl
        self.generator = torch.Generator()
        self._blocks: Prototypes

    def heads(self, feature_dim: int) -> nn.ModuleDict:
        """Make the projector, which is SOP's."""
        model = self.config.model
        projector = Projector(feature_dim, model.projector_hidden, model.embedding_dim, model.projector_layers)
        return nn.ModuleDict({"shared": projector})

    def open(self, device: torch.device, images: int) -> None:
        """Make the memory, filled with random unit vectors."""
        self.generator.manual_seed(distributed.derive_seed("massl", self.config.train.seed))  # the same on all ranks
        rows = self._capacity(images)
        # The torch engine: nothing is searched, so FAISS need not reserve memory on the device.
        self.memory = Memory(rows, self.config.model.embedding_dim, self.generator, device, "torch")

    def _capacity(self, images: int) -> int:
        capacity, size = memory_rows("massl", self.settings.capacity, images), self.settings.block_size
        if size > capacity:
            raise ConfigError(
                f"massl.block_size = {size} is too much for a memory of {capacity} rows ({images} training images, "
                f"massl.capacity = {self.settings.capacity}): wanted at most {capacity}; "
                f"for few images set massl.block_size={max(2, capacity // 4)}, or use more images"
            )
        return capacity

    def begin_step(self, settings: StepSettings, images: int, patches: int) -> None:
        """Cut the memory into blocks: a permutation of its rows, the same for student and teacher and on all ranks."""
        size = self.settings.block_size
        count = self.memory.capacity // size
        rows = self.memory.sample(count * size, self.generator).view(count, size)
        embeddings = self.memory.embeddings[rows]
        self._blocks = Prototypes(
            self.memory,
            anchors=embeddings,
            anchor_rows=rows,
            holds_anchor=torch.ones_like(rows, dtype=torch.bool),
            support_rows=rows.new_empty(count, size, 0),
            support_similarities=embeddings.new_empty(count, size, 0),
            contributions=embeddings.new_ones(count, size, 1),
        )
        self._health = {f"{key}_cls": value for key, value in self._blocks.health().items() if key.startswith("memory")}

    def look_ahead(self, networks: Networks, parts: list[Batch]) -> None:
        """Compute nothing: the loss is a mean over parts."""

    def learn(self, networks: Networks, part: Batch, settings: StepSettings, share: float) -> Learned:
        """Compute views, embeddings, losses and gradients of some of the step's images."""
        config = self.config
        global_views = networks.normalized(part.global_views, part.global_colors)
        local_views = networks.normalized(part.local_views, part.local_colors)
        views, images = global_views.shape[:2]
        teacher = networks.teach(global_views.flatten(0, 1), None, True)
        targets = teacher.cls.unflatten(0, (views, images))
        learned = Learned(
            # TermLoss.sums, then the KoLeo term
            sums={"cls": no_sums(networks.device), "koleo": torch.zeros(1, device=networks.device)},
            to_store={"cls": targets[min(1, views - 1)]},
            features=teacher.cls_features.unflatten(0, (views, images)),
        )
        for with_globals, student in studied(networks, config, global_views, local_views, part.masks):
            first_view = 0 if with_globals else views
            term = cls_loss(
                student.cls,
                targets,
                self._blocks,
                config.loss.student_temp,
                settings.teacher_temp,
                first_view,
                views + len(local_views),
            )
            loss = term.loss
            learned.sums["cls"] += term.sums()
            if self.settings.koleo_weight and with_globals:
                spread = torch.stack([koleo(view) for view in student.cls[:views]]).mean()
                loss = loss + self.settings.koleo_weight * spread
                learned.sums["koleo"] += spread.detach()
            (loss * share).backward()
        return learned

    def end_step(self, learned: list[Learned], image_ids: Int64[Tensor, " b"]) -> dict[str, Tensor]:
        """Store the teacher's embedding of each image's second view, once, in rank order."""
        embeddings = torch.cat([part.to_store["cls"] for part in learned])
        self.memory.store(distributed.gather_equal_rows(embeddings), distributed.gather_equal_rows(image_ids))
        sums = averaged_sums(learned, ("cls",))["cls"]
        metrics = term_metrics("cls", sums, len(learned), self.floors()["cls"])
        loss = metrics["loss_cls"]
        if self.settings.koleo_weight:
            spread = distributed.average(torch.stack([part.sums["koleo"] for part in learned]).mean(0))[0]
            loss = loss + self.settings.koleo_weight * spread
            metrics["koleo_cls"] = spread
        return {"loss": loss, **metrics, **self._health}

    @torch.no_grad()
    def fill(self, networks: Networks, batches: Batches, stage: Stage = silent_stage) -> None:
        """Store teacher embeddings before the first step, until no random row is left (`massl.fill = teacher`)."""
        if self.settings.fill != "teacher":
            return
        for batch in batches_to_fill(batches, self.memory.capacity, self.config, networks.device, stage):
            stored = [min(1, len(batch.global_views) - 1)]
            views = networks.normalized(batch.global_views[stored], batch.global_colors[stored])
            embeddings = networks.teach(views.flatten(0, 1), None, True).cls
            image_ids = distributed.gather_rows(batch.image_ids.to(networks.device))
            self.memory.store(distributed.gather_rows(embeddings), image_ids, ends_step=False)

    def watched(self, count: int) -> dict[str, Watched]:
        """Return the rows of the memory that were stored last."""
        memory = self.memory
        rows = memory.newest_rows(count)
        return {
            "cls": Watched(memory.embeddings[rows], memory.image_ids[rows], rows, memory.embeddings, memory.image_ids)
        }

    def prototypes(self, step: int) -> PrototypeSample | None:
        """Return None: a row by itself shows nothing of what was learned."""
        return None

    def floors(self) -> dict[str, float]:
        """Return ln P, the loss where the teacher is as similar to all rows of a block."""
        return {"cls": math.log(self.settings.block_size)}

    def needs(self, device: torch.device, images: int) -> Needs:
        """Return the sizes of the memory and of the blocks' copy of it."""
        rows, dim = self._capacity(images), self.config.model.embedding_dim
        sizes = {
            "memory_rows": {"cls": rows},
            # embeddings in float32; image ids and steps in int64
            "memories_bytes": rows * (dim * 4 + 16),
            "neighbor_lists_bytes": 0,
            # all blocks of a step, and the one that is compared
            "gathered_members_bytes": (rows + self.settings.block_size) * dim * 4,
        }
        return Needs(True, False, {"cls": self.settings.block_size}, sizes)

    def digests(self) -> dict[str, str]:
        """Return digests of the memory and of the generator of blocks."""
        return {"cls memory": self.memory.digest(), "draws of blocks": generator_digest(self.generator)}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory with the ids of its images, and the generator."""
        memory = {f"cls.memory.{key}": value for key, value in self.memory.state_dict().items()}
        return {"generator": self.generator.get_state(), **memory}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a saved state; see `Objective.load_state_dict`."""
        prefix = "cls.memory."
        memory = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if not memory or "generator" not in state:
            raise CheckpointError("the checkpoint has no MaSSL memory: resume with the same objective.kind")
        self.generator.set_state(state["generator"])
        self.memory.load_state_dict(memory)
