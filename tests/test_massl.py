"""MaSSL: a step against loops over blocks, pairs and images; KoLeo against all pairs; its memory."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from sop_faiss.errors import ConfigError
from sop_faiss.objectives.choose import choose_objective
from sop_faiss.objectives.regularizers import koleo
from sop_faiss.train.loop import train_step
from tests.images import write_shards
from tests.oracle import loop_koleo, loop_massl_loss
from tests.rivals import KINDS, opened, see
from tests.runs import tiny_config


def test_steps_do_what_the_paper_says(tmp_path):
    shards = write_shards(tmp_path, classes=2, per_class=12, size=20)
    state, batches = opened(tmp_path, shards, *KINDS["massl"], "optim.momentum=0.9", "massl.koleo_weight=0.5")
    objective = state.objective
    assert objective.memory.fill == 1
    for step in range(3):
        batch, memory = batches[step], objective.memory.embeddings.clone()
        same_draws = torch.Generator()
        same_draws.set_state(objective.generator.get_state())
        blocks = torch.randperm(24, generator=same_draws)[:21].view(3, 7)
        seen, first = see(state, batch), objective.memory.pointer
        temperature = state.schedules.at(step).teacher_temp
        metrics = train_step(state, batch).metrics
        loss = loop_massl_loss(seen.student, seen.teacher, memory, blocks, 0.1, temperature)
        torch.testing.assert_close(metrics["loss_cls"], loss, rtol=1e-4, atol=1e-5)
        spread = sum(loop_koleo(view) for view in seen.student[:2]) / 2
        torch.testing.assert_close(metrics["loss"], loss + 0.5 * spread, rtol=1e-4, atol=1e-4)
        stored = (first + torch.arange(6)) % 24
        torch.testing.assert_close(objective.memory.embeddings[stored], seen.teacher[1], rtol=1e-4, atol=1e-5)
        assert torch.equal(objective.memory.image_ids[stored], batch.image_ids)


def test_koleo_is_the_log_distance_to_the_nearest_image():
    embeddings = F.normalize(torch.randn(7, 5, generator=torch.Generator().manual_seed(0)), dim=1).requires_grad_()
    torch.testing.assert_close(koleo(embeddings), loop_koleo(embeddings), rtol=1e-5, atol=1e-6)
    one, two = (torch.autograd.grad(f(embeddings), embeddings)[0] for f in (koleo, loop_koleo))
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert float(koleo(embeddings[:1].detach())) == 0
    assert koleo(embeddings[[0, 0]].detach()).isfinite()


def test_a_block_is_no_larger_than_the_memory(tmp_path):
    objective = choose_objective(tiny_config(tmp_path, *KINDS["massl"]))
    for refused in (objective.open, objective.needs):
        with pytest.raises(ConfigError, match=r"massl\.block_size"):
            refused(torch.device("cpu"), 6)
    assert objective.needs(torch.device("cpu"), 1000).sizes["memory_rows"] == {"cls": 24}
