"""The verb of `sop-index tune`: which settings of an encoder find a user's images best."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int64

from sop_faiss.bootstrap import PairedDifference, paired_difference
from sop_faiss.data.images.source import ImageSource, open_source
from sop_faiss.data.images.subset import Subset
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.encoder_settings import Setting, possible_settings, setting_features
from sop_faiss.evaluate.leave_one_out import found_others, found_others_whitened, queries_of
from sop_faiss.evaluate.metrics import average_precision, recall_at_1
from sop_faiss.model.encoders.choice import is_choice, write_choice
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.pooling import split_pooling
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.model.encoders.whitening import Whitening, WhiteningOrigin, learn_whitening
from sop_faiss.progress import Stage
from sop_faiss.verbs.finding.index_build import DEFAULT_ENCODER
from sop_faiss.verbs.output_paths import check_outputs, encoder_files, source_files

FEWEST, MOST = 30, 100_000
"""Images that are compared."""
_PER_CLASS = 10
"""Of each class, at least, before further classes are taken."""
_FEWEST_FOR_WHITENING = 200
_IMAGES_PER_DIRECTION = 4
"""Of a half of the images, a direction that fewer span is as much noise as variance."""
_MOST_DIRECTIONS = 256
_SEED = 0
"""Of the sample, and of the crops."""


@dataclass(frozen=True)
class Candidate:
    """A setting and what it scored."""

    setting: Setting
    whitened: int
    """To this many dimensions; 0: not whitened."""
    scores: Float64[np.ndarray, " q"]
    """Of each query, in percent."""
    milliseconds: float
    """Of the encoder per image."""

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.setting}{f', whitened to {self.whitened}' if self.whitened else ''}"


@dataclass(frozen=True)
class Tuned:
    """What was compared and chosen."""

    candidates: list[Candidate]
    """The encoder's own setting first, then the best first."""
    chosen: Candidate
    difference: PairedDifference | None
    """Of the best to the own setting, with an interval for that many comparisons; None: the own one is the best."""
    by: str
    """What the scores are, in words."""
    classes: list[str]
    """Names of those that images look for, the largest first; empty without labels."""
    images: int
    bad: list[str]
    """Images that could not be used."""


def tune(
    data: str,
    out: Path,
    encoder: EncoderSpec | None = None,
    *,
    images: int = 500,
    labels: bool = True,
    force: bool = False,
    stage: Stage,
) -> Tuned:
    """Compare sizes, scales, poolings, last blocks and whitening of an encoder on images, and write the choice.

    By labels, where images have some, every image looks for the others of its class; else two crops of each image look
    for each other. The encoder's own setting is kept unless the best one is better beyond doubt: its paired interval,
    for the number of settings compared, is above 0.

    Args:
        data: SRC of the images.
        out: the JSON file to write, which `model` takes; a whitening is written beside it.
        encoder: which encoder, and another setting to start from.
        images: how many are compared at most.
        labels: whether labels count; False where folders are not what is searched for, as those of a phone.
        force: let it replace a file that is not a result; see `check_outputs`.

    Raises:
        ConfigError: an option is impossible.
        DataError: there are too few images.
        SopError: as `encoder_of_spec` and `open_source`.
    """
    encoder = encoder or EncoderSpec("")
    if not encoder.model:
        encoder = replace(encoder, model=DEFAULT_ENCODER)
    _check(data, out, encoder, images, force)
    source = open_source(data)
    loaded = encoder_of_spec(encoder)
    sample, of_class = _sample(source, images, labels)
    settings = possible_settings(loaded)
    with stage(f"comparing {len(settings)} settings", "images") as progress:
        found = setting_features(loaded, sample, settings, views=of_class is None, seed=_SEED, progress=progress)
    usable = len(found.positions)
    if usable < FEWEST:
        raise DataError(f"{data}: {usable} images can be compared, wanted {FEWEST} or more")
    image_of_row: Int64[np.ndarray, " n"] = np.arange(usable)
    if of_class is None:
        image_of_row = np.concatenate([image_of_row, image_of_row])
        classes = image_of_row
    else:
        classes = of_class[found.positions]
        if not queries_of(classes).any():
            raise DataError(f"{data}: no two usable images have the same label, so none can be found by another")
    metric = _first_is_right if of_class is None else average_precision
    width = _directions(usable)
    candidates = []
    with stage("scoring", "settings") as progress:
        for done, (setting, rows) in enumerate(found.rows.items(), start=1):
            cost = found.milliseconds[setting.size, setting.scales]
            candidates.append(Candidate(setting, 0, found_others(rows, classes, metric), cost))
            if width:
                learn = partial(_learned_map, width)
                scores = found_others_whitened(rows, classes, metric, image_of_row, learn)
                candidates.append(Candidate(setting, min(width, rows.shape[1]), scores, cost))
            progress(done, len(found.rows))
    chosen, difference = choose(candidates)
    by = "views" if of_class is None else "labels"
    names = [] if of_class is None else _names(classes, source.class_names)
    ranked = [candidates[0], *sorted(candidates[1:], key=lambda each: -each.scores.mean())]
    tuned = Tuned(ranked, chosen, difference, by, names, usable, found.bad)
    _write(out, loaded, tuned, data, found.rows[chosen.setting])
    return tuned


def _names(classes: Int64[np.ndarray, " n"], names: list[str] | None) -> list[str]:
    numbers, counts = np.unique(classes, return_counts=True)
    ranked = numbers[np.argsort(-counts, kind="stable")].tolist()
    return [str(number) if names is None else names[number] for number in ranked]


def _first_is_right(ranks: Int64[np.ndarray, " r"], relevant_count: int) -> float:
    return recall_at_1(ranks)


def choose(candidates: list[Candidate]) -> tuple[Candidate, PairedDifference | None]:
    """Return the best candidate if it is clearly better than the first, else the first; and their difference."""
    own, best = candidates[0], max(candidates, key=lambda each: each.scores.mean())
    if best is own:
        return own, None
    difference = paired_difference(own.scores, best.scores, comparisons=len(candidates) - 1)
    return (best if difference.difference.low > 0 else own), difference


def _check(data: str, out: Path, encoder: EncoderSpec, images: int, force: bool) -> None:
    """Refuse what would fail after the work."""
    if not FEWEST <= images <= MOST:
        raise ConfigError(f"`images={images}`: wanted {FEWEST} to {MOST:,} images to compare settings on")
    if encoder.mirrored:
        raise ConfigError("`mirrored` is not compared here, and would double the time of all settings: leave it out")
    if encoder.whitening is not None:
        raise ConfigError("`whitening` is a setting that is compared here: leave it out")
    if is_choice(encoder.model):
        raise ConfigError(f"`model={encoder.model}` is a choice already: name the encoder itself")
    if out.suffix != ".json":
        raise ConfigError(f"`out={out}`: wanted a name that ends in .json")
    check_outputs({"--out": out}, [*source_files(data), *encoder_files(encoder)], force=force)


def _sample(source: ImageSource, count: int, by_labels: bool) -> tuple[Subset, Int64[np.ndarray, " n"] | None]:
    """Draw images, and their labels if some are shared: then a number of each class, of as many classes as fit."""
    drawn = np.random.default_rng(_SEED).permutation(len(source))
    labels = source.labels
    if labels is not None and by_labels:
        drawn_labels = labels[drawn]
        shared = queries_of(drawn_labels) & (drawn_labels >= 0)
        if shared.any():
            drawn = drawn[shared]
            classes, first = np.unique(labels[drawn], return_index=True)
            several = max(_PER_CLASS, -(-count // len(classes)))
            by_draw = classes[np.argsort(first)]
            parts = [drawn[labels[drawn] == number][:several] for number in by_draw[: -(-count // 2)]]
            chosen = np.sort(np.concatenate(parts)[:count])
            return Subset(source, chosen), labels[chosen]
    return Subset(source, np.sort(drawn[:count])), None


def _directions(images: int) -> int:
    """Return how many dimensions a whitening of half of the images may have; 0: there are too few for any."""
    return 0 if images < _FEWEST_FOR_WHITENING else min(_MOST_DIRECTIONS, images // 2 // _IMAGES_PER_DIRECTION)


def _learned(width: int, rows: Float32[np.ndarray, "n d"], origin: WhiteningOrigin) -> Whitening:
    try:
        return learn_whitening(rows, min(width, rows.shape[1]), origin)
    except ConfigError:  # fewer directions are spanned
        return learn_whitening(rows, None, origin)


def _learned_map(width: int, rows: Float32[np.ndarray, "n d"]) -> Any:
    return _learned(width, rows, WhiteningOrigin("half", "", len(rows), "", "")).apply


def _write(out: Path, encoder: Encoder, tuned: Tuned, data: str, rows: Float32[np.ndarray, "n d"]) -> None:
    setting = tuned.chosen.setting
    pooling, blocks = split_pooling(setting.pooling)
    assert encoder.spec is not None
    remembered = {name: value for name, value in encoder.spec.items() if name != "last_blocks"}
    remembered |= {"size": setting.size, "scales": list(setting.scales), "pooling": pooling}
    if blocks > 1:
        remembered["last_blocks"] = blocks
    if tuned.chosen.whitened:
        print_of_rows = hashlib.sha256(rows.tobytes()).hexdigest()
        origin = WhiteningOrigin(data, print_of_rows, len(rows), encoder.fingerprint, setting.pooling)
        whitening = _learned(tuned.chosen.whitened, rows, origin)
        # its name follows its content: an index that uses an earlier one still finds it
        file = out.with_suffix(f".whitening-{whitening.fingerprint[:12]}.safetensors")
        whitening.write(file)
        remembered["whitening"] = str(file.absolute())
    write_choice(out, remembered, encoder.fingerprint, measured(tuned, data))


def measured(tuned: Tuned, data: str) -> dict[str, Any]:
    """Return what was compared as JSON values."""
    gain = tuned.difference.difference if tuned.difference is not None else None
    return {
        "data": data,
        "images": tuned.images,
        "by": tuned.by,
        "queries": len(tuned.chosen.scores),
        "chosen": tuned.chosen.name,
        "settings": [
            {
                "setting": each.name,
                "score": round(float(each.scores.mean()), 4),
                "milliseconds": round(each.milliseconds, 2),
            }
            for each in tuned.candidates
        ],
        "best_minus_own": None if gain is None else [gain.mean, gain.low, gain.high],
    }
