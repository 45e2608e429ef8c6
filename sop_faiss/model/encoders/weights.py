"""Weights of others: read a file without running anything in it, and fit its tensors to a module or refuse.

Files are safetensors, or PyTorch files read by `torch.load(weights_only=True)` with a short allow-list of harmless
types that official checkpoints carry (the namespace of their arguments, numpy scalars).
"""

from __future__ import annotations

import argparse
import pickle
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sop_faiss.errors import CheckpointError
from sop_faiss.files import require_readable
from sop_faiss.model.encoders.layouts import chosen_network, layout_of, networks_in, same_kind, timm_names
from sop_faiss.model.encoders.methods import Method, method_of
from sop_faiss.paths import path_state

_HEAD_PREFIXES = (
    *("head.", "head_dist.", "fc.", "classifier.", "projector.", "projection_head."),
    "head_dense.",  # EsViT's, of its region term
    *("decoder_embed.", "decoder_pos_embed", "decoder_blocks.", "decoder_norm.", "decoder_pred."),  # MAE's
    *("lm_head.", "cls_pt_layers."),  # of BEiT, of BEiT v2
    "local_cls_norm.",  # DINOv3's, of small views while it trains
)
"""Classifier and projection heads, decoders: not part of an encoder."""
_HARMLESS = re.compile(
    r"(^|\.)(mask_token|masked_embed|relative_position_index|attn_mask|n_averaged|rope_embed\.periods|qkv\.bias_mask)$"
)
"""The token of masked patches, buffers that networks saved, and the count of a moving average."""


def _safe_globals() -> list[Any]:
    scalar = np.float64(0).__reduce__()[0]
    dtypes = [type(np.dtype(name)) for name in ("bool", "int32", "int64", "float32", "float64")]
    return [argparse.Namespace, np.dtype, scalar, (scalar, "numpy.core.multiarray.scalar"), *dtypes]


def _read_file(path: Path) -> Any:
    """Return what the file holds: tensors, and containers of plain values."""
    if path.is_dir():
        raise CheckpointError(f"weights file {path} is a directory: name a file in it")
    if not path.is_file():
        raise CheckpointError(f"weights file {path} {path_state(path)}; check the path")
    require_readable(path)
    if path.suffix == ".safetensors":
        try:
            return load_file(path, device="cpu")
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged or not a safetensors file ({_first_line(error)})") from None
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(_safe_globals()):
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"it needs {found[1]}, which is not a plain type" if found else "its content is not plain tensors"
        raise CheckpointError(
            f"{path} was not read: {what}, and code in files is never run; save its tensors as .safetensors instead"
        ) from None
    except Exception as error:  # the bytes are untrusted: the parser may fail in any way
        reason = _first_line(error) or type(error).__name__
        raise CheckpointError(f"{path} is damaged or not a PyTorch file ({reason})") from None


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0].split(". ", 1)[0][:160]


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file as `read_recognized` does; one of DINO's kind is refused.

    Raises:
        CheckpointError: as of `read_recognized`.
    """
    return read_recognized(path, student=False, official=False)[0]


def read_recognized(path: Path, *, student: bool, official: bool) -> tuple[dict[str, Tensor], Method | None]:
    """Read the tensors of a weights file under timm's names, in the file's order, and return whose method's file it is.

    A `state_dict` or `model` is opened. Of a network and its moving average the latter is taken, and the log says so.

    Args:
        path: the file.
        student: take the learning network and not its moving average.
        official: it may be of DINO, DINOv2, iBOT, MaSSL or SOP: full checkpoints hold `teacher` and `student`, with
            `module.` and `backbone.` before the names, and published backbones the names alone, or a `state_dict` or
            `model` of them.

    Raises:
        CheckpointError: the file is missing, damaged, holds no tensors, would have to run code, is of DINO's kind
            without `official`, or lacks the network that is wanted.
    """
    networks = networks_in(_read_file(path))
    if not any(networks.values()):
        raise CheckpointError(f"{path} holds no tensors by name: it is a file of another kind")
    tensors = timm_names(chosen_network(networks, path, student=student, official=official))
    return tensors, method_of(networks)


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    return f"{', '.join(listed[:3])}{', ...' if len(listed) > 3 else ''}"


def fit_tensors(
    module: nn.Module, tensors: Mapping[str, Tensor], *, origin: str, target: str, heads: tuple[str, ...] = ()
) -> list[str]:
    """Load tensors into a module of the same names and shapes.

    Args:
        module: receives the values, cast to its dtypes.
        tensors: by the module's names; surplus heads and mask tokens are left out.
        origin: where they come from, for the message.
        target: what the module is, for the message.
        heads: what else the names of a head may start with.

    Returns:
        The names that were left out.

    Raises:
        CheckpointError: tensors are missing, surplus, of another shape, or not finite; a few are named.
    """
    own = module.state_dict()
    missing = [name for name in own if name not in tensors]
    left_out = [name for name in tensors if name not in own]
    unexpected = [name for name in left_out if not (name.startswith(_HEAD_PREFIXES + heads) or _HARMLESS.search(name))]
    reshaped = [
        f"{name} {tuple(tensors[name].shape)} instead of {tuple(value.shape)}"
        for name, value in own.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    problems = [
        f"{len(names)} {what} ({_few(names)})"
        for what, names in (("missing", missing), ("of another shape", reshaped), ("unexpected", unexpected))
        if names
    ]
    if problems:
        remedy = layout_of(own, tensors) or "name the model it was made for"
        raise CheckpointError(f"{origin} does not fit {target}: {'; '.join(problems)}; {remedy}")
    broken = [name for name in own if tensors[name].is_floating_point() and not tensors[name].isfinite().all()]
    if broken:
        raise CheckpointError(f"{origin} holds NaN or infinity in {_few(broken)}: it is damaged")
    module.load_state_dict({name: tensors[name] for name in own})
    return left_out


def fit_tensors_by_position(module: nn.Module, tensors: Mapping[str, Tensor], *, origin: str, target: str) -> list[str]:
    """Load tensors in the file's order, under any names, if every shape and last part of a name agrees.

    For weights of the same model saved under other names. At most a classifier's two tensors may be left at the end.

    Returns:
        The names that were left out.

    Raises:
        CheckpointError: the number, shapes or kinds of the tensors do not agree, or a value is not finite.
    """
    own = module.state_dict()
    names = list(tensors)
    if not len(own) <= len(names) <= len(own) + 2:
        raise CheckpointError(
            f"{origin} holds {len(names)} tensors, {target} has {len(own)} and a classifier: "
            "they cannot be matched by position"
        )
    for own_name, name in zip(own, names, strict=False):
        if not same_kind(own_name, name) or own[own_name].shape != tensors[name].shape:
            raise CheckpointError(
                f"{origin} does not fit {target} by position: {name} is {tuple(tensors[name].shape)}, "
                f"{own_name} is {tuple(own[own_name].shape)}"
            )
    renamed = {own_name: tensors[name] for own_name, name in zip(own, names, strict=False)}
    fit_tensors(module, renamed, origin=origin, target=target)
    return names[len(own) :]
