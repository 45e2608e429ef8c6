"""Student and teacher: the same network twice, the teacher an exponential moving average (docs/method.md, 1)."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sop_faiss.config import Config
from sop_faiss.model.backbones.backbone import Backbone
from sop_faiss.model.backbones.build import build_backbone
from sop_faiss.model.projector import Projector

__all__ = ["Network", "Student", "build_student_and_teacher", "update_teacher"]


class Network(nn.Module):
    """Backbone and projector.

    Args:
        backbone: makes tokens.
        projector: makes embeddings of them.
        global_token: what stands for a whole view: `cls`, or `mean` of its patch tokens.
    """

    def __init__(self, backbone: Backbone, projector: Projector, global_token: str) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = projector
        self.global_token = global_token
        self._frozen = False

    def forward(
        self,
        images: Float[Tensor, "b 3 h w"],
        masks: Bool[Tensor, "b n"] | None = None,
        patches: Int64[Tensor, " m"] | None = None,
        wants_cls: bool = True,
    ) -> tuple[Float[Tensor, "rows d"], Float[Tensor, "m d"]]:
        """Embeddings of the views (none unless `wants_cls`), and of some of their patches; no others are projected.

        Args:
            images: normalized views of equal size.
            masks: patches that the network does not see.
            patches: which patches' embeddings are asked for, counted over the whole batch in row-major order.
            wants_cls: whether the views' own embeddings are asked for.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._frozen):
            features = self._features(images, masks, patches, wants_cls)
        embeddings = self.projector(features)
        views = len(images) if wants_cls else 0
        return embeddings[:views], embeddings[views:]

    def _features(
        self,
        images: Float[Tensor, "b 3 h w"],
        masks: Bool[Tensor, "b n"] | None,
        patches: Int64[Tensor, " m"] | None,
        wants_cls: bool,
    ) -> Float[Tensor, "rows f"]:
        if self.global_token != "mean" or not wants_cls:
            return self.backbone.read(images, masks, patches, wants_cls)
        tokens = self.backbone(images, masks).patches
        means = tokens.mean(1)
        return means if patches is None else torch.cat([means, tokens.flatten(0, 1)[patches]])

    def freeze_backbone(self, frozen: bool) -> None:
        """Whether the backbone stands still: no gradients are computed for it, no drop path or batch statistics."""
        if self._frozen != frozen:
            self._frozen = frozen
            self.backbone.train(not frozen)


class Student(nn.Module):
    """The student's pass over all views of a batch, as one module for data-parallel wrappers."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(
        self,
        global_views: Float[Tensor, "G b 3 h w"],
        local_views: Float[Tensor, "L b 3 s s"],
        masks: Bool[Tensor, "G b n"] | None,
        patches: Int64[Tensor, " m"] | None,
        wants_cls: bool,
    ) -> tuple[Float[Tensor, "V b d"] | None, Float[Tensor, "m d"]]:
        """Embeddings of all views, the masked global ones first, and of the named patches of the global ones.

        Either group of views may be empty; then its pass is left out.
        """
        groups = []
        if len(global_views):
            flat_masks = None if masks is None else masks.flatten(0, 1)
            groups.append(self.network(global_views.flatten(0, 1), flat_masks, patches, wants_cls))
        if len(local_views) and wants_cls:
            groups.append(self.network(local_views.flatten(0, 1)))
        patch = groups[0][1].clone()  # the local views' is empty; FSDP2 hooks on to what comes out, and warns of views
        if not wants_cls:
            return None, patch
        images = (global_views if len(global_views) else local_views).shape[1]
        return torch.cat([cls.unflatten(0, (-1, images)) for cls, _ in groups]), patch


def _build(config: Config, drop_path: float) -> Network:
    model = config.model
    backbone = build_backbone(model, config.views.global_size, drop_path)
    projector = Projector(backbone.feature_dim, model.projector_hidden, model.embedding_dim, model.projector_layers)
    return Network(backbone, projector, model.global_token)


def build_student_and_teacher(config: Config) -> tuple[Network, Network]:
    """Two networks with equal weights, drawn from `train.seed`; the teacher has no drop path and no gradients.

    The backbone's weights are those of `seeded_backbone` with the same seed.

    Raises:
        ConfigError: the backbone is unknown or lacks what the configuration asks for, or a view's side is not divisible
            by its patch.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        student = _build(config, config.model.drop_path)
        teacher = copy.deepcopy(student) if config.model.drop_path == 0 else _build(config, 0.0)
    student.backbone.check_settings(config)
    student.backbone.check_size("views.global_size", config.views.global_size)
    if config.views.local_count:
        student.backbone.check_size("views.local_size", config.views.local_size)
    teacher.load_state_dict(student.state_dict())
    if config.train.checkpoint_activations:
        student.backbone.checkpoint_activations()
    return student, teacher.requires_grad_(False)


@torch.no_grad()
def update_teacher(teacher: nn.Module, student: nn.Module, momentum: float) -> None:
    """teacher = momentum * teacher + (1 - momentum) * student, for every parameter; buffers are copied.

    Of a student in shards (FSDP2) one parameter at a time is put together.
    """
    ours: list[Tensor] = list(teacher.parameters())
    theirs: list[Tensor] = list(student.parameters())
    if any(isinstance(parameter, DTensor) for parameter in theirs):
        for mine, parameter in zip(ours, theirs, strict=True):
            mine.lerp_(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter, 1.0 - momentum)
    else:
        torch._foreach_lerp_(ours, theirs, 1.0 - momentum)
    for buffer, source in zip(teacher.buffers(), student.buffers(), strict=True):
        buffer.copy_(source)
