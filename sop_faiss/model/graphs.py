"""A model as a graph that needs neither timm nor this package: ONNX, and PyTorch's own export."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sop_faiss.errors import ConfigError

_ONNX_PACKAGES = ("onnx", "onnxscript")


class _Features(nn.Module):
    """Images in, features out, under names that the graph keeps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.model(images)
        return features.flatten(1)


def require_onnx() -> None:
    """Check that PyTorch can write ONNX files here.

    Raises:
        ConfigError: a package is missing.
    """
    missing = [name for name in _ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"`onnx` needs {' and '.join(missing)}: pip install 'sop-faiss[onnx]'")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' warnings and progress: their result is checked."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def write_torch_export(model: nn.Module, images: Float[Tensor, "b 3 h w"], path: Path) -> None:
    """Write `torch.export`'s program of a model: `torch.export.load(path).module()(images)` gives features.

    Args:
        model: images in, features out; in evaluation mode.
        images: an example of two or more; any number of this size can be put in afterwards.
        path: a .pt2 file.

    Raises:
        ConfigError: this PyTorch cannot export the model.
    """
    try:
        with _quiet(), torch.no_grad():
            batch = torch.export.Dim("batch", min=1)
            program = torch.export.export(_Features(model), (images,), dynamic_shapes={"images": {0: batch}})
            encoded = io.BytesIO()  # onto a full disk, PyTorch's own writer ends the process
            torch.export.save(program, encoded)
    except Exception as error:  # the exporter may raise any exception
        raise ConfigError(
            f"torch.export does not take this model ({_reason(error)}): leave `torch_export` out"
        ) from None
    path.write_bytes(encoded.getbuffer())


def read_torch_export(path: Path, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b d"]:
    """Return what a written program gives for some images."""
    with _quiet(), torch.no_grad():
        features: Tensor = torch.export.load(path).module()(images)
    return features


def write_onnx(model: nn.Module, images: Float[Tensor, "b 3 h w"], path: Path) -> None:
    """Write an ONNX file with the input `images` (batch, 3, h, w) and the output `features` (batch, d).

    Args:
        model: images in, features out; in evaluation mode.
        images: an example of two or more; any number of this size can be put in afterwards.
        path: an .onnx file.

    Raises:
        ConfigError: a package is missing, or the model cannot be written as ONNX.
    """
    require_onnx()
    try:
        with _quiet(), contextlib.redirect_stdout(None), torch.no_grad():
            torch.onnx.export(
                _Features(model),
                (images,),
                path,
                input_names=["images"],
                output_names=["features"],
                dynamic_shapes={"images": {0: torch.export.Dim("batch", min=1)}},
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except OSError:
        raise
    except Exception as error:  # the exporter may raise any exception
        raise ConfigError(f"ONNX does not take this model ({_reason(error)}): leave `onnx` out") from None


def _reason(error: Exception) -> str:
    return (str(error).strip().split("\n", 1)[0] or type(error).__name__)[:160]
