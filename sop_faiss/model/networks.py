"""Student and teacher: the same network twice, the teacher an exponential moving average (docs/method.md, 1)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Int64, UInt8
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sop_faiss.config import Config, ViewsConfig
from sop_faiss.data.views.device_color import normalize
from sop_faiss.model.backbones.backbone import Backbone
from sop_faiss.model.backbones.build import build_backbone
from sop_faiss.model.backbones.first_layer import first_layer
from sop_faiss.model.low_rank import add_low_rank, freeze_base


class Embedded(NamedTuple):
    """What a network computes of some views: features of its backbone, and embeddings of its heads."""

    cls_features: Float[Tensor, "*views f"]
    patch_features: Float[Tensor, "m f"]
    cls: Float[Tensor, "*views c"]
    """One row for each whole view; no rows if they were not asked for."""
    patches: Float[Tensor, "m p"]
    """One row for each patch that was asked for, in that order."""


class Network(nn.Module):
    """A backbone and its heads.

    Args:
        backbone: makes tokens.
        heads: make embeddings of them: `shared` of all tokens, then `last` of all embeddings, or `cls` of those of
            whole views and `patch` of those of patches. Each is optional.
        global_token: what stands for a whole view: `cls`, or `mean` of its patch tokens.
    """

    def __init__(self, backbone: Backbone, heads: nn.ModuleDict, global_token: str) -> None:
        super().__init__()
        self.backbone = backbone
        self.heads = heads
        self.global_token = global_token
        self._frozen = False

    def forward(
        self,
        images: Float[Tensor, "b 3 h w"],
        masks: Bool[Tensor, "b n"] | None = None,
        patches: Int64[Tensor, " m"] | None = None,
        wants_cls: bool = True,
        wants_last: bool = True,
    ) -> Embedded:
        """Compute features and embeddings of views and of some of their patches; no others go through a head.

        Args:
            images: normalized views of equal size.
            masks: patches that the network does not see.
            patches: which patches' embeddings are asked for, counted over the whole batch in row-major order.
            wants_cls: whether the views' own embeddings are asked for.
            wants_last: whether embeddings also go through the heads after `shared`.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._frozen):
            features = self._features(images, masks, patches, wants_cls)
        views = len(images) if wants_cls else 0
        embeddings = self.heads["shared"](features) if "shared" in self.heads else features
        cls, of_patches = embeddings[:views], embeddings[views:]
        if wants_last:
            cls, of_patches = self.last("cls", cls), self.last("patch", of_patches)
        return Embedded(features[:views], features[views:], cls, of_patches)

    def last(self, term: str, embeddings: Float[Tensor, "n d"]) -> Float[Tensor, "n k"]:
        """Pass embeddings of a loss term through the head after `shared`, if there is one."""
        name = "last" if "last" in self.heads else term
        return self.heads[name](embeddings) if name in self.heads else embeddings

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
        """Freeze the backbone or not: without gradients, drop path and batch statistics."""
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
    ) -> Embedded:
        """Compute features and embeddings of all views (V, b), the masked global ones first, and of the named patches.

        Either group of views may be empty; then its pass is left out.

        Args:
            global_views: normalized.
            local_views: normalized.
            masks: patches of the global views that the network does not see.
            patches: see `Network.forward`; of the global views.
            wants_cls: whether embeddings of whole views are asked for; without, local views are left out.
        """
        images = (global_views if len(global_views) else local_views).shape[1]
        groups = []
        if len(global_views):
            flat_masks = None if masks is None else masks.flatten(0, 1)
            groups.append(self.network(global_views.flatten(0, 1), flat_masks, patches, wants_cls))
        if len(local_views) and wants_cls:
            groups.append(self.network(local_views.flatten(0, 1)))
        first = groups[0]  # patches are of global views alone
        features, cls = (
            torch.cat([group[kind].view(-1, images, group[kind].shape[-1]) for group in groups]) for kind in (0, 2)
        )
        # Copies: FSDP2 hooks into the outputs and warns if they are views.
        return Embedded(features, first.patch_features.clone(), cls, first.patches.clone())


@dataclass(frozen=True)
class Networks:
    """Student and teacher on one rank, and how they compute: all that an objective needs of a run.

    Attributes:
        student: its parameters.
        teacher: without gradients.
        shared_student: the student's pass over all views, whose gradients are those of all ranks.
        device: where both are.
        autocast_dtype: what backbones compute in; None: float32.
        views: mean and standard deviation of the channels, and where colors are changed.
    """

    student: Network
    teacher: Network
    shared_student: nn.Module
    device: torch.device
    autocast_dtype: torch.dtype | None
    views: ViewsConfig

    def normalized(
        self, views: UInt8[Tensor, "v b s s2 3"], colors: Float32[Tensor, "v b c"]
    ) -> Float[Tensor, "v b 3 s s2"]:
        """Return views of a batch as the networks take them; see `data.views.device_color.normalize`."""
        return normalize(views, colors, self.views, self.device)

    @torch.no_grad()
    def teach(
        self,
        images: Float[Tensor, "b 3 h w"],
        patches: Int64[Tensor, " m"] | None,
        wants_cls: bool,
        wants_last: bool = True,
    ) -> Embedded:
        """Return what the teacher makes of views; arguments as `Network.forward`."""
        with self.autocast():
            embedded: Embedded = self.teacher(images, None, patches, wants_cls, wants_last)
        return embedded

    def study(
        self,
        global_views: Float[Tensor, "G b 3 h w"],
        local_views: Float[Tensor, "L b 3 s s2"],
        masks: Bool[Tensor, "G b n"] | None,
        patches: Int64[Tensor, " m"] | None,
        wants_cls: bool,
    ) -> Embedded:
        """Return what the student makes of views, with gradients; arguments as `Student.forward`."""
        with self.autocast():
            embedded: Embedded = self.shared_student(global_views, local_views, masks, patches, wants_cls)
        return embedded

    def autocast(self) -> torch.autocast:
        """Return the context in which backbones compute."""
        return torch.autocast(self.device.type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None)


def _build(config: Config, make_heads: Callable[[int], nn.ModuleDict], drop_path: float) -> Network:
    backbone = build_backbone(config.model, config.views.global_size, drop_path)
    network = Network(backbone, make_heads(backbone.feature_dim), config.model.global_token)
    if config.model.lora.rank:
        add_low_rank(backbone, config.model.lora)
    return network


def build_student_and_teacher(config: Config, make_heads: Callable[[int], nn.ModuleDict]) -> tuple[Network, Network]:
    """Build two networks with equal weights, drawn from `train.seed`; the teacher has no drop path and no gradients.

    The backbone's weights are those of `seeded_backbone` with the same seed.

    Args:
        make_heads: `Objective.heads`.

    Raises:
        ConfigError: the backbone is unknown or lacks what the configuration asks for, or a view's side is not divisible
            by its patch.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        student = _build(config, make_heads, config.model.drop_path)
        teacher = copy.deepcopy(student) if config.model.drop_path == 0 else _build(config, make_heads, 0.0)
    student.backbone.check_settings(config)
    names = [f"train.phases[{place}]" for place in range(len(config.train.phases))]
    for name, phase in zip([*names, "views"], config.each_phase(), strict=True):
        student.backbone.check_size(f"{name}.global_size", phase.views.global_size)
        if config.views.local_count:
            student.backbone.check_size(f"{name}.local_size", phase.views.local_size)
    if config.masks.drop:
        student.backbone.drop_hidden(config)
    teacher.load_state_dict(student.state_dict())
    if config.model.first_layer == "frozen":
        first_layer(student.backbone).requires_grad_(False)
    if config.model.lora.rank:
        freeze_base(student.backbone)
    if config.train.checkpoint_activations:
        student.backbone.checkpoint_activations()
    return student, teacher.requires_grad_(False)


@torch.no_grad()
def update_teacher(teacher: nn.Module, student: nn.Module, momentum: float) -> None:
    """Set teacher = momentum * teacher + (1 - momentum) * student for every parameter that learns; copy buffers.

    The parameters of a student in shards (FSDP2) are put together one at a time.
    """
    pairs = zip(teacher.parameters(), student.parameters(), strict=True)
    learning = [(mine, parameter) for mine, parameter in pairs if parameter.requires_grad]
    ours: list[Tensor] = [mine for mine, _ in learning]
    theirs: list[Tensor] = [parameter for _, parameter in learning]
    if any(isinstance(parameter, DTensor) for parameter in theirs):
        for mine, parameter in zip(ours, theirs, strict=True):
            mine.lerp_(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter, 1.0 - momentum)
    else:
        torch._foreach_lerp_(ours, theirs, 1.0 - momentum)
    for buffer, source in zip(teacher.buffers(), student.buffers(), strict=True):
        buffer.copy_(source)
