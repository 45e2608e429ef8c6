"""How the ranks share the student: DDP, FSDP2, or gradients averaged by hand; and complete tensors from shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from sop_faiss import distributed
from sop_faiss.config import Config
from sop_faiss.model.networks import Student

_SHARDED_FROM = 250_000_000
"""`train.parallel: auto` shards students with this many parameters or more: ViT-L has 304 million, ViT-B 86."""
_BUCKET_ELEMENTS = 2**23  # gradients averaged together: 32 MiB, about DDP's 25


def share_student(
    student: Student, config: Config, device: torch.device, autocast_dtype: torch.dtype | None
) -> tuple[nn.Module, bool]:
    """Make the ranks share one student.

    With FSDP2 each rank has a part of every parameter, gradient and optimizer state; the teacher, which has neither
    gradients nor optimizer state, is complete on every rank. Under autocast the shards of blocks are sent in its
    precision.

    Args:
        student: in place on this rank's device; with FSDP2 its parameters become shards.
        device: of this rank.
        autocast_dtype: precision of the backbone; None: float32.

    Returns:
        The module to call, and whether its gradients must be averaged by hand (`average_gradients`).
    """
    if distributed.world_size() == 1:
        return student, False
    if gets_sharded(sum(parameter.numel() for parameter in student.parameters()), config, distributed.world_size()):
        mesh = init_device_mesh(device.type, (distributed.world_size(),))
        of_blocks = MixedPrecisionPolicy(autocast_dtype, torch.float32, cast_forward_inputs=False)
        for block in student.network.backbone.blocks():
            fully_shard(block, mesh=mesh, mp_policy=of_blocks)
        fully_shard(student, mesh=mesh)
        return student, False
    if config.train.accumulate > 1 or config.train.views_apart:
        return student, True  # several backward passes, each of which DDP would average
    unused = config.masks.kind == "none" or config.optim.projector_warmup_epochs > 0
    shared = DistributedDataParallel(student, find_unused_parameters=unused)
    if device.type == "cpu":  # where resuming is exact
        shared.register_comm_hook(None, lambda _, bucket: distributed.average_in_rank_order(bucket.buffer()))
    return shared, False


def gets_sharded(parameters: int, config: Config, world_size: int) -> bool:
    """Return whether FSDP2 shares a student with this many parameters, according to `train.parallel`."""
    if world_size == 1 or config.train.parallel == "ddp":
        return False
    return config.train.parallel == "fsdp" or parameters >= _SHARDED_FROM


def is_sharded(network: nn.Module) -> bool:
    """Return whether this rank has only a part of the network."""
    return any(isinstance(parameter, DTensor) for parameter in network.parameters())


def whole(value: Shaped[Tensor, "*shape"]) -> Tensor:
    """Return the complete tensor. All ranks must call this; of shards only the main rank gets it, on the CPU."""
    if not isinstance(value, DTensor):
        return value
    full = value.full_tensor()
    return full.cpu() if distributed.is_main() else full.new_empty(0, device="cpu")


def here(value: Shaped[Tensor, "*shape"]) -> Tensor:
    """Return this rank's part of a tensor: its shard, or all of it."""
    return value.to_local() if isinstance(value, DTensor) else value


def like(target: Shaped[Tensor, "*shape"], value: Shaped[Tensor, "*shape"]) -> Tensor:
    """Return a complete tensor, which all ranks have read, on the device and in the shards of `target`."""
    value = value.to(target.device)
    if not isinstance(target, DTensor):
        return value
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


def copy_weights(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load complete tensors, which all ranks have, into a network of the same shape, sharded or not."""
    wanted = network.state_dict()
    network.load_state_dict({name: like(wanted[name], value) for name, value in tensors.items()})


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average every gradient over the ranks, many of them at a time."""
    bucket: list[Tensor] = []
    for gradient in [parameter.grad for parameter in parameters if parameter.grad is not None]:
        bucket.append(gradient)
        if sum(map(torch.numel, bucket)) >= _BUCKET_ELEMENTS:
            _average(bucket)
            bucket = []
    _average(bucket)


def _average(gradients: list[Tensor]) -> None:
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.average_(flat)
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
