"""The runs of a study: each arm with each seed as a checked configuration of the length that the budget allows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import nn

from sop_faiss.config import Config, flat_settings
from sop_faiss.config.load import load_layers
from sop_faiss.config.study import Arm, StudyConfig
from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.shards.shard_stream import ShardStream
from sop_faiss.errors import ConfigError, DataError, SopError
from sop_faiss.model.initial_weights import resolve_init
from sop_faiss.model.networks import build_student_and_teacher
from sop_faiss.verbs.training.online_scores import open_evaluation, scored_encoder
from sop_faiss.verbs.training.training_images import make_batches, open_training_images

_LENGTH = ("train.epochs", "train.stop_after_steps")


@dataclass(frozen=True)
class PlannedRun:
    """One arm with one seed."""

    arm: Arm
    seed: int
    config: Config
    steps: int
    """That it makes; by its schedules, or until `train.stop_after_steps`."""

    @property
    def name(self) -> str:
        """Return `ARM/seed_N`, its place in the study's directory."""
        return f"{self.arm.name}/seed_{self.seed}"


def arm_configs(study: StudyConfig) -> dict[str, Config]:
    """Return the configuration of each arm with the first seed, before the budget.

    Raises:
        ConfigError: an axis names no field, a value is impossible, or two arms are the same run.
    """
    configs = {arm.name: _config_of(study, arm, study.seeds[0]) for arm in study.arms()}
    has_budget = any((study.budget.steps, study.budget.images, study.budget.minutes))
    seen: dict[tuple[tuple[str, str], ...], str] = {}
    for name, config in configs.items():
        if config.train.minutes:
            raise ConfigError(
                f"arm {name}: train.minutes = {config.train.minutes:g} is for single runs; in a study, which compares "
                "runs of a length known before, set train.minutes=0 and budget.minutes"
            )
        settings = flat_settings(config)
        for each in _LENGTH if has_budget else ():
            del settings[each]  # which the budget sets
        other = seen.setdefault(tuple((key, repr(value)) for key, value in settings.items()), name)
        if other != name:
            raise ConfigError(f"arms {other} and {name} are the same run: leave one out, or let them differ")
    return configs


def _config_of(study: StudyConfig, arm: Arm, seed: int) -> Config:
    layers: dict[str, dict[str, Any]] = {
        "settings": study.settings,
        f"arm {arm.name}": arm.settings,
        "seeds": {"train.seed": seed},
    }
    try:
        return load_layers(study.base, {origin: settings for origin, settings in layers.items() if settings})
    except ConfigError as error:
        named = str(error).startswith((*layers, "config "))  # else a check of values, which are of several layers
        raise ConfigError(str(error) if named else f"arm {arm.name}: {error}") from None


def check_arms(configs: Mapping[str, Config], later: Collection[str] = ()) -> dict[str, int]:
    """Check what a run of each arm would refuse when it starts: its network, its images, its scores.

    Networks are built without memory for weights, and what several arms share is checked once.

    Args:
        configs: what `arm_configs` returns.
        later: arms whose images alone are opened: what they start from is gone, or not made yet.

    Returns:
        The number of training images of each arm.

    Raises:
        ConfigError: the backbone does not exist or does not fit the settings, or a score is impossible.
        DataError: images are missing.
    """
    counts: dict[str, int] = {}
    opened: dict[str, Any] = {}  # a list of a million images takes a while
    checked: set[str] = set()
    for name, config in configs.items():
        data = repr(config.data)
        key = repr((data, config.model, config.views, config.masks, config.train, config.evaluate))
        try:
            if data not in opened:
                opened[data] = open_training_images(config)
            counts[name] = len(opened[data][1])
            if name not in later and key not in checked:
                _check_start(config, *opened[data])
                checked.add(key)
        except SopError as error:
            kind = DataError if isinstance(error, DataError) else ConfigError
            raise kind(f"arm {name}: {error}") from None
    return counts


def _check_start(
    config: Config,
    source: ImageSource | ShardStream,
    trained: Int64[np.ndarray, " m"],
    held_out: Int64[np.ndarray, " h"],
) -> None:
    config = resolve_init(config)
    with torch.device("meta"):  # shapes without weights
        student, _ = build_student_and_teacher(config, lambda feature_dim: nn.ModuleDict())
    scored_encoder(student.backbone, config)
    make_batches(config, source, trained, student.backbone.patch_size)
    open_evaluation(config, source, trained, held_out)


def plan_runs(
    study: StudyConfig,
    configs: Mapping[str, Config],
    images: Mapping[str, int],
    step_seconds: Mapping[str, float] | None = None,
) -> list[PlannedRun]:
    """Plan every run, all arms with the first seed first, so that an early look at the results shows each arm.

    Args:
        configs: what `arm_configs` returns.
        images: what `check_arms` returns.
        step_seconds: seconds per step of each arm, which a budget of minutes needs.

    Raises:
        ConfigError: an arm cannot meet the budget.
    """
    return [
        _planned(
            study,
            arm,
            replace(configs[arm.name], train=replace(configs[arm.name].train, seed=seed)),
            images[arm.name],
            None if step_seconds is None else step_seconds[arm.name],
        )
        for seed in study.seeds
        for arm in study.arms()
    ]


def _planned(study: StudyConfig, arm: Arm, config: Config, images: int, step_seconds: float | None) -> PlannedRun:
    steps_per_epoch = max(1, images // config.train.batch_size)
    steps = _budget_steps(study, arm.name, config, step_seconds)
    if steps is None:
        total = config.train.total_steps(steps_per_epoch)
        return PlannedRun(arm, config.train.seed, config, min(total, config.train.stop_after_steps or total))
    try:
        train = replace(config.train, epochs=steps / steps_per_epoch, stop_after_steps=0)
        config = replace(config, train=train)
    except ConfigError as error:
        raise ConfigError(f"arm {arm.name} cannot meet the budget, {steps:,} steps of training: {error}") from None
    return PlannedRun(arm, config.train.seed, config, steps)


def _budget_steps(study: StudyConfig, arm: str, config: Config, step_seconds: float | None) -> int | None:
    """Return the steps that an arm makes; None without a budget."""
    budget, batch = study.budget, config.train.batch_size
    if budget.steps:
        return budget.steps
    if budget.images:
        if budget.images < batch:
            raise ConfigError(
                f"budget.images = {budget.images:,} is less than one batch of arm {arm} (train.batch_size = {batch:,}):"
                " raise it, or lower the batch size"
            )
        return budget.images // batch
    if not budget.minutes or step_seconds is None:
        return None
    steps = int(budget.minutes * 60 / step_seconds)
    if steps < 1:
        raise ConfigError(
            f"budget.minutes = {budget.minutes:g} is less than one step of arm {arm} ({step_seconds:.1f} s): raise it, "
            "or make the step smaller"
        )
    return steps
