"""A run's prototypes as images: anchors with their supports, now and early in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from sop_faiss.config import Config
from sop_faiss.errors import CheckpointError
from sop_faiss.model.checkpoint import read_state, read_tensors
from sop_faiss.objectives.sop_terms import Term, fit_memory
from sop_faiss.report.contact_sheet import SheetHit, Strip
from sop_faiss.report.run_report import ImageSection
from sop_faiss.sop.memory import Memory
from sop_faiss.sop.prototype_sample import PrototypeSample, SeenPrototype, sample_prototypes
from sop_faiss.sop.prototypes import PrototypeMaker
from sop_faiss.verbs.run_page.images import RunImages

_SUPPORTS_SHOWN = 8


def sample_of_checkpoint(config: Config, checkpoint: Path, images: int) -> PrototypeSample:
    """Draw the first prototypes of the step after a checkpoint, from its memory, searched on the CPU.

    Args:
        images: number of training images.

    Raises:
        CheckpointError: the checkpoint is damaged or of another configuration.
        ConfigError: too few rows remain for the supports.
    """
    name, term = next(iter(config.sop.terms().items()))
    capacity, exclude_same_image = fit_memory(config, name, images)
    tensors = read_tensors(checkpoint, "objective")
    rows = tensors.get(f"{name}.memory.embeddings")  # of distillation as wide as its teacher's features
    memory = Memory(capacity, config.model.embedding_dim if rows is None else rows.shape[-1], torch.Generator())
    maker = PrototypeMaker(
        memory,
        # fixed anchors are saved for all tasks; random ones of the first task are drawn first
        replace(term, tasks=1) if config.sop.anchors == "random" else term,
        contributions=config.sop.contributions,
        eps=config.sop.eps,
        anchors=config.sop.anchors,
        exclude_same_image=exclude_same_image,
        generator=torch.Generator(),
    )
    try:
        Term(memory, maker).load_tensors(name, tensors)
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"the memories of {checkpoint} cannot be loaded ({reason})") from None
    return sample_prototypes(int(read_state(checkpoint, verify=False)["step"]) + 1, name, maker.draw())


def early_sample(samples: Sequence[PrototypeSample]) -> PrototypeSample | None:
    """Return the earliest of a run's samples whose anchors are mostly of images, not random rows of the start."""
    known = (sample for sample in samples if 2 * sum(map(_is_of_image, sample.prototypes)) >= len(sample.prototypes))
    return next(known, samples[0] if samples else None)


def _is_of_image(prototype: SeenPrototype) -> bool:
    return prototype.image is not None and prototype.image >= 0


def prototype_section(title: str, sample: PrototypeSample, images: RunImages) -> ImageSection:
    """Show a sample as strips: the anchor on the left, then its supports, nearest first."""
    return ImageSection(title, _explain(sample, images), [_strip(each, images) for each in sample.prototypes])


def _strip(prototype: SeenPrototype, images: RunImages) -> Strip:
    anchor_gives, *others_give = prototype.contributions
    supports = zip(prototype.supports, prototype.similarities, others_give, strict=True)
    hits = [
        SheetHit(images.image(image), similarity, images.same_class(prototype.image, image), f"gives {weight:.2f}")
        for image, similarity, weight in list(supports)[:_SUPPORTS_SHOWN]
    ]
    empty = "This loss term has no supports: the anchor is the whole prototype."
    return Strip(images.image(prototype.image), hits, f"anchor, gives {anchor_gives:.2f}", empty)


def _explain(sample: PrototypeSample, images: RunImages) -> str:
    if sample.level == "cls":  # the name of the loss term
        what = "Random anchors (left) with their supports: rows of the memory of [CLS] embeddings, shown as the whole "
        what += "images whose views they are."
    else:
        what = "Random anchors of the memory of patch embeddings, shown as the whole images of the patches."
    if not any(prototype.supports for prototype in sample.prototypes):
        return what
    what += " The number is the similarity to the anchor; a member gives its weight to its own prototype, and the rest "
    what += "to all others in equal parts."
    if images.source.labels is not None:
        what += " Marks say whether the support is of the anchor's class; training knew no class."
    return what
