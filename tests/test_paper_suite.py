"""The packaged suite `paper` runs to its end on tiny sets in the layouts of their authors, each training for a step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from sop_faiss.cli.eval import main
from sop_faiss.evaluate.trained import detect, finetune, segment, training
from tests.cocos import write_coco
from tests.encoders import tiny_config, write_run
from tests.ground_truths import GRADED_GND, write_pickle
from tests.images import encode, make_image, write_folder
from tests.segments import write_segments
from tests.transfers import write_cars, write_cifar, write_flowers, write_inat
from tests.videos import write_davis

pytestmark = pytest.mark.slow

IN9 = ("original", "mixed_same", "mixed_rand", "mixed_next", "only_fg", "no_fg", "only_bg_b", "only_bg_t")


def write_imagenet(root: Path) -> None:
    """As many training images as neighbors vote by default."""
    train = write_folder(root / "train", classes=3, per_class=67, seed=1)
    write_folder(root / "val", classes=3, per_class=2, seed=2)
    names = "\n".join(str(file.relative_to(train)) for file in sorted(train.rglob("*.jpg")))
    for share in (1, 10):
        (root / f"{share}percent.txt").write_text(names)


def write_revisited(root: Path) -> None:
    """Not the published ground truths, which these commands want."""
    for name in ("roxford5k", "rparis6k"):
        (root / name / "jpg").mkdir(parents=True)
        for image in (*GRADED_GND["imlist"], *GRADED_GND["qimlist"]):
            (root / name / "jpg" / f"{image}.jpg").write_bytes(encode(make_image(np.random.default_rng(0), 40)))
        write_pickle(root / name / f"gnd_{name}.pkl", GRADED_GND)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_imagenet(tmp_path / "imagenet")
    write_cifar(tmp_path / "cifar-10-batches-py")
    write_cifar(tmp_path / "cifar-100-python", hundred=True)
    for year in (2018, 2019):
        write_inat(tmp_path / f"inat{year}", year)
    write_flowers(tmp_path / "flowers-102")
    write_cars(tmp_path / "stanford_cars", devkit=True)
    write_revisited(tmp_path / "revisited")
    write_davis(tmp_path / "DAVIS")
    write_coco(tmp_path / "coco", 4, official=True)
    write_segments(tmp_path / "ADEChallengeData2016", ade=True)
    write_folder(tmp_path / "bg_challenge" / "original" / "train", per_class=4, prefix="00_")
    for name in IN9:
        write_folder(tmp_path / "bg_challenge" / name / "val", per_class=2, prefix="00_")
    write_run(tmp_path / "run", tiny_config(patch_size=16))
    return tmp_path


def test_every_task_of_the_paper_runs_on_official_layouts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(whole: training.Training, *more: Any) -> Any:
        return training.train(replace(whole, steps=1), *more)

    for module in (detect, finetune, segment):
        monkeypatch.setattr(module, "train", train)
    words = ("suite", "paper", "--model", root / "run", "--size", 64, "--root", root, "--out", root / "board")
    result = CliRunner().invoke(main, [*map(str, words)])
    assert "2 of 24 tasks failed: roxford, rparis" in result.stderr, result.output
    assert result.stderr.count("is not the published ground truth") == 2
    (of_tasks,) = json.loads((root / "board" / "leaderboard.json").read_text()).values()
    assert len(of_tasks) == 22 and all(each["metrics"] for each in of_tasks.values())
    assert not list((root / "board").rglob("*.state"))
