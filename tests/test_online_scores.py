"""Scores while training: what is measured, in the background or not, what a kill loses, and the verdict."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor

from sop_faiss.bootstrap import LEVEL, RESAMPLES, Interval, Score
from sop_faiss.cli.train import main
from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.source import open_source
from sop_faiss.data.views.crops import draw_view, view_generator, write_view
from sop_faiss.data.views.view_pairs import ViewPairs
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.label_free import LABEL_FREE
from sop_faiss.evaluate.view_recall import views_found
from sop_faiss.files import read_json
from sop_faiss.model.checkpoint import find_checkpoint, read_state, read_tensors
from sop_faiss.model.encoders import forward
from sop_faiss.model.encoders.encoder import encoder_of_backbone
from sop_faiss.model.encoders.load import load_encoder
from sop_faiss.model.encoders.preprocess import Preprocess
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.train.log.json_lines import keep_lines_until
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.train.score_history import ScoreHistory
from sop_faiss.train.scoring import runs_in_background
from sop_faiss.train.verdict import Outcome, verdict_of
from sop_faiss.verbs.scoring.retrieve import evaluate_retrieval
from sop_faiss.verbs.training import train
from sop_faiss.verbs.training.dry_run import describe_run
from sop_faiss.verbs.training.online_scores import OnlineEvaluation, open_evaluation
from sop_faiss.verbs.training.train import run_training
from sop_faiss.verbs.training.training_images import open_training_images
from tests import forked
from tests.images import write_folder, write_shards
from tests.runs import networks_of, tiny_config, tiny_config_file
from tests.test_cli_retrieve import graded_gnd, plain_gnd, write_set
from tests.test_loop import command, records, wait_for_step

EVERY_4 = ("train.epochs=3", "train.log_every_steps=1", "evaluate.every_steps=4")


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("train"), classes=2, per_class=12, size=20)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("photos"), classes=0, per_class=20, size=(30, 24))


def evaluation(tmp_path: Path, *overrides: str) -> OnlineEvaluation | None:
    config = tiny_config(tmp_path, *overrides)
    return open_evaluation(config, *open_training_images(config))


# recall@1 between views


def test_view_recall_is_what_a_loop_finds():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(30, 4)).astype(np.float32)
    views = [features + rng.normal(scale=0.5, size=features.shape).astype(np.float32) for _ in range(2)]
    first, second = (view / np.linalg.norm(view, axis=1, keepdims=True) for view in views)
    found = 0
    for one, other in ((first, second), (second, first)):
        for row in range(30):
            found += max(range(30), key=lambda column: float(one[row] @ other[column])) == row
    assert 0 < found < 60
    assert views_found(first, second).sum() == found
    assert views_found(first, first).all()


def test_an_encoder_that_sees_no_difference_scores_as_guessing_does():
    same = np.full((8, 4), 0.5, np.float32)
    assert views_found(same, same).mean() == 1 / 8
    with pytest.raises(DataError, match="views of 1 images: wanted 2 or more"):
        views_found(same[:1], same[:1])


@pytest.mark.parametrize("colored", [False, True])
def test_pairs_are_the_runs_own_views_and_always_the_same(tmp_path, photos, colored):
    source, positions = open_source(photos), np.array([3, 7, 11])
    setting = f"evaluate.view_colors={colored}"
    pairs = ViewPairs(source, positions, tiny_config(tmp_path, setting))
    made = list(pairs)
    assert len(made) == len(pairs) == 3
    views = tiny_config(tmp_path).views
    for position, pair in zip(positions, made, strict=True):
        image = decode_image(source.read(int(position)))
        for index in (0, 1):  # with the colors of the first and of the second global view
            expected = np.empty((16, 16, 3), np.uint8)
            drawn = draw_view(*image.shape[:2], index, views, view_generator(0, 2**63, int(position), index))
            write_view(image, drawn, expected, colored=colored)
            np.testing.assert_array_equal(pair[index], expected)
    for overrides in ((), ("train.seed=5",), ("views.local_count=3",), ("views.global_count=1",)):
        again_made = ViewPairs(source, positions, tiny_config(tmp_path, setting, *overrides))
        for again, pair in zip(again_made, made, strict=True):
            np.testing.assert_array_equal(again, pair)


def test_images_that_cannot_be_read_are_left_out_up_to_a_share(tmp_path, photos):
    folder = write_folder(tmp_path / "photos", classes=0, per_class=10)
    (folder / "0004.jpg").write_bytes(b"no image")
    source, everything = open_source(folder), np.arange(10)
    assert len(list(ViewPairs(source, everything, tiny_config(tmp_path, "data.max_bad_fraction=0.1")))) == 9
    with pytest.raises(DataError, match=r"1 of the 10 images to be scored cannot be read so far \(last: .*0\.01"):
        list(ViewPairs(source, everything, tiny_config(tmp_path)))


# what is measured


def test_without_labels_views_are_compared(tmp_path, photos):
    online = evaluation(tmp_path, f"data.train={photos}", "evaluate.every_steps=5")
    assert online is not None and online.names == ("view_recall_at_1",) and online.best_by == "view_recall_at_1"
    assert evaluation(tmp_path, f"data.train={photos}") is None


def test_label_free_numbers_are_of_the_same_views_and_change_nothing_else(tmp_path, photos):
    common = (f"data.train={photos}", "train.epochs=1", *EVERY_4[1:], "train.stop_after_steps=2")
    for name, setting in {"without": "false", "with": "true"}.items():
        run_training(tiny_config(tmp_path, *common, f"evaluate.label_free={setting}"), tmp_path / name)
    logged = [[line for line in read_metrics(tmp_path / name) if "loss" not in line] for name in ("without", "with")]
    for before, after in zip(*logged, strict=True):
        assert set(after) - set(before) == set(LABEL_FREE) and {key: after[key] for key in before} == before
        assert after["rankme"] >= 1 and after["lidar"] >= 1 and 0 <= after["assignment_entropy"] <= 100
    losses = [
        [line["loss"] for line in read_metrics(tmp_path / name) if "loss" in line] for name in ("without", "with")
    ]
    assert losses[0] == losses[1]
    assert (
        read_state(find_checkpoint(tmp_path / "with"))["scored_on"]
        == read_state(find_checkpoint(tmp_path / "without"))["scored_on"]
    )


def test_what_is_not_a_mean_over_images_cannot_be_followed(tmp_path, photos):
    wanted = (f"data.train={photos}", "evaluate.every_steps=5", "evaluate.label_free=true")
    online = evaluation(tmp_path, *wanted, "evaluate.best_by=assignment_entropy")
    assert online is not None and online.names == ("view_recall_at_1", *LABEL_FREE)
    with pytest.raises(ConfigError, match=r"evaluate\.best_by = lidar"):
        evaluation(tmp_path, *wanted, "evaluate.best_by=lidar")
    with pytest.raises(ConfigError, match=r"evaluate\.label_free = true with evaluate\.view_recall = never"):
        tiny_config(tmp_path, "evaluate.label_free=true", "evaluate.view_recall=never")


@pytest.mark.parametrize(
    ("overrides", "names", "best_by"),
    [
        (("evaluate.test=holdout",), ("knn_top1_k5",), "knn_top1_k5"),
        (("evaluate.test=holdout", "evaluate.view_recall=always"), ("knn_top1_k5", "view_recall_at_1"), "knn_top1_k5"),
        (
            ("evaluate.test=holdout", "evaluate.retrieval=plain", "evaluate.best_by=map"),
            ("knn_top1_k5", "map"),
            "map",
        ),
        (("evaluate.retrieval=plain",), ("map",), "map"),
        (("evaluate.retrieval=graded",), ("map_medium", "map_hard"), "map_medium"),
        (("evaluate.retrieval=graded", "evaluate.retrieval_protocol=dino"), ("map_medium", "map_hard"), "map_medium"),
    ],
)
def test_what_is_named_is_measured_in_this_order(tmp_path, shards, overrides, names, best_by):
    write_set(tmp_path / "plain", plain_gnd())
    write_set(tmp_path / "graded", graded_gnd())
    settings = [f"data.train={shards}", "data.holdout_share=0.25", "evaluate.k=5", "evaluate.every_steps=5", *overrides]
    if any("retrieval=" in override for override in overrides):
        settings.append(f"evaluate.retrieval_root={tmp_path}")
    online = evaluation(tmp_path, *settings)
    assert online is not None
    assert (online.names, online.best_by) == (names, best_by)
    config = tiny_config(tmp_path, *settings)
    scores = online(train.RunState(config, torch.device("cpu"), 18).teacher)
    assert tuple(scores) == names
    for percent, each, _ in scores.values():
        assert 0 <= percent <= 100 and percent == pytest.approx(each.mean(), rel=1e-12) and len(each) > 1
    assert describe_run(config)["scores"] == list(names)


def test_a_difficulty_that_no_query_has_is_no_score(tmp_path, photos):
    gnd = graded_gnd()
    for entry in gnd["gnd"]:
        entry["hard"] = []
    write_set(tmp_path / "easy", gnd)
    settings = (f"data.train={photos}", "evaluate.every_steps=5", f"evaluate.retrieval={tmp_path / 'easy'}")
    online = evaluation(tmp_path, *settings)
    assert online is not None and online.names == ("map_medium",)
    with pytest.raises(ConfigError, match=r"best_by = map_hard .* map_medium"):
        evaluation(tmp_path, *settings, "evaluate.best_by=map_hard")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("evaluate.best_by=knn",), "evaluate.best_by = knn is not measured: wanted one of view_recall_at_1"),
        (("evaluate.retrieval=nowhere",), "wanted roxford5k, rparis6k inside evaluate.retrieval_root"),
        (
            ("evaluate.retrieval=PLACE/plain", "evaluate.retrieval_protocol=dino"),
            "choose evaluate.retrieval_protocol=plain",
        ),
        (("evaluate.test=PHOTOS", "evaluate.train=PHOTOS", "evaluate.k=2"), "k-NN needs a label for every image"),
        (("data.holdout_share=0.05",), "view_recall_at_1 of 1 image: raise data.holdout_share"),
    ],
)
def test_mistakes_are_told_before_the_run(tmp_path, photos, overrides, message):
    write_set(tmp_path / "plain", plain_gnd())
    filled = [text.replace("PLACE", str(tmp_path)).replace("PHOTOS", str(photos)) for text in overrides]
    arguments = [str(tiny_config_file(tmp_path)), f"data.train={photos}", "evaluate.every_steps=2", *filled]
    result = CliRunner().invoke(main, [*arguments, "--output", str(tmp_path / "run")])
    assert result.exit_code == 1 and message in result.stderr, result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ") and "--gnd" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_classes_of_the_test_set_are_those_of_the_same_name(tmp_path, photos):
    """The test folder lacks the first class, and the training folder's numbers do not sort as text does."""
    for prefix in ("class_", ""):
        train_set = write_folder(tmp_path / f"train{prefix}", classes=12, per_class=2, prefix=prefix)
        test_set = shutil.copytree(train_set, tmp_path / f"test{prefix}")
        for label in range(9):
            shutil.rmtree(test_set / f"{prefix}{label}")
        settings = (f"evaluate.train={train_set}", f"evaluate.test={test_set}", "evaluate.k=1")
        online = evaluation(tmp_path, f"data.train={photos}", "evaluate.every_steps=5", *settings)
        assert online is not None
        encoder = load_encoder("timm:test_resnet", random_weights=0, size=32)
        assert online.tasks[0].measure(encoder) == {"knn_top1_k1": 100}


def test_a_stream_has_no_views_to_compare(tmp_path, shards):
    stream = ("data.access=sequential", "data.samples_per_epoch=24", f"data.train={shards}")
    with pytest.raises(ConfigError, match=r"view_recall_at_1 .* data\.access = sequential"):
        evaluation(tmp_path, *stream, "evaluate.every_steps=2")
    with pytest.raises(ConfigError, match=r"sequential .* evaluate\.view_recall=auto"):
        evaluation(tmp_path, *stream, "evaluate.every_steps=2", "evaluate.view_recall=always")


def test_scores_are_those_of_the_commands_on_the_checkpoint(tmp_path, photos):
    """mAP as `sop-retrieve` measures it, and recall@1 by hand, of the teacher that the run ended with."""
    write_set(tmp_path / "plain", plain_gnd())
    config = tiny_config(
        tmp_path, f"data.train={photos}", "train.epochs=1", "evaluate.every_steps=100", "evaluate.view_recall=always",
        f"evaluate.retrieval={tmp_path / 'plain'}", "evaluate.view_images=10", "evaluate.batch_size=7",
    )  # fmt: skip
    run_training(config, tmp_path / "run")
    first, last = (line for line in read_metrics(tmp_path / "run") if "map" in line)
    assert (first["step"], last["step"]) == (0, 3)
    retrieved = evaluate_retrieval(EncoderSpec(str(tmp_path / "run")), str(tmp_path / "plain"))
    assert last["map"] == pytest.approx(retrieved.scores.metrics["mAP"])
    encoder, source = load_encoder(str(tmp_path / "run")), open_source(photos)
    chosen = [position for position in range(20) if position in sample_of_ten()]
    pairs = np.stack(list(ViewPairs(source, np.array(chosen), config)))
    plain = Preprocess(16, 16, mean=encoder.preprocess.mean, std=encoder.preprocess.std, multiple=4)
    one, other = (encoder.encode(pairs[:, number], preprocess=plain) for number in (0, 1))
    assert last["view_recall_at_1"] == pytest.approx(100 * views_found(one, other).mean())


def sample_of_ten() -> set[int]:
    from sop_faiss.data.stream import split_holdout

    return set(split_holdout(20, 0.5, 0)[1].tolist())


# in the background


class Fake:
    """Scores a teacher by a number that says which it was; `before` may wait, or fail."""

    best_by = "score"

    def __init__(self, before: Callable[[int], None] = lambda call: None) -> None:
        self.before, self.calls, self.threads = before, 0, []

    def __call__(self, teacher: Any, *_: Any) -> dict[str, Score]:
        self.calls += 1
        self.threads.append(threading.current_thread() is threading.main_thread())
        score = float(sum(parameter.double().sum() for parameter in teacher.parameters()))
        self.before(self.calls)
        assert score == float(sum(parameter.double().sum() for parameter in teacher.parameters()))  # it stood still
        return {"score": same(score)}


def same(value: float) -> Score:
    """A score that is the same for each query, so that its difference to another has no spread."""
    return Score(value, np.full(10, value))


def use(monkeypatch: pytest.MonkeyPatch, fake: Any) -> None:
    monkeypatch.setattr(train, "open_evaluation", lambda *_: fake)


def score_lines(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run) if "loss" not in line]


def by_step(run: Path) -> list[dict[str, Any]]:
    return sorted(records(run), key=lambda line: (line["step"], "loss" in line))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards) -> Path:
    """A run of 12 steps, scored between the steps."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        use(patch, Fake())
        config = tiny_config(folder, f"data.train={shards}", *EVERY_4, "evaluate.background=never")
        assert run_training(config, folder / "run").finished
    assert [line["step"] for line in score_lines(folder / "run")] == [0, 4, 8, 12]
    return folder / "run"


def background(tmp_path: Path, shards: Path, *overrides: str) -> Any:
    return tiny_config(tmp_path, f"data.train={shards}", *EVERY_4, "evaluate.background=always", *overrides)


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [
        ("auto", "cpu", False), ("always", "cpu", True), ("never", "cpu", False), ("auto", "cuda", True),
        ("never", "cuda", False),
    ],
)  # fmt: skip
def test_where_scores_are_measured(setting, device, expected):
    assert runs_in_background(setting, torch.device(device)) is expected


def test_losses_and_scores_do_not_depend_on_it(tmp_path, shards):
    """With real scores: bit for bit, also where each step is scored."""
    common = (f"data.train={shards}", "train.epochs=3", "evaluate.every_steps=1", "evaluate.view_recall=always")
    common += ("data.holdout_share=0.25", "evaluate.test=holdout", "evaluate.k=5")
    for background in ("never", "always"):
        run_training(tiny_config(tmp_path, *common, f"evaluate.background={background}"), tmp_path / background)
    run_training(tiny_config(tmp_path, *common, "evaluate.every_steps=0"), tmp_path / "unscored")
    assert by_step(tmp_path / "always") == by_step(tmp_path / "never")
    assert len(score_lines(tmp_path / "always")) == 10
    assert [line for line in records(tmp_path / "always") if "loss" in line] == records(tmp_path / "unscored")


def test_training_goes_on_while_a_score_is_measured(tmp_path, shards, whole, monkeypatch):
    """The score of step 4 comes when step 6 is done, and is of the teacher of step 4."""
    reached = threading.Event()
    fake = Fake(lambda call: call == 2 and not reached.wait(60) and pytest.fail("the loop stood still"))
    use(monkeypatch, fake)

    def progress(done: int, total: int) -> None:
        if done == 6:
            reached.set()

    run_training(background(tmp_path, shards), tmp_path / "run", progress=progress)
    steps = [line["step"] for line in read_metrics(tmp_path / "run")]
    assert steps.index(6) < len(steps) - 1 - steps[::-1].index(4)
    assert by_step(tmp_path / "run") == by_step(whole)
    assert fake.threads == [True, False, False, True]  # step 0 and the end in the loop's own


def test_the_next_score_waits_for_the_one_in_flight(tmp_path, shards, whole, monkeypatch):
    """Step 8 is due while step 4 is still measured, and step 7 was reached meanwhile."""
    running: list[int] = []
    most: list[int] = []
    at_seven, gate = threading.Event(), threading.Event()

    def before(call: int) -> None:
        running.append(call)
        most.append(len(running))
        if call == 2:
            assert at_seven.wait(60)
            gate.wait(0.3)  # the loop is at step 8 by now
        running.remove(call)

    use(monkeypatch, Fake(before))
    run_training(background(tmp_path, shards), tmp_path / "run", progress=lambda done, _: done == 7 and at_seven.set())
    assert max(most) == 1
    assert by_step(tmp_path / "run") == by_step(whole)


class Killed(Exception):
    pass


@pytest.mark.parametrize("logged", [False, True])
def test_what_a_kill_loses_is_measured_again(tmp_path, shards, whole, monkeypatch, logged):
    """The checkpoint of step 6 holds the teacher of step 4; its score is lost, or logged after the checkpoint."""
    release = threading.Event()
    use(monkeypatch, Fake(lambda call: call == 2 and release.wait(60)))

    def progress(done: int, total: int) -> None:
        lines = score_lines(tmp_path / "run")
        if done == 6:
            if logged:
                release.set()
                time.sleep(0.2)  # it is done when step 7 looks
        elif done == 7:
            assert [line["step"] for line in lines] == ([0, 4] if logged else [0])
            release.set()
            raise Killed

    with pytest.raises(Killed):
        run_training(background(tmp_path, shards), tmp_path / "run", progress=progress)
    checkpoint = find_checkpoint(tmp_path / "run")
    state = read_json(checkpoint / "state.json")
    assert (checkpoint.name, state["measured_step"]) == ("step_00000006", 4)
    assert (checkpoint / "measured.safetensors").is_file()
    again = Fake()
    use(monkeypatch, again)
    run_training(background(tmp_path, shards), tmp_path / "run", resume=True)
    assert [line["step"] for line in score_lines(tmp_path / "run")] == [0, 4, 8, 12]
    assert again.calls == 3 and again.threads[0]
    assert by_step(tmp_path / "run") == by_step(whole)
    last = [read_json(find_checkpoint(run) / "state.json") for run in (tmp_path / "run", whole)]
    for key in ("difference", "best_by", "first_score", "best_score", "best_step", "measured_step"):
        assert last[0][key] == last[1][key], key
    assert (
        last[0]["measured_step"] is None and not (find_checkpoint(tmp_path / "run") / "measured.safetensors").exists()
    )


def test_a_signal_waits_for_no_score(tmp_path, shards, whole, monkeypatch):
    """What is being measured ends within a batch of images, and is measured when the run is resumed."""

    class Endless(Fake):
        def __call__(self, teacher: Any, *_: Any) -> dict[str, Score]:
            if threading.current_thread() is threading.main_thread():
                return super().__call__(teacher)
            while True:
                teacher.backbone(torch.zeros(1, 3, 16, 16))

    use(monkeypatch, Endless())
    stopped = run_training(
        background(tmp_path, shards),
        tmp_path / "run",
        progress=lambda done, _: done == 5 and os.kill(os.getpid(), signal.SIGTERM),
    )
    assert not stopped.finished and stopped.step == 6
    assert read_json(find_checkpoint(tmp_path / "run") / "state.json")["measured_step"] == 4
    use(monkeypatch, Fake())
    assert run_training(background(tmp_path, shards), tmp_path / "run", resume=True).finished
    assert by_step(tmp_path / "run") == by_step(whole)


@pytest.mark.parametrize(("call", "step"), [(1, 0), (2, 4), (4, 12)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_score_between_the_steps(tmp_path, shards, whole, monkeypatch, number, call, step, caplog):
    """It is given up within a batch of images, whenever it is made, and made when the run is resumed."""

    class Reading(Fake):
        def __call__(self, teacher: Any, *_: Any) -> dict[str, Score]:
            scores = super().__call__(teacher)
            teacher.backbone(torch.zeros(1, 3, 16, 16))
            return scores

    monkeypatch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)  # also in a background job
    use(monkeypatch, Reading(lambda now: signal.raise_signal(number) if now == call else None))
    config = tiny_config(tmp_path, f"data.train={shards}", *EVERY_4, "evaluate.background=never")
    with contextlib.suppress(KeyboardInterrupt):
        stopped = run_training(config, tmp_path / "run")
        assert number == signal.SIGTERM and not stopped.finished and stopped.step == step
    assert any("after this batch of images" in message for message in caplog.messages)
    assert [line["step"] for line in score_lines(tmp_path / "run")] == list(range(0, step, 4))
    use(monkeypatch, Reading())
    assert run_training(config, tmp_path / "run", resume=True).finished
    assert by_step(tmp_path / "run") == by_step(whole)


@pytest.mark.parametrize(("setting", "call"), [("always", 2), ("always", 4), ("never", 3)])
def test_a_score_that_cannot_be_measured_stops_the_run_which_is_saved(
    tmp_path, shards, whole, monkeypatch, setting, call, caplog
):
    def before(number: int) -> None:
        if number == call:
            raise DataError("0003 cannot be read")

    use(monkeypatch, Fake(before))
    overrides = (f"evaluate.background={setting}", "train.checkpoint_every_steps=100")
    with pytest.raises(DataError, match=r"^0003 cannot be read$"):
        run_training(background(tmp_path, shards, *overrides), tmp_path / "run")
    checkpoint = find_checkpoint(tmp_path / "run")
    step = int(checkpoint.name.removeprefix("step_"))
    due = 4 * (call - 1)
    assert due <= step <= due + 4
    assert read_json(checkpoint / "state.json")["measured_step"] == due
    assert f"the teacher could not be scored: the run is saved at step {step} and stops" in caplog.text
    use(monkeypatch, Fake())
    run_training(background(tmp_path, shards, *overrides), tmp_path / "run", resume=True)
    assert by_step(tmp_path / "run") == by_step(whole)


def test_a_first_score_that_cannot_be_measured_ends_the_run_at_once(tmp_path, shards, monkeypatch):
    def before(number: int) -> None:
        raise MemoryError("Unable to allocate 7.28 TiB for an array")

    use(monkeypatch, Fake(before))
    arguments = [str(tiny_config_file(tmp_path)), f"data.train={shards}", *EVERY_4, "--output", str(tmp_path / "run")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("error: out of memory (Unable to allocate 7.28 TiB for an array)")


def test_a_image_that_breaks_while_training_is_one_line(tmp_path):
    folder = write_folder(tmp_path / "photos", classes=0, per_class=24, size=20)
    config = tiny_config(tmp_path, f"data.train={folder}", *EVERY_4, "data.holdout_share=0.25")
    held_out = open_training_images(config)[2]
    broken = sorted(folder.iterdir())[held_out[0]]

    def progress(done: int, total: int) -> None:
        if done == 2:
            broken.write_bytes(b"no image")

    with pytest.raises(DataError, match="1 of the 6 images"):
        run_training(config, tmp_path / "run", progress=progress)
    assert find_checkpoint(tmp_path / "run").name == "step_00000004"


@pytest.mark.slow
def test_killed_runs_with_scores_in_the_background(tmp_path, shards):
    config = tiny_config_file(tmp_path)
    overrides = ("evaluate.every_steps=1", "data.holdout_share=0.25", "evaluate.test=holdout", "evaluate.k=5")
    always = (*overrides, "evaluate.background=always")
    log, again = tmp_path / "log", command(config, tmp_path / "killed", shards, *always)
    assert forked.end(forked.start(command(config, tmp_path / "whole", shards, *overrides), log)) == [0]
    for step in (3, 8, 13, 17):
        processes = forked.start(again, log)
        wait_for_step(tmp_path / "killed", step, processes[0])
        assert forked.kill(processes) == [-signal.SIGKILL]
    log.with_suffix(".out").unlink()
    assert forked.end(forked.start(again, log)) == [0], log.read_text()
    told = json.loads(log.with_suffix(".out").read_text())
    assert told["finished"] is True and told["best_step"] > 0
    assert by_step(tmp_path / "killed") == by_step(tmp_path / "whole")


def test_autocast_is_left_alone_where_it_is_off(monkeypatch):
    """Leaving it empties a cache that the training thread fills."""
    cleared: list[bool] = []
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: cleared.append(True))
    with forward._no_autocast("cpu"):
        assert not torch.is_autocast_enabled("cpu")
    assert not cleared
    with torch.autocast("cpu", dtype=torch.bfloat16), forward._no_autocast("cpu"):
        assert not torch.is_autocast_enabled("cpu")
        product: Tensor = torch.ones(2, 2) @ torch.ones(2, 2)
        assert product.dtype == torch.float32


def test_features_are_exact_where_matrices_are_not(tmp_path):
    config = tiny_config(tmp_path)
    encoder = encoder_of_backbone(networks_of(config)[1].backbone, config, "teacher")
    torch.set_float32_matmul_precision("medium")
    try:
        with contextlib.suppress(KeyError), forward.exact_inference(encoder):
            assert torch.get_float32_matmul_precision() == "highest"
            raise KeyError
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_lines_of_a_step_that_is_measured_again(tmp_path):
    lines = [{"step": 4, "loss": 1.0}, {"step": 5, "loss": 1.0}, {"step": 4, "map": 2.0}, {"step": 6, "loss": 1.0}]
    path = tmp_path / "metrics.jsonl"
    for measured, expected in ((None, lines[:3]), (4, lines[:2])):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        keep_lines_until(path, 5, measured)
        assert [json.loads(line) for line in path.read_text().splitlines()] == expected


# best/ and the verdict


def varied(mean: float, spread: float, seed: int = 1) -> Score:
    each = np.random.default_rng(seed).normal(mean, spread, 200)
    return Score(float(each.mean()), each)


def test_best_stays_at_step_0_until_a_later_one_is_shown_to_be_better():
    history = ScoreHistory()
    assert history.summary() == {} and history.verdict() is None
    history.follow("map")
    first = varied(50, 20)
    assert history.moves_best(0, first.percent, None)
    history.add(0, first)
    assert history.verdict() is None and history.kept_step == 0
    noise = np.random.default_rng(2).normal(0, 1, (4, 200))
    noise -= noise.mean(axis=1, keepdims=True)
    for step, gain, spread, moves, kept, outcome in (
        (4, -5.0, 10.0, False, 0, Outcome.WORSE),
        (8, 1.0, 20.0, False, 0, Outcome.NOT_SHOWN),  # higher, but one query in two is worse
        (12, 0.5, 0.5, True, 12, Outcome.BEAT),  # lower, but sure
        (16, 0.9, 20.0, False, 12, Outcome.BEAT),  # higher again, and not sure
        (20, 2.0, 1.0, True, 20, Outcome.BEAT),
        (24, 1.9, 1.0, False, 20, Outcome.BEAT),
    ):
        each = first.each + gain + spread * noise[step % 3]
        score = Score(float(each.mean()), each)
        difference = history.compare(score, 6)
        assert difference is not None and difference.mean == pytest.approx(gain)
        assert history.moves_best(step, score.percent, difference) is moves
        history.add(step, score, difference)
        assert history.kept_step == kept
        assert history.summary()["verdict"] == outcome
        is_better, said = history.verdict() or (None, "")
        assert is_better is (outcome is Outcome.BEAT) and "\n" not in said
        assert ("optim.base_lr" in said) is not is_better
        if not is_better:  # during the warm-up no other settings are advised
            early, later = (history.verdict(steps) or (True, "") for steps in (step, step - 1))
            assert "optim." not in early[1] and f"warm-up takes {step} steps" in early[1] and "optim." in later[1]
    assert history.best_step == 20


@pytest.mark.parametrize("scores_taken", [1, 20])
def test_the_interval_is_that_of_a_slow_bootstrap(scores_taken):
    """Another generator, a loop, and the level of all scores together: 95 % for one, 99.75 % for 20."""
    history = ScoreHistory("map")
    first, later = varied(50, 20), varied(52, 20, seed=3)
    history.add(0, first)
    found = history.compare(later, scores_taken)
    rng = np.random.default_rng(7)
    means = sorted(float(np.mean((later.each - first.each)[rng.integers(0, 200, 200)])) for _ in range(RESAMPLES))
    left_out = (1 - LEVEL) / scores_taken / 2
    assert found is not None and found.mean == pytest.approx(later.percent - first.percent)
    spread = float(np.std(means))
    assert found.low == pytest.approx(means[round(left_out * RESAMPLES)], abs=0.2 * spread)
    assert found.high == pytest.approx(means[-1 - round(left_out * RESAMPLES)], abs=0.2 * spread)


def test_a_run_that_gets_longer_widens_the_interval_of_its_best_score(tmp_path):
    """Also where 20 scores were planned and fewer are taken: they could all have been."""
    first, gain = varied(50, 20), varied(2, 12, seed=3)
    later = Score(first.percent + gain.percent, first.each + gain.each)
    history = ScoreHistory("map", measured=None)
    history.add(0, first)
    history.expect(100, 100, 0)
    difference = history.compare(later, history.comparisons)
    history.add(100, later, difference)
    assert history.comparisons == 1 and history.summary()["verdict"] == Outcome.BEAT and history.kept_step == 100
    state = {**history.counters(), "sha256": {"scores.safetensors": ""}}
    save_file(history.tensors()["scores"], tmp_path / "scores.safetensors")
    resumed = ScoreHistory()
    resumed.load(json.loads(json.dumps(state)), tmp_path, networks_of(tiny_config(tmp_path))[1], measures=False)
    resumed.expect(100, 100, 100)
    assert resumed.difference == difference and resumed.summary() == history.summary()
    for steps in (2000, 100):
        resumed.expect(steps, 100, 100)
        assert resumed.comparisons == 20 and resumed.difference == resumed.compare(later, 20)
        assert resumed.summary()["verdict"] == Outcome.NOT_SHOWN and resumed.kept_step == 100  # best/ is as it was
    is_better, said = resumed.verdict() or (True, "")
    assert not is_better and "which had beaten" in said


def test_scores_of_a_stop_between_multiples_count(tmp_path):
    """Of 60 steps one score, at the stop; then at 100, 200 and so on, up to 1,240: fourteen."""
    history = ScoreHistory("map")
    history.add(0, varied(50, 20))
    history.expect(60, 100, 0)
    assert history.comparisons == 1
    history.add(60, varied(51, 20))
    history.expect(1240, 100, 60)
    assert history.comparisons == 14
    history.add(100, varied(51, 20))
    history.expect(1240, 100, 130)  # a signal, in between
    assert history.comparisons == 14


def test_a_step_that_becomes_the_last_one_is_scored(tmp_path, shards, monkeypatch):
    use(monkeypatch, Fake())
    common = (f"data.train={shards}", *EVERY_4)

    def stop(done: int, _: int) -> None:
        if done == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    assert not run_training(tiny_config(tmp_path, *common), tmp_path / "run", progress=stop).finished
    step = read_json(find_checkpoint(tmp_path / "run") / "state.json")["step"]
    ended = tiny_config(tmp_path, *common, f"train.stop_after_steps={step}")
    for _ in range(2):  # once
        assert run_training(ended, tmp_path / "run", resume=True).last_metrics["best_step"] == step
    assert [line["step"] for line in score_lines(tmp_path / "run")] == [0, step]


def test_what_cannot_be_compared_is_not_called_better(caplog):
    history = ScoreHistory("map")
    history.add(0, varied(50, 1))
    fewer = Score(90.0, np.full(199, 90.0))
    assert history.compare(fewer, 1) is None and "199" in caplog.text
    assert not history.moves_best(4, 90.0, None)
    history.add(4, fewer, None)
    assert history.kept_step == 0 and (history.verdict() or (True,))[0] is False


def test_a_run_whose_step_0_has_no_values_keeps_the_highest_score():
    """As one that an earlier version started, or that is scored since a resume."""
    for first in (50.0, None):
        history = ScoreHistory("map", first=first, best=40.0, best_step=4)
        assert history.moves_best(8, 41.0, None) and not history.moves_best(8, 39.0, None)
        history.add(8, same(41.0), None)
        assert history.kept_step == 8 and history.summary()["verdict"] is None
        assert "not known" in (history.verdict() or (None, ""))[1]


def test_another_score_to_follow_forgets_the_first(caplog):
    def filled() -> ScoreHistory:
        return ScoreHistory("map", "one", 50.0, 60.0, 8, Interval(10.0, 9.0, 11.0), np.ones(3), np.ones(3))

    history = filled()
    history.follow("map", "one")
    assert history.best == 60.0 and not caplog.records
    for metric, scored_on in (("view_recall_at_1", "one"), ("map", "another")):
        history = filled()
        history.follow(metric, scored_on)
        assert history == ScoreHistory(metric, scored_on)
        assert "no longer count" in caplog.text
        caplog.clear()


def test_other_images_to_score_on_start_the_comparison_anew(tmp_path, photos, caplog):
    """`evaluate.*` may change on resume; how often is scored changes no score."""
    common = (f"data.train={photos}", "train.epochs=1")
    run_training(tiny_config(tmp_path, *common, *EVERY_4[2:], "train.stop_after_steps=2"), tmp_path / "run")
    often = (*common, "evaluate.every_steps=1")
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    assert run_training(tiny_config(tmp_path, *often), tmp_path / "same", resume=True).last_metrics["verdict"]
    other = (*often, "evaluate.view_images=10")
    changed = run_training(tiny_config(tmp_path, *other), tmp_path / "run", resume=True).last_metrics
    assert changed["first_score"] is None and changed["verdict"] is None


def test_settings_that_earlier_versions_lacked_forget_no_scores(tmp_path, photos):
    """At their defaults they are not part of what a run says that it was scored on."""
    common = (f"data.train={photos}", "train.epochs=1", *EVERY_4[2:], "train.stop_after_steps=1")
    for name, overrides in {"plain": (), "other": ("evaluate.pooling=gem", "evaluate.mirrored=true")}.items():
        run_training(tiny_config(tmp_path, *common, *overrides), tmp_path / name)
        scored_on = json.loads(read_state(find_checkpoint(tmp_path / name))["scored_on"])
        assert {"pooling", "mirrored"} & scored_on.keys() == ({"pooling", "mirrored"} if overrides else set())


class Moving:
    """Scores that rise or fall by a point with each call, alike for all queries."""

    best_by = "map"

    def __init__(self, by: float) -> None:
        self.by, self.calls = by, 0

    def __call__(self, teacher: Any, *_: Any) -> dict[str, Score]:
        self.calls += 1
        return {"view_recall_at_1": same(1.0), "map": same(50.0 + self.by * self.calls)}


@pytest.mark.parametrize("falling", [True, False])
def test_the_command_ends_with_the_verdict(tmp_path, shards, monkeypatch, falling, caplog):
    use(monkeypatch, Moving(-1 if falling else 1))
    arguments = [str(tiny_config_file(tmp_path)), f"data.train={shards}", *EVERY_4, "--output", str(tmp_path / "run")]
    with caplog.at_level("INFO"):
        first = CliRunner().invoke(main, [*arguments, "train.stop_after_steps=6"])
        assert first.exit_code == 0, first.stderr
        caplog.clear()
        result = CliRunner().invoke(main, [*arguments, "--resume"])
    told = json.loads(result.stdout)
    expected = (49.0, 48.0, 4) if falling else (51.0, 55.0, 12)
    assert (told["first_score"], told["best_score"], told["best_step"]) == expected
    assert (told["best_by"], told["map"], told["step"]) == ("map", 45.0 if falling else 55.0, 12)
    assert told["verdict"] == ("worse than step 0" if falling else "beat step 0")
    assert told["difference"] == ([-1.0] * 3 if falling else [4.0] * 3)
    said = [record.getMessage() for record in caplog.records if "map was" in record.getMessage()]
    assert len(said) == 1 and ("keeps the teacher of step 0" in said[0]) == falling
    kept = 0 if falling else 12
    best = read_json(tmp_path / "run" / "best" / "state.json")
    assert (best["step"], best["scores"]["map"], told["kept_step"]) == (kept, 49.0 if falling else 55.0, kept)
    assert (f"--model {tmp_path / 'run' / 'best'} " in result.stderr) == falling


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stop_ends_with_the_verdict_and_a_resume_repeats_it(tmp_path, shards, number, caplog):
    """With real scores; the values of single queries are in the checkpoint."""
    overrides = (f"data.train={shards}", "train.epochs=3", "evaluate.every_steps=2")
    whole = run_training(tiny_config(tmp_path, *overrides), tmp_path / "whole").last_metrics
    caplog.clear()

    def stop(done: int, _: int) -> None:
        if done == 5:
            os.kill(os.getpid(), number)

    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C
    try:
        with contextlib.suppress(KeyboardInterrupt), caplog.at_level("INFO"):
            assert not run_training(tiny_config(tmp_path, *overrides), tmp_path / "run", progress=stop).finished
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert any("difference" in message or "step 0: " in message for message in caplog.messages[-2:])
    state = read_json(find_checkpoint(tmp_path / "run") / "state.json")
    assert state["step"] in (5, 6) and len(state["difference"]) == 3
    again = run_training(tiny_config(tmp_path, *overrides), tmp_path / "run", resume=True).last_metrics
    names = ("best_by", "first_score", "best_score", "best_step", "difference", "verdict", "kept_step")
    assert {name: again[name] for name in names} == {name: whole[name] for name in names}
    each = [read_tensors(find_checkpoint(tmp_path / run), "scores") for run in ("run", "whole")]
    for name in ("first", "best"):
        assert torch.equal(each[0][name], each[1][name]) and len(each[0][name]) == 24
    assert float(each[0]["first"].mean()) == pytest.approx(again["first_score"])
    assert verdict_of(read_json(find_checkpoint(tmp_path / "run") / "state.json")) is not None


@pytest.mark.parametrize(
    ("call", "said"), [(1, "this batch of images"), (2, "this batch of images"), (None, "this step")]
)
def test_ctrl_c_says_what_ends_before_the_run_is_saved(tmp_path, shards, monkeypatch, caplog, call, said):
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)  # also in a background job

    def interrupt(at: int | None, now: int) -> None:
        if now == at:
            signal.raise_signal(signal.SIGINT)

    use(monkeypatch, Fake(lambda now: interrupt(call, now)))
    config = tiny_config(tmp_path, f"data.train={shards}", *EVERY_4, "evaluate.background=never")
    with pytest.raises(KeyboardInterrupt, match="the run is saved"):
        run_training(config, tmp_path / "run", progress=lambda now, _: interrupt(None if call else 2, now))
    assert [message for message in caplog.messages if "interrupted" in message] == [
        f"interrupted: saving after {said}; press Ctrl-C again to stop at once"
    ]


def test_a_run_without_scores_has_no_verdict(tmp_path, shards, caplog):
    caplog.set_level("INFO")
    result = run_training(tiny_config(tmp_path, f"data.train={shards}", "train.epochs=1"), tmp_path / "run")
    assert not {"best_by", "first_score", "best_score", "verdict"} & result.last_metrics.keys()
    assert "evaluate.every_steps" in caplog.messages[-1]


def test_best_follows_the_score_that_is_named(tmp_path, shards, monkeypatch):
    values = iter([(1.0, 9.0), (2.0, 3.0), (3.0, 2.0), (4.0, 1.0)])
    one = SimpleNamespace(names=("rises", "falls"))

    class Two:
        best_by = "falls"

        def __call__(self, teacher: Any, *_: Any) -> dict[str, Score]:
            return dict(zip(one.names, map(same, next(values)), strict=True))

    use(monkeypatch, Two())
    run_training(tiny_config(tmp_path, f"data.train={shards}", *EVERY_4), tmp_path / "run")
    assert read_json(tmp_path / "run" / "best" / "state.json")["scores"] == {"rises": 1.0, "falls": 9.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("difference", [1.0, 2.0]),
        ("difference", "abc"),
        ("scored_on", 1),
        ("first_score", "50"),
        ("first_score", float("nan")),
        ("best_step", -1),
        ("measured_step", 2.5),
        ("best_by", 3),
    ],
)
def test_scores_that_were_edited_make_a_checkpoint_damaged(whole, tmp_path, field, value):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    newest = find_checkpoint(run)
    state = read_json(newest / "state.json")
    (newest / "state.json").write_text(json.dumps(state | {field: value}))
    assert find_checkpoint(run) != newest
    del state[field]  # as checkpoints were before
    (newest / "state.json").write_text(json.dumps(state))
    assert find_checkpoint(run) == newest
