"""`make demo`: from images to a page of what the encoder finds, on built-in digits or a user's own images."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from sop_faiss.config import Config, load_config
from sop_faiss.data.demo import write_digits
from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.source import ImageSource, open_source
from sop_faiss.data.pack import pack
from sop_faiss.errors import ConfigError, DataError, RunStoppedError
from sop_faiss.evaluate.feature_sets import open_feature_set
from sop_faiss.evaluate.knn_task import KnnTask
from sop_faiss.evaluate.labeled_sets import LabeledFeatures, LabeledSets
from sop_faiss.evaluate.retrieval import choose_protocol, score_retrieval
from sop_faiss.evaluate.retrieval_set import open_retrieval_set
from sop_faiss.evaluate.retrieval_task import RetrievalTask
from sop_faiss.index.search import FeatureIndex
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.paths import real_path
from sop_faiss.progress import ProgressCallback, Stage
from sop_faiss.report.contact_sheet import SheetTable, spread_places
from sop_faiss.report.panel_plot import panel_chart
from sop_faiss.report.plots import read_curves
from sop_faiss.report.run_panels import RunConstants, panels_of_run
from sop_faiss.verbs.finding.index_build import build
from sop_faiss.verbs.finding.index_search import search_by_images, search_by_key
from sop_faiss.verbs.finding.search_output import write_search_page
from sop_faiss.verbs.training.train import run_training

__all__ = ["DemoResult", "DemoTasks", "Scores", "digits_demo", "open_demo_tasks", "photos_demo"]

KNN_GAIN, MAP_GAIN = 10.0, 3.0
"""Points over random weights that the digits demo promises."""
_K = 20
_QUERIES_SHOWN = 20
_QUERIES_TRIED = 200  # of photos, of which the shown ones are chosen
_CHARTS = ("k-NN accuracy", "Loss over ln K", "Teacher entropy over ln K")
_FEWEST_PHOTOS = 16
_MARKER = "what is in this folder was made by make demo, which replaces it"


@dataclass(frozen=True)
class Scores:
    """How well features serve, in percent."""

    name: str
    knn_top1: float
    mean_average_precision: float


@dataclass(frozen=True)
class DemoResult:
    """What a demo has shown."""

    page: Path
    scores: list[Scores]
    """Raw pixels, random weights, trained; empty without labels."""
    reached: bool
    """Whether the promised gains over random weights were reached; True without labels."""


def _fresh_folder(out: Path) -> None:
    """Make the demo's folder; of an earlier demo only what it made itself is removed, anything else is left alone."""
    marker = out / ".made-by-demo"
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not marker.is_file():
        raise ConfigError(f"{out} exists and was not made by the demo: choose another `out` or remove it")
    for name in ("data", "run", "index"):
        if (out / name).is_dir():
            shutil.rmtree(out / name)
    (out / "results.html").unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    marker.write_text(_MARKER + "\n", encoding="utf-8")


def _train(config: Config, out: Path, progress: ProgressCallback) -> None:
    try:
        finished = run_training(config, out / "run", progress=progress).finished
    except KeyboardInterrupt:  # its message names --resume, which the demo does not have
        raise KeyboardInterrupt from None
    if not finished:
        raise RunStoppedError("the demo was stopped by a signal: run it again; it starts from the beginning")


def _pixels(source: ImageSource) -> Float32[np.ndarray, "n d"]:
    """Unit-norm raw pixels, the naive feature."""
    rows = np.stack([decode_image(source.read(i)).ravel() for i in range(len(source))]).astype(np.float32)
    rows += 1.0  # a black image still has a direction
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@dataclass(frozen=True)
class DemoTasks:
    """What the digits demo measures of features."""

    knn: KnnTask
    retrieval: RetrievalTask

    def score_encoder(self, name: str, encoder: Encoder) -> Scores:
        """Return the scores of an encoder's features."""
        measured = self.knn.measure(encoder) | self.retrieval.measure(encoder)
        return Scores(name, measured[self.knn.names[0]], measured[self.retrieval.names[0]])

    def score_pixels(self, name: str) -> Scores:
        """Return the scores of raw pixels."""
        train, test = self.knn.sets.train, self.knn.sets.test
        assert train.source is not None and train.labels is not None
        assert test.source is not None and test.labels is not None
        features = LabeledFeatures(_pixels(train.source), train.labels, _pixels(test.source), test.labels)
        data = self.retrieval.data
        ranked = score_retrieval(_pixels(data.queries), _pixels(data.gallery), data.truth, self.retrieval.rules)
        return Scores(name, self.knn.classify(features).metrics[f"top1_k{_K}"], ranked.metrics["mAP"])


def open_demo_tasks(data: Path) -> DemoTasks:
    """Open the digits, or another set that is laid out as they are.

    Raises:
        DataError: images or labels are missing.
    """
    train, test = (open_feature_set(str(data / name)) for name in ("train", "test"))
    retrieval = open_retrieval_set(str(data / "retrieval"))
    rules = choose_protocol(None, retrieval.truth)
    return DemoTasks(KnnTask(LabeledSets(train, test, "k-NN"), (_K,)), RetrievalTask(retrieval, rules))


def digits_demo(out: Path, stage: Stage) -> DemoResult:
    """Train on the built-in digits and compare with raw pixels and with random weights.

    Args:
        out: folder for everything; one of an earlier demo is replaced.
        stage: shows what is going on.

    Raises:
        ConfigError: `out` holds something else.
        SopError: as the steps raise.
    """
    _fresh_folder(out)
    data = out / "data"
    write_digits(data)
    config = load_config("digits_demo", [f"data.train={data / 'train'}"])
    with stage("scoring raw pixels and random weights", "steps") as progress:
        tasks = open_demo_tasks(data)
        scores = [tasks.score_pixels("raw pixels")]
        progress(1, 2)
        before = encoder_of_spec(EncoderSpec("config:digits_demo", random_weights=config.train.seed, device="cpu"))
        scores.append(tasks.score_encoder("before (random weights)", before))
        progress(2, 2)
    with stage("training", "steps") as progress:
        _train(config, out, progress)
    after = EncoderSpec(str(out / "run"), device="cpu")
    with stage("scoring the trained encoder", "steps") as progress:
        scores.append(tasks.score_encoder("after (trained)", encoder_of_spec(after)))
        progress(1, 1)
    _, untrained, trained = scores
    reached = (
        trained.knn_top1 - untrained.knn_top1 >= KNN_GAIN
        and trained.mean_average_precision - untrained.mean_average_precision >= MAP_GAIN
    )
    rows = [[s.name, f"{s.knn_top1:.1f} %", f"{s.mean_average_precision:.1f} %"] for s in scores]
    table = SheetTable(("features", f"k-NN top-1 (k = {_K})", "mAP"), rows, "Before and after training, without labels")
    page = _index_and_page(out, str(data / "train"), open_source(data / "test"), [table], stage)
    return DemoResult(page, scores, reached)


def photos_demo(images: str, out: Path, stage: Stage) -> DemoResult:
    """Train on a user's own images and show what the encoder finds; no labels are used.

    Args:
        images: SRC of the images.
        out: folder for everything; one of an earlier demo is replaced.
        stage: shows what is going on.

    Raises:
        ConfigError: `out` holds something else.
        DataError: there are too few images.
        SopError: as the steps raise.
    """
    if real_path(out) in (real_path(images), *real_path(images).parents):
        raise ConfigError(f"the images {images} are inside `out={out}`, which the demo replaces: choose another `out`")
    count = len(open_source(images))
    if count < _FEWEST_PHOTOS:
        raise DataError(f"{images} has {count} images: the demo needs {_FEWEST_PHOTOS} or more to learn from")
    _fresh_folder(out)
    with stage("packing", "images") as progress:
        packed = pack(images, out / "data", resize=160, progress=progress)
    usable = packed.samples
    if usable < _FEWEST_PHOTOS:
        raise DataError(f"only {usable} of the {count} images of {images} are usable: the demo needs {_FEWEST_PHOTOS}")
    batch_size = min(64, usable)
    capacity = max(64, min(2048, usable))
    sizes = [
        f"data.train={out / 'data'}",
        f"train.batch_size={batch_size}",
        f"train.epochs={160 * batch_size / usable:.3f}",
        f"sop.cls.capacity={capacity}",
        f"sop.patch.capacity={capacity}",
        f"sop.cls.num_anchors={capacity // 4}",
        f"sop.patch.num_anchors={capacity // 4}",
    ]
    with stage("training", "steps") as progress:
        _train(load_config("photos_demo", sizes), out, progress)
    return DemoResult(_index_and_page(out, str(out / "data"), None, (), stage), [], True)


def _index_and_page(
    out: Path, gallery: str, queries: ImageSource | None, summary: Sequence[SheetTable], stage: Stage
) -> Path:
    """Index the gallery and show the nearest of some queries: of another source, or of the index itself."""
    encoder = EncoderSpec(str(out / "run"), device="cpu")
    with stage("indexing", "images") as progress:
        build(out / "index", encoder=encoder, data=gallery, progress=progress)
    index = FeatureIndex.open(out / "index")
    k = min(10, len(index) - 1)
    if queries is None:
        result = search_by_key(index, [index.ids.keys[row] for row in spread_places(len(index), _QUERIES_TRIED)], k)
    else:
        result = search_by_images(index, encoder_of_spec(encoder), queries, k)
    panels, _ = panels_of_run(read_curves(out / "run"), RunConstants({}, 0))
    page = out / "results.html"
    with stage("drawing the page", "images") as progress:
        write_search_page(
            page,
            index,
            result,
            title="What the encoder finds",
            summary=summary,
            queries=_QUERIES_SHOWN,
            charts=[panel_chart(panel) for panel in panels if panel.title in _CHARTS],
            progress=progress,
        )
    return page
