"""The verb of sop-embed: an encoder and images in, a feature store on disk out.

Features are kept in a cache next to the output (or in the user's own, `--cache`) until the store is complete, so that
after a kill the same command continues.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from sop_faiss import distributed
from sop_faiss.data.images.source import ImageSource, open_source
from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.results import result_content
from sop_faiss.features.cache import kept_until_whole
from sop_faiss.features.extract import ExtractionOptions, extract_features
from sop_faiss.features.store import FeatureStore
from sop_faiss.features.store_manifest import require_dtype
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.model.encoders.whitening import Whitening, WhiteningOrigin, learn_whitening
from sop_faiss.output_checks import refuse_occupied
from sop_faiss.progress import ProgressCallback
from sop_faiss.verbs.output_paths import check_outputs, encoder_files, source_files


@dataclass(frozen=True)
class EmbedOptions:
    """How features are extracted and stored."""

    extraction: ExtractionOptions = field(default_factory=ExtractionOptions)
    """How features are extracted."""
    feature_dtype: str = "float32"
    """`float32` or `float16`, on disk."""
    whole: bool = False
    """Whole images, longer side as long as the encoder's images, as retrieval sees them; otherwise a square crop."""
    whiten: str | None = None
    """SRC of the images from which a PCA whitening is learned; None: no whitening."""
    whiten_dimension: int | None = None
    """How many directions it keeps; None: all that the images span."""


class Embedded(NamedTuple):
    """What was written."""

    manifest: dict[str, Any]
    """Of the store."""
    measurement: dict[str, Any]
    """Counts and speed, as `result_content`."""


def embed(
    encoder: EncoderSpec,
    data: str,
    out: Path,
    options: EmbedOptions | None = None,
    *,
    result_json: Path | None = None,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> Embedded:
    """Write the feature store of the images of a source.

    Args:
        data: SRC: shards, a folder of images, or a list.
        out: the store's directory, new or empty; checked before anything is computed.
        result_json: where the caller will write the measurement; checked before anything is computed.
        force: let it replace a file that is not a result; see `check_outputs`.

    Raises:
        SopError: the output is occupied, or as `encoder_of_spec`, `open_source` and `extract_features`.
    """
    options = options or EmbedOptions()
    encoder = _join_ranks(encoder)
    progress = progress if distributed.is_main() else None
    distributed.decide(lambda: _check_request(encoder, data, out, options, result_json, force))
    source = open_source(data)
    learned_on = None if options.whiten is None else open_source(options.whiten)
    loaded = encoder_of_spec(encoder)
    images = len(source) + (0 if learned_on is None else len(learned_on))
    with kept_until_whole(loaded, out):
        started = time.perf_counter()
        if learned_on is not None:
            loaded.whiten_with(_learned(loaded, learned_on, options, _shifted(progress, 0, images)))
            loaded.spec = {**(loaded.spec or {}), "whitening": str(out.absolute())}  # where it is written
        store = _extract(loaded, source, options, _shifted(progress, images - len(source), images))
        seconds = time.perf_counter() - started
        manifest = distributed.decide(lambda: store.write(out, feature_dtype=options.feature_dtype))
    return Embedded(manifest, _measurement(data, encoder, options, manifest, images, seconds))


def _check_request(
    encoder: EncoderSpec, data: str, out: Path, options: EmbedOptions, result_json: Path | None, force: bool
) -> None:
    """Refuse what would fail after the work."""
    refuse_occupied(out)
    require_dtype(options.feature_dtype)
    if options.whiten is not None and encoder.whitening is not None:
        raise ConfigError("`whiten` learns a whitening and `whitening` applies one: give one of them")
    if options.whiten is None and options.whiten_dimension is not None:
        raise ConfigError("`whiten_dim` is of the whitening that `whiten` learns: give `whiten` SRC")
    if options.whiten_dimension is not None and options.whiten_dimension < 1:
        raise ConfigError(f"`whiten_dim` {options.whiten_dimension}: wanted 1 or more")
    learned_on = [] if options.whiten is None else source_files(options.whiten)
    read = [out, *source_files(data), *learned_on, *encoder_files(encoder)]
    check_outputs({"--json": result_json}, read, to_stdout=["--json"], force=force)


def _join_ranks(encoder: EncoderSpec) -> EncoderSpec:
    """Join the other processes that `torchrun` has started, each with a GPU of its own."""
    if distributed.announced_world_size() == 1:
        return encoder
    if ":" in encoder.device:
        raise ConfigError(f"`device` {encoder.device} under torchrun, where each rank takes its own: use `device=cuda`")
    return replace(encoder, device=str(distributed.join_process_group(encoder.device)))


def _extract(
    encoder: Encoder, source: ImageSource, options: EmbedOptions, progress: ProgressCallback | None
) -> FeatureStore:
    return extract_features(
        encoder,
        source,
        replace(options.extraction, across_ranks=True),
        preprocess=encoder.preprocess.keeping_aspect() if options.whole else None,
        progress=progress,
    )


def _learned(
    encoder: Encoder, source: ImageSource, options: EmbedOptions, progress: ProgressCallback | None
) -> Whitening:
    """Learn the whitening of a set of images, as this encoder sees them."""
    features = _extract(encoder, source, options, progress).features
    origin = WhiteningOrigin(
        set_name=source.description,
        set_fingerprint=hashlib.sha256(features.tobytes()).hexdigest(),
        images=len(features),
        encoder_fingerprint=encoder.fingerprint,
        pooling=encoder.token_pooling,
    )
    return learn_whitening(features, options.whiten_dimension, origin)


def _shifted(progress: ProgressCallback | None, before: int, total: int) -> ProgressCallback | None:
    """Report a part of the work as such."""
    return None if progress is None else lambda done, _: progress(before + done, total)


def _measurement(
    data: str, encoder: EncoderSpec, options: EmbedOptions, manifest: dict[str, Any], images: int, seconds: float
) -> dict[str, Any]:
    return result_content(
        command="sop-embed",
        dataset=data,
        protocol={
            "preprocess": manifest["preprocess"],
            "pooling": manifest["pooling"],
            "whitening": manifest["whitening"],
            "feature_dtype": options.feature_dtype,
            "batch_size": options.extraction.batch_size,
            "device": encoder.device,
            "ranks": distributed.world_size(),
        },
        metrics={
            "images": float(manifest["count"]),
            "dropped": float(manifest["dropped"]["count"]),
            "dimension": float(manifest["dimension"]),
            "images_per_second": round(images / max(seconds, 1e-9), 3),
        },
        encoder=manifest["encoder"],
        seconds=seconds,
    )
