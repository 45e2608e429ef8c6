"""The complete configuration, and the checks that concern several sections."""

from __future__ import annotations

from dataclasses import dataclass, field

from sop_faiss.config.checks import require
from sop_faiss.config.data import DataConfig, MasksConfig, ViewsConfig
from sop_faiss.config.method import LossConfig, ModelConfig, NeighborsConfig, SopConfig
from sop_faiss.config.run import EvaluateConfig, OptimConfig, TrainConfig

__all__ = ["Config"]


@dataclass(frozen=True)
class Config:
    """Everything that determines a run."""

    data: DataConfig = field(default_factory=DataConfig)
    views: ViewsConfig = field(default_factory=ViewsConfig)
    masks: MasksConfig = field(default_factory=MasksConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    neighbors: NeighborsConfig = field(default_factory=NeighborsConfig)
    sop: SopConfig = field(default_factory=SopConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    def __post_init__(self) -> None:
        require(
            self.sop.patch.weight == 0 or self.masks.kind != "none",
            "masks.kind = none leaves the patch loss without patches: set sop.patch.weight=0 too",
        )
        masks = self.masks
        is_fixed = masks.kind == "random" and masks.random_ratio is not None
        never = masks.random_ratio == 0 if is_fixed else 0 in (masks.probability, masks.ratio[1])
        require(
            self.sop.patch.weight == 0 or masks.kind == "none" or not never,
            "masks hides no patch (probability or ratio 0), which leaves the patch loss without any: "
            "raise it, or set sop.patch.weight=0",
        )
        require(
            self.sop.patch.weight == 0 or masks.start_epoch < max(1, self.train.epochs),
            f"masks.start_epoch = {masks.start_epoch}: wanted fewer than train.epochs = {self.train.epochs}, or the "
            "patch loss would never start; lower it",
        )
        require(
            self.sop.cls.weight > 0 or masks.start_epoch == 0,
            f"masks.start_epoch = {masks.start_epoch} with sop.cls.weight = 0: nothing would be learned before that "
            "epoch; set masks.start_epoch=0",
        )
        require(
            self.optim.warmup_epochs <= self.train.epochs,
            f"optim.warmup_epochs = {self.optim.warmup_epochs} exceeds train.epochs = {self.train.epochs}: "
            "the learning rate would never reach its peak; lower the warm-up",
        )
        projector_epochs = self.optim.projector_warmup_epochs
        require(
            projector_epochs == 0 or projector_epochs + self.optim.warmup_epochs < self.train.epochs,
            f"optim.projector_warmup_epochs = {projector_epochs}, then optim.warmup_epochs = "
            f"{self.optim.warmup_epochs} for the backbone, leave nothing of train.epochs = {self.train.epochs}: "
            "lower the warm-ups",
        )
        require(
            self.evaluate.test != "holdout" or self.data.holdout_share > 0,
            "evaluate.test = holdout needs data.holdout_share above 0",
        )
