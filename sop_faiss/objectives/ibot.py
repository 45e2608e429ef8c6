"""iBOT: DINO's agreement of views, and the same for masked patches (arXiv 2111.07832).

Read it next to the paper's algorithm 1. The teacher is an online tokenizer: the student must predict, where a patch is
hidden from it, the teacher's distribution of that patch over learned prototypes.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64
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
from sop_faiss.objectives.centering import (
    Center,
    Targets,
    drop_last_gradients,
    patch_loss,
    targets_of,
    views_loss,
)
from sop_faiss.objectives.objective import Learned, Needs, StepSettings, Watched, studied, watch_newest
from sop_faiss.objectives.term_metrics import averaged_sums, no_sums, term_metrics
from sop_faiss.progress import Stage, silent_stage
from sop_faiss.sop.loss import masked_row_weights
from sop_faiss.sop.prototype_sample import PrototypeSample


class IbotObjective:
    """iBOT for [CLS] and patch tokens; a term of weight 0 is left out.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.settings = config.ibot
        self.terms = config.ibot.terms()
        self.has_cls, self.has_patch = "cls" in self.terms, "patch" in self.terms
        self.centers: dict[str, Center] = {}
        self.steps = 0
        """Steps made."""
        self._steps_per_epoch = 1
        self._newest: dict[str, Tensor] = {}
        self._newest_ids: Int64[Tensor, " b"] = torch.empty(0, dtype=torch.int64)

    def heads(self, feature_dim: int) -> nn.ModuleDict:
        """Make DINO's head for both kinds of tokens; only its last layer may be another for patches (section 3.2)."""
        model, learns_norm = self.config.model, not self.settings.norm_last_layer
        projector = Projector(feature_dim, model.projector_hidden, model.embedding_dim, model.projector_layers)
        if self.settings.shared_head:
            prototypes = next(iter(self.terms.values())).prototypes  # of all terms
            last = {"last": LastLayer(model.embedding_dim, prototypes, learns_norm)}
        else:
            last = {n: LastLayer(model.embedding_dim, term.prototypes, learns_norm) for n, term in self.terms.items()}
        return nn.ModuleDict({"shared": projector, **last})

    def open(self, device: torch.device, images: int) -> None:
        """Make the centers, one for each term, also of a shared head."""
        momentum = self.settings.center_momentum
        self.centers = {name: Center(term.prototypes, momentum, device) for name, term in self.terms.items()}
        self._steps_per_epoch = max(1, images // self.config.train.batch_size)

    def begin_step(self, settings: StepSettings, images: int, patches: int) -> None:
        """Draw nothing: all parts of a step use the centers that the last step left."""

    def _patch_temp(self) -> float:
        """Return the teacher's temperature for patches, which starts to rise when the first patch is hidden."""
        loss = self.config.loss
        steps = round(loss.teacher_temp_epochs * self._steps_per_epoch)
        risen = self.steps - self.config.masks.start_epoch * self._steps_per_epoch
        progress = min(1.0, max(0, risen) / steps) if steps else 1.0
        return loss.teacher_temp_start + (loss.teacher_temp - loss.teacher_temp_start) * progress

    def look_ahead(self, networks: Networks, parts: list[Batch]) -> None:
        """Compute nothing: the loss is a mean over parts."""

    def learn(self, networks: Networks, part: Batch, settings: StepSettings, share: float) -> Learned:
        """Compute views, logits, losses and gradients of some of the step's images (algorithm 1)."""
        config, masks = self.config, part.masks
        student_temp, views = config.loss.student_temp, len(masks)

        # Views: G global ones, which the teacher sees unmasked and the student masked, and L local ones.
        global_views = networks.normalized(part.global_views, part.global_colors)
        local_views = networks.normalized(part.local_views, part.local_colors)
        masked = masks.flatten().nonzero().squeeze(1)

        learned, targets = self._teach(networks, global_views, masked, settings.teacher_temp)

        # The student's logits and the losses: all views together, or the local ones first.
        wanted = masked if self.has_patch else None
        for with_globals, student in studied(
            networks, config, global_views, local_views, masks, wanted, whole=self.has_cls
        ):
            loss = torch.zeros((), device=networks.device)
            if self.has_cls:
                first_view = 0 if with_globals else views
                term = views_loss(student.cls, targets["cls"], student_temp, first_view, views + len(local_views))
                loss = loss + self.terms["cls"].weight * term.loss
                learned.sums["cls"] += term.sums()
            if self.has_patch and with_globals:
                weights = masked_row_weights(masks.flatten(0, 1))
                term = patch_loss(student.patches, targets["patch"], weights, student_temp)
                loss = loss + self.terms["patch"].weight * term.loss
                learned.sums["patch"] += term.sums()
            (loss * share).backward()
        if self.steps < round(self.settings.freeze_last_layer_epochs * self._steps_per_epoch):
            drop_last_gradients(networks.student)
        return learned

    @torch.no_grad()
    def _teach(
        self,
        networks: Networks,
        global_views: Float[Tensor, "G b 3 h w"],
        masked: Int64[Tensor, " m"],
        teacher_temp: float,
    ) -> tuple[Learned, dict[str, Targets]]:
        """Return what the teacher makes of the unmasked views, and each term's targets.

        It computes the embeddings of all patches, since the center of patches is that of all; but only the hidden ones
        are targets and have logits.
        """
        views, images = global_views.shape[:2]
        patches = (global_views.shape[-1] // networks.teacher.backbone.patch_size) ** 2
        everything = torch.arange(views * images * patches, device=networks.device) if self.has_patch else None
        teacher = networks.teach(global_views.flatten(0, 1), everything, self.has_cls, wants_last=False)
        learned = Learned(
            sums={name: no_sums(networks.device) for name in self.terms},
            to_store={},
            features=teacher.cls_features.unflatten(0, (views, images)) if self.has_cls else None,
        )
        newest, targets = min(1, views - 1), {}
        if self.has_cls:
            logits = networks.teacher.last("cls", teacher.cls)
            targets["cls"] = targets_of(logits, self.centers["cls"], teacher_temp)
            learned.sums["center_cls"] = logits.mean(0)
            learned.to_store["cls"] = teacher.cls.unflatten(0, (views, images))[newest]
        if self.has_patch:
            logits = networks.teacher.last("patch", teacher.patches[masked])
            targets["patch"] = targets_of(logits, self.centers["patch"], self._patch_temp())
            # The last layer is linear: the mean of all patches' logits is the logits of their mean.
            learned.sums["center_patch"] = networks.teacher.last("patch", teacher.patches.mean(0, keepdim=True))[0]
            by_view = teacher.patches.unflatten(0, (views, images, patches))
            learned.to_store["patch"] = by_view[newest, :, patches // 2]
        return learned, targets

    def end_step(self, learned: list[Learned], image_ids: Int64[Tensor, " b"]) -> dict[str, Tensor]:
        """Move the centers by the logits of all parts and ranks."""
        self.steps += 1
        self._newest_ids = distributed.gather_equal_rows(image_ids)
        sums = averaged_sums(learned, self.terms)
        metrics: dict[str, Tensor] = {"loss": torch.zeros((), device=image_ids.device)}
        for name, center in self.centers.items():
            center.follow(torch.stack([part.sums[f"center_{name}"] for part in learned]))
            self._newest[name] = distributed.gather_equal_rows(torch.cat([part.to_store[name] for part in learned]))
            metrics.update(term_metrics(name, sums[name], len(learned), self.floors()[name]))
            metrics["loss"] += self.terms[name].weight * metrics[f"loss_{name}"]
        return metrics

    def fill(self, networks: Networks, batches: Batches, stage: Stage = silent_stage) -> None:
        """Fill nothing: there is no memory."""

    def watched(self, count: int) -> dict[str, Watched]:
        """Return the teacher's embeddings of the last step's second views, and of the patch in their middle."""
        return {name: watch_newest(newest, self._newest_ids, count) for name, newest in self._newest.items()}

    def prototypes(self, step: int) -> PrototypeSample | None:
        """Return None: learned prototypes are not images."""
        return None

    def floors(self) -> dict[str, float]:
        """Return ln K of each term, the loss where the teacher's distribution is uniform."""
        return {name: math.log(term.prototypes) for name, term in self.terms.items()}

    def needs(self, device: torch.device, images: int) -> Needs:
        """Return no sizes: nothing large is kept from step to step."""
        columns = {name: term.prototypes for name, term in self.terms.items()}
        sizes = {"memories_bytes": 0, "neighbor_lists_bytes": 0}
        return Needs(self.has_cls, self.has_patch, columns, sizes, keeps_logits=True)

    def digests(self) -> dict[str, str]:
        """Return digests of the centers."""
        return {f"{name} center": str(checksum(center.value)) for name, center in self.centers.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the centers and the number of steps."""
        centers = {f"{name}.center": center.value.clone() for name, center in self.centers.items()}
        return {**centers, "steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a saved state; see `Objective.load_state_dict`."""
        for name, center in self.centers.items():
            if f"{name}.center" not in state or "steps" not in state:
                raise CheckpointError(
                    f"the checkpoint has no {name} center of iBOT: resume with the same objective.kind, "
                    "ibot.cls.weight and ibot.patch.weight"
                )
            center.load(state[f"{name}.center"])
        self.steps = int(state["steps"])
