"""SOP pretraining of image encoders with FAISS-backed memories, and retrieval with what they learn.

The two names of the top level are imported on first use, so that `import sop_faiss` stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sop_faiss.index.search import FeatureIndex
    from sop_faiss.model.encoders.load import load_encoder

__version__ = "0.1.0"
__all__ = ["FeatureIndex", "__version__", "load_encoder"]


def __getattr__(name: str) -> Any:
    if name == "load_encoder":
        from sop_faiss.model.encoders.load import load_encoder

        return load_encoder
    if name == "FeatureIndex":
        from sop_faiss.index.search import FeatureIndex

        return FeatureIndex
    raise AttributeError(f"module 'sop_faiss' has no attribute {name!r}")
