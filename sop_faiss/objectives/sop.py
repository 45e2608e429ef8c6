"""The paper's objective: views of an image agree in their assignment to self-organizing prototypes.

Read it from top to bottom next to the paper (arXiv 2505.21533): sections 3.1 (memory), 3.2 (prototypes) and 3.3
(losses). There are two loss terms, `cls` and `patch`, each with its own memory and prototypes; a term of weight 0 is
left out. The mathematics is in `sop_faiss/sop/`.
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
from sop_faiss.errors import CheckpointError
from sop_faiss.model.networks import Networks
from sop_faiss.model.projector import Projector
from sop_faiss.objectives.objective import Learned, Needs, StepSettings, Watched, batches_to_fill, studied
from sop_faiss.objectives.regularizers import Regularizer
from sop_faiss.objectives.sop_terms import Term, open_term, sizes_of_terms
from sop_faiss.objectives.term_metrics import averaged_sums, no_sums, term_metrics
from sop_faiss.progress import Stage, silent_stage
from sop_faiss.sop.loss import cls_loss, masked_row_weights, patch_loss
from sop_faiss.sop.prototype_sample import PrototypeSample, sample_prototypes
from sop_faiss.sop.prototypes import Prototypes


class SopObjective:
    """SOP for [CLS] and patch tokens.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.term_configs = config.sop.terms()
        self.has_cls, self.has_patch = "cls" in self.term_configs, "patch" in self.term_configs
        self.terms: dict[str, Term] = {}
        self.stored_patch_generator = torch.Generator()
        self._drawn: dict[str, Prototypes] = {}
        self._health: dict[str, Tensor] = {}
        self._stored_patches: Int64[Tensor, " b"] = torch.empty(0, dtype=torch.int64)
        self._images_learned = 0  # of the step's images, in the parts so far
        regularizer = config.regularizer
        self.regularizer = None if regularizer.kind == "none" else Regularizer(regularizer, config.train.seed)

    def heads(self, feature_dim: int) -> nn.ModuleDict:
        """Make one projector for [CLS] and patch tokens (section 4)."""
        model = self.config.model
        projector = Projector(feature_dim, model.projector_hidden, model.embedding_dim, model.projector_layers)
        return nn.ModuleDict({"shared": projector})

    def open(self, device: torch.device, images: int) -> None:
        """Make the memories, filled with random unit vectors (section 3.1), and their prototype makers."""
        self.terms = {name: open_term(self.config, name, device, images) for name in self.term_configs}
        seed = distributed.derive_seed("stored patch", self.config.train.seed)
        self.stored_patch_generator.manual_seed(seed)  # the same on all ranks

    def begin_step(self, settings: StepSettings, images: int, patches: int) -> None:
        """Draw the prototypes, the same for student and teacher (section 3.2), and the patches to store."""
        self._drawn = {name: term.maker.draw() for name, term in self.terms.items()}
        self._health = {
            f"{key}_{name}": value for name, drawn in self._drawn.items() for key, value in drawn.health().items()
        }
        self._stored_patches = self._draw_stored_patches(images, patches)
        self._images_learned = 0
        if self.regularizer is not None:
            self.regularizer.begin_step()

    def look_ahead(self, networks: Networks, parts: list[Batch]) -> None:
        """Show all parts of the step to the regularizer, if any, by a forward pass of each without gradients."""
        if self.regularizer is None:
            return
        seen = []
        with torch.no_grad():
            for part in parts:
                global_views = networks.normalized(part.global_views, part.global_colors)
                local_views = networks.normalized(part.local_views, part.local_colors)
                masked = part.masks.flatten().nonzero().squeeze(1) if self.has_patch else None
                shown = studied(
                    networks, self.config, global_views, local_views, part.masks, masked, whole=self.has_cls
                )
                seen += [student for with_globals, student in shown if with_globals]
        self.regularizer.look_ahead(seen, len(parts[0].masks))

    def learn(self, networks: Networks, part: Batch, settings: StepSettings, share: float) -> Learned:
        """Compute views, embeddings, losses and gradients of some of the step's images (algorithm 1)."""
        config, device = self.config, networks.device
        temperatures = (config.loss.student_temp, settings.teacher_temp)
        masks = part.masks
        views, images, patches = masks.shape

        # Views: G global ones, which the teacher sees unmasked and the student masked, and L local ones.
        global_views = networks.normalized(part.global_views, part.global_colors)
        local_views = networks.normalized(part.local_views, part.local_colors)
        masked = masks.flatten().nonzero().squeeze(1)
        first = self._images_learned
        stored_patches = self._stored_patches[first : first + images]
        self._images_learned += images
        # The patch to store of each image, as a row of the patch tokens of all global views, one view after the other.
        stored_view = _stored_view(views)
        stored = (stored_view * images + torch.arange(images, device=device)) * patches + stored_patches

        # The teacher's embeddings; of patches those that the student must predict, and the one that each image stores.
        wanted = torch.cat([masked, stored]) if self.has_patch else None
        teacher = networks.teach(global_views.flatten(0, 1), wanted, self.has_cls)
        teacher_cls = teacher.cls.view(views, -1, teacher.cls.shape[-1])
        teacher_patches, patches_to_store = teacher.patches[: len(masked)], teacher.patches[len(masked) :]
        learned = Learned(
            sums={name: no_sums(device) for name in self.term_configs},
            to_store={"cls": teacher_cls[stored_view], "patch": patches_to_store},
            features=teacher.cls_features.unflatten(0, (views, images)) if self.has_cls else None,
        )

        # The student's embeddings and the losses (section 3.3).
        asked = masked if self.has_patch else None
        for with_globals, student in studied(
            networks, config, global_views, local_views, masks, asked, whole=self.has_cls
        ):
            loss = torch.zeros((), device=device)
            if self.has_cls:
                first_view = 0 if with_globals else views
                term = cls_loss(
                    student.cls, teacher_cls, self._drawn["cls"], *temperatures, first_view, views + len(local_views)
                )
                loss = loss + self.term_configs["cls"].weight * term.loss
                learned.sums["cls"] += term.sums()
            if self.has_patch and with_globals:
                weights = masked_row_weights(masks.flatten(0, 1))
                term = patch_loss(student.patches, teacher_patches, weights, self._drawn["patch"], *temperatures)
                loss = loss + self.term_configs["patch"].weight * term.loss
                learned.sums["patch"] += term.sums()
            if self.regularizer is not None and with_globals:
                # Of all parts together: `share` is a factor of the other losses only.
                loss = loss + self.regularizer.loss(student, views, first) / share
            (loss * share).backward()
        return learned

    def end_step(self, learned: list[Learned], image_ids: Int64[Tensor, " b"]) -> dict[str, Tensor]:
        """Store one embedding of each image of all ranks in each memory, once, in rank order (section 3.1).

        Departs: the released code stores before the backward pass.
        """
        everywhere = distributed.gather_equal_rows(image_ids)
        sums = averaged_sums(learned, self.terms)
        metrics: dict[str, Tensor] = {"loss": torch.zeros((), device=image_ids.device)}
        for name, term in self.terms.items():
            embeddings = torch.cat([part.to_store[name] for part in learned])
            term.memory.store(distributed.gather_equal_rows(embeddings), everywhere)
            metrics.update(term_metrics(name, sums[name], len(learned), self.floors()[name]))
            metrics["loss"] += self.term_configs[name].weight * metrics[f"loss_{name}"]
        if self.regularizer is not None:
            metrics["loss"] += self.config.regularizer.weight * self.regularizer.value
            metrics["regularizer"] = self.regularizer.value
        return {**metrics, **self._health}

    @torch.no_grad()
    def fill(self, networks: Networks, batches: Batches, stage: Stage = silent_stage) -> None:
        """Store teacher embeddings before the first step, until no random row is left (`sop.fill = teacher`)."""
        if self.config.sop.fill != "teacher":
            return
        needed = max(term.memory.capacity for term in self.terms.values())
        for batch in batches_to_fill(batches, needed, self.config, networks.device, stage):
            views, images, patches = batch.masks.shape
            stored = [_stored_view(views)]
            kept = networks.normalized(batch.global_views[stored], batch.global_colors[stored])
            rows = torch.arange(images, device=networks.device) * patches + self._draw_stored_patches(images, patches)
            teacher = networks.teach(kept.flatten(0, 1), rows if self.has_patch else None, self.has_cls)
            image_ids = distributed.gather_rows(batch.image_ids.to(networks.device))
            for name, embeddings in (("cls", teacher.cls), ("patch", teacher.patches)):
                if name in self.terms:
                    self.terms[name].memory.store(distributed.gather_rows(embeddings), image_ids, ends_step=False)

    def _draw_stored_patches(self, images: int, patches: int) -> Int64[Tensor, " b"]:
        """Draw, uniformly, which patch of its second global view each of this rank's images will store.

        The draw is for the images of all ranks, so that it does not depend on the number of ranks.
        """
        count = images * distributed.world_size()
        everywhere = torch.randint(patches, (count,), generator=self.stored_patch_generator)
        device = next(iter(self.terms.values())).memory.image_ids.device
        return everywhere.view(-1, images)[distributed.rank()].to(device)

    def watched(self, count: int) -> dict[str, Watched]:
        """Return the rows of each memory that were stored last."""
        newest = {name: term.memory.newest_rows(count) for name, term in self.terms.items()}
        return {
            name: Watched(memory.embeddings[rows], memory.image_ids[rows], rows, memory.embeddings, memory.image_ids)
            for name, rows in newest.items()
            if (memory := self.terms[name].memory)
        }

    def prototypes(self, step: int) -> PrototypeSample | None:
        """Return the first prototypes of the [CLS] term, or of the patch term if that is the only one."""
        name = next(iter(self._drawn))
        return sample_prototypes(step, name, self._drawn[name])

    def floors(self) -> dict[str, float]:
        """Return ln K of each term, the loss where the teacher assigns each image to all prototypes alike."""
        return {name: math.log(term.num_anchors) for name, term in self.term_configs.items()}

    def needs(self, device: torch.device, images: int) -> Needs:
        """Return the sizes of memories, of kept neighbors, and of the members of one task."""
        columns = {name: term.num_anchors for name, term in self.term_configs.items()}
        return Needs(self.has_cls, self.has_patch, columns, sizes_of_terms(self.config, device, images))

    def digests(self) -> dict[str, str]:
        """Return digests of the memories, and of the generators of anchors and stored patches."""
        digests = {"draws of stored patches": generator_digest(self.stored_patch_generator)}
        for name, term in self.terms.items():
            digests[f"{name} memory"] = term.memory.digest()
            digests[f"draws of {name} anchors"] = generator_digest(term.maker.generator)
        if self.regularizer is not None:
            digests["draws of directions"] = generator_digest(self.regularizer.generator)
        return digests

    def state_dict(self) -> dict[str, Tensor]:
        """Return the memories with the ids of their images, the generators, and fixed anchors."""
        state = {"patch_generator": self.stored_patch_generator.get_state()}
        for name, term in self.terms.items():
            state.update(term.tensors(name))
        if self.regularizer is not None:
            state["regularizer_generator"] = self.regularizer.generator.get_state()
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a saved state; see `Objective.load_state_dict`."""
        self.stored_patch_generator.set_state(state["patch_generator"])
        for name, term in self.terms.items():
            term.load_tensors(name, state)
        if self.regularizer is not None:
            if "regularizer_generator" not in state:
                raise CheckpointError("the checkpoint has no regularizer: resume with the same regularizer.kind")
            self.regularizer.generator.set_state(state["regularizer_generator"])


def _stored_view(views: int) -> int:
    """Return the global view whose teacher embeddings are stored: the second.

    Departs: the paper's text says one view, its pseudo-code both; the released code takes the second.
    """
    return min(1, views - 1)
