"""The lines of `metrics.jsonl`, and numbers that there are none of."""

from __future__ import annotations

import json
import math

from sop_faiss.train.log.monitor import Monitor, read_metrics
from sop_faiss.verbs.training.train import run_training
from tests.images import write_shards
from tests.runs import tiny_config

RATIOS = ("loss_patch_over_lnK", "teacher_entropy_patch_over_lnK")


def test_a_number_that_there_is_none_of_is_null_and_no_point(tmp_path, monkeypatch):
    monitor = Monitor(tmp_path)
    points = []
    monkeypatch.setattr(monitor._board, "add_scalar", lambda *point: points.append(point))
    monitor.log({"step": 3, "epoch": 0.5, "images": 12, "loss": 1.5, "memory_age_cls": math.nan})
    monitor.close()
    line = {"step": 3, "epoch": 0.5, "images": 12, "loss": 1.5, "memory_age_cls": None}
    assert [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [line]
    assert points == [("loss", 1.5, 3)]


def test_a_batch_without_a_masked_patch_has_a_patch_loss_of_0_and_no_ratios(tmp_path):
    """Their mean is over no rows; [CLS] and the run go on."""
    shards = write_shards(tmp_path / "shards", classes=2, per_class=6, size=20)
    config = tiny_config(tmp_path, f"data.train={shards}", "masks.probability=1e-9", "train.epochs=1")
    assert run_training(config, tmp_path / "run").finished
    lines = read_metrics(tmp_path / "run")
    assert len(lines) == 2
    for line in lines:
        assert line["loss_patch"] == 0
        assert [line[key] for key in RATIOS] == [None, None]
        assert line["loss"] == line["loss_cls"] > 0
        assert line["teacher_entropy_cls_over_lnK"] > 0


def test_memories_tell_their_fill_and_age(tmp_path):
    shards = write_shards(tmp_path / "shards", classes=2, per_class=12, size=20)
    told = {}
    for fill in ("random", "teacher"):
        config = tiny_config(tmp_path, f"data.train={shards}", f"sop.fill={fill}", "train.epochs=2")
        run_training(config, tmp_path / fill)
        told[fill] = [(line["memory_fill_cls"], line["memory_age_cls"]) for line in read_metrics(tmp_path / fill)]
    # 24 rows, 6 new ones a step, as the step's prototypes saw them
    assert told["random"] == [(0, None), (0.25, 1), (0.5, 1.5), (0.75, 2), *[(1, 2.5)] * 4]
    # those of the fill pass are of the teacher of step 0
    assert told["teacher"] == [(1, 0), (1, 1), (1, 1.75), (1, 2.25), *[(1, 2.5)] * 4]
