"""Alarms: what the numbers of a failing run look like, why that happens, and what helps (docs/metrics.md).

An alarm goes off when its sign shows in several logged steps in a row, after a warm-up. The end of a run is judged by
its last logged steps, however few there are. Signs are pure functions of the numbers; counts over time are saved with
the run. Numbers that are not finite stop a run at once: see `stopped.check_finite`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sop_faiss.config import Config
from sop_faiss.errors import CheckpointError

PATIENCE = 5
"""Logged steps in a row that show a sign before its alarm goes off: a single batch may be unusual."""
LEAST_WARMUP_STEPS = 100
"""Fresh networks make embeddings that are nearly the same for all images; small runs left that after ten steps."""
UNIFORM_ENTROPY = 0.99
"""Teacher entropy over ln K. Runs that learned stayed below 0.92 after their warm-up; one that failed had 0.99."""
CONSTANT_LOGITS = 0.2
"""Root mean square distance of two images' embeddings, divided by the lower temperature of teacher and student: an
upper bound for the difference of their log assignments. Below it no anchors can tell images apart. Checkpoints of runs
that learned had 16 to 64, of digits with fixed anchors 8 to 15."""
ALIKE_COSINE, EXACTLY_UNIFORM = 0.999, 0.9999
"""If the anchors are such embeddings too, only differences of differences tell images apart, and these vanish earlier:
when embeddings have this mean cosine, and the teacher's entropy is this fraction of ln K. The same checkpoints had
cosines of 0.19 to 0.95, with fixed anchors up to 0.986, and entropies below 0.96."""
DROPPED_RANK = 0.5
"""RankMe as a fraction of its best. In runs that learned it rose or stayed; with fixed anchors it fell by up to 0.4."""
LEAST_BEST_RANK = 4.0
"""With a smaller best RankMe, a drop means nothing."""
ONE_IMAGE_SHARE = 0.5
"""Fraction of anchors whose supports all come from one image, as `one_image_share` reports it."""
BLIND_VIEW_AUC = 0.55
"""Mean of `view_auc` over some logged steps; 0.5 is chance, whatever the number of images."""
AUC_IMAGES = 128
"""Least number of images in the mean: at chance it is then above `BLIND_VIEW_AUC` once in 40 times.
Digits had 0.79 to 0.85."""


@dataclass(frozen=True)
class _Kind:
    is_certain: bool
    """No run recovers from it: there is nothing left to learn from."""
    explanation: str
    """Likely cause; remedy."""


KINDS = {
    "constant_output": _Kind(
        True,
        "the networks have collapsed to a constant output, as they do with fixed anchors, a teacher that follows too "
        "fast, too much weight decay or images that are all the same; raise optim.momentum, lower optim.base_lr, "
        "optim.weight_decay and loss.teacher_temp, with SOP set sop.anchors=random, and look at the views (sop-data "
        "preview)",
    ),
    "teacher_uniform": _Kind(
        False,
        "the teacher assigns each image to all prototypes alike, which teaches nothing: its temperature is too high "
        "for embeddings this much alike, or the student does not move; lower loss.teacher_temp and "
        "loss.teacher_temp_start, fill the memory (sop.fill=teacher, massl.fill=teacher), or raise optim.base_lr or "
        "optim.momentum",
    ),
    "rank_drop": _Kind(
        False,
        "embeddings lose directions, mostly because of a learning rate or weight decay that is too high, or a teacher "
        "that follows too fast; lower optim.base_lr or optim.weight_decay_end, or raise optim.momentum",
    ),
    "one_image": _Kind(
        False,
        "images cannot be told apart: the images are copies of one, or the views keep nothing of their image; look "
        "at them (sop-data check --duplicates, sop-data preview) and soften views.*, or give SOP's prototypes supports "
        "of other images (neighbors.exclude_same_image=always, a larger memory)",
    ),
}
"""By name, the most certain first."""


@dataclass(frozen=True)
class Alarm:
    """An alarm that is going off."""

    name: str
    message: str
    """Numbers, likely cause, remedy; one line."""
    stops: bool
    """Whether the run stops here."""
    is_logged: bool
    """Whether to log it: the first time, and each time it has gone off twice as often."""


@dataclass(frozen=True)
class Rules:
    """The settings of a run that its alarms depend on."""

    stop_on: str
    """`non_finite`, `certain` or `any`."""
    warmup_steps: int
    """Signs up to this step are ignored."""
    student_temp: float
    auc_steps: int
    """Logged steps that `view_auc` is averaged over."""

    @classmethod
    def of(cls, config: Config, steps_per_epoch: int) -> Rules:
        """Return the rules of a run."""
        train, warmup = config.train, config.train.alarm_warmup_steps
        if warmup is None:
            epochs = config.optim.projector_warmup_epochs + config.optim.warmup_epochs
            warmup = max(LEAST_WARMUP_STEPS, round(epochs * steps_per_epoch))
        auc_steps = max(PATIENCE, -(-AUC_IMAGES // train.batch_size))
        return cls(train.stop_on, warmup, config.loss.student_temp, auc_steps)


def signs(
    metrics: Mapping[str, float | int], best: Mapping[str, float], view_auc: float, student_temp: float
) -> dict[str, str]:
    """Return the signs that a step shows: name of the alarm -> the numbers. NaN is not a sign.

    Args:
        metrics: of the step.
        best: largest value so far of each RankMe.
        view_auc: its mean over the last logged steps.
        student_temp: temperature of the student.
    """
    shown: dict[str, list[str]] = {name: [] for name in KINDS}
    if _is_constant(metrics, student_temp):
        shown["constant_output"].append(f"mean cosine of the images' embeddings {metrics['embedding_cosine']:.7f}")
    for key, value in metrics.items():
        if key.startswith("teacher_entropy_") and value > UNIFORM_ENTROPY:
            shown["teacher_uniform"].append(f"{key} = {value:.4f}")
        if key.startswith("one_image_share_") and value >= ONE_IMAGE_SHARE:
            shown["one_image"].append(f"{key} = {value:.2f}")
        if key in best and best[key] >= LEAST_BEST_RANK and value < DROPPED_RANK * best[key]:
            shown["rank_drop"].append(f"{key} = {value:.2f}, from {best[key]:.2f}")
    if view_auc < BLIND_VIEW_AUC:
        shown["one_image"].append(f"mean view_auc = {view_auc:.3f}, where 0.5 is chance")
    return {name: ", ".join(numbers) for name, numbers in shown.items() if numbers}


def _is_constant(metrics: Mapping[str, float | int], student_temp: float) -> bool:
    """Return whether no assignment can tell the images' embeddings apart; see `CONSTANT_LOGITS`, `ALIKE_COSINE`."""
    cosine = metrics.get("embedding_cosine", math.nan)
    if math.isnan(cosine):
        return False
    distance = math.sqrt(max(0.0, 2.0 * (1.0 - cosine)))  # rounding may take a cosine above 1
    if distance < CONSTANT_LOGITS * min(student_temp, metrics["teacher_temp"]):
        return True
    # The cosine is of the first loss term's embeddings, and metrics are in the order of the terms.
    entropy = next((value for key, value in metrics.items() if key.startswith("teacher_entropy_")), 0.0)
    return cosine > ALIKE_COSINE and entropy > EXACTLY_UNIFORM


class Alarms:
    """Counts signs over logged steps; the same on all ranks, since the numbers are the same."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._held = dict.fromkeys(KINDS, 0)  # logged steps in a row
        self._gone_off = dict.fromkeys(KINDS, 0)  # logged steps in all
        self._best: dict[str, float] = {}
        self._recent_auc: list[float] = []

    def _stops(self, name: str) -> bool:
        return self.rules.stop_on == "any" or (self.rules.stop_on == "certain" and KINDS[name].is_certain)

    @property
    def may_stop_soon(self) -> bool:
        """Return whether a sign shows that would stop the run if it stayed, so that a checkpoint now may be useless."""
        return any(self._held[name] > 0 and self._stops(name) for name in KINDS)

    def observe(self, step: int, metrics: Mapping[str, float | int]) -> list[Alarm]:
        """Add a logged step, and return the alarms that go off, the most certain first."""
        if step <= self.rules.warmup_steps:
            return []
        for key, value in metrics.items():
            if key.endswith("_rankme") and value > self._best.get(key, 0.0):
                self._best[key] = value
        self._recent_auc = self._last_auc([*self._recent_auc, metrics.get("view_auc", math.nan)])
        shown = signs(metrics, self._best, self._mean_auc(self._recent_auc), self.rules.student_temp)
        alarms = []
        for name, kind in KINDS.items():
            self._held[name] = self._held[name] + 1 if name in shown else 0
            if self._held[name] >= PATIENCE:
                self._gone_off[name] += 1
                count = self._gone_off[name]
                message = f"{shown[name]}: {kind.explanation}"
                alarms.append(Alarm(name, message, self._stops(name), count & (count - 1) == 0))
        return alarms

    def at_end(self, records: Sequence[Mapping[str, float | int | None]]) -> dict[str, str]:
        """Judge the end of a run by the signs that all its last logged steps show, even within the warm-up.

        Args:
            records: all logged steps of the run; None: no such number.

        Returns:
            Name of the alarm -> numbers of the last step, likely cause and remedy; one line each.
        """
        steps = [{key: math.nan if value is None else value for key, value in line.items()} for line in records]
        mean_auc = self._mean_auc(self._last_auc([step.get("view_auc", math.nan) for step in steps]))
        shown = [signs(step, self._best, mean_auc, self.rules.student_temp) for step in steps[-PATIENCE:]]
        return {
            name: f"{shown[-1][name]}: {kind.explanation}"
            for name, kind in KINDS.items()
            if shown and all(name in signs_of_step for signs_of_step in shown)
        }

    def _last_auc(self, aucs: Sequence[float]) -> list[float]:
        return [float(auc) for auc in aucs if math.isfinite(auc)][-self.rules.auc_steps :]

    def _mean_auc(self, aucs: list[float]) -> float:
        """Return the mean; NaN if there are too few steps."""
        return sum(aucs) / len(aucs) if len(aucs) == self.rules.auc_steps else math.nan

    def state_dict(self) -> dict[str, Any]:
        """Return all counts, as JSON values."""
        return {
            "held": dict(self._held),
            "gone_off": dict(self._gone_off),
            "best": dict(self._best),
            "recent_auc": list(self._recent_auc),
        }

    def load_state_dict(self, state: Any) -> None:
        """Continue from saved counts; checkpoints of earlier versions have none, and counts start at 0.

        Raises:
            CheckpointError: the counts were changed by hand.
        """
        try:
            for name in KINDS:
                self._held[name] = int(state.get("held", {}).get(name, 0))
                self._gone_off[name] = int(state.get("gone_off", {}).get(name, 0))
            self._best = {str(key): float(value) for key, value in state.get("best", {}).items()}
            self._recent_auc = [float(value) for value in state.get("recent_auc", [])]
        except (AttributeError, TypeError, ValueError, OverflowError):
            raise CheckpointError(
                "alarms in the checkpoint's state.json were changed: remove the checkpoint to use the one before"
            ) from None
