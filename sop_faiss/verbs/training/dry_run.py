"""The facts of a dry run besides the configuration: images, parameters, steps, and the memory a device will need."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from torch.nn.utils import parametrize

from sop_faiss import distributed
from sop_faiss.config import Config
from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.shards.address import hide_secrets, is_address
from sop_faiss.data.shards.shard_cache import default_cache_folder
from sop_faiss.data.shards.shard_source import ShardSource
from sop_faiss.data.shards.shard_stream import ShardStream
from sop_faiss.model.initial_weights import resolve_init
from sop_faiss.model.low_rank import weights_made
from sop_faiss.model.networks import Network, build_student_and_teacher
from sop_faiss.objectives.choose import choose_objective
from sop_faiss.objectives.objective import Needs
from sop_faiss.train.parallel import gets_sharded
from sop_faiss.train.schedules import Schedules
from sop_faiss.train.state import autocast_dtype
from sop_faiss.verbs.training.online_scores import open_evaluation, scored_encoder
from sop_faiss.verbs.training.training_images import make_batches, open_training_images, training_device

_LOSS_BLOCKS_BYTES = 8 * 4 * 2**20
"""Memory of one block of the loss (`sop/loss.py`): some copies of 2**20 float32 logits."""
_HOW = (
    "the sum of the *_bytes next to it, for one rank. Activations: what a forward pass of one view of each kind keeps "
    "for the backward pass, counted on the CPU in float32, times the views and images processed at once; half of that "
    "with bf16. Not counted: the CUDA context, workspaces of libraries, fragmentation, and processes that read images"
)


def describe_run(config: Config) -> dict[str, Any]:
    """Describe a run for `sop-train --dry-run`: its images, parameters, steps, and estimated memory.

    The number of steps of a run of `train.minutes` is None, since it depends on the machine.

    Raises:
        ConfigError: a setting is impossible.
        DataError: the training images cannot be opened.
    """
    config = resolve_init(config)
    source, trained, held_out = open_training_images(config)
    objective = choose_objective(config)
    student, _ = build_student_and_teacher(config, objective.heads)
    device, world_size = training_device(config), distributed.announced_world_size()
    needs = objective.needs(device, len(trained))
    batches = make_batches(config, source, trained, student.backbone.patch_size, (0, world_size))
    scored_encoder(student.backbone, config)
    evaluation = open_evaluation(config, source, trained, held_out)
    schedules = Schedules(config, batches.steps_per_epoch)
    steps = schedules.total_steps if schedules.is_decided else None
    parameters = sum(p.numel() for p in student.parameters())
    is_sharded = gets_sharded(parameters, config, world_size)
    return {
        "data": _describe_data(config, source),
        "training_images": len(trained),
        "held_out_images": len(held_out),
        "scores": [] if evaluation is None else list(evaluation.names),
        "backbone_parameters": sum(p.numel() for p in student.backbone.parameters()),
        "projector_parameters": sum(p.numel() for p in student.heads.parameters()),
        "trained_parameters": sum(p.numel() for p in student.parameters() if p.requires_grad),
        "steps_per_epoch": batches.steps_per_epoch,
        "steps": steps,
        "ends_at_step": min(filter(None, (steps, config.train.stop_after_steps)), default=None),
        "device": device.type,
        "world_size": world_size,
        "parallel": "none" if world_size == 1 else "fsdp" if is_sharded else "ddp",
        "batch_size_per_rank": batches.batch_size_per_rank,
        **_memory(config, student, needs, device, world_size, is_sharded),
    }


def _describe_data(config: Config, source: ImageSource | ShardStream) -> dict[str, Any]:
    """Describe the training images: kind, counts, classes, and the cache of remote shards."""
    facts: dict[str, Any] = {"source": hide_secrets(config.data.train), "remote": is_address(config.data.train)}
    if isinstance(source, ShardStream):
        counts = {"shards": len(source.addresses), "images_per_epoch": config.data.samples_per_epoch}
        return {**facts, "kind": "shards, read in sequence", **counts}
    if isinstance(source, ShardSource):
        facts["kind"] = "shards"
        facts["shards"] = len(source.shards)
        facts["bytes"] = sum(size for size, _ in source.identities)
        if source.fetch is not None:
            folder = config.data.cache_dir or str(default_cache_folder())
            here = sum(path.is_file() for path in source.shards)
            facts["cache"] = {"folder": folder, "limit_bytes": config.data.cache_bytes, "shards_here": here}
    else:
        facts["kind"] = "folder of images" if Path(config.data.train).is_dir() else "list of images"
        facts["folders"] = len({PurePosixPath(source.member_of(position)).parent for position in range(len(source))})
    labels = source.labels
    labeled = np.empty(0, np.int64) if labels is None else labels[labels >= 0]
    return {
        **facts,
        "root": str(source.root),
        "images": len(source),
        "labeled_images": len(labeled),
        "classes": len(np.unique(labeled)),
    }


def activation_bytes(student: Network, config: Config, needs: Needs) -> tuple[int, int]:
    """Count the bytes that a forward pass of one global and of one local view keeps for the backward pass, in float32.

    A view runs through the network, and autograd reports what it keeps. The total is proportional to the number of
    views, since each view passes through the network independently.
    """
    views, unit = config.views, student.backbone.patch_size
    patches = (views.global_size // unit) ** 2
    dropped = int(config.masks.drop * patches)
    masks = (torch.arange(patches) < dropped).unsqueeze(0) if config.masks.hides else None
    masked = torch.arange(round(_masked_share(config) * patches)) if needs.patches else None
    of_global = _kept_bytes(student, views.global_size, masks, masked, needs.cls)
    return of_global, _kept_bytes(student, views.local_size) if views.local_count and needs.cls else 0


def _kept_bytes(
    student: Network,
    side: int,
    masks: Bool[Tensor, "1 n"] | None = None,
    patches: Int64[Tensor, " m"] | None = None,
    wants_cls: bool = True,
) -> int:
    """Count the bytes of tensors that autograd keeps for one view, without weights, each storage once."""
    weights: set[int] = set()
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    # batch norm in training mode refuses one value per channel, as a small view has on a coarse map
    normalizes = any(isinstance(module, torch.nn.BatchNorm2d) for module in student.modules())
    views = 2 if normalizes and masks is None and patches is None else 1
    with parametrize.cached(), torch.random.fork_rng(devices=[]):  # cached: `weights_made` are those that are used
        of_network = (*student.parameters(), *weights_made(student))
        weights |= {weight.untyped_storage().data_ptr() for weight in of_network}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = student(torch.zeros(views, 3, side, side), masks, patches, wants_cls)
    del output  # until here it keeps the tensors that were counted, so no address was used twice
    return sum(kept.values()) // views


def _masked_share(config: Config) -> float:
    """Return the average fraction of a global view's patches that are hidden."""
    masks = config.masks
    if masks.kind == "random" and masks.random_ratio is not None:
        return masks.random_ratio
    return 0.0 if masks.kind == "none" else masks.probability * sum(masks.ratio) / 2


def _memory(
    config: Config, student: Network, needs: Needs, device: torch.device, world_size: int, is_sharded: bool
) -> dict[str, Any]:
    """Return the bytes that one rank needs, their total, and the bytes of a checkpoint."""
    parameters = sum(p.numel() for p in student.parameters())
    learning = sum(p.numel() for p in student.parameters() if p.requires_grad)
    # student, teacher and two AdamW moments, in float32
    checkpoint_bytes = (
        (parameters + learning) * 2 * 4 + needs.sizes["memories_bytes"] + needs.sizes["neighbor_lists_bytes"]
    )
    copied = config.train.background_save and device.type == "cpu"  # the copy of a GPU's state is in main memory
    parts = world_size if is_sharded else 1
    held, held_learning = -(-parameters // parts), -(-learning // parts)
    uses_bf16 = autocast_dtype(config, device) is not None
    sizes = {
        "checkpoint_copy_bytes": checkpoint_bytes if copied else 0,
        # the teacher, and this rank's part of student, gradients and two AdamW moments, in float32
        "weights_and_optimizer_bytes": (parameters + held + held_learning * 3) * 4,
        **needs.sizes,
        **_largest_phase(config, student, needs, world_size, uses_bf16, is_sharded),
    }
    return {**with_total(sizes), "checkpoint_bytes": checkpoint_bytes}  # the latter on disk


def _largest_phase(
    config: Config, student: Network, needs: Needs, world_size: int, uses_bf16: bool, is_sharded: bool
) -> dict[str, int]:
    """Estimate the bytes that a step needs on each rank besides weights and memories; of `train.phases` the largest."""
    phases = [_device_memory(phase, student, needs, world_size, uses_bf16, is_sharded) for phase in config.each_phase()]
    return max(phases, key=lambda sizes: sum(sizes.values()))


def _device_memory(
    config: Config, student: Network, needs: Needs, world_size: int, uses_bf16: bool, is_sharded: bool
) -> dict[str, int]:
    images = config.train.batch_size // world_size
    at_once = images // config.train.accumulate
    views = config.views
    local_count = views.local_count if needs.cls else 0
    of_global, of_local = activation_bytes(student, config, needs)
    groups = views.global_count * of_global, local_count * of_local
    kept = max(groups) if config.train.views_apart else sum(groups)
    pixels = 3 * (views.global_count * views.global_size**2 + local_count * views.local_size**2)
    patches = round(_masked_share(config) * (views.global_size // student.backbone.patch_size) ** 2)
    rows = {"cls": 1, "patch": patches}  # of a global view
    targets = max(rows[name] * columns for name, columns in needs.target_columns.items())
    counts = views.global_count, local_count
    rows_at_once = {
        "cls": max(counts) if config.train.views_apart else sum(counts),
        "patch": patches * views.global_count,
    }
    logits = sum(rows_at_once[name] * columns for name, columns in needs.target_columns.items())
    learning = sum(parameter.numel() for parameter in student.parameters() if parameter.requires_grad)
    made = sum(weight.numel() for weight in weights_made(student)) if config.model.lora.rank else 0
    passes = 1 if config.train.views_apart or not local_count else 2
    return {
        "activations_bytes": at_once * kept // (2 if uses_bf16 else 1),
        # uint8 of all images of a step, float32 of those processed at once
        "views_bytes": pixels * (images + 4 * at_once),
        # the teacher's assignments of one task, of the larger loss term
        "loss_bytes": at_once * views.global_count * targets * 4 + _LOSS_BLOCKS_BYTES,
        # the student's logits and their gradients
        **({"logits_bytes": at_once * logits * 4 * 2} if needs.keeps_logits else {}),
        # weights with what model.lora adds to them, which each pass of the student makes and keeps
        **({"merged_weights_bytes": made * 4 * passes} if made else {}),
        "gradient_buckets_bytes": learning * 4 if world_size > 1 and not is_sharded else 0,
        # FSDP2 gathers what is outside of blocks, and two blocks at a time, weights and gradients
        "gathered_weights_bytes": _gathered(student) * 4 * 2 if is_sharded else 0,
    }


def _gathered(student: Network) -> int:
    """Count the parameters that FSDP2 gathers at a time: those of two blocks, and those outside of blocks."""
    sizes = [sum(p.numel() for p in block.parameters()) for block in student.backbone.blocks()]
    rest = sum(p.numel() for p in student.parameters()) - sum(sizes)
    return rest + sum(sorted(sizes)[-2:])


def with_total(facts: dict[str, Any]) -> dict[str, Any]:
    """Add `device_bytes_estimate`, the sum of all keys that end in `_bytes`, and how it was made."""
    total = sum(value for key, value in facts.items() if key.endswith("_bytes"))
    return {**facts, "device_bytes_estimate": total, "device_bytes_estimate_is": _HOW}
