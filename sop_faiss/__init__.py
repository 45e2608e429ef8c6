"""SOP pretraining of image encoders with FAISS-backed memories, and retrieval with what they learn.

The names of the top level are imported on first use, so that `import sop_faiss` is cheap. docs/python.md has recipes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sop_faiss.errors import SopError
    from sop_faiss.index.search import FeatureIndex
    from sop_faiss.model.encoders.encoder import Encoder
    from sop_faiss.model.encoders.load import load_encoder

__version__ = "0.2.0"
__all__ = ["Encoder", "FeatureIndex", "SopError", "__version__", "load_encoder"]

_MODULES = {
    "Encoder": "sop_faiss.model.encoders.encoder",
    "FeatureIndex": "sop_faiss.index.search",
    "SopError": "sop_faiss.errors",
    "load_encoder": "sop_faiss.model.encoders.load",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'sop_faiss' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
