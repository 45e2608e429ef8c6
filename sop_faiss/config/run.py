"""The sections of a configuration about the run: optimizer, length and bookkeeping, online evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from sop_faiss.config.checks import require, require_between, require_finite, require_one_of, require_share
from sop_faiss.config.phases import PhaseConfig, check_phases


@dataclass(frozen=True)
class OptimConfig:
    """AdamW or Muon, their schedules, and the teacher's momentum (docs/method.md, 5)."""

    kind: str = "adamw"
    """`adamw`, or `muon` (torch's) for the weights of linear layers and ordinary convolutions above the backbone's
    stem, a convolution's as a matrix of one row per output; all others stay with AdamW. Not with shards (FSDP2)."""
    muon_lr_scale: float = 1.0
    """Of `muon`: its learning rate divided by AdamW's. At 1 it takes AdamW's, since its updates are scaled to about the
    size of AdamW's."""
    muon_momentum: float = 0.95
    """Of `muon`: decay of the mean gradient (Nesterov's), in the place of `beta1`."""
    base_lr: float = 5e-4
    """Learning rate for a batch of 256; the peak is base_lr * batch_size / 256, if `lr_scaling` is linear."""
    lr_scaling: str = "linear"
    """How the peak follows the batch: `linear` (DINO, iBOT), or `sqrt`: base_lr * sqrt(batch_size / 256), as DINOv2,
    whose base is that of a batch of 1024, twice this one."""
    min_lr: float = 1e-6
    """Where the cosine ends."""
    warmup_epochs: float = 10.0
    """Epochs over which the learning rate rises from 0 to its peak."""
    weight_decay: float = 0.04
    """Weight decay at the first step."""
    weight_decay_end: float = 0.4
    """Cosine from `weight_decay`; none on biases and 1-d parameters."""
    decay_mask_token: bool = False
    """Decay the mask token, too, as iBOT does, which keeps it as a matrix of one row. Here it is a 1-d parameter."""
    projector_warmup_epochs: float = 0.0
    """For these epochs the backbone is frozen and only the projector learns, so that a random projector does not
    corrupt a backbone with weights of `model.init`; these steps are cheaper. Then the backbone's learning rate rises
    from 0 over `warmup_epochs`."""
    layer_decay: float = 1.0
    """Layer-wise learning rates, as in BEiT: the projector's times this for the backbone's last layer, and times this
    again for each layer below, as timm counts layers. 1: the same for all layers."""
    patch_embed_lr_scale: float = 1.0
    """The patch embedding's learning rate divided by what it would be, `layer_decay` included; DINOv2: 0.2."""
    clip_norm: float = 3.0
    """Gradient norm limit of each parameter by itself; 0 switches it off."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.999
    """AdamW's decay of the mean squared gradient."""
    momentum: float = 0.996
    """The teacher keeps this fraction of itself per step (EMA); cosine to `momentum_end`."""
    momentum_end: float = 1.0
    """Where the momentum ends; at 1 the teacher stops changing."""

    def __post_init__(self) -> None:
        require_finite("optim", self)
        require(self.base_lr > 0, f"optim.base_lr = {self.base_lr}: wanted more than 0")
        require(self.min_lr >= 0, f"optim.min_lr = {self.min_lr}: wanted 0 or more")
        for name in ("warmup_epochs", "projector_warmup_epochs"):
            require(getattr(self, name) >= 0, f"optim.{name} = {getattr(self, name)}: wanted 0 or more")
        require_one_of("optim.kind", self.kind, ("adamw", "muon"))
        require_one_of("optim.lr_scaling", self.lr_scaling, ("linear", "sqrt"))
        for name in ("layer_decay", "patch_embed_lr_scale"):
            require(
                0 < getattr(self, name) <= 1, f"optim.{name} = {getattr(self, name)}: wanted more than 0, at most 1"
            )
        scale = self.muon_lr_scale
        require(0 < scale <= 1000, f"optim.muon_lr_scale = {scale}: wanted more than 0, at most 1000")
        for name, default in (("muon_lr_scale", 1.0), ("muon_momentum", 0.95)):
            require(
                self.kind == "muon" or getattr(self, name) == default,
                f"optim.{name} = {getattr(self, name)} is a setting of optim.kind = muon, and this run's is "
                f"{self.kind}: leave it out, or set optim.kind=muon",
            )
        for name in ("weight_decay", "weight_decay_end", "clip_norm"):
            require(getattr(self, name) >= 0, f"optim.{name} = {getattr(self, name)}: wanted 0 or more")
        for name in ("beta1", "beta2", "muon_momentum"):
            require(0 <= getattr(self, name) < 1, f"optim.{name} = {getattr(self, name)}: wanted 0 <= beta < 1")
        for name in ("momentum", "momentum_end"):
            require_share(f"optim.{name}", getattr(self, name))


@dataclass(frozen=True)
class TrainConfig:
    """Length, size and bookkeeping of the run."""

    epochs: float = 800.0
    """Passes over the data; schedules are stretched over them."""
    minutes: float = 0.0
    """Train for this many minutes instead of `epochs` (0: no), without start-up, scores and time in which the run was
    stopped. The first twentieth of the time measures the speed, and then the number of steps is decided once, so that
    all schedules end with the time; durations in epochs (warm-ups, the teacher's temperature) stay as they are. The
    decision is kept in checkpoints: from there the run is made of steps as any other and is resumed exactly, but
    another run, on the same machine too, has another number of steps. A run that becomes slower ends at 1.1 times this.
    `stop_after_steps` may end it sooner. Not with `phases`, whose speeds differ."""
    phases: tuple[PhaseConfig, ...] = ()
    """Other sizes of the views in the first parts of the run: low resolution first, then full. A list as
    `[{until: 0.7, global_size: 96, local_size: 48}]`: up to this fraction of the run's steps (of the schedules', not of
    `stop_after_steps`) views have these sides in pixels, afterwards those of `views`; without `local_size` local views
    have theirs all the time. Position embeddings are resampled; blur stays in pixels; masks hide the same fractions.
    Scores are measured at `views.global_size` all the time."""
    batch_size: int = 1024
    """Images per step over all ranks."""
    accumulate: int = 1
    """Process a rank's images in this many equal parts, one after the other, with less memory. With model.drop_path=0
    the step is the same except for the order of sums; with drop path each part has its own draw from the same
    distribution. A batch norm that uses the batch's statistics allows one part only."""
    views_apart: bool = False
    """Process the local views, forward and backward, before the global ones, with less memory. As with `accumulate`,
    the step is the same except for the order of sums and another draw of drop path."""
    checkpoint_activations: bool = False
    """Keep only the inputs of the student's blocks, and compute the rest again in the backward pass: the same results
    with far less memory and a third more time. Not with batch norms that update statistics (`model.batchnorm`)."""
    compile: str = "none"
    """torch.compile: `none`, `backbone` (each block), or `step` (complete student and teacher, with the projector). If
    it cannot work, the log says why, and the run continues without."""
    parallel: str = "auto"
    """How ranks share the student: `ddp` (each has all of it), `fsdp` (FSDP2: each has a part of every parameter,
    gradient and optimizer state), or `auto`: fsdp from 250 million parameters on (ViT-L). Ignored with one rank."""
    check_ranks_every_steps: int = 100
    """Compare memories, draws and teacher of all ranks by checksum every this many steps (0: never)."""
    seed: int = 0
    """Of everything random: weights, order, views, masks, draws of prototypes."""
    precision: str = "auto"
    """`float32`, `bf16` (autocast of the backbone), or `auto`: bf16 on CUDA, float32 elsewhere."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`."""
    stop_after_steps: int = 0
    """Save and stop after this step, with schedules unchanged (0: run to the end)."""
    checkpoint_every_steps: int = 1000
    """Save a checkpoint every this many steps, and at the end."""
    keep_last: int = 3
    """Newest checkpoints to keep, in addition to those of `keep_every_steps`."""
    keep_every_steps: int = 0
    """Keep every checkpoint at a multiple of this permanently (0: none)."""
    background_save: bool = True
    """Copy the contents of a checkpoint at its step, and write them from a thread while training continues. The copy
    takes the size of a checkpoint in main memory. Off: no copy, and each save waits for the disk."""
    log_every_steps: int = 20
    """Write a line of metrics.jsonl every this many steps; only in these steps, health is measured and alarms are
    checked."""
    stop_on: str = "certain"
    """What stops a run: `non_finite` numbers; `certain`: these, and a collapse beyond doubt (all images have one
    embedding); `any`: every alarm. Others only warn (docs/metrics.md)."""
    alarm_warmup_steps: int | None = None
    """Alarms are checked after this step (numbers that are not finite always stop a run). null: after both warm-ups of
    `optim`, and 100 steps at least, since fresh networks make embeddings that are all alike."""
    wandb_project: str = ""
    """Log to this project at Weights & Biases, too (empty: no; needs `pip install 'sop-faiss[wandb]'`).
    TensorBoard events are always written."""

    def __post_init__(self) -> None:
        require_finite("train", self)
        require(0 < self.epochs <= 1e6, f"train.epochs = {self.epochs}: wanted more than 0, and at most 1,000,000")
        require(0 <= self.minutes <= 1e7, f"train.minutes = {self.minutes}: wanted 0 or more, at most 10,000,000")
        check_phases(self.phases)
        require(
            not (self.phases and self.minutes),
            f"train.minutes = {self.minutes:g} with train.phases: the first steps do not show how long later ones of "
            "another size take; set train.epochs instead, or leave out the phases",
        )
        require(self.batch_size >= 1, f"train.batch_size = {self.batch_size}: wanted 1 or more")
        require(0 <= self.seed < 2**63, f"train.seed = {self.seed}: wanted 0 or more")
        require_one_of("train.precision", self.precision, ("auto", "float32", "bf16"))
        require_one_of("train.device", self.device, ("auto", "cpu", "cuda"))
        require_one_of("train.compile", self.compile, ("none", "backbone", "step"))
        require_one_of("train.parallel", self.parallel, ("auto", "ddp", "fsdp"))
        for name in ("stop_after_steps", "keep_every_steps", "check_ranks_every_steps"):
            require(getattr(self, name) >= 0, f"train.{name} = {getattr(self, name)}: wanted 0 or more")
        require_one_of("train.stop_on", self.stop_on, ("non_finite", "certain", "any"))
        warmup = self.alarm_warmup_steps
        require(warmup is None or warmup >= 0, f"train.alarm_warmup_steps = {warmup}: wanted 0 or more, or null")
        for name in ("accumulate", "checkpoint_every_steps", "keep_last", "log_every_steps"):
            require(getattr(self, name) >= 1, f"train.{name} = {getattr(self, name)}: wanted 1 or more")

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the optimizer updates of a run of `epochs`."""
        return max(1, round(self.epochs * steps_per_epoch))

    def phase_ends(self, steps_per_epoch: int) -> list[int]:
        """Return the number of steps until the end of each of `phases`."""
        return [round(phase.until * self.total_steps(steps_per_epoch)) for phase in self.phases]


@dataclass(frozen=True)
class EvaluateConfig:
    """Quality while training: features of the teacher's backbone, scored every so many steps.

    k-NN top-1 where `test` is named (`knn_top1_k20`), mAP where `retrieval` is (`map`; `map_medium` and `map_hard` of
    graded sets), and without both, and without any labels, recall@1 between two views of an image
    (`view_recall_at_1`).
    """

    train: str = ""
    """SRC of the labeled gallery."""
    test: str = ""
    """SRC of the labeled queries; `holdout`: the images that `data.holdout_share` leaves out, scored against the
    images trained on."""
    retrieval: str = ""
    """A retrieval data set as `sop-retrieve --dataset` takes it: roxford5k, rparis6k or a directory."""
    retrieval_root: str = ""
    """The directory that holds the data set's directory (empty: the current one)."""
    retrieval_protocol: str = "auto"
    """`revisitop`, `dino`, `plain`, or `auto`: what suits the ground truth."""
    view_recall: str = "auto"
    """Recall@1 between two views, cropped as global views are: the fraction of images whose one view is nearer
    to their other view than to that of any other image, both ways. `always`, `never`, or `auto`: where nothing else is
    measured. The images are those of `data.holdout_share`; without it they are trained on, so that a high score is
    about seen images only."""
    view_colors: bool = False
    """Change the colors of these views, too, as those of the first and the second global view. Early in training that
    hides what is learned: on 1,264 photos mAP rose from 4.1 to 6.7 %, recall@1 without from 9.8 to 18.4 %, with them
    from 1.1 to 1.2 %."""
    view_images: int = 1000
    """The most images for it, a seeded draw. Among more images a view is harder to find: compare equal numbers."""
    label_free: bool = False
    """Measure the other numbers without labels on the same views: RankMe, LiDAR, alpha-ReQ and the entropy of
    assignments (docs/metrics.md says what each is worth). They cost no forward passes over recall between views, which
    is then measured, too."""
    every_steps: int = 0
    """Score at step 0, at every multiple of this, and at the last step (0: never)."""
    best_by: str = ""
    """The score that `best/` follows (empty: the first that is measured, of k-NN, mAP and recall@1)."""
    background: str = "auto"
    """Whether the loop continues while a copy of the teacher is scored: `always`, `never`, or `auto`: on CUDA. On a CPU
    both would need the same cores. Losses are the same, bit for bit, either way."""
    pooling: str = ""
    """How the scored feature is made of the last block's tokens, as `--pooling` of the commands (empty: the backbone's
    own). `quadrants` suits small images of centered things."""
    mirrored: bool = False
    """Add the feature of the mirrored image, as `--mirrored` of the commands: scores take twice the time."""
    k: int = 20
    """Neighbors of the k-NN score."""
    batch_size: int = 256
    """Images per forward pass of a score."""
    max_train_images: int = 0
    """Use only this many gallery images, a seeded draw (0: all)."""

    def __post_init__(self) -> None:
        require_finite("evaluate", self)
        require(self.every_steps >= 0, f"evaluate.every_steps = {self.every_steps}: wanted 0 or more")
        require(self.k >= 1, f"evaluate.k = {self.k}: wanted 1 or more")
        require_between("evaluate.batch_size", self.batch_size, 1, 65_536)
        require(self.max_train_images >= 0, f"evaluate.max_train_images = {self.max_train_images}: wanted 0 or more")
        require(self.view_images >= 2, f"evaluate.view_images = {self.view_images}: wanted 2 or more")
        require_one_of("evaluate.retrieval_protocol", self.retrieval_protocol, ("auto", "revisitop", "dino", "plain"))
        for name in ("view_recall", "background"):
            require_one_of(f"evaluate.{name}", getattr(self, name), ("auto", "always", "never"))
        require(
            not self.every_steps or bool(self.test or self.retrieval) or self.view_recall != "never",
            f"evaluate.every_steps = {self.every_steps} with nothing to score: set evaluate.test or "
            "evaluate.retrieval, or set evaluate.view_recall=auto",
        )
        require(
            not self.label_free or self.view_recall != "never",
            "evaluate.label_free = true with evaluate.view_recall = never: both are of the same views; set "
            "evaluate.view_recall=auto",
        )
        require(
            bool(self.every_steps) or not self.best_by,
            f"evaluate.best_by = {self.best_by} with evaluate.every_steps = 0: nothing is scored; set every_steps",
        )
        require(
            bool(self.retrieval) or not self.retrieval_root,
            f"evaluate.retrieval_root = {self.retrieval_root} without evaluate.retrieval: name the data set",
        )
        require(
            self.test != "holdout" or not self.train,
            "evaluate.test = holdout is scored against the other training images: leave evaluate.train empty",
        )
        require(
            self.test == "holdout" or bool(self.train) == bool(self.test),
            "evaluate.train and evaluate.test: wanted both or neither",
        )
