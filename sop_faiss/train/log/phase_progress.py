"""The progress of the steps, reported phase by phase: steps on views of other sizes take another time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sop_faiss.config import Config
from sop_faiss.progress import ProgressCallback, Stage


@contextlib.contextmanager
def steps_stage(stage: Stage, config: Config, steps_per_epoch: int) -> Iterator[ProgressCallback]:
    """Announce the steps of a run; with `train.phases` each phase as a stage, whose time left can be estimated.

    Args:
        stage: announces a stage.
        steps_per_epoch: optimizer updates per pass over the data.

    Yields:
        The callback, called with the steps done and the last step.
    """
    ends = config.train.phase_ends(steps_per_epoch)
    if not ends:
        with stage("training", "steps") as show:
            yield show
        return
    names = [
        f"training, phase {number} of {len(ends) + 1} ({phase.views.global_size} px)"
        for number, phase in enumerate(config.each_phase(), 1)
    ]
    with contextlib.ExitStack() as opened:
        shown: list[tuple[str, ProgressCallback]] = []

        def show_phase(step: int, last: int) -> None:
            name, end = next(
                ((name, end) for name, end in zip(names, ends, strict=False) if step <= end), (names[-1], last)
            )
            if not shown or shown[-1][0] != name:
                opened.close()
                shown.append((name, opened.enter_context(stage(name, "steps"))))
            shown[-1][1](step, min(end, last))

        yield show_phase
