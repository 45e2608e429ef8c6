"""sop-eval segment: results, a state that continues, both heads, and mistakes in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sop_faiss.cli.eval import main
from tests.messages import command_fails
from tests.segments import write_segments

NETWORK = ("--model", "timm:test_efficientnet", "--random-weights", 0)
SHORT = (*NETWORK, "--size", 32, "--steps", 3, "--batch-size", 4, "--lr", 0.05, "--distort", 0)


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["segment", *(str(word) for word in words)])


def fails(*words: object) -> str:
    return command_fails(main, "segment", *words)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_segments(tmp_path_factory.mktemp("segments") / "s")


def test_it_is_trained_once(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root, out = tmp_path / "copy", Path("out")
    shutil.copytree(data, root)
    words = (*SHORT, "--stride", 4, "--data", root, "--out", out)
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    result = run(*words, "--json", first)
    assert result.exit_code == 0, result.output
    assert "4 test and 6 training images" in result.stdout and "person everywhere" in result.stdout
    assert "training: 3 of 3 steps" in result.stderr
    again = run(*words, "--json", second)
    assert again.exit_code == 0 and "training:" not in again.stderr
    contents = [json.loads(file.read_text()) for file in (first, second)]
    for content in contents:
        content.pop("seconds"), content.pop("environment")
    assert contents[0] == contents[1] and contents[0]["command"] == "sop-eval segment"
    content = contents[0]
    assert set(content["metrics"]) == {"miou", "macc", "aacc"}
    low, high = content["miou_interval"]
    assert low <= content["metrics"]["miou"] <= high
    floor = content["largest_class_everywhere"]
    shares = {name: row["pixels"] for name, row in content["per_class"].items()}
    assert floor["class"] == "person" and shares["tree-merged"] == 0
    assert floor["aacc"] == pytest.approx(100 * shares["person"] / sum(shares.values()))
    assert floor["miou"] == pytest.approx(floor["aacc"] / 2)  # of the two that occur
    assert content["per_class"]["tree-merged"]["accuracy"] is None
    protocol = content["protocol"]
    assert (protocol["classes"], protocol["classes_in_test"], protocol["window_stride"]) == (3, 2, 21)
    assert "steps" in fails(*words, "--steps", 4) and "head" in fails(*words[:-4], "--head", "upernet", *words[-4:])
    shutil.copy(root / "semantic" / "train" / "0.png", root / "semantic" / "train" / "1.png")
    assert "training images" in fails(*words)
    (out / "segment.pt").write_bytes(b"")
    assert "damaged" in fails(*words)


def test_quick_upernet_on_the_other_layout(tmp_path: Path) -> None:
    data = write_segments(tmp_path / "ade", count=(2, 1), ade=True)
    words = ("--head", "upernet", "--data", data, "--quick", "--steps", 1, "--size", 32, "--channels", 8)
    result = run(*NETWORK, *words, "--json", "-")
    content = json.loads(result.stdout)
    protocol = content["protocol"]
    assert (protocol["classes"], protocol["size"], protocol["learning_rate"]) == (150, 32, 1e-3)
    assert protocol["distort"] == 0 and len(content["classes_left_out"]) >= 150 - 32 * 32


def test_what_a_user_gets_wrong(data: Path, tmp_path: Path) -> None:
    both = (*SHORT, "--data", data)
    for option, value in (
        ("--steps", 0),
        ("--batch-size", 1),
        ("--lr", "nan"),
        ("--lr", -1),
        ("--warmup-steps", 4),
        ("--min-scale", 3),
        ("--max-scale", "inf"),
        ("--flip", 2),
        ("--distort", -1),
        ("--stride", 5),
        ("--precision", "fp8"),
        ("--head", "fcn"),
        ("--blocks", 2),
        ("--blocks", 4),
        ("--seed", -1),
        ("--workers", -1),
        ("--size", 10**9),
        ("--layer-decay", 0.9),
        ("--drop-path", 0.1),
        ("--channels", 64),
        ("--auxiliary", 0.2),
        ("--pooling", "gem"),
        ("--scales", "1,0.5"),
        ("--cache", tmp_path / "cache"),
    ):
        assert option in fails(*both, option, value), option
    assert "--mirrored" in fails(*both, "--mirrored")
    assert "--stride" in fails(*both, "--head", "upernet", "--stride", 8)
    assert "--blocks" in fails(*both, "--head", "upernet", "--blocks", 4)
    assert "--blocks" in fails(*both, "--stride", 8, "--blocks", 4)
    assert "--size" in fails(*both, "--head", "upernet", "--size", 40)
    assert "something else" in fails(*both, "--out", data)
    assert "--json" in fails(*both, "--json", data / "result.json")
    assert "ADE20K" in fails(*SHORT, "--data", tmp_path / "none")
    assert "--supercategories" in fails(
        *SHORT, "--supercategories", "--data", write_segments(tmp_path / "ade", count=(2, 1), ade=True)
    )
    assert not (tmp_path / "cache").exists()


def test_a_suite_has_segmentation(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "suite.yaml"
    task = f"task: segment, data: {data}, stride: 8, size: 32, steps: 2, batch_size: 4"
    file.write_text(f"tasks: {{scenes: {{{task}}}}}")
    result = CliRunner().invoke(main, ["suite", str(file), *map(str, NETWORK), "--out", str(tmp_path / "board")])
    assert result.exit_code == 0, result.output
    assert "| scenes: miou | " in (tmp_path / "board" / "leaderboard.md").read_text()
