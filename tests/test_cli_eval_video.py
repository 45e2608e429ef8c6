"""sop-eval video: objects are followed, masks are kept and read again, and mistakes are one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image

from sop_faiss.cli.eval import main
from sop_faiss.errors import DataError
from sop_faiss.evaluate.sets.video_set import LIST
from sop_faiss.evaluate.video_task import mask_of_labels
from sop_faiss.verbs.scoring import eval_video
from sop_faiss.verbs.scoring.eval_video import SETTINGS_FILE, score_folder
from tests.messages import command_fails
from tests.videos import HEIGHT, WIDTH, frame_file, mask_file, write_davis

NETWORK = ("--model", "timm:test_efficientnet", "--random-weights", 0, "--size", 64, "--stride", 8)


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["video", *(str(word) for word in words)])


def fails(*words: object) -> str:
    return command_fails(main, "video", *words)


@pytest.fixture(scope="module")
def davis(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_davis(tmp_path_factory.mktemp("davis") / "d")


def test_moving_squares_are_followed(davis: Path, tmp_path: Path) -> None:
    file = tmp_path / "v.json"
    sharp = (*NETWORK[:4], "--size", 128, "--stride", 4)
    result = run(*sharp, "--data", davis, "--json", file)
    assert result.exit_code == 0, result.output
    assert "cat 2" in result.stdout and "12 of 12 frames" in result.stderr
    content = json.loads(file.read_text())
    metrics, still = content["metrics"], content["first_mask_kept"]
    assert metrics["j_and_f"] > 90 and still["j_and_f"] < 50
    assert metrics["j_and_f"] == pytest.approx((metrics["j_mean"] + metrics["f_mean"]) / 2)
    assert [(each["sequence"], each["object"]) for each in content["per_object"]] == [
        ("cat", 1),
        ("cat", 2),
        ("dog", 1),
        ("dog", 2),
    ]
    protocol = content["protocol"]
    assert (protocol["size"], protocol["stride"], protocol["frames_counted"], protocol["objects"]) == (128, 4, 8, 4)
    again = run(*sharp, "--data", davis, "--json", "-")
    assert json.loads(again.stdout)["metrics"] == metrics


def test_masks_are_written_and_finished_sequences_kept(
    davis: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "masks"
    first = run(*NETWORK, "--data", davis, "--out", out, "--json", tmp_path / "1.json")
    assert first.exit_code == 0, first.output
    metrics = json.loads((tmp_path / "1.json").read_text())["metrics"]
    assert score_folder(davis, out)[0] == metrics
    assert sorted(path.name for path in (out / "cat").iterdir()) == [f"{place:05d}.png" for place in range(6)]
    with Image.open(out / "cat" / "00000.png") as image:
        assert image.mode == "P"
    (out / "dog").rename(tmp_path / "dog")
    found = []
    find = eval_video.find_objects
    monkeypatch.setattr(
        eval_video, "find_objects", lambda video, *others: found.append(video.name) or find(video, *others)
    )
    again = run(*NETWORK, "--data", davis, "--out", out, "--json", tmp_path / "2.json")
    assert again.exit_code == 0 and found == ["dog"]
    assert json.loads((tmp_path / "2.json").read_text())["metrics"] == metrics
    for path in (tmp_path / "dog").iterdir():
        assert path.read_bytes() == (out / "dog" / path.name).read_bytes()
    assert "radius" in fails(*NETWORK, "--radius", 3, "--data", davis, "--out", out)
    assert "not empty" in fails(*NETWORK, "--data", davis, "--out", davis)
    Image.new("L", (WIDTH, HEIGHT), 3).save(out / "cat" / "00002.png")
    assert "00002.png" in fails(*NETWORK, "--data", davis, "--out", out)
    (out / SETTINGS_FILE).write_text("[]")
    assert "other settings" in fails(*NETWORK, "--data", davis, "--out", out)


def test_a_sequence_that_fails_leaves_no_half_of_its_masks(tmp_path: Path) -> None:
    davis, out = write_davis(tmp_path / "d"), tmp_path / "masks"
    frame_file(davis, "dog", 3).write_bytes(b"")
    assert "00003.jpg" in fails(*NETWORK, "--data", davis, "--out", out)
    assert sorted(path.name for path in out.iterdir()) == ["cat", SETTINGS_FILE]


def test_quick_is_of_few_frames(tmp_path: Path) -> None:
    davis = write_davis(tmp_path / "d", ("cat",), frames=23, objects=1, white=True)
    result = run(*NETWORK[:4], "--data", davis, "--quick", "--stride", 32, "--json", "-")
    protocol = json.loads(result.stdout)["protocol"]
    assert (protocol["size"], protocol["most_frames"], protocol["frames_counted"]) == (240, 20, 18)


def test_what_a_user_gets_wrong(davis: Path, tmp_path: Path) -> None:
    assert "val.txt" in fails(*NETWORK, "--data", tmp_path)
    for option in ("--frames", "--radius", "--top", "--stride"):
        assert option in fails(*NETWORK, option, -1, "--data", davis)
    assert "--size" in fails(*NETWORK[:4], "--size", 0, "--data", davis)
    assert "--size" in fails(*NETWORK[:4], "--size", 16, "--data", davis)
    assert "--stride" in fails(*NETWORK, "--stride", 5, "--data", davis)
    for name, value in (("pooling", "gem"), ("scales", "1,0.5"), ("cache", tmp_path / "c"), ("last-blocks", 2)):
        assert f"--{name}" in fails(*NETWORK, f"--{name}", value, "--data", davis)
    assert "--mirrored" in fails(*NETWORK, "--mirrored", "--data", davis)
    assert "--json" in fails(*NETWORK, "--data", davis, "--json", davis / "v.json")
    assert not (tmp_path / "c").exists()


def test_masks_of_others_that_cannot_be_scored(davis: Path, tmp_path: Path) -> None:
    folder = tmp_path / "masks"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for place in range(1, 5):
            (folder / name / f"{place:05d}.png").write_bytes(mask_file(davis, name, place).read_bytes())
    assert score_folder(davis, folder)[0]["j_and_f"] == 100.0
    (folder / "dog" / "00002.png").unlink()
    with pytest.raises(DataError, match=r"00002\.png"):
        score_folder(davis, folder)


def test_empty_and_full_masks_of_two_objects(tmp_path: Path) -> None:
    davis = write_davis(tmp_path / "d", ("cat",), frames=5)
    for place, value in ((1, 0), (2, 2), (3, 1)):
        Image.new("L", (WIDTH, HEIGHT), value).save(mask_file(davis, "cat", place))
    (tmp_path / "m").mkdir()
    for place in (1, 2, 3):
        Image.new("L", (WIDTH, HEIGHT), 2).save(tmp_path / "m" / f"{place:05d}.png")
    (tmp_path / "m").rename(tmp_path / "cat")
    # J of object 1: 1 (both empty), 1, 0; of object 2: 0, 1, 0. F: a full mask has no boundary, as an empty one
    found, _ = score_folder(davis, tmp_path)
    assert found["j_mean"] == pytest.approx(100 * (2 / 3 + 1 / 3) / 2) and found["f_mean"] == 100.0
    assert found["j_decay"] == pytest.approx(100 * (1.0 + 0.5) / 2)  # the first two frames less the last


def test_classes_that_fill_or_leave_a_frame() -> None:
    labels = torch.zeros(4, 3)
    labels[:, 1] = 1
    assert (mask_of_labels(labels, (2, 2), (4, 6)) == 1).all()
    labels = torch.tensor([[0.6, 0.4, 0.0], [0.9, 0.1, 0.0], [0.9, 0.1, 0.0], [0.9, 0.1, 0.0]])
    mask = mask_of_labels(labels, (2, 2), (2, 2)).numpy()  # each class is stretched, so that 0.4 of an object wins
    assert np.array_equal(mask, [[1, 0], [0, 0]])


def test_a_suite_has_videos(davis: Path, tmp_path: Path) -> None:
    file = tmp_path / "suite.yaml"
    file.write_text(f"tasks: {{davis: {{task: video, data: {davis}, stride: 8, size: 64}}}}")
    result = CliRunner().invoke(main, ["suite", str(file), *map(str, NETWORK[:4]), "--out", str(tmp_path / "board")])
    assert result.exit_code == 0, result.output
    assert "| davis: j_and_f | " in (tmp_path / "board" / "leaderboard.md").read_text()
    assert (davis / LIST).exists()
