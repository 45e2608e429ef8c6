"""Numbers of any encoder that need no labels, on views of a sample of images."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from sop_faiss.config import Config
from sop_faiss.data.images.source import open_source
from sop_faiss.data.stream import split_holdout
from sop_faiss.data.views.view_pairs import ViewPairs
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.view_recall_task import ViewRecallTask
from sop_faiss.model.encoders.encode import require_batch_size
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import ProgressCallback
from sop_faiss.verbs.scoring.task_result import TaskResult


def evaluate_label_free(
    data: str,
    spec: EncoderSpec,
    *,
    images: int = 1000,
    colors: bool = False,
    batch_size: int = 256,
    max_bad_fraction: float = 0.01,
    progress: ProgressCallback | None = None,
) -> TaskResult:
    """Measure recall between two views, RankMe, LiDAR, alpha-ReQ and the entropy of assignments.

    Views are square crops of a quarter to all of an image, mirrored or not, of the size of the encoder's input.

    Args:
        data: SRC of images; labels are not read.
        spec: which encoder.
        images: the most images, a seeded draw. The numbers depend on it.
        colors: whether the colors of the views are changed, as in training.
        batch_size: views per forward pass.
        max_bad_fraction: unusable images up to this share are left out.
        progress: called with the number of images read.

    Raises:
        ConfigError: a number is out of range, or the size is too small or too large for views.
        DataError: the source is unusable, or has fewer than two images.
    """
    if images < 2:
        raise ConfigError(f"`images={images}`: wanted 2 or more")
    if not 0 <= max_bad_fraction <= 1:
        raise ConfigError(f"`max_bad_fraction={max_bad_fraction}`: wanted 0 to 1")
    require_batch_size(batch_size)
    started = time.perf_counter()
    source = open_source(data)
    if len(source) < 2:
        raise DataError(f"{data} has {len(source)} image: wanted 2 or more")
    encoder, plain = encoder_of_spec(spec), Config()
    config = replace(
        plain,
        data=replace(plain.data, max_bad_fraction=max_bad_fraction, top_value=encoder.preprocess.top_value),
        views=replace(plain.views, global_size=encoder.preprocess.crop),
        evaluate=replace(plain.evaluate, view_colors=colors),
    )
    positions = split_holdout(len(source), min(1.0, images / len(source)), seed=0)[1]
    task = ViewRecallTask(ViewPairs(source, positions, config, "`max_bad_fraction`"), batch_size, label_free=True)
    scores = task.measure_each(encoder, progress)
    protocol = {
        "images": len(scores["view_recall_at_1"].each),
        "view_size": config.views.global_size,
        "view_scale": list(config.views.global_scale),
        "view_colors": colors,
        "units": {name: score.unit for name, score in scores.items()},
    }
    metrics = {name: score.percent for name, score in scores.items() if math.isfinite(score.percent)}
    origin = {"name": encoder.name, "fingerprint": encoder.fingerprint}
    return TaskResult("sop-eval label-free", data, protocol, metrics, origin, time.perf_counter() - started)
