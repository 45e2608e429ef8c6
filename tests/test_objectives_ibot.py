"""iBOT: three steps against loops over pairs, patches and prototypes, with both centers moving; its terms alone."""

from __future__ import annotations

import pytest
import torch

from sop_faiss.train.loop import train_step
from tests.images import write_shards
from tests.oracle import loop_dino_loss, loop_ibot_patch_loss
from tests.rivals import KINDS, logits, opened, see


@pytest.mark.parametrize("kind", ["ibot", "ibot apart"])
def test_steps_do_what_the_paper_says(tmp_path, kind):
    shards = write_shards(tmp_path, classes=2, per_class=12, size=20)
    overrides = ("optim.warmup_epochs=0", "optim.momentum=0.9", "ibot.patch.weight=0.5", "masks.start_epoch=0")
    state, batches = opened(tmp_path, shards, *KINDS[kind], *overrides)
    heads = {"cls": "last", "patch": "last"} if kind == "ibot" else {"cls": "cls", "patch": "patch"}
    centers = {name: torch.zeros(term.prototypes) for name, term in state.objective.terms.items()}
    for step in range(3):
        batch, temperature = batches[step], state.schedules.at(step).teacher_temp
        seen = see(state, batch)
        student, teacher = (
            {"cls": logits(network, heads["cls"], cls), "patch": logits(network, heads["patch"], patches).flatten(0, 1)}
            for network, cls, patches in (
                (state.student, seen.student, seen.student_patches),
                (state.teacher, seen.teacher, seen.teacher_patches),
            )
        )
        metrics = train_step(state, batch).metrics
        masks = batch.masks.flatten(0, 1)
        first = loop_dino_loss(student["cls"], teacher["cls"], centers["cls"], 0.1, temperature)
        second = loop_ibot_patch_loss(student["patch"], teacher["patch"], masks, centers["patch"], 0.1, temperature)
        torch.testing.assert_close(metrics["loss_cls"], first, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(metrics["loss_patch"], second, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(metrics["loss"], first + 0.5 * second, rtol=1e-4, atol=1e-5)
        for name, center in centers.items():
            centers[name] = 0.9 * center + 0.1 * teacher[name].mean((0, 1))  # of all patches, hidden or not
            torch.testing.assert_close(state.objective.centers[name].value, centers[name], rtol=1e-4, atol=1e-5)


def test_patches_alone_and_their_temperature(tmp_path):
    shards = write_shards(tmp_path, classes=2, per_class=12, size=20)
    alone, batches = opened(tmp_path, shards, *KINDS["ibot"], "ibot.cls.weight=0")
    assert len(batches[0].local_views) == 0  # nobody looks at them
    metrics = train_step(alone, batches[0]).metrics
    assert float(metrics["loss"]) == float(metrics["loss_patch"]) and "loss_cls" not in metrics
    assert alone.objective.watched(4)["patch"].embeddings.shape == (4, 8)
    overrides = ("masks.start_epoch=2", "loss.teacher_temp_epochs=2")
    late, batches = opened(tmp_path, shards, *KINDS["ibot"], *overrides)
    temperatures = []
    for step in range(0, 24, 2):
        late.objective.steps = step
        temperatures.append(round(late.objective._patch_temp(), 5))
    assert temperatures[:5] == [0.04] * 5  # until the first patch is hidden, in step 8
    assert temperatures[5:9] == [0.0475, 0.055, 0.0625, 0.07] and set(temperatures[8:]) == {0.07}
