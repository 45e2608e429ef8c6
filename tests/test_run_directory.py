"""A run is continued with the settings that it was started with, and what differs is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sop_faiss.config import to_yaml
from sop_faiss.errors import ConfigError
from sop_faiss.verbs.training.run_directory import _check_same_run
from tests.runs import tiny_config


def test_a_setting_that_is_empty_now_is_shown(tmp_path: Path) -> None:
    now = tiny_config(tmp_path)
    started = replace(now, model=replace(now.model, init="lite0"))
    (tmp_path / "config.yaml").write_text(to_yaml(started))
    _check_same_run(tmp_path, started)
    with pytest.raises(ConfigError, match=r"was started with model\.init = lite0, not '': resume with"):
        _check_same_run(tmp_path, now)
