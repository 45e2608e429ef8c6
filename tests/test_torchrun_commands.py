"""Commands under torchrun: ranks share the encoding, and the first one alone writes and prints."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from sop_faiss.index.search import FeatureIndex
from tests.cocos import write_coco
from tests.encoders import write_run
from tests.images import write_folder
from tests.segments import write_segments
from tests.videos import write_davis

LAUNCH_TWO = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def run(ranks: int, command: str, *words: object, module: str = "sop_faiss.cli") -> str:
    """Its stdout."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, "-m", f"{module}.{command}", *map(str, words)],
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


RANDOM = ("--device", "cpu", "--random-weights", 0)
TRAININGS = {
    "finetune": ("--size", 32, "--epochs", 2, "--batch-size", 8, "--lr", 0.5, "--drop-path", 0.3, "--ema", 0.5),
    "segment": ("--head", "upernet", "--size", 64, "--steps", 5, "--batch-size", 4, "--lr", 1e-3, "--channels", 8),
    "detect": ("--size", 64, "--epochs", 2, "--batch-size", 2, "--lr", 1e-4, "--width", 8, "--rois", 4, "--cascade"),
}
NETWORKS = {"finetune": "timm:test_resnet", "segment": "timm:test_vit", "detect": "timm:test_vit"}


def training(task: str, root: Path) -> list[object]:
    """Words of a short training on made images, which are written where they are not there."""
    data = root / task
    if not data.exists():
        if task == "finetune":
            write_folder(data / "train", classes=3, per_class=6, seed=1, size=40)
            write_folder(data / "val", classes=3, per_class=2, seed=2, size=40)
        else:
            write_segments(data) if task == "segment" else write_coco(data)
    undrawn = ("--min-scale", 1, "--crop", 0, "--drop-path", 0, "--batchnorm", "batch") if task == "detect" else ()
    return [task, "--model", NETWORKS[task], *RANDOM, *TRAININGS[task], *undrawn, "--data", data]


def state_of(folder: Path) -> dict[str, dict[str, dict[str, torch.Tensor]]]:
    """What a training has kept after its last step."""
    parts: dict[str, dict[str, dict[str, torch.Tensor]]]
    parts = torch.load(next(folder.glob("*.pt")), weights_only=True)["training"]["parts"]
    return parts


@pytest.mark.parametrize("task", list(TRAININGS))
def test_two_ranks_train_as_one(task: str, tmp_path: Path) -> None:
    """Batch norms, stochastic depth, mixing and losses are those of the complete batch."""
    words = training(task, tmp_path)
    said, parts = {}, {}
    for ranks in (1, 2):
        outputs = ("--out", tmp_path / f"out{ranks}", "--json", tmp_path / f"{ranks}.json")
        said[ranks] = run(ranks, "undrawn_eval", *words, *outputs, module="tests")
        parts[ranks] = state_of(tmp_path / f"out{ranks}")
    one, two = (json.loads((tmp_path / f"{ranks}.json").read_text()) for ranks in (1, 2))
    assert two["protocol"] == one["protocol"] and len(said[1].splitlines()) == len(said[2].splitlines())
    for name, value in parts[1]["model"].items():
        torch.testing.assert_close(parts[2]["model"][name], value, rtol=1e-3, atol=3e-4, msg=name)
    moments = [
        torch.cat([each["exp_avg"].flatten() for each in parts[n]["optimizer"]["state"].values()]) for n in (1, 2)
    ]
    assert torch.linalg.vector_norm(moments[1] - moments[0]) < 1e-3 * torch.linalg.vector_norm(moments[0])


def test_ranks_of_a_detector_draw_for_themselves_and_again(tmp_path: Path) -> None:
    """Crops are those of one process; sides, and what else a step draws, differ by rank; a rerun has the same."""
    sizes = ("--size", 64, "--epochs", 3, "--batch-size", 4, "--width", 8, "--rois", 8, "--batchnorm", "batch")
    words = ("detect", "--model", "timm:test_resnet", *RANDOM, *sizes, "--data", write_coco(tmp_path / "coco", 9))
    notes = {}
    for ranks, name in ((1, "one"), (2, "two"), (2, "again")):
        (tmp_path / name).mkdir()
        run(ranks, "drawn_detect", tmp_path / name, *words, "--out", tmp_path / f"{name}.out", module="tests")
        notes[name] = [json.loads((tmp_path / name / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    assert notes["two"] == notes["again"]
    first, second = notes["two"]
    assert len(first["sides"]) == len(second["sides"]) == 12 and len(set(first["sides"])) > 2
    assert sum(one != other for one, other in zip(first["sides"], second["sides"], strict=True)) > 6
    assert not first["crops"].keys() & second["crops"].keys()
    assert first["crops"] | second["crops"] == notes["one"][0]["crops"]
    assert len(set(notes["one"][0]["crops"].values())) > 16  # of 24: others in each epoch
    one, other = (state_of(tmp_path / f"{name}.out")["model"] for name in ("two", "again"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_two_ranks_stop_on_a_signal_and_continue_exactly(tmp_path: Path) -> None:
    words = ["-m", "sop_faiss.cli.eval", *map(str, training("finetune", tmp_path)), "--epochs", "12"]
    whole, stopped = ([*LAUNCH_TWO, *words, "--out", str(tmp_path / place)] for place in ("whole", "stopped"))
    assert subprocess.run(whole, timeout=600).returncode == 0
    with subprocess.Popen(stopped, stderr=subprocess.PIPE, text=True) as started:
        while not (tmp_path / "stopped" / "finetune.pt").exists():
            assert started.poll() is None
            time.sleep(0.05)
        started.send_signal(signal.SIGTERM)
        _, said = started.communicate(timeout=600)
    assert said.count("stopped by a signal after step") == 1, said
    assert subprocess.run(stopped, timeout=600).returncode == 0
    one, two = (state_of(tmp_path / place)["model"] for place in ("whole", "stopped"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())


@pytest.mark.parametrize("broken", ["train", "val"])
def test_an_image_that_the_second_rank_cannot_use_is_one_line(broken: str, tmp_path: Path) -> None:
    words = list(map(str, training("finetune", tmp_path)))
    image = sorted((tmp_path / "finetune" / broken).rglob("*.jpg"))[1]
    image.write_bytes(b"no image")
    failed = subprocess.run(
        [*LAUNCH_TWO, "-m", "sop_faiss.cli.eval", *words], capture_output=True, text=True, timeout=300
    )
    assert failed.returncode != 0 and failed.stderr.count("error: image") == 1 and image.stem in failed.stderr
