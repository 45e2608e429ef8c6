"""The record of prototypes: it tells what the step drew, changes nothing, and survives a resume."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sop_faiss.data.images.source import open_source
from sop_faiss.data.stream import Batches
from sop_faiss.objectives.objective import StepSettings
from sop_faiss.sop.memory import Memory
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.train.log.prototype_log import PROTOTYPES_FILE, PrototypeLog, SeenPrototype, read_prototypes
from sop_faiss.train.loop import train_step
from sop_faiss.train.state import RunState
from sop_faiss.verbs.training.train import run_training
from tests.images import write_shards
from tests.oracle import brute_force_supports
from tests.runs import tiny_config


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("train"), classes=2, per_class=12, size=20)


def fresh(folder: Path, shards: Path, *overrides: str) -> tuple[RunState, Batches]:
    config = tiny_config(folder, *overrides)
    source = open_source(shards)
    return RunState(config, torch.device("cpu"), len(source)), Batches(source, np.arange(len(source)), config, 4)


def seen_by_hand(memory: Memory, maker_state: dict[str, torch.Tensor]) -> list[SeenPrototype]:
    """The first 8 prototypes of the coming step, from the memory's rows and the generator's state alone."""
    generator = torch.Generator()
    generator.set_state(maker_state["generator"])
    anchors = torch.randperm(24, generator=generator)[:8].tolist()
    rows, ids = memory.embeddings.clone(), memory.image_ids.tolist()
    seen = []
    for anchor in anchors:
        supports = brute_force_supports(rows, memory.image_ids, anchor, k=3, exclude_same_image=True)
        similarities = [float(rows[anchor].double() @ rows[row].double()) for row in supports]
        # the anchor gives 1 - eps, a support its similarity, at least 1/K
        weights = [0.9, *(max(1 / 8, similarity) for similarity in similarities)]
        seen.append(SeenPrototype(ids[anchor], [ids[row] for row in supports], similarities, weights))
    return seen


def test_it_tells_what_the_step_drew(tmp_path, shards):
    state, batches = fresh(tmp_path, shards)
    log, term = PrototypeLog(tmp_path, 0, every_steps=3), state.objective.terms["cls"]
    for step in range(4):
        wanted = seen_by_hand(term.memory, term.maker.state_dict())
        train_step(state, batches[step], log)
        samples = read_prototypes(tmp_path)
        if step < 3:
            assert (samples[-1].step, samples[-1].level) == (step + 1, "cls")
            for got, expected in zip(samples[-1].prototypes, wanted, strict=True):
                assert (got.image, got.supports) == (expected.image, expected.supports)
                assert got.similarities == pytest.approx(expected.similarities, abs=1.1e-5)  # five decimals
                assert got.contributions == pytest.approx(expected.contributions, abs=1.1e-5)
    assert [sample.step for sample in samples] == [1, 2, 3]  # 4 is no one's turn
    assert any(prototype.image >= 0 for prototype in samples[-1].prototypes)


def test_it_changes_nothing(tmp_path, shards):
    (watched, batches), (unwatched, _) = fresh(tmp_path, shards), fresh(tmp_path, shards)
    log = PrototypeLog(tmp_path, 0, every_steps=1)
    for step in range(3):
        train_step(watched, batches[step], log)
        train_step(unwatched, batches[step])
    ours, theirs = watched.tensors(), unwatched.tensors()
    for name in theirs:
        assert all(torch.equal(ours[name][key], value) for key, value in theirs[name].items())


def test_it_is_kept_now_and_then(tmp_path, shards):
    objective = fresh(tmp_path, shards)[0].objective
    objective.begin_step(StepSettings(0.1, 0.0, 0.9, 0.04), 6, 16)
    log = PrototypeLog(tmp_path, 0, every_steps=700)
    for step in range(1, 2501):
        log.note(step, objective)
    steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 700, 1000, 1400, 2000, 2100]
    assert [sample.step for sample in read_prototypes(tmp_path)] == steps


def test_a_resumed_run_keeps_the_same_record(tmp_path, shards):
    def train(name: str, *overrides: str, resume: bool = False) -> Path:
        config = tiny_config(tmp_path, f"data.train={shards}", "train.epochs=2", *overrides)
        run_training(config, tmp_path / name, resume=resume)
        return tmp_path / name

    whole = train("whole")
    parts = train("parts", "train.stop_after_steps=4")
    with (parts / PROTOTYPES_FILE).open("a") as stream:  # of a step that a kill has undone
        stream.write('{"step": 5, "level": "cls", "prototypes": []}\n{"step": 6, "lev')
    train("parts", resume=True)
    assert (parts / PROTOTYPES_FILE).read_bytes() == (whole / PROTOTYPES_FILE).read_bytes()
    assert [sample.step for sample in read_prototypes(whole)] == [1, 2, 3, 5, 6]
    assert [line["loss"] for line in read_metrics(whole)] == [line["loss"] for line in read_metrics(parts)]


def test_random_rows_patches_and_renewed_anchors(tmp_path, shards):
    state, batches = fresh(tmp_path, shards, "sop.cls.weight=0", "sop.anchors=fixed_vectors")
    log = PrototypeLog(tmp_path, 0, every_steps=1)
    for step in range(5):
        train_step(state, batches[step], log)
    samples = read_prototypes(tmp_path)
    assert {sample.level for sample in samples} == {"patch"}
    assert {prototype.image for prototype in samples[0].prototypes} == {-1}
    assert {prototype.image for prototype in samples[-1].prototypes} == {None}  # all 24 rows are others by now
    assert all(len(prototype.contributions) == 1 and prototype.supports == [] for prototype in samples[0].prototypes)


@pytest.mark.parametrize(
    "change",
    [
        {"level": "<b>"},
        {"prototypes": 3},
        {"prototypes": [{"image": 1}]},
        {"prototypes": [{"image": "1", "supports": [], "similarities": [], "contributions": [1.0]}]},
        {"prototypes": [{"image": 1, "supports": [2], "similarities": [], "contributions": [1.0, 1.0]}]},
        {"prototypes": [{"image": 1, "supports": [True], "similarities": [1.0], "contributions": [1.0, 1.0]}]},
        {"prototypes": [{"image": 1, "supports": [2], "similarities": [float("nan")], "contributions": [1, 1]}]},
    ],
)
def test_a_line_that_was_changed_ends_the_record(tmp_path, change):
    whole = {"image": 1, "supports": [2], "similarities": [0.5], "contributions": [1.0, 0.5]}
    good = {"step": 1, "level": "cls", "prototypes": [whole]}
    lines = [good, good | {"step": 2} | change, good | {"step": 3}]
    (tmp_path / PROTOTYPES_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [sample.step for sample in read_prototypes(tmp_path)] == [1]
    assert read_prototypes(tmp_path)[0].prototypes == [SeenPrototype(**whole)]
