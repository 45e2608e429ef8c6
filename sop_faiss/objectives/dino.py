"""DINO: views of an image agree in their distribution over learned prototypes (arXiv 2104.14294).

Read it next to the paper's algorithm 1. The prototypes are the rows of the head's last layer, which the student learns
and the teacher follows. What keeps all images from one distribution is the teacher's center and its low temperature.
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
from sop_faiss.distributed import checksum
from sop_faiss.errors import CheckpointError
from sop_faiss.model.last_layer import LastLayer
from sop_faiss.model.networks import Networks
from sop_faiss.model.projector import Projector
from sop_faiss.objectives.centering import Center, drop_last_gradients, targets_of, views_loss
from sop_faiss.objectives.objective import Learned, Needs, StepSettings, Watched, studied, watch_newest
from sop_faiss.objectives.term_metrics import averaged_sums, no_sums, term_metrics
from sop_faiss.progress import Stage, silent_stage
from sop_faiss.sop.prototype_sample import PrototypeSample


class DinoObjective:
    """DINO for [CLS] tokens.

    Args:
        config: of the run.
    """

    center: Center

    def __init__(self, config: Config) -> None:
        self.config = config
        self.settings = config.dino
        self.steps = 0
        """Steps made."""
        self._frozen_steps = 0
        self._newest: tuple[Tensor, Tensor] = torch.empty(0, config.model.embedding_dim), torch.empty(0).long()

    def heads(self, feature_dim: int) -> nn.ModuleDict:
        """Make the head: three layers down to a bottleneck, L2 norm, and the weight-normed last layer (section 3.1)."""
        model = self.config.model
        projector = Projector(feature_dim, model.projector_hidden, model.embedding_dim, model.projector_layers)
        last = LastLayer(model.embedding_dim, self.settings.prototypes, not self.settings.norm_last_layer)
        return nn.ModuleDict({"shared": projector, "last": last})

    def open(self, device: torch.device, images: int) -> None:
        """Make the center, and count the steps in which the last layer does not learn."""
        self.center = Center(self.settings.prototypes, self.settings.center_momentum, device)
        steps_per_epoch = max(1, images // self.config.train.batch_size)
        self._frozen_steps = round(self.settings.freeze_last_layer_epochs * steps_per_epoch)

    def begin_step(self, settings: StepSettings, images: int, patches: int) -> None:
        """Draw nothing: all parts of a step use the center that the last step left."""

    def look_ahead(self, networks: Networks, parts: list[Batch]) -> None:
        """Compute nothing: the loss is a mean over parts."""

    def learn(self, networks: Networks, part: Batch, settings: StepSettings, share: float) -> Learned:
        """Compute views, logits, losses and gradients of some of the step's images (algorithm 1)."""
        config = self.config
        global_views = networks.normalized(part.global_views, part.global_colors)
        local_views = networks.normalized(part.local_views, part.local_colors)
        views, images = global_views.shape[:2]

        # The teacher's distributions, of the global views.
        teacher = networks.teach(global_views.flatten(0, 1), None, True, wants_last=False)
        with torch.no_grad():
            logits = networks.teacher.last("cls", teacher.cls)
        targets = targets_of(logits, self.center, settings.teacher_temp)
        learned = Learned(
            # TermLoss.sums, and what the center will follow
            sums={"cls": no_sums(networks.device), "center": logits.mean(0)},
            to_store={"cls": teacher.cls.unflatten(0, (views, images))[min(1, views - 1)]},
            features=teacher.cls_features.unflatten(0, (views, images)),
        )
        del logits  # as large as the targets

        # The student's, of all views together, or of the local ones first.
        for with_globals, student in studied(networks, config, global_views, local_views, part.masks):
            first_view = 0 if with_globals else views
            term = views_loss(student.cls, targets, config.loss.student_temp, first_view, views + len(local_views))
            learned.sums["cls"] += term.sums()
            (term.loss * share).backward()
        if self.steps < self._frozen_steps:
            drop_last_gradients(networks.student)
        return learned

    def end_step(self, learned: list[Learned], image_ids: Int64[Tensor, " b"]) -> dict[str, Tensor]:
        """Move the center by the logits of all parts and ranks (equation 4)."""
        self.steps += 1
        self.center.follow(torch.stack([part.sums["center"] for part in learned]))
        embeddings = torch.cat([part.to_store["cls"] for part in learned])
        self._newest = distributed.gather_equal_rows(embeddings), distributed.gather_equal_rows(image_ids)
        sums = averaged_sums(learned, ("cls",))["cls"]
        metrics = term_metrics("cls", sums, len(learned), self.floors()["cls"])
        return {"loss": metrics["loss_cls"], **metrics}

    def fill(self, networks: Networks, batches: Batches, stage: Stage = silent_stage) -> None:
        """Fill nothing: there is no memory."""

    def watched(self, count: int) -> dict[str, Watched]:
        """Return the teacher's embeddings of the last step's second views, before the last layer."""
        return {"cls": watch_newest(*self._newest, count)}

    def prototypes(self, step: int) -> PrototypeSample | None:
        """Return None: learned prototypes are not images."""
        return None

    def floors(self) -> dict[str, float]:
        """Return ln K, the loss where the teacher's distribution is uniform."""
        return {"cls": math.log(self.settings.prototypes)}

    def needs(self, device: torch.device, images: int) -> Needs:
        """Return no sizes: nothing large is kept from step to step."""
        sizes = {"memories_bytes": 0, "neighbor_lists_bytes": 0}
        return Needs(True, False, {"cls": self.settings.prototypes}, sizes, keeps_logits=True)

    def digests(self) -> dict[str, str]:
        """Return a digest of the center."""
        return {"center": str(checksum(self.center.value))}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the center and the number of steps."""
        return {"center": self.center.value.clone(), "steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a saved state; see `Objective.load_state_dict`."""
        if not {"center", "steps"} <= state.keys():
            raise CheckpointError("the checkpoint has no center of DINO: resume with the same objective.kind")
        self.center.load(state["center"])
        self.steps = int(state["steps"])
