"""The verb of sop-embed: an encoder and pictures in, a feature store on disk out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sop_faiss.data.source import open_source
from sop_faiss.evaluate.results import write_result
from sop_faiss.features.extract import extract_features
from sop_faiss.features.store import require_dtype
from sop_faiss.files import refuse_occupied
from sop_faiss.model.spec import EncoderSpec
from sop_faiss.pipeline.outputs import check_outputs, encoder_files, source_files
from sop_faiss.progress import ProgressCallback

__all__ = ["EmbedOptions", "embed"]


@dataclass(frozen=True)
class EmbedOptions:
    """How features are extracted and stored."""

    batch_size: int = 64
    """Pictures per forward pass."""
    workers: int | None = None
    """Threads that read and decode; None: one per CPU, at most 8."""
    feature_dtype: str = "float32"
    """`float32` or `float16`, on disk."""
    max_bad_fraction: float = 0.01
    """Share of unusable pictures that is dropped; more is an error."""
    whole: bool = False
    """Whole pictures, longer side as long as the encoder's images, as retrieval sees them; otherwise a square crop."""


def embed(
    encoder: EncoderSpec,
    data: str,
    out: Path,
    options: EmbedOptions | None = None,
    *,
    result_json: Path | None = None,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Write the feature store of the pictures of a source.

    Args:
        encoder: which encoder.
        data: SRC: shards, a folder of pictures, or a list.
        out: the store's directory, new or empty; checked before anything is computed.
        options: batch size and the like.
        result_json: also write the measurement (counts and speed) there.
        progress: called with the number of pictures read.

    Returns:
        The manifest of the store.

    Raises:
        SopError: the output is occupied, or as `EncoderSpec.load`, `open_source` and `extract_features`.
    """
    options = options or EmbedOptions()
    refuse_occupied(out)
    require_dtype(options.feature_dtype)
    check_outputs({"--json": result_json}, [out, *source_files(data), *encoder_files(encoder)])
    source = open_source(data)
    loaded = encoder.load()
    started = time.perf_counter()
    store = extract_features(
        loaded,
        source,
        preprocess=loaded.preprocess.keeping_aspect() if options.whole else None,
        batch_size=options.batch_size,
        workers=options.workers,
        max_bad_fraction=options.max_bad_fraction,
        progress=progress,
    )
    seconds = time.perf_counter() - started
    manifest = store.write(out, feature_dtype=options.feature_dtype)
    if result_json is not None:
        write_result(
            result_json,
            command="sop-embed",
            dataset=data,
            protocol={
                "preprocess": manifest["preprocess"],
                "pooling": manifest["pooling"],
                "feature_dtype": options.feature_dtype,
                "batch_size": options.batch_size,
                "device": encoder.device,
            },
            metrics={
                "images": float(manifest["count"]),
                "dropped": float(manifest["dropped"]["count"]),
                "dimension": float(manifest["dimension"]),
                "images_per_second": round(len(source) / max(seconds, 1e-9), 3),
            },
            encoder=manifest["encoder"],
            seconds=seconds,
        )
    return manifest
