"""The page of a run, as `sop-report` writes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from sop_faiss.config import Config, load_run_config
from sop_faiss.data.shards.address import hide_secrets
from sop_faiss.errors import CheckpointError, ConfigError, DataError, SopError, one_line
from sop_faiss.model.checkpoint import find_checkpoint, read_state
from sop_faiss.objectives.choose import choose_objective
from sop_faiss.paths import path_state, real_path
from sop_faiss.progress import ProgressCallback, Stage
from sop_faiss.report.plots import METRICS_FILE, Curve, read_curves
from sop_faiss.report.run_panels import RunConstants, panels_of_run
from sop_faiss.report.run_report import ImageSection, RunPage, write_run_report
from sop_faiss.train.log.prototype_log import read_prototypes
from sop_faiss.verbs.run_page.facts import (
    bad_sample_table,
    run_table,
    say_verdict,
    score_notices,
    score_table,
    settings_table,
    stop_table,
)
from sop_faiss.verbs.run_page.images import RunImages, open_run_images
from sop_faiss.verbs.run_page.neighbors import neighbor_section
from sop_faiss.verbs.run_page.prototypes import early_sample, prototype_section, sample_of_checkpoint

_LOOKS = "What the prototypes look like"
_EXPLAINED = "Random anchors with their supports as images, now and early in training."


@dataclass(frozen=True)
class ReportOptions:
    """The images of the page."""

    images: bool = True
    data: str | None = None
    """Source (SRC) of the training images, if they were moved since."""
    gallery: int = 2000
    """Largest number of training images that are searched for nearest neighbors; 0 leaves that section out."""

    def __post_init__(self) -> None:
        if not 0 <= self.gallery <= 1_000_000:
            raise ConfigError(f"`gallery` {self.gallery}: wanted 0 to 1,000,000 images")


class WrittenReport(NamedTuple):
    """What a user should know of a page besides where it is."""

    verdict: str
    """Whether training beat step 0, in one sentence."""
    missing: list[str]
    """What is missing in the page and why, one line each; empty if nothing is missing."""


def report_run(
    run: Path, out: Path, stage: Stage, options: ReportOptions | None = None, footer: str = ""
) -> WrittenReport:
    """Write a run's page; the run may still be training.

    Args:
        footer: how the page was made.

    Raises:
        ConfigError: the run's configuration cannot be read.
        DataError: the directory is not a run, or has no metrics yet.
        OSError: the page cannot be written.
    """
    options = options or ReportOptions()
    config, curves, damage = _read_run(run)
    checkpoint, state = _last_checkpoint(run)
    with stage("looking for neighbors", "images") as progress:
        sections = _Images(config, run, checkpoint, state, options).sections(progress) if options.images else []
    dim = None if config.objective.kind == "distill" else config.model.embedding_dim  # the teacher's may be gone
    constants = RunConstants(choose_objective(config).floors(), dim)
    panels, left_out = panels_of_run(curves, constants)
    tables = [run_table(run, config, curves, state), score_table(panels), stop_table(run), bad_sample_table(run)]
    page = RunPage(
        title=f"Training run {real_path(run).name}",
        subtitle=f"{run}: {config.model.backbone} on {hide_secrets(config.data.train)}",
        verdict=say_verdict(panels, state),
        notices=score_notices(panels) + damage + ([] if options.images else ["Images were left out."]),
        facts=[table for table in tables if table is not None],
        panels=panels,
        panels_left_out=left_out,
        images=sections,
        settings=settings_table(config),
        footer=footer,
    )
    with stage("drawing", "images") as progress:
        write_run_report(out, page, progress)
    missing = damage + [section.problem for section in sections if section.problem]
    return WrittenReport(say_verdict(panels, state), missing)


def _read_run(run: Path) -> tuple[Config, dict[str, Curve], list[str]]:
    """Read the configuration and the curves; the last value has a line about records that could not be read, if any."""
    if not run.is_dir() or not (run / "config.yaml").is_file():
        what = "has no config.yaml" if run.is_dir() else path_state(run)
        raise DataError(f"{run} is not a training run (it {what}): wanted a run directory of sop-train")
    config = load_run_config(run / "config.yaml")
    left_out: list[int] = []
    curves = read_curves(run, left_out) if (run / METRICS_FILE).is_file() else {}
    if not curves:
        raise DataError(
            f"run {run} has no {'complete ' * bool(left_out)}line in {METRICS_FILE} yet: let it train some steps"
        )
    lines = f"{len(left_out):,} damaged lines of {METRICS_FILE} are left out"
    return config, curves, [f"{lines}, the first is line {left_out[0]:,}."] if left_out else []


def _last_checkpoint(run: Path) -> tuple[Path | None, dict[str, Any]]:
    """Find the newest complete checkpoint and its state; None before the first."""
    try:
        checkpoint = find_checkpoint(run)
        return checkpoint, read_state(checkpoint, verify=False)
    except CheckpointError:  # none yet, or just deleted by the run
        return None, {}


@dataclass(frozen=True)
class _Images:
    """The maker of the sections of images; instead of what cannot be shown there is a line that says why."""

    config: Config
    run: Path
    checkpoint: Path | None
    state: dict[str, Any]
    options: ReportOptions

    def sections(self, progress: ProgressCallback) -> list[ImageSection]:
        """Make all sections; only one, without images, if the images are missing."""
        try:
            images = open_run_images(self.config, self.state.get("data_digest"), self.options.data)
        except (SopError, OSError) as error:
            return [ImageSection(_LOOKS, _EXPLAINED, problem=f"No images: {one_line(str(error))}")]
        sections = self._prototypes(images)
        if self.checkpoint is not None and self.options.gallery:
            title = "Nearest neighbors"
            try:
                section = neighbor_section(self.config, self.checkpoint, images, self.options.gallery, progress)
            except SopError as error:
                section = ImageSection(title, "", problem=f"No nearest neighbors: {one_line(str(error))}")
            sections.append(section)
        return sections

    def _prototypes(self, images: RunImages) -> list[ImageSection]:
        if self.config.objective.kind not in ("sop", "distill"):
            return []  # the prototypes of other objectives are learned, or single rows
        samples = read_prototypes(self.run)
        early, now = early_sample(samples), samples[-1] if samples else None
        problem = ""
        if self.checkpoint is not None:
            try:
                now = sample_of_checkpoint(self.config, self.checkpoint, len(images.trained))
            except SopError as error:
                problem = f"The last checkpoint's prototypes cannot be drawn: {one_line(str(error))}"
        shown = {} if now is None else {"now": now}
        if early is not None and now is not None and early.step < now.step:
            shown["early in training"] = early
        sections = [
            prototype_section(f"Prototypes {when}, drawn for step {sample.step:,}", sample, images)
            for when, sample in shown.items()
        ]
        if early is None:
            problem = problem or "This run has no record of early prototypes (prototypes.jsonl)."
        if problem:
            sections = sections or [ImageSection(_LOOKS, _EXPLAINED)]
            sections[-1] = replace(sections[-1], problem=problem)
        return sections
