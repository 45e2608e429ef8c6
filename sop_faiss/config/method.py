"""The sections of a configuration about the method: networks, memories, prototypes, losses."""

from __future__ import annotations

from dataclasses import dataclass, field

from sop_faiss.config.checks import require, require_between, require_finite, require_one_of
from sop_faiss.config.lora import LoraConfig

_SIZES = {
    "patch_size": 1024,
    "embed_dim": 16_384,
    "depth": 512,
    "num_heads": 512,
    "window_size": 1024,
    "projector_layers": 64,
    "projector_hidden": 65_536,
    "embedding_dim": 16_384,
}
"""The largest sizes of a model: beyond any in use, and small enough to fail here and not in an allocation."""


@dataclass(frozen=True)
class ModelConfig:
    """Backbone and projector."""

    backbone: str = "vit_small_patch16_224"
    """A timm ViT (also with registers, RoPE or SwiGLU: DINOv2, DINOv3, Eva), Swin or convolutional network, or one of
    two for images of 32 to 64 pixels: `resnet_small`, residual, 307,360 weights, stride 4; `vit_tiny_convstem`, a ViT
    whose patches of 8 pixels come from 3 x 3 convolutions, so that a patch also sees the edges of its neighbors, masked
    ones too. Leave it at its default if `init` names the network."""
    init: str = ""
    """Weights that the backbone starts with; the projector's are always random. Empty: random ones from `train.seed`.
    `lite0`, `lite1` or `lite2`, whose weights the extra `encoder` installs; `timm:NAME` with `weights`; `dino:FILE`, an
    official DINO, iBOT, MaSSL or SOP checkpoint of a network like `backbone`; or a run directory, or a checkpoint in
    one (its teacher). They set `backbone` and its sizes, and `views.mean` and `views.std` where those are at their
    defaults. Position embeddings are resampled to `views.global_size`. Only the first step needs the file: a resumed
    run does not."""
    weights: str = ""
    """Weights file of `init=timm:NAME`: .safetensors, .pth or .bin (`sop-train --weights`). Code in it is never run."""
    by_position: bool = False
    """Match the tensors of `weights` by order and shape: weights of the same network saved under other names."""
    position_resize: str = "auto"
    """How a ViT's position embeddings are resized to views of another size than `views.global_size`. `timm`: bicubic,
    antialiased. `dino`: plain bicubic with 0.1 added to the size in its scale, as DINO and iBOT do, and so the paper's
    recipes. `auto`: that of `init`, which is `dino` for `dino:FILE` of a ViT without registers; else `timm`. It belongs
    to the encoder: exports keep it, and features and indices of one are not compared with those of the other."""
    batchnorm: str = "auto"
    """Of convolutional networks, and of the stem of `vit_tiny_convstem`. `frozen`: normalize with the running
    statistics, which stay as they are; scale and shift still learn. `batch`: as in training from scratch, the student
    normalizes all global views of a step together, whatever image and crop they are of, and all local views together;
    the teacher uses the student's running statistics, and only one process with the batch in one part is possible.
    `auto`: `frozen` with `init`, else `batch`."""
    patch_size: int | None = None
    """Overrides the backbone's own (ViT)."""
    embed_dim: int | None = None
    """Overrides the width (ViT; `resnet_small`: of the last stage, 128)."""
    depth: int | None = None
    """Overrides the number of blocks (ViT; `resnet_small`: of each stage, 1)."""
    num_heads: int | None = None
    """Overrides the attention heads (ViT)."""
    window_size: int | None = None
    """Overrides the attention window (Swin)."""
    layer_scale: float | None = None
    """Overrides LayerScale (ViT): a learned factor of each channel of every residual branch, which starts at this;
    1e-5 in DINOv2 and DINOv3. null: the backbone's own; a plain ViT has none."""
    registers: int | None = None
    """Overrides the registers (ViT): learned tokens beside [CLS] that stand for nothing, 4 in DINOv2 with registers
    and DINOv3. RoPE and SwiGLU have no field: choose a backbone that has them, as `vit_small_patch16_dinov3` (RoPE)
    or `vit_small_plus_patch16_dinov3` (both), of any `embed_dim` and `depth`."""
    first_layer: str = "random"
    """The convolution that sees the pixels. `random`: the backbone's own weights. `whitened`: principal components of
    patches of the training images, scaled to unit variance, with both signs. `frozen`: these, and they are not
    trained. Both need random access to the images, and no `init`."""
    drop_path: float = 0.1
    """Stochastic depth of the student; the teacher has none."""
    cls_token_std: float = 1e-6
    """Standard deviation of the [CLS] token that a ViT starts with. Departs: iBOT starts with 0.02, which this sets;
    1e-6 is timm's, and leaves its Eva family with timm's 0.02."""
    global_token: str = "cls"
    """What represents the whole view: `cls`, or `mean` of the final patch tokens (Swin: always `mean`). Of
    convolutional networks `cls` is their own pooling, and there is no `mean`."""
    projector_layers: int = 3
    """Linear layers of the projector."""
    projector_hidden: int = 2048
    """Width of its hidden layers."""
    embedding_dim: int = 256
    """d: dimension of the unit-norm embeddings and of the memories. With `objective.kind=distill` it is the width of
    the teacher's features, whatever is set here."""
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        require_finite("model", self)
        require(bool(self.backbone), "model.backbone is empty: wanted the name of a timm network")
        require_one_of("model.global_token", self.global_token, ("cls", "mean"))
        require_one_of("model.position_resize", self.position_resize, ("auto", "timm", "dino"))
        require_one_of("model.batchnorm", self.batchnorm, ("auto", "frozen", "batch"))
        require(
            bool(self.init) or not (self.weights or self.by_position),
            "model.weights and model.by_position say how model.init is read, which is empty: add model.init=timm:NAME",
        )
        require(
            0 < self.cls_token_std <= 1, f"model.cls_token_std = {self.cls_token_std}: wanted more than 0, at most 1"
        )
        require(0.0 <= self.drop_path < 1.0, f"model.drop_path = {self.drop_path}: wanted 0 <= drop_path < 1")
        require_one_of("model.first_layer", self.first_layer, ("random", "whitened", "frozen"))
        require(
            self.first_layer == "random" or not self.init,
            f"model.first_layer = {self.first_layer} would replace weights of model.init = {self.init}: leave one out",
        )
        require(
            not self.lora.rank or bool(self.init),
            f"model.lora.rank = {self.lora.rank} without model.init: random weights would stay as they are; name an "
            "encoder, as model.init=lite0",
        )
        require(
            not self.lora.rank or self.batchnorm != "batch",
            "model.batchnorm = batch with model.lora: statistics that follow the batch would be part of the encoder, "
            "and not of the adapter; set model.batchnorm=frozen",
        )
        scale = self.layer_scale
        require(scale is None or 0 < scale <= 1, f"model.layer_scale = {scale}: wanted more than 0, at most 1")
        if self.registers is not None:
            require_between("model.registers", self.registers, 0, 1024)
        for name, most in _SIZES.items():
            value = getattr(self, name)
            if value is not None:
                require_between(f"model.{name}", value, 2 if name in ("projector_hidden", "embedding_dim") else 1, most)
        if self.embed_dim is not None and self.num_heads is not None:
            require(
                self.embed_dim % self.num_heads == 0,
                f"model.embed_dim = {self.embed_dim} is not divisible by model.num_heads = {self.num_heads}",
            )


@dataclass(frozen=True)
class NeighborsConfig:
    """How the nearest rows of the anchors are found."""

    engine: str = "auto"
    """`faiss`, `torch` (exact, by blocks), or `auto`: FAISS on a CPU; on a GPU the faster of both, by a trial at the
    first search, or torch if FAISS cannot search on the device."""
    precision: str = "float32"
    """`float32`, or `bf16`: 2k + 32 candidates are searched for in bfloat16 and scored again in float32. For GPUs. If
    many rows are nearly as similar as the k-th, another one may be taken; similarities are exact."""
    exclude_same_image: str = "auto"
    """Leave rows of the anchor's own image out of its supports: `always`, `never`, or `auto`: if the data set has fewer
    images than twice the memory's capacity, so that the memory has several rows of an image."""
    refresh: str = "auto"
    """`full`: search for all anchors every step. `incremental`: keep each row's nearest rows and update only what a
    store has changed; the same neighbors except for ties; not with sop.anchors = fixed_vectors. `auto`: the
    cheaper one."""
    index: str = "exact"
    """`exact`, or for memories of millions of rows on the CPU an approximate index: `ivf` (rows in lists around k-means
    centroids) or `hnsw` (a graph; slow to build). Its measured recall is in the metrics: `neighbor_recall_cls`."""
    rebuild_every_steps: int = 100
    """The approximate index is rebuilt after this many steps, and when half of the rows are new. Rows stored since then
    are searched exactly."""
    probes: int = 16
    """IVF lists that are searched per anchor, of about sqrt(capacity) lists; more find more and take longer."""
    ef_search: int = 64
    """Length of HNSW's candidate list; a longer one finds more and takes longer."""

    def __post_init__(self) -> None:
        require_finite("neighbors", self)
        require_one_of("neighbors.engine", self.engine, ("auto", "faiss", "torch"))
        require_one_of("neighbors.precision", self.precision, ("float32", "bf16"))
        require_one_of("neighbors.exclude_same_image", self.exclude_same_image, ("auto", "always", "never"))
        require_one_of("neighbors.refresh", self.refresh, ("auto", "full", "incremental"))
        require_one_of("neighbors.index", self.index, ("exact", "ivf", "hnsw"))
        for name in ("rebuild_every_steps", "probes", "ef_search"):
            require(getattr(self, name) >= 1, f"neighbors.{name} = {getattr(self, name)}: wanted 1 or more")
        require(
            self.index == "exact" or self.refresh != "incremental",
            f"neighbors.index = {self.index} and neighbors.refresh = incremental exclude each other, since kept "
            "neighbors are exact: set neighbors.index=exact or neighbors.refresh=auto",
        )
        require(
            self.index == "exact" or self.engine != "torch",
            f"neighbors.index = {self.index} is an index of FAISS, which neighbors.engine = torch does not use: set "
            "neighbors.index=exact or neighbors.engine=auto",
        )
        require(
            self.index == "exact" or self.precision == "float32",
            f"neighbors.index = {self.index} with neighbors.precision = bf16: an index searches in float32; set "
            "neighbors.precision=float32, or neighbors.index=exact",
        )
        require(
            self.precision == "float32" or self.refresh != "incremental",
            "neighbors.precision = bf16 with neighbors.refresh = incremental: kept lists need exact searches; "
            "set neighbors.refresh=full, or neighbors.precision=float32",
        )


@dataclass(frozen=True)
class TermConfig:
    """One loss term: its weight, its memory and its prototypes (docs/method.md, 2 to 4)."""

    weight: float = 1.0
    """lambda: factor of the term in the loss; 0 switches it off, with its memory, search and forward pass."""
    capacity: int = 65536
    """N, rows of its memory; at most as many as there are training images."""
    num_anchors: int = 4096
    """K, prototypes (SOPs) per task."""
    num_supports: int = 8
    """k, supports per anchor; a prototype has S = k + 1 members."""
    tasks: int = 4
    """T, independent draws of prototypes per step; the loss is their mean."""


@dataclass(frozen=True)
class SopConfig:
    """Self-organizing prototypes (docs/method.md, 3)."""

    cls: TermConfig = field(default_factory=TermConfig)
    """The [CLS] term: lambda_1 and N_C."""
    patch: TermConfig = field(
        default_factory=lambda: TermConfig(capacity=8192, num_anchors=512, num_supports=0, tasks=1)
    )
    """The patch term: lambda_2 and N_P."""
    fill: str = "random"
    """First contents of the memories: `random` unit vectors (the paper), or `teacher` embeddings of a fill pass."""
    contributions: str = "similarity"
    """`similarity` (the released code's, clamped), `smooth` (the paper's pseudo-code), or `one_hot`."""
    eps: float = 0.1
    """The anchor gives 1 - eps to its own prototype."""
    anchors: str = "random"
    """`random` every step, `fixed_rows` (same positions), or `fixed_vectors` (copied at step 0)."""

    def __post_init__(self) -> None:
        require_finite("sop", self)
        require_one_of("sop.contributions", self.contributions, ("similarity", "smooth", "one_hot"))
        require_one_of("sop.anchors", self.anchors, ("random", "fixed_rows", "fixed_vectors"))
        require_one_of("sop.fill", self.fill, ("random", "teacher"))
        require(bool(self.terms()), "sop.cls.weight and sop.patch.weight are both 0: nothing would be learned")
        for name, term in (("cls", self.cls), ("patch", self.patch)):
            require_finite(f"sop.{name}", term)
            require(term.weight >= 0, f"sop.{name}.weight = {term.weight}: wanted 0 or more")
            require(term.capacity >= 2, f"sop.{name}.capacity = {term.capacity}: wanted 2 or more")
            require(term.num_anchors >= 2, f"sop.{name}.num_anchors = {term.num_anchors}: wanted 2 or more")
            require(term.num_supports >= 0, f"sop.{name}.num_supports = {term.num_supports}: wanted 0 or more")
            require_between(f"sop.{name}.tasks", term.tasks, 1, 1000)
            limit = 1.0 - 1.0 / term.num_anchors
            require(
                0.0 <= self.eps < limit,
                f"sop.eps = {self.eps}: wanted 0 <= eps < 1 - 1/num_anchors = {limit:.3f}, "
                "or an anchor would give more to other prototypes than to its own",
            )
            require(
                term.weight == 0 or term.num_anchors <= term.capacity,
                f"sop.{name}.num_anchors = {term.num_anchors} exceeds sop.{name}.capacity = {term.capacity}: "
                "lower num_anchors or raise capacity",
            )
            require(
                term.weight == 0 or term.num_supports < term.capacity,
                f"sop.{name}.num_supports = {term.num_supports}: wanted fewer than sop.{name}.capacity = "
                f"{term.capacity}, since an anchor is not its own support",
            )

    def terms(self) -> dict[str, TermConfig]:
        """Return the loss terms that have a weight, by name."""
        return {name: term for name, term in (("cls", self.cls), ("patch", self.patch)) if term.weight}


@dataclass(frozen=True)
class RegularizerConfig:
    """A loss beside SOP's that spreads the images of a batch apart (docs/method.md, 4)."""

    kind: str = "none"
    """`none`; `koleo` (DINOv2): away from the nearest image, by the log of the distance; `variance_covariance`
    (VICReg): each dimension spread to a standard deviation of 1, and none a copy of another; `sigreg` (LeJEPA): along
    random directions as a standard normal distribution is. Of the student's global views, each view by itself, over
    the images of all ranks and parts: with `train.accumulate` at the price of one more forward pass of the student."""
    weight: float = 0.1
    """Its factor in the loss. DINOv2's is 0.1. `variance_covariance` is scaled as VICReg's terms are relative to its
    25; `sigreg` is a statistic that grows with the batch, and LeJEPA's weight is 0.02 to 0.05."""
    on: str = "auto"
    """`features`, what the backbone makes of a view; `embeddings`, what the projector makes of them; or `auto`, as in
    their papers: `features` for `koleo`, else `embeddings`. KoLeo compares directions; the two others also fix lengths,
    of features as they are and of embeddings times sqrt(embedding_dim)."""
    covariance_weight: float = 0.04
    """Of `variance_covariance`: weight of the covariances relative to the variances'; VICReg has 1 to 25."""
    directions: int = 1024
    """Of `sigreg`: random directions, drawn again in each step."""

    def __post_init__(self) -> None:
        require_finite("regularizer", self)
        require_one_of("regularizer.kind", self.kind, ("none", "koleo", "variance_covariance", "sigreg"))
        require_one_of("regularizer.on", self.on, ("auto", "features", "embeddings"))
        require(
            self.weight > 0, f"regularizer.weight = {self.weight}: wanted more than 0; regularizer.kind=none is off"
        )
        require(
            self.covariance_weight >= 0,
            f"regularizer.covariance_weight = {self.covariance_weight}: wanted 0 or more",
        )
        require_between("regularizer.directions", self.directions, 1, 65_536)
        for name in ("weight", "on", "covariance_weight", "directions") if self.kind == "none" else ():
            value = getattr(self, name)
            require(
                value == type(self).__dataclass_fields__[name].default,
                f"regularizer.{name} = {value} with regularizer.kind = none: leave it out, or name the kind",
            )

    def of_features(self) -> bool:
        """Return whether features are regularized, and not embeddings."""
        return self.on == "features" or (self.on == "auto" and self.kind == "koleo")


@dataclass(frozen=True)
class LossConfig:
    """Temperatures (docs/method.md, 4)."""

    student_temp: float = 0.1
    """Temperature of the student's assignments."""
    teacher_temp_start: float = 0.04
    """Teacher temperature at the first step; a lower one makes sharper assignments."""
    teacher_temp: float = 0.07
    """Teacher temperature from `teacher_temp_epochs` on; linear from `teacher_temp_start` before."""
    teacher_temp_epochs: float = 30.0
    """Epochs over which the teacher temperature rises."""

    def __post_init__(self) -> None:
        require_finite("loss", self)
        for name in ("student_temp", "teacher_temp_start", "teacher_temp"):
            require(getattr(self, name) >= 0.005, f"loss.{name} = {getattr(self, name)}: wanted 0.005 or more")
        require_between("loss.teacher_temp_epochs", self.teacher_temp_epochs, 0, 1_000_000)
