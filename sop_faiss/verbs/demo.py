"""`make demo`: from images to a page of what an encoder finds, on several versions of built-in cut-outs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from sop_faiss.bootstrap import Interval
from sop_faiss.config import Config, load_config
from sop_faiss.data.demo_scenes import KNOWN_PER_THING, write_scenes
from sop_faiss.data.images.source import ImageSource, open_source
from sop_faiss.errors import ConfigError, RunStoppedError
from sop_faiss.evaluate.baselines import pixel_features, small_images
from sop_faiss.evaluate.knn_task import KnnTask
from sop_faiss.evaluate.retrieval import choose_protocol, score_retrieval
from sop_faiss.evaluate.retrieval_task import RetrievalTask
from sop_faiss.evaluate.sets.feature_sets import open_feature_set
from sop_faiss.evaluate.sets.labeled_sets import LabeledFeatures, LabeledSets
from sop_faiss.evaluate.sets.retrieval_set import open_retrieval_set
from sop_faiss.index.search import FeatureIndex
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.packaged import packaged_architecture, packaged_weights
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import ProgressCallback, Stage
from sop_faiss.report.contact_sheet import Chart, SheetTable
from sop_faiss.report.panel_plot import panel_chart
from sop_faiss.report.plots import read_curves
from sop_faiss.report.run_panels import RunConstants, panels_of_run
from sop_faiss.train.verdict import effect_on
from sop_faiss.verbs.finding.index_build import build
from sop_faiss.verbs.finding.index_search import search_by_images
from sop_faiss.verbs.finding.search_output import write_search_page
from sop_faiss.verbs.training.train import TrainingResult, run_training

KNN_GAIN, MAP_GAIN = 15.0, 10.0
"""Points over raw pixels and over random weights that the demo promises."""
_PRETRAINED = "lite0"
_SIZE = 96
"""Of images, in pixels; twice the side of the photographs."""
_STEPS = 200
"""Of 16 images, one or two minutes of two cores."""
_K = KNOWN_PER_THING
_QUERIES_SHOWN = 20
_CAPTION = (
    "Find the other photographs of a thing, which is moved, turned, in other light and colors, and blurred: pixels of "
    "the same place differ. The things asked for were not trained on."
)
_CHARTS = ("k-NN accuracy", "Recall between two views", "Loss over ln K", "Teacher entropy over ln K")
"""Panels of the training that a demo shows."""
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
    """Raw pixels, random weights, the pretrained encoder, trained."""
    reached: bool
    """Whether the promised gains over raw pixels and random weights were reached."""
    verdict: str
    """Whether training made the pretrained encoder better, in a sentence."""


def fresh_folder(out: Path) -> None:
    """Make the demo's folder; of an earlier demo only what it made itself is removed, anything else is left alone.

    Raises:
        ConfigError: it holds something else.
    """
    marker = out / ".made-by-demo"
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not marker.is_file():
        raise ConfigError(f"{out} exists and was not made by the demo: choose another `out` or remove it")
    for name in ("data", "run", "index", "before"):
        if (out / name).is_dir():
            shutil.rmtree(out / name)
    (out / "results.html").unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    marker.write_text(_MARKER + "\n", encoding="utf-8")


def train_for_demo(config: Config, out: Path, progress: ProgressCallback) -> TrainingResult:
    """Train into `run` of the demo's folder, to the end.

    Raises:
        KeyboardInterrupt: Ctrl-C, at once.
        RunStoppedError: a signal stopped it, or it stopped itself.
        SopError: as of `run_training`.
    """
    try:
        result = run_training(config, out / "run", progress=progress, saves_on_interrupt=False)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the demo was stopped: run it again; it starts from the beginning") from None
    if not result.finished:
        raise RunStoppedError("the demo was stopped by a signal: run it again; it starts from the beginning")
    return result


def _pixels(source: ImageSource) -> Float32[np.ndarray, "n d"]:
    return pixel_features(small_images(source, _SIZE // 2))


@dataclass(frozen=True)
class DemoTasks:
    """What the demo measures of features."""

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
    """Open the scenes, or another set that is laid out as they are.

    Raises:
        DataError: images or labels are missing.
    """
    known, asked = (open_feature_set(str(data / name)) for name in ("known", "asked"))
    retrieval = open_retrieval_set(str(data / "retrieval"))
    rules = choose_protocol(None, retrieval.truth)
    return DemoTasks(KnnTask(LabeledSets(known, asked, "k-NN"), (_K,)), RetrievalTask(retrieval, rules))


def scenes_demo(out: Path, stage: Stage, seed: int = 0) -> DemoResult:
    """Continue the pretrained encoder on built-in photographs, and compare with pixels, random weights and its start.

    Args:
        out: folder for everything; one of an earlier demo is replaced.
        stage: announces each step.
        seed: of the training and of the random weights; the photographs stay the same.

    Raises:
        CheckpointError: the pretrained encoder is not installed.
        ConfigError: `out` holds something else.
        SopError: as the steps raise.
    """
    packaged_weights(_PRETRAINED)
    fresh_folder(out)
    data = out / "data"
    write_scenes(data)
    config = _config(data, seed)
    network = f"timm:{packaged_architecture(_PRETRAINED)}"
    encoders = {
        "random weights": EncoderSpec(network, random_weights=seed, size=_SIZE, pooling="pooled", device="cpu"),
        f"{_PRETRAINED} as installed": EncoderSpec(_PRETRAINED, size=_SIZE, pooling="pooled", device="cpu"),
    }
    with stage("scoring raw pixels, random weights and the pretrained encoder", "steps") as progress:
        tasks = open_demo_tasks(data)
        scores = [tasks.score_pixels("raw pixels")]
        progress(1, 3)
        for name, spec in encoders.items():
            scores.append(tasks.score_encoder(name, encoder_of_spec(spec)))
            progress(len(scores), 3)
    with stage("training", "steps") as progress:
        result = train_for_demo(config, out, progress)
    after = EncoderSpec(str(out / "run"), device="cpu")
    with stage("scoring the trained encoder", "steps") as progress:
        scores.append(tasks.score_encoder("after training", encoder_of_spec(after)))
        progress(1, 1)
    pixels, untrained, _, trained = scores
    reached = all(
        trained.knn_top1 - other.knn_top1 >= KNN_GAIN
        and trained.mean_average_precision - other.mean_average_precision >= MAP_GAIN
        for other in (pixels, untrained)
    )
    difference = Interval(*map(float, result.last_metrics["difference"]))
    verdict = f"A training of {_STEPS} steps without labels {effect_on(_PRETRAINED, difference)} of mAP"
    rows = [[s.name, f"{s.knn_top1:.1f} %", f"{s.mean_average_precision:.1f} %"] for s in scores]
    table = SheetTable(("features", f"k-NN top-1 (k = {_K})", "mAP"), rows, f"{_CAPTION} {verdict}.")
    page = _index_and_page(out, str(data / "known"), open_source(data / "asked"), [table], stage)
    return DemoResult(page, scores, reached, verdict)


def _config(data: Path, seed: int) -> Config:
    """Take the recipe for one's own photos at the size of these, with changed colors, and its first steps only."""
    sizes = [f"views.global_size={_SIZE}", "views.local_size=64", "views.local_count=2"]
    colors = ["views.jitter=0.8", "views.gray=0.2", "views.solarize_global2=0.2"]  # as the photographs differ
    steps = [f"train.stop_after_steps={_STEPS}", f"evaluate.every_steps={_STEPS}", f"train.seed={seed}"]
    parts = {"data.train": "train", "evaluate.retrieval": "retrieval"}
    return load_config(
        "continue_conv", [*sizes, *colors, *steps, *(f"{key}={data / name}" for key, name in parts.items())]
    )


def training_charts(run: Path) -> list[Chart]:
    """Draw how a training went."""
    panels, _ = panels_of_run(read_curves(run), RunConstants({}, 0))
    return [panel_chart(panel) for panel in panels if panel.title in _CHARTS]


def _index_and_page(out: Path, gallery: str, queries: ImageSource, summary: Sequence[SheetTable], stage: Stage) -> Path:
    """Index the gallery and show the nearest of some queries."""
    encoder = EncoderSpec(str(out / "run"), device="cpu")
    with stage("indexing", "images") as progress:
        build(out / "index", encoder=encoder, data=gallery, progress=progress)
    index = FeatureIndex.open(out / "index")
    result = search_by_images(index, encoder_of_spec(encoder), queries, min(10, len(index) - 1))
    page = out / "results.html"
    with stage("drawing the page", "images") as progress:
        write_search_page(
            page,
            index,
            result,
            title="Several versions of each cut-out: what the encoder finds",
            summary=summary,
            by_label=True,
            queries=_QUERIES_SHOWN,
            charts=training_charts(out / "run"),
            progress=progress,
        )
    return page
