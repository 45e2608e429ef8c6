"""What a field of the configuration takes, for messages about a wrong value."""

from __future__ import annotations

import functools
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from sop_faiss.config.phases import PHASES_WANTED
from sop_faiss.config.schema import Config

_KINDS = {
    bool: ("true or false", "values of true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
}


@functools.cache
def wanted(name: str) -> str:
    """Return what the field or section with this dotted name takes.

    Example:
        `wanted("train.epochs")` is `wanted a number`; `wanted("views.mean")` is `wanted 3 numbers, as [A, B, C]`.
    """
    kind: Any = Config
    for part in name.split(".") if name else ():
        kind = get_type_hints(kind)[part]
    if is_dataclass(kind):
        first = fields(kind)[0].name
        place = f"{name}.{first}" if name else f"{first}: ..."
        return f"wanted settings by name, as {place}"
    inner = get_args(kind)
    if not inner:
        return f"wanted {_KINDS[kind][0]}"
    if inner[-1] is Ellipsis:  # of sections: the phases of a run
        return PHASES_WANTED
    if type(None) in inner:
        return f"wanted {_KINDS[inner[0]][0]}, or null"
    return f"wanted {len(inner)} {_KINDS[inner[0]][1]}, as [{', '.join('ABCDEFGH'[: len(inner)])}]"
