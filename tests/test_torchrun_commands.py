"""Commands under torchrun: ranks share the encoding, and the first one alone writes and prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sop_faiss.index.search import FeatureIndex
from tests.encoders import write_run
from tests.images import write_folder
from tests.videos import write_davis

LAUNCH_TWO = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def run(ranks: int, command: str, *words: object) -> str:
    """Its stdout."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, "-m", f"sop_faiss.cli.{command}", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("torchrun")
    write_run(root / "run")
    write_folder(root / "train", classes=2, per_class=7)
    write_folder(root / "test", classes=2, per_class=3, seed=5)
    return root


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("knn", ["-k", 3]),
        ("linear", ["--epochs", 5]),
        ("eval", ["robustness", "--k", 3, "--share", 0.5, "--grid", 2]),
    ],
)
def test_two_ranks_score_what_one_scores(place: Path, tmp_path: Path, command: str, options: list[object]) -> None:
    words = (
        "--model",
        place / "run",
        "--device",
        "cpu",
        "--train",
        place / "train",
        "--test",
        place / "test",
    )
    said = [run(ranks, command, *options, *words, "--json", tmp_path / f"{ranks}.json") for ranks in (1, 2)]
    one, two = (json.loads((tmp_path / f"{ranks}.json").read_text()) for ranks in (1, 2))
    assert two["metrics"] == pytest.approx(one["metrics"]) and two["protocol"] == one["protocol"]
    assert said[1].count("test and") == said[0].count("test and") == 1


def test_two_ranks_retrieve_what_one_retrieves(place: Path, tmp_path: Path) -> None:
    words = ("--model", place / "run", "--device", "cpu", "--dataset", place / "train")
    said = [run(ranks, "retrieve", *words, "--json", tmp_path / f"{ranks}.json") for ranks in (1, 2)]
    one, two = (json.loads((tmp_path / f"{ranks}.json").read_text()) for ranks in (1, 2))
    assert two["metrics"] == pytest.approx(one["metrics"])
    assert said[1].count("queries in") == 1


def test_two_ranks_follow_the_objects_that_one_follows(place: Path, tmp_path: Path) -> None:
    davis = write_davis(tmp_path / "davis", ("a", "b", "c"))
    words = ("video", "--model", place / "run", "--device", "cpu", "--data", davis, "--size", 64)
    texts = []
    for ranks in (1, 2):
        texts.append(run(ranks, "eval", *words, "--json", tmp_path / f"{ranks}.json", "--out", tmp_path / f"m{ranks}"))
    one, two = (json.loads((tmp_path / f"{ranks}.json").read_text()) for ranks in (1, 2))
    assert two["metrics"] == one["metrics"] and two["per_object"] == one["per_object"]
    assert texts[1].count("all objects") == 1
    files = [sorted(path.relative_to(folder) for path in folder.rglob("*.png")) for folder in tmp_path.glob("m?")]
    assert files[0] == files[1] and len(files[0]) == 18
    (davis / "JPEGImages" / "480p" / "b" / "00002.jpg").write_bytes(b"")  # of the second rank
    failed = subprocess.run(
        [*LAUNCH_TWO, "-m", "sop_faiss.cli.eval", *map(str, words)], capture_output=True, text=True, timeout=300
    )
    assert failed.returncode != 0 and failed.stderr.count("error: frame") == 1


@pytest.mark.parametrize("factory", ["Flat", "IVF2,SQ8"])
def test_two_ranks_build_what_one_builds(place: Path, tmp_path: Path, factory: str) -> None:
    words = ("build", "--model", place / "run", "--device", "cpu", "--data", place / "train", "--factory", factory)
    said = [run(ranks, "index", *words, "--out", tmp_path / f"{ranks}.index") for ranks in (1, 2)]
    one, two = (FeatureIndex.open(tmp_path / f"{ranks}.index") for ranks in (1, 2))
    assert one.ids.keys == two.ids.keys
    np.testing.assert_allclose(one.features(range(14)), two.features(range(14)), atol=1e-2 if "SQ" in factory else 1e-5)
    assert said[1].count("14 vectors") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.index", "2.index"]
    embed = ("--model", place / "run", "--device", "cpu", "--data", place / "train", "--out", tmp_path / "store")
    run(1, "embed", *embed)
    run(2, "index", "build", "--features", tmp_path / "store", "--out", tmp_path / "of_store.index")
    assert FeatureIndex.open(tmp_path / "of_store.index").ids.keys == sorted(one.ids.keys)
