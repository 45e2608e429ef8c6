"""`make demo IMAGES=...`: a pretrained encoder on a user's own images, before and after a short training on them."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sop_faiss.bootstrap import Interval
from sop_faiss.config import Config, load_config
from sop_faiss.data.images.source import open_source
from sop_faiss.data.pack import pack
from sop_faiss.data.stream import split_holdout
from sop_faiss.errors import CheckpointError, ConfigError, DataError
from sop_faiss.index.search import FeatureIndex
from sop_faiss.model.encoders.packaged import packaged_weights
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.paths import real_path
from sop_faiss.progress import Stage
from sop_faiss.report.contact_sheet import SheetTable, Strip, write_contact_sheet
from sop_faiss.train.verdict import Outcome, effect_on, outcome_of
from sop_faiss.verbs.demo import fresh_folder, train_for_demo, training_charts
from sop_faiss.verbs.finding.index_build import build
from sop_faiss.verbs.finding.index_search import search_by_key
from sop_faiss.verbs.finding.search_output import as_strips
from sop_faiss.verbs.training.train import TrainingResult

_log = logging.getLogger(__name__)
_FEWEST_PHOTOS = 16
_PRETRAINED = "lite0"
_SIZE = 128
"""Of images, in pixels; a quarter of the time of the encoder's own 256."""
_STEPS = 250
"""Steps of 16 photos that fit into the demo's five minutes on two cores."""
_MOST_EPOCHS = 20
"""Few photos are not seen more often than in the complete recipe."""
_PROJECTOR_STEPS, _WARMUP_STEPS = 16, 6
"""Of the recipe for 1,000 photos."""
_SCRATCH_STEPS = 160
_FROM_HELD_OUT = 500
"""With this many photos a fifth is left out of training, to be scored on: enough for an interval to say something."""
_QUERIES_SHOWN, _NEIGHBORS_SHOWN = 16, 8


@dataclass(frozen=True)
class PhotosResult:
    """What the demo has shown."""

    page: Path
    verdict: str
    """Whether the training was worth it, in one or two sentences."""
    commands: list[str]
    """What to run next, complete command lines."""


def photos_demo(images: str, out: Path, stage: Stage, seed: int = 0) -> PhotosResult:
    """Continue a pretrained encoder on a user's own images, and show what it finds before and after; without labels.

    Without the package of its weights, train from scratch, with a line in the log.

    Args:
        images: SRC of the images.
        out: folder for everything; one of an earlier demo is replaced.
        stage: announces each step.
        seed: of the training and of the photos that are left out of it.

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
    pretrained = _has_pretrained()
    fresh_folder(out)
    with stage("packing", "images") as progress:
        usable = pack(images, out / "data", resize=160, progress=progress).samples
    if usable < _FEWEST_PHOTOS:
        raise DataError(f"only {usable} of the {count} images of {images} are usable: the demo needs {_FEWEST_PHOTOS}")
    config = _config(out, usable, pretrained, seed)
    with stage("training", "steps") as progress:
        result = train_for_demo(config, out, progress)
    verdict, is_better = _say(result.last_metrics, config, pretrained)
    commands = _commands(images, out, usable, pretrained, is_better)
    strips = _strips(out, pretrained, stage)
    new = " New: not among the nearest before training." if pretrained else ""
    page = out / "results.html"
    with stage("drawing the page", "images") as progress:
        write_contact_sheet(
            page,
            "Your photos, before and after" if pretrained else "What the encoder finds",
            strips,
            subtitle=verdict,
            legend="Each query first, then the nearest; the number is the cosine similarity. Queries are spread evenly "
            f"over the photos, not picked.{new}",
            summary=_tables(config, usable, result, commands),
            charts=training_charts(out / "run"),
            pairs=True,
            progress=progress,
        )
    return PhotosResult(page, verdict, commands)


def _has_pretrained() -> bool:
    try:
        packaged_weights(_PRETRAINED)
    except CheckpointError as error:
        _log.warning("%s; without it the demo trains a small network from scratch, which finds less", error)
        return False
    return True


def _config(out: Path, usable: int, pretrained: bool, seed: int) -> Config:
    """Take the recipe with the sizes that suit this many photos, and its first steps only."""
    share = 0.2 if usable >= _FROM_HELD_OUT else 0.0
    trained = len(split_holdout(usable, share, seed)[0])
    sizes = [f"data.train={out / 'data'}", f"data.holdout_share={share}", f"train.seed={seed}"]
    if not pretrained:
        batch_size, capacity = min(64, trained), max(64, min(2048, trained))
        sizes += [
            f"train.batch_size={batch_size}",
            f"train.epochs={_SCRATCH_STEPS * batch_size / trained:.3f}",
            f"sop.cls.capacity={capacity}",
            f"sop.patch.capacity={capacity}",
            f"sop.cls.num_anchors={capacity // 4}",
            f"sop.patch.num_anchors={capacity // 4}",
        ]
        return load_config("photos_demo", sizes)
    batch_size = min(16, trained)
    per_epoch = trained // batch_size
    steps = min(_STEPS, _MOST_EPOCHS * per_epoch)
    sizes += [
        f"views.global_size={_SIZE}",
        f"views.local_size={_SIZE // 2}",
        "views.local_count=2",
        f"train.batch_size={batch_size}",
        f"train.stop_after_steps={steps}",
        f"sop.cls.num_anchors={min(256, trained // 4)}",
        f"optim.projector_warmup_epochs={min(_PROJECTOR_STEPS, steps // 4) / per_epoch:.4f}",
        f"optim.warmup_epochs={min(_WARMUP_STEPS, steps // 10) / per_epoch:.4f}",
        f"evaluate.every_steps={steps}",
    ]
    return load_config("continue_conv", sizes)


def _say(metrics: Mapping[str, Any], config: Config, pretrained: bool) -> tuple[str, bool]:
    """Return the verdict in words, and whether training was shown to help."""
    if metrics.get("difference") is None:
        return "The training could not be compared with its start: images were lost meanwhile.", False
    difference = Interval(*map(float, metrics["difference"]))
    outcome = outcome_of(difference)
    start = f"the pretrained encoder ({_PRETRAINED})" if pretrained else "random weights"
    seen = "photos that were not trained on" if config.data.holdout_share else "the photos, which were trained on"
    text = (
        f"This short training {effect_on(start, difference)}. Of {seen}, a crop finds another crop of its photo among "
        f"those of all others in {metrics['first_score']:.1f} % of cases before and {metrics['best_score']:.1f} % "
        "after (95 % interval of the difference in brackets). That says whether photos are told apart, not whether "
        "those of one kind are found: look at the neighbors."
    )
    if outcome is not Outcome.BEAT:
        text += " Keep what it started from, unless the complete recipe below shows more."
    return text, outcome is Outcome.BEAT


def _strips(out: Path, pretrained: bool, stage: Stage) -> list[Strip]:
    """Return the neighbors of some photos before and after, one strip next to the other; of one encoder from scratch.

    Both see images of the same size and pool in the same way, so that only the training differs.
    """
    encoders = {"before": EncoderSpec(_PRETRAINED, size=_SIZE, pooling="pooled", device="cpu")} if pretrained else {}
    encoders["index"] = EncoderSpec(str(out / "run"), device="cpu")
    found = []
    for name, encoder in encoders.items():
        with stage(
            "indexing" + (", " + ("before" if name == "before" else "after")) * pretrained, "images"
        ) as progress:
            build(out / name, encoder=encoder, data=str(out / "data"), progress=progress)
        index = FeatureIndex.open(out / name)
        rows = np.unique(np.linspace(0, len(index) - 1, _QUERIES_SHOWN).astype(np.int64))
        keys = [index.ids.keys[row] for row in rows]
        found.append(as_strips(index, search_by_key(index, keys, min(_NEIGHBORS_SHOWN, len(index) - 1)), by_label=True))
    if not pretrained:
        return found[0]
    pairs = zip(*found, strict=True)
    return [strip for before, after in pairs for strip in (replace(before, note="before"), _marked(before, after))]


def _marked(before: Strip, after: Strip) -> Strip:
    """Return the second strip with a note at each neighbor that the first does not have."""
    known = {hit.image.name for hit in before.hits}
    hits = [hit if hit.image.name in known else replace(hit, note="new") for hit in after.hits]
    return replace(after, note="after training", hits=hits)


def _tables(config: Config, usable: int, result: TrainingResult, commands: Sequence[str]) -> list[SheetTable]:
    """Tabulate what was trained, the health of the training, and what to run next."""
    metrics = result.last_metrics
    held_out = len(split_holdout(usable, config.data.holdout_share, config.train.seed)[1])
    trained = [
        ["started from", config.model.init or f"random weights of {config.model.backbone}"],
        ["photos", f"{usable:,}, {held_out:,} of them left out for the score" if held_out else f"{usable:,}"],
        [
            "steps",
            f"{result.step:,} of {config.train.batch_size} photos; the complete schedule has {result.steps or 0:,}",
        ],
        ["size", f"{config.views.global_size} px"],
    ]
    health = [
        ["signs of trouble", ", ".join(metrics["signs"]) or "none"],
        *(
            [label, f"{metrics[name]:.3g}"]
            for name, label in (
                ("feature_cosine", "mean cosine of different photos (1: all alike)"),
                ("feature_rankme", "dimensions in use (RankMe)"),
                ("view_auc", "views of one photo against those of others (0.5: chance)"),
            )
            if isinstance(metrics.get(name), float)
        ),
    ]
    return [
        SheetTable(("what was trained", ""), trained),
        SheetTable(("health", "at the end"), health),
        SheetTable(("next", "command"), [[*command.split(": ", 1)] for command in commands]),
    ]


def _commands(images: str, out: Path, usable: int, pretrained: bool, is_better: bool) -> list[str]:
    """Return what to run next, each after a few words and a colon."""
    shown = out / ("index" if is_better or not pretrained else "before")
    recipe = ["continue_conv"] if pretrained else ["photos_demo", "train.epochs=200"]
    if usable // 4 < 256:  # K of the recipes
        terms = ("cls",) if pretrained else ("cls", "patch")
        recipe += [f"sop.{term}.num_anchors={usable // 4}" for term in terms]
    if not pretrained and usable < 64:
        recipe.append(f"train.batch_size={usable}")
    longer = out.parent / f"{out.name}-longer"
    lines = {
        "search these photos in a browser": ["sop-index", "serve", str(shown)],
        "train with the complete recipe": ["sop-train", *recipe, f"data.train={images}", "--output", str(longer)],
        "see this training": ["sop-report", str(out / "run")],
    }
    return [f"{what}: {shlex.join(words)}" for what, words in lines.items()]
