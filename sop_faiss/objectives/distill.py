"""Distillation for retrieval: a student of any network learns what a frozen encoder finds similar.

It is SOP (`sop.py`) with another teacher. The memory holds the features of a frozen encoder, self-organizing prototypes
are drawn from it, and the student's embedding, which has the width of these features, is compared with the same rows:
the loss is the cross-entropy between its assignment and the teacher's, plus `direction_weight` times 1 - their cosine.
The run's own moving average of the student takes no part in the loss; as ever it is what is scored and exported.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from sop_faiss import distributed
from sop_faiss.config import Config
from sop_faiss.data.batch import Batch
from sop_faiss.data.stream import Batches
from sop_faiss.distributed import checksum, generator_digest
from sop_faiss.errors import CheckpointError
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.frozen_teacher import open_frozen_teacher
from sop_faiss.model.networks import Networks
from sop_faiss.model.projector import Projector
from sop_faiss.objectives.objective import Learned, Needs, StepSettings, Watched, batches_to_fill, studied, watch_newest
from sop_faiss.objectives.sop_terms import Term, open_term, sizes_of_terms
from sop_faiss.objectives.term_metrics import averaged_sums, no_sums, term_metrics
from sop_faiss.progress import Stage, silent_stage
from sop_faiss.sop.loss import cls_loss, paired_views
from sop_faiss.sop.prototype_sample import PrototypeSample, sample_prototypes
from sop_faiss.sop.prototypes import Prototypes

_log = logging.getLogger(__name__)


class DistillObjective:
    """Distillation of a frozen encoder's [CLS] features.

    Args:
        config: of the run.
    """

    term: Term
    center: Float[Tensor, " d"]
    """Mean of the teacher's unit-norm features; zero without `distill.center`, and until the memory is filled."""

    def __init__(self, config: Config) -> None:
        self.settings = config.distill
        self._given = config
        self._drawn: Prototypes
        self._health: dict[str, Tensor] = {}
        self._newest: tuple[Tensor, Tensor] | None = None

    @functools.cached_property
    def teacher(self) -> Encoder:
        """The frozen encoder, on the CPU until `open`."""
        return open_frozen_teacher(self._given)

    @functools.cached_property
    def config(self) -> Config:
        """The run's configuration, its embeddings as wide as the teacher's features."""
        model, width = self._given.model, self.teacher.feature_dim
        if model.embedding_dim not in (width, type(model)().embedding_dim) and distributed.is_main():
            _log.info("model.embedding_dim is %d, as the features of %s", width, self.teacher.name)
        return replace(self._given, model=replace(model, embedding_dim=width))

    def heads(self, feature_dim: int) -> nn.ModuleDict:
        """Make the projector, which ends in the width of the teacher's features."""
        model = self.config.model
        projector = Projector(feature_dim, model.projector_hidden, model.embedding_dim, model.projector_layers)
        return nn.ModuleDict({"shared": projector})

    def open(self, device: torch.device, images: int) -> None:
        """Make the memory and the prototype maker, and move the teacher to the device."""
        self.term = open_term(self.config, "cls", device, images)
        self.teacher.to(device)
        self.center = torch.zeros(self.teacher.feature_dim, device=device)

    def begin_step(self, settings: StepSettings, images: int, patches: int) -> None:
        """Draw the prototypes, the same for student and teacher."""
        self._drawn = self.term.maker.draw()
        self._health = {f"{key}_cls": value for key, value in self._drawn.health().items()}

    def look_ahead(self, networks: Networks, parts: list[Batch]) -> None:
        """Compute nothing: the loss is a mean over parts."""

    def learn(self, networks: Networks, part: Batch, settings: StepSettings, share: float) -> Learned:
        """Compute views, the teacher's features, embeddings, losses and gradients of some of the step's images."""
        config, device = self.config, networks.device
        global_views = networks.normalized(part.global_views, part.global_colors)
        local_views = networks.normalized(part.local_views, part.local_colors)
        views, images = global_views.shape[:2]
        all_views, same_view = views + len(local_views), self.settings.views == "same"
        stored = min(1, views - 1)  # as SOP does

        targets = self._teach(networks, global_views.flatten(0, 1)).unflatten(0, (views, images))
        learned = Learned(
            sums={"cls": no_sums(device), "direction": torch.zeros(1, device=device)},
            to_store={"cls": targets[stored]},
            features=None,
        )
        for with_globals, student in studied(networks, config, global_views, local_views, part.masks):
            first_view = 0 if with_globals else views
            if with_globals:
                # Health is of the student's, since the frozen teacher's say nothing of the run.
                learned.to_store["student"] = student.cls[stored].detach()
                learned.features = student.cls_features[:views].detach()
            term = cls_loss(
                student.cls,
                targets,
                self._drawn,
                config.loss.student_temp,
                settings.teacher_temp,
                first_view,
                all_views,
                same_view=same_view,
            )
            direction = direction_loss(student.cls, targets, first_view, all_views, same_view=same_view)
            learned.sums["cls"] += term.sums()
            learned.sums["direction"] += direction.detach()
            loss = config.sop.cls.weight * term.loss + self.settings.direction_weight * direction
            (loss * share).backward()
        return learned

    @torch.no_grad()
    def _teach(self, networks: Networks, views: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b d"]:
        """Return the teacher's features of normalized views: unit norm, centered, unit norm again."""
        mean, std, own = networks.views.mean, networks.views.std, self.teacher.preprocess
        if (own.mean, own.std) != (mean, std):  # the same pixels, normalized as the teacher is used to
            scale, shift = (
                torch.tensor(values, device=views.device).view(3, 1, 1)
                for values in (
                    [a / b for a, b in zip(std, own.std, strict=True)],
                    [(a - b) / c for a, b, c in zip(mean, own.mean, own.std, strict=True)],
                )
            )
            views = views * scale + shift
        with networks.autocast():
            features = self.teacher(views)
        return F.normalize(F.normalize(features.float(), dim=1) - self.center, dim=1)

    def end_step(self, learned: list[Learned], image_ids: Int64[Tensor, " b"]) -> dict[str, Tensor]:
        """Store the teacher's feature of each image's second view, once, in rank order."""
        everywhere = distributed.gather_equal_rows(image_ids)
        stored, newest = (
            distributed.gather_equal_rows(torch.cat([part.to_store[name] for part in learned]))
            for name in ("cls", "student")
        )
        self.term.memory.store(stored, everywhere)
        self._newest = newest, everywhere
        sums = averaged_sums(learned, ("cls",))["cls"]
        direction = distributed.average(torch.stack([part.sums["direction"] for part in learned]).mean(0))[0]
        metrics = term_metrics("cls", sums, len(learned), self.floors()["cls"])
        loss = self.config.sop.cls.weight * metrics["loss_cls"] + self.settings.direction_weight * direction
        return {"loss": loss, **metrics, "loss_direction": direction, **self._health}

    @torch.no_grad()
    def fill(self, networks: Networks, batches: Batches, stage: Stage = silent_stage) -> None:
        """Store the teacher's features before the first step, until no random row is left, and center them."""
        memory = self.term.memory
        self.center.zero_()
        for batch in batches_to_fill(batches, memory.capacity, self.config, networks.device, stage):
            stored = [min(1, len(batch.global_views) - 1)]
            views = networks.normalized(batch.global_views[stored], batch.global_colors[stored])
            features = self._teach(networks, views.flatten(0, 1))
            image_ids = distributed.gather_rows(batch.image_ids.to(networks.device))
            memory.store(distributed.gather_rows(features), image_ids, ends_step=False)
        if self.settings.center:
            self.center = memory.embeddings.mean(0)
            rows = memory.newest_rows(memory.capacity)
            centered = F.normalize(memory.embeddings[rows] - self.center, dim=1)
            memory.store(centered, memory.image_ids[rows], ends_step=False)

    def watched(self, count: int) -> dict[str, Watched]:
        """Return the student's newest embeddings: the memory's are the frozen teacher's."""
        if self._newest is None:
            memory = self.term.memory
            return {"cls": watch_newest(memory.embeddings, memory.image_ids, 0)}
        return {"cls": watch_newest(*self._newest, count)}

    def prototypes(self, step: int) -> PrototypeSample | None:
        """Return the first prototypes, which are of the teacher's features."""
        return sample_prototypes(step, "cls", self._drawn)

    def floors(self) -> dict[str, float]:
        """Return ln K, the loss where the teacher assigns each image to all prototypes alike."""
        return {"cls": math.log(self._given.sop.cls.num_anchors)}

    def needs(self, device: torch.device, images: int) -> Needs:
        """Return the sizes of the memory, of kept neighbors, of the members of one task, and of the teacher."""
        sizes = sizes_of_terms(self.config, device, images)
        held = sum(value.numel() * value.element_size() for value in self.teacher.state_dict().values())
        return Needs(True, False, {"cls": self.config.sop.cls.num_anchors}, {**sizes, "frozen_teacher_bytes": held})

    def digests(self) -> dict[str, str]:
        """Return digests of the teacher, the center, the memory, and the generator of anchors."""
        return {
            "distilled teacher": self.teacher.fingerprint,
            "center": str(checksum(self.center)),
            "cls memory": self.term.memory.digest(),
            "draws of cls anchors": generator_digest(self.term.maker.generator),
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory with the ids of its images, the generator, the center, and the teacher's fingerprint."""
        fingerprint = torch.tensor(list(bytes.fromhex(self.teacher.fingerprint)), dtype=torch.uint8)
        return {"teacher_sha256": fingerprint, "center": self.center.clone(), **self.term.tensors("cls")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a saved state; see `Objective.load_state_dict`."""
        if "teacher_sha256" not in state or "center" not in state:
            raise CheckpointError("the checkpoint has no distilled teacher: resume with the same objective.kind")
        known = bytes(state["teacher_sha256"].tolist()).hex()
        if known != self.teacher.fingerprint:
            raise CheckpointError(
                f"distill.teacher = {self.settings.teacher} is not the encoder that the run learned from: its "
                f"fingerprint is {self.teacher.fingerprint[:12]}..., the checkpoint has {known[:12]}...; name the same "
                "weights, or start another run"
            )
        self.term.load_tensors("cls", state)
        self.center.copy_(state["center"])


def direction_loss(
    student: Float[Tensor, "v B d"],
    teacher: Float[Tensor, "G B d"],
    first_view: int,
    all_views: int,
    *,
    same_view: bool,
) -> Float[Tensor, ""]:
    """Return the mean of 1 - cosine over the pairs that `cls_loss` compares, and over images.

    Args:
        student: unit-norm embeddings of some consecutive views; losses of all add up.
        teacher: unit-norm features of the global views.
        first_view: number of the first view in `student` among all views.
        all_views: V.
        same_view: see `cls_loss`.
    """
    partners, pairs = paired_views(len(student), len(teacher), first_view, all_views, same_view)
    losses = [
        (1 - torch.linalg.vecdot(view.float(), teacher[j])).mean()
        for view, others in zip(student, partners, strict=True)
        for j in others
    ]
    return torch.stack(losses).sum() / pairs if losses else student.sum() * 0.0
