"""What a user may have meant by a key that no setting has."""

from __future__ import annotations

import difflib
import functools
from dataclasses import fields, is_dataclass
from typing import Any

from sop_faiss.config.schema import Config

_MEANT = {
    "K": ("num_anchors",),  # the paper's symbols
    "k": ("num_supports",),
    "T": ("tasks", "student_temp", "teacher_temp"),
    "N": ("capacity",),
    "N_C": ("sop.cls.capacity",),
    "N_P": ("sop.patch.capacity",),
    "V": ("global_count", "local_count"),
    "d": ("embedding_dim",),
    "lambda_1": ("sop.cls.weight",),
    "lambda_2": ("sop.patch.weight",),
    "lr": ("base_lr",),  # names that other programs use
    "learning_rate": ("base_lr",),
    "wd": ("weight_decay",),
    "ema": ("momentum",),
    "momentum_teacher": ("momentum",),
    "temp": ("student_temp", "teacher_temp"),
    "temperature": ("student_temp", "teacher_temp"),
    "clip_grad": ("clip_norm",),
    "arch": ("backbone",),
    "out_dim": ("embedding_dim",),
    "queue_size": ("capacity",),
    "num_workers": ("data.workers",),
    "data_path": ("data.train",),
    "batch_size_per_gpu": ("train.batch_size",),
    "batch_size_per_rank": ("train.batch_size",),
    "image_size": ("global_size",),
    "img_size": ("global_size",),
    "local_crops_number": ("local_count",),
    "max_steps": ("stop_after_steps",),
    "steps": ("stop_after_steps",),
    "amp": ("train.precision",),
    "fp16": ("train.precision",),
    "wandb": ("wandb_project",),
}
"""Last part of an unknown key -> what settings that may be meant end in."""
_MOST = 4
_LONGEST = 100  # letters that are compared, since comparing takes their square
_ENOUGH = 0.65  # similarity of difflib, 0..1, below which a name says nothing


@functools.cache
def known_keys() -> tuple[str, ...]:
    """Return the dotted names of all sections and fields, in their order; the fields of a section before its parts."""
    return tuple(_keys_of(Config))


def _keys_of(schema: type[Any], prefix: str = "") -> list[str]:
    plain: list[str] = []
    parts: list[str] = []
    for entry in fields(schema):
        name = f"{prefix}{entry.name}"
        default = entry.default_factory() if callable(entry.default_factory) else None
        if default is not None and is_dataclass(default):
            parts += [name, *_keys_of(type(default), f"{name}.")]
        else:
            plain.append(name)
    return [*plain, *parts]


def called(key: str) -> list[str]:
    """Return the settings with a key's last part, or that the paper or another program calls so.

    They may be in any section; if the key's own section has some, these alone.
    """
    section, _, last = key.rpartition(".")
    suffixes = (*_MEANT.get(last, _MEANT.get(last.lower(), ())), last)
    found = [name for suffix in suffixes for name in known_keys() if f".{name}".endswith(f".{suffix}")]
    own = [name for name in found if name.rpartition(".")[0] == section]
    return list(dict.fromkeys(own or found))


def meant_by(key: str) -> list[str]:
    """Return the settings that an unknown key may mean: those that are called so, at most four; else the nearest."""
    key = key[:_LONGEST]
    section, _, last = key.rpartition(".")

    def similarity(name: str) -> float:
        own_section, _, own_last = name.rpartition(".")
        of_last = difflib.SequenceMatcher(None, last, own_last).ratio()
        return max(of_last, difflib.SequenceMatcher(None, key, name).ratio()) + 0.05 * (own_section == section)

    if found := called(key):
        return found[:_MOST]
    nearest = max(known_keys(), key=similarity)
    return [nearest] if similarity(nearest) >= _ENOUGH else []
