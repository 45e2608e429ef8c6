"""What an unknown key may have meant."""

from __future__ import annotations

import pytest

from sop_faiss.config import load_config
from sop_faiss.config.unknown_keys import _MEANT, known_keys, meant_by
from sop_faiss.errors import ConfigError


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("sop.cls.K", ["sop.cls.num_anchors"]),
        ("sop.patch.K", ["sop.patch.num_anchors"]),
        ("K", ["sop.cls.num_anchors", "sop.patch.num_anchors"]),
        ("k", ["sop.cls.num_supports", "sop.patch.num_supports", "evaluate.k"]),
        ("T", ["sop.cls.tasks", "sop.patch.tasks", "loss.student_temp", "loss.teacher_temp"]),
        ("sop.N_C", ["sop.cls.capacity"]),
        ("lr", ["optim.base_lr"]),
        ("train.LR", ["optim.base_lr"]),
        ("epochs", ["train.epochs"]),
        ("optim.epochs", ["train.epochs"]),
        ("data.batch_size", ["train.batch_size", "evaluate.batch_size"]),
        ("train.batchsize", ["train.batch_size"]),
        ("optimizer", ["optim"]),
        ("warmup_epoch", ["optim.warmup_epochs"]),
        ("xyzzy", []),
        ("", []),
        (".", []),
        ("x" * 1_000_000, []),
    ],
)
def test_a_key_means_settings_of_any_section(key, meant):
    assert meant_by(key) == meant


def test_what_the_table_names_exists():
    for suffixes in _MEANT.values():
        for suffix in suffixes:
            assert any(f".{name}".endswith(f".{suffix}") for name in known_keys()), suffix


def test_the_error_suggests_them():
    with pytest.raises(ConfigError, match=r"sop\.cls\.K; did you mean sop\.cls\.num_anchors\?"):
        load_config("digits_demo", ["sop.cls.K=3"])
