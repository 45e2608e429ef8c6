"""The device that evaluation runs on."""

from __future__ import annotations

import torch

from sop_faiss.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """Return the device of this name; `auto` is CUDA where there is one, else the CPU.

    Raises:
        ConfigError: the name is unknown, or there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and (kind == "cpu" or not number.isdecimal())):
        raise ConfigError(f"device {name!r}: wanted auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name}: torch sees {torch.cuda.device_count()} CUDA devices; use cpu or repair the driver"
        )
    return torch.device(name)
