"""The complete configuration, and the checks that concern several sections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sop_faiss.config.checks import require, shown
from sop_faiss.config.data import DataConfig, MasksConfig, ViewsConfig
from sop_faiss.config.distill import DistillConfig
from sop_faiss.config.method import LossConfig, ModelConfig, NeighborsConfig, RegularizerConfig, SopConfig
from sop_faiss.config.phases import PhaseConfig
from sop_faiss.config.rivals import OBJECTIVES, DinoConfig, IbotConfig, MasslConfig, ObjectiveConfig
from sop_faiss.config.run import EvaluateConfig, OptimConfig, TrainConfig


@dataclass(frozen=True)
class Config:
    """Everything that determines a run."""

    data: DataConfig = field(default_factory=DataConfig)
    views: ViewsConfig = field(default_factory=ViewsConfig)
    masks: MasksConfig = field(default_factory=MasksConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    neighbors: NeighborsConfig = field(default_factory=NeighborsConfig)
    sop: SopConfig = field(default_factory=SopConfig)
    regularizer: RegularizerConfig = field(default_factory=RegularizerConfig)
    massl: MasslConfig = field(default_factory=MasslConfig)
    dino: DinoConfig = field(default_factory=DinoConfig)
    ibot: IbotConfig = field(default_factory=IbotConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    def __post_init__(self) -> None:
        self._check_objective()
        self._check_masks()
        if self.model.lora.rank:
            self._check_lora()
        by_epochs = not self.train.minutes  # else the number of epochs is not known yet
        require(
            self.optim.warmup_epochs <= self.train.epochs or not by_epochs,
            f"optim.warmup_epochs = {self.optim.warmup_epochs} exceeds train.epochs = {self.train.epochs}: "
            "the learning rate would never reach its peak; lower the warm-up",
        )
        projector_epochs = self.optim.projector_warmup_epochs
        require(
            projector_epochs == 0 or projector_epochs + self.optim.warmup_epochs < self.train.epochs or not by_epochs,
            f"optim.projector_warmup_epochs = {projector_epochs}, then optim.warmup_epochs = "
            f"{self.optim.warmup_epochs} for the backbone, leave nothing of train.epochs = {self.train.epochs}: "
            "lower the warm-ups",
        )
        require(
            self.evaluate.test != "holdout" or self.data.holdout_share > 0,
            "evaluate.test = holdout needs data.holdout_share above 0",
        )

    def _check_lora(self) -> None:
        """Check that no setting of the optimizer is about weights that stay as they are."""
        require(
            self.optim.kind == "adamw",
            f"optim.kind = {self.optim.kind} with model.lora: it is for the backbone's matrices, which stay as they "
            "are; set optim.kind=adamw",
        )
        require(
            self.optim.patch_embed_lr_scale == 1,
            f"optim.patch_embed_lr_scale = {self.optim.patch_embed_lr_scale} with model.lora: the patch embedding "
            "stays as it is; leave it out",
        )

    def in_phase(self, step: int, steps_per_epoch: int) -> Config:
        """Return the configuration with the sizes of views that a step has, counted from 0 (`train.phases`)."""
        for phase, end in zip(self.train.phases, self.train.phase_ends(steps_per_epoch), strict=True):
            if step < end:
                return self._with_sizes(phase)
        return self

    def each_phase(self) -> list[Config]:
        """Return the configuration with the sizes of views of each phase, in order; the last one is this."""
        return [*(self._with_sizes(phase) for phase in self.train.phases), self]

    def _with_sizes(self, phase: PhaseConfig) -> Config:
        local_size = self.views.local_size if phase.local_size is None else phase.local_size
        return replace(self, views=replace(self.views, global_size=phase.global_size, local_size=local_size))

    def term_weights(self) -> dict[str, float]:
        """Return the weight of each loss term of the objective, `cls` and `patch`; 0: it has no such term."""
        kind = self.objective.kind
        if kind in ("sop", "ibot"):
            settings = self.sop if kind == "sop" else self.ibot
            return {"cls": settings.cls.weight, "patch": settings.patch.weight}
        return {"cls": 1.0, "patch": 0.0}

    def _check_objective(self) -> None:
        """Check that only the chosen objective is configured."""
        kind = self.objective.kind
        for other, sections in OBJECTIVES.items():
            for section in (each for each in sections if each not in OBJECTIVES[kind]):
                name, value = next(_changed(getattr(self, section), section), ("", None))
                require(
                    not name,
                    f"{name} = {shown(value)} is a setting of objective.kind = {other}, and this run's is {kind}: "
                    f"leave it out, or set objective.kind={other}",
                )
        require(
            self.regularizer.kind == "none" or self.term_weights()["cls"] > 0,
            f"regularizer.kind = {self.regularizer.kind} with sop.cls.weight = 0, which embeds no complete views: set "
            "regularizer.kind=none, or give sop.cls a weight",
        )
        if kind == "distill":
            self.distill.check(self.sop)

    def _check_masks(self) -> None:
        """Check that the masks suit the objective."""
        kind, masks, weights = self.objective.kind, self.masks, self.term_weights()
        if kind in ("massl", "dino", "distill"):
            require(
                masks.kind == "none",
                f"masks.kind = {masks.kind} with objective.kind = {kind}, which masks nothing: set masks.kind=none",
            )
        is_fixed = masks.kind == "random" and masks.random_ratio is not None
        never = masks.random_ratio == 0 if is_fixed else 0 in (masks.probability, masks.ratio[1])
        require(
            masks.drop == 0 or weights["patch"] == 0,
            f"masks.drop = {masks.drop:g} with a patch loss, which needs every patch: set {kind}.patch.weight=0",
        )
        if weights["patch"] > 0:
            require(
                masks.kind != "none",
                f"masks.kind = none leaves the patch loss without patches: set {kind}.patch.weight=0 too",
            )
            require(
                not never,
                "masks hides no patch (probability or ratio 0), which leaves the patch loss without any: "
                f"raise it, or set {kind}.patch.weight=0",
            )
            require(
                masks.start_epoch < max(1, self.train.epochs) or self.train.minutes > 0,
                f"masks.start_epoch = {masks.start_epoch}: wanted fewer than train.epochs = {self.train.epochs}, or "
                "the patch loss would never start; lower it",
            )
        require(
            weights["cls"] > 0 or masks.start_epoch == 0,
            f"masks.start_epoch = {masks.start_epoch} with {kind}.cls.weight = 0: nothing would be learned before that "
            "epoch; set masks.start_epoch=0",
        )


def _changed(settings: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Find the settings of a section that are not at their defaults."""
    yield from _differences(asdict(settings), asdict(type(settings)()), prefix)


def _differences(mine: dict[str, Any], default: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in mine.items():
        if isinstance(value, dict):
            yield from _differences(value, default[name], f"{prefix}.{name}")
        elif value != default[name]:
            yield f"{prefix}.{name}", value
