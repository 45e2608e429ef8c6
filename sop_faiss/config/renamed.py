"""Settings that had another name in earlier versions."""

from __future__ import annotations

from typing import Any

RENAMED = {
    "loss.cls_weight": "sop.cls.weight",
    "loss.patch_weight": "sop.patch.weight",
    "memory.cls_capacity": "sop.cls.capacity",
    "memory.patch_capacity": "sop.patch.capacity",
    "memory.fill": "sop.fill",
    "views.colour": "views.color",  # codespell:ignore colour
    "views.grey": "views.gray",  # codespell:ignore grey
    "evaluate.view_colours": "evaluate.view_colors",
}
"""Dotted name up to version 0.1 -> name since 0.2.

A user's file or override with an old name is refused with the new one; the configuration of an old run is translated.
"""


def translate(content: dict[str, Any]) -> dict[str, Any]:
    """Return sections of fields with old names replaced by the new ones.

    Args:
        content: the plain values of a configuration, as in `config.yaml` of a run.
    """
    result = {section: dict(fields) if isinstance(fields, dict) else fields for section, fields in content.items()}
    for old, new in RENAMED.items():
        section, _, field = old.partition(".")
        fields = result.get(section)
        if isinstance(fields, dict) and field in fields:
            value = fields.pop(field)
            *path, name = new.split(".")
            target = result
            for part in path:
                inner = target.get(part)
                target[part] = target = dict(inner) if isinstance(inner, dict) else {}
            target[name] = value
    if result.get("memory") == {}:
        del result["memory"]
    return result
