"""All ranks must have the same memories, draws and teacher: checked every `train.check_ranks_every_steps`."""

from __future__ import annotations

from sop_faiss import distributed
from sop_faiss.errors import RunStoppedError
from sop_faiss.train.state import RunState


def check_ranks_agree(state: RunState) -> None:
    """Stop the run if a rank's memories, generators or teacher differ from the main rank's.

    Raises:
        RunStoppedError: they differ; the message names the step and what differs.
    """
    every = state.config.train.check_ranks_every_steps
    if distributed.world_size() == 1 or not every or state.step % every:
        return
    teacher = " ".join(str(distributed.checksum(parameter)) for parameter in state.teacher.parameters())
    ours = {**state.objective.digests(), "teacher": teacher}
    main, *others = distributed.gather_objects(ours)
    for number, theirs in enumerate(others, 1):
        different = [what for what in main if theirs[what] != main[what]]
        if different:
            raise RunStoppedError(
                f"ranks 0 and {number} disagree at step {state.step} ({', '.join(different)}): resume from the last "
                "checkpoint; if it happens again, the machines differ in hardware or versions"
            )
