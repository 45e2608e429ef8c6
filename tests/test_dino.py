"""DINO: three steps against loops over pairs, images and prototypes, with the center moving."""

from __future__ import annotations

import pytest
import torch

from sop_faiss.train.loop import train_step
from sop_faiss.verbs.training.dry_run import describe_run
from tests.images import write_shards
from tests.oracle import loop_dino_loss
from tests.rivals import KINDS, logits, opened, see
from tests.runs import tiny_config


@pytest.mark.parametrize("norm_last_layer", ["true", "false"])
def test_steps_do_what_the_paper_says(tmp_path, norm_last_layer):
    shards = write_shards(tmp_path, classes=2, per_class=12, size=20)
    overrides = (f"dino.norm_last_layer={norm_last_layer}", "optim.warmup_epochs=0", "optim.momentum=0.9")
    state, batches = opened(tmp_path, shards, *KINDS["dino"], *overrides)
    center = torch.zeros(12)
    for step in range(3):
        seen, temperature = see(state, batches[step]), state.schedules.at(step).teacher_temp
        student, teacher = logits(state.student, "last", seen.student), logits(state.teacher, "last", seen.teacher)
        before = [parameter.clone() for parameter in state.student.heads["last"].parameters()]
        metrics = train_step(state, batches[step]).metrics
        loss = loop_dino_loss(student, teacher, center, 0.1, temperature)
        torch.testing.assert_close(metrics["loss"], loss, rtol=1e-4, atol=1e-5)
        center = 0.9 * center + 0.1 * teacher.mean((0, 1))
        torch.testing.assert_close(state.objective.center.value, center, rtol=1e-4, atol=1e-5)
        # nothing, weight decay included, changes the last layer in the first half epoch of four steps
        after = list(state.student.heads["last"].parameters())
        assert [torch.equal(one, two) for one, two in zip(before, after, strict=True)] == [step < 2] * len(after)
        torch.testing.assert_close(state.objective.watched(6)["cls"].embeddings, seen.teacher[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("overrides", "rows"), [((), 3), (("train.views_apart=true",), 2)])
def test_a_dry_run_counts_the_logits(tmp_path, overrides, rows):
    shards = write_shards(tmp_path, classes=2, per_class=12, size=20)
    described = describe_run(tiny_config(tmp_path, f"data.train={shards}", *KINDS["dino"], *overrides))
    assert described["logits_bytes"] == 6 * rows * 12 * 4 * 2  # of all views, and their gradients
    assert described["memories_bytes"] == 0
