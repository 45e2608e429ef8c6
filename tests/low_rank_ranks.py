"""One of two ranks that train low-rank additions by each way of sharing the student; run by test_low_rank.py."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from sop_faiss import distributed
from sop_faiss.data.images.source import open_source
from sop_faiss.data.stream import Batches
from sop_faiss.model.initial_weights import load_initial_weights
from sop_faiss.train.loop import train_step
from sop_faiss.train.parallel import copy_weights
from sop_faiss.train.rank_agreement import check_ranks_agree
from sop_faiss.train.state import RunState
from tests.low_rank_runs import low_rank_config

CPU = torch.device("cpu")
WAYS = {"ddp": (), "fsdp": ("train.parallel=fsdp",), "by hand": ("train.views_apart=true",)}


def main(folder: Path, shards: Path) -> None:
    distributed.join_process_group("cpu")
    source = open_source(shards)
    trained = {}
    for way, overrides in WAYS.items():
        (here := folder / f"rank{distributed.rank()}").mkdir(exist_ok=True)
        settings = ("train.check_ranks_every_steps=1", "optim.warmup_epochs=0", f"model.init={folder / 'base'}")
        config = low_rank_config(here, *settings, *overrides)
        state = RunState(config, CPU, len(source))
        load_initial_weights(state.teacher.backbone, config.model, config.views)
        copy_weights(state.student, state.teacher.state_dict())
        batches = Batches(source, np.arange(len(source)), config, 4, distributed.rank(), distributed.world_size())
        for step in range(3):
            train_step(state, batches[step])
            check_ranks_agree(state)
        trained[way] = {**state.teacher.state_dict(), **state.tensors()["student"]}
        moments = {name.rpartition(".")[2].partition("|")[0] for name in state.tensors()["optimizer"]}
        assert {"up", "down"} <= moments and "original" not in moments
    for way in WAYS if distributed.is_main() else ():
        differences = [(trained[way][name] - value).abs().max() for name, value in trained["ddp"].items()]
        assert max(differences) < 1e-4, way
    distributed.leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
