"""One of two ranks that hold each way of sharing the student against DDP; run by test_parallel.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sop_faiss import distributed
from sop_faiss.data.images.source import open_source
from sop_faiss.data.stream import Batches
from sop_faiss.errors import RunStoppedError
from sop_faiss.model.checkpoint import find_checkpoint
from sop_faiss.train.checkpoints.saver import CheckpointSaver
from sop_faiss.train.log.stopped import STOPPED_FILE, _norms_by_block
from sop_faiss.train.loop import train_step
from sop_faiss.train.parallel import copy_weights, whole
from sop_faiss.train.rank_agreement import check_ranks_agree
from sop_faiss.train.state import RunState
from tests.runs import tiny_config

CPU = torch.device("cpu")
WAYS = {
    "ddp": (),
    "fsdp": ("train.parallel=fsdp",),
    "fsdp in parts": ("train.parallel=fsdp", "train.accumulate=3", "train.views_apart=true"),
    "fsdp with checkpoints": ("train.parallel=fsdp", "train.checkpoint_activations=true"),
    "by hand": ("train.views_apart=true",),
}


def main(folder: Path, shards: Path) -> None:
    distributed.join_process_group("cpu")
    ranks = (distributed.rank(), distributed.world_size())
    folder_here = folder / f"rank{ranks[0]}"
    folder_here.mkdir()
    source = open_source(shards)

    def state(way: str, *overrides: str) -> RunState:
        common = ("model.drop_path=0", "train.check_ranks_every_steps=1", "model.depth=3", "optim.clip_norm=0.05")
        config = tiny_config(folder_here, *common, *WAYS[way], *overrides)
        made = RunState(config, CPU, len(source))
        assert made.is_sharded == way.startswith("fsdp")
        return made

    states = {way: state(way) for way in WAYS}
    batches = Batches(source, np.arange(len(source)), states["ddp"].config, 4, *ranks)
    reported = [train_all(states, batches, step) for step in range(3)]
    assert reported[0] != reported[1]
    a_part = states["fsdp"].student.backbone.trunk.blocks[0].mlp.fc1.weight
    assert a_part.to_local().numel() == a_part.numel() // 2

    # A projector that learns alone for two steps, on a backbone that is filled first.
    frozen = {way: state(way, "optim.projector_warmup_epochs=0.5", "optim.warmup_epochs=0") for way in ("ddp", "fsdp")}
    for run in frozen.values():
        run.teacher.load_state_dict({name: value * 0.9 for name, value in run.teacher.state_dict().items()})
        copy_weights(run.student, run.teacher.state_dict())
    before = whole(frozen["fsdp"].student.backbone.trunk.blocks[0].mlp.fc1.weight).clone()
    for step in range(4):
        train_all(frozen, batches, step)
        now = whole(frozen["fsdp"].student.backbone.trunk.blocks[0].mlp.fc1.weight)
        assert torch.equal(now, before) == (step < 2 or ranks[0] > 0), step  # the whole is the main rank's

    # A checkpoint of either is gone on from by the other.
    for way in ("ddp", "fsdp"):
        CheckpointSaver(states[way], folder / way).save(wait=True)
    crossed = {"ddp": "fsdp", "fsdp": "ddp", "fsdp in parts": "fsdp"}
    resumed = {way: state(way) for way in crossed}
    for way, made_by in crossed.items():
        resumed[way].resume(find_checkpoint(folder / made_by))
    train_all({"ddp": states["ddp"], **{f"{way}, resumed": s for way, s in resumed.items()}}, batches, 3)

    # A rank whose memory differs in one bit is noticed by all.
    fsdp = resumed["fsdp"]
    check_ranks_agree(fsdp)
    if ranks[0] == 1:
        fsdp.objective.terms["cls"].memory.embeddings.view(torch.int32)[3, 2] ^= 1
    with pytest.raises(RunStoppedError, match=r"ranks 0 and 1 disagree at step 4 \(cls memory\): resume"):
        check_ranks_agree(fsdp)

    # So is a weight that only one rank holds and that is not finite; all stop, and tell of the gradients in all shards.
    whole_run = states["ddp"]
    for run in (fsdp, whole_run):
        train_step(run, batches[4])
    with torch.no_grad():
        held = fsdp.student.backbone.trunk.blocks[0].mlp.fc1.weight.to_local()
        if ranks[0] == 1:
            held[0, 0] = torch.nan
    with pytest.raises(RunStoppedError, match="a weight of the student is not finite"):
        CheckpointSaver(fsdp, folder).save(wait=True)
    if ranks[0] == 0:
        norms = json.loads((folder / STOPPED_FILE).read_text())["gradient_norms"]
        assert norms == pytest.approx(_norms_by_block(whole_run.student), rel=1e-3)
    distributed.leave_process_group()


def train_all(states: dict[str, RunState], batches: Batches, step: int) -> dict[str, float]:
    """One step of each, which must tell the same and leave the same student; what they tell."""
    reported = {
        way: {k: float(v) for k, v in train_step(state, batches[step]).metrics.items()} for way, state in states.items()
    }
    students = {
        way: {name: whole(value) for name, value in state.student.state_dict().items()} for way, state in states.items()
    }
    first = next(iter(reported.values()))
    for way, values in reported.items():
        assert values == pytest.approx(first, rel=1e-5, abs=1e-6, nan_ok=True), (way, step)
    if distributed.is_main():
        for way, student in students.items():
            for name, value in student.items():
                torch.testing.assert_close(value, students["ddp"][name], rtol=1e-3, atol=2e-5, msg=f"{way}: {name}")
    teachers = [list(state.teacher.parameters()) for state in states.values()]
    for teacher in teachers[1:]:
        for one, two in zip(teachers[0], teacher, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=2e-5)
    return first


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
