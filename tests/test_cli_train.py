"""`sop-train` as a user types it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from sop_faiss.cli.train import _text, main
from sop_faiss.config import Config, DataConfig, ModelConfig, config_summary, packaged_configs
from sop_faiss.train.checkpoints.run_lock import LOCK_NAME, RunLock
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.verbs.training.train import TrainingResult
from tests.images import write_folder, write_shards
from tests.runs import tiny_config_file

RUN = Path("run")


def run(*arguments: str):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def one_line_error(result, status: int = 1) -> str:
    assert result.exit_code == status, result.output + result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    return lines[0]


@pytest.fixture
def config(tmp_path):
    return tiny_config_file(tmp_path)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("cli"), classes=2, per_class=6, size=20)


def test_help_explains_itself():
    result = run("--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
    assert "torchrun" in result.stdout
    words = " ".join(result.stdout.split())
    for name, path in packaged_configs().items():
        assert f"{name} {config_summary(path)}" in words
    assert "required unless --dry-run" in words
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    command = next(line.strip() for line in result.stdout.splitlines() if "sop-train imagenette_resnet_small" in line)
    assert command in readme and f"{command.partition(' --output')[0]} --dry-run" in words


@pytest.mark.parametrize(
    ("begun", "offered"),
    [
        ("vit", "\n".join(f"plain,vit{n}" for n in ("b16", "b16_modern", "l16", "l16_modern", "s16"))),
        ("./m", "file,./m"),
    ],
)
def test_completion_offers_packaged_configurations_and_files(begun, offered):
    asked = {"COMP_WORDS": f"sop-train {begun}", "COMP_CWORD": "1", "_SOP_TRAIN_COMPLETE": "bash_complete"}
    result = CliRunner().invoke(main, env=asked, prog_name="sop-train")
    assert result.stdout.strip() == offered


def test_train_then_resume_to_the_end(tmp_path, config, shards):
    common = (config, f"data.train={shards}", "train.epochs=2", "--output", tmp_path / "run")
    first = run(*common, "train.stop_after_steps=2")
    assert first.exit_code == 0, first.stderr
    summary = json.loads(first.stdout)
    assert (summary["finished"], summary["step"], summary["steps"]) == (False, 2, 4)
    assert (summary["epoch"], summary["images"], summary["output"]) == (1.0, 12, str(tmp_path / "run"))
    last = read_metrics(tmp_path / "run")[-1]
    for name in ("loss", "loss_cls", "learning_rate"):
        assert summary[name] == pytest.approx(last[name], rel=5e-6) and len(f"{summary[name]:.15g}") <= 12
    build = f"sop-index build --model {tmp_path / 'run'} --data {shards} --out run.index"
    assert first.stderr.endswith(f"2 of 2 steps; saved in {tmp_path / 'run'}; next: {build}\n")
    second = run(*common, "--resume", "train.log_every_steps=3")
    summary = json.loads(second.stdout)
    assert (summary["finished"], summary["step"], summary["steps"]) == (True, 4, 4)
    assert summary["images"] == 24
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]  # the last one always
    assert "training: 4 of 4 steps" in second.stderr
    for name in ("config.yaml", "metrics.jsonl", "latest", "checkpoints", "events"):
        assert (tmp_path / "run" / name).exists()
    assert (tmp_path / "run" / "latest").read_text() == "step_00000004\n"


def test_the_work_before_and_between_the_steps_is_reported(tmp_path, config, shards):
    """And what a program reads comes after all lines for people."""
    settings = (f"data.train={shards}", "train.epochs=1", "sop.fill=teacher", "evaluate.every_steps=5")
    result = run(config, *settings, "train.stop_after_steps=1", "--output", tmp_path / "run")
    shown = [line for line in result.stderr.splitlines() if " of " in line and line.endswith(" s")]
    assert [line.rpartition(",")[0] for line in shown] == [
        "filling the memories: 12 of 12 images",
        *(f"scoring step {step}: 12 of 12 images" for step in (0, 1)),  # also where a run is stopped
        "training: 1 of 1 steps",
    ]
    last = json.loads(result.output.splitlines()[-1])
    assert (last["step"], last["steps"], last["best_step"]) == (1, 2, 1) and last["verdict"]


def settings(data: str, init: str = "") -> Config:
    return Config(data=DataConfig(train=data), model=ModelConfig(init=init))


@pytest.mark.parametrize(("kept_step", "model"), [(None, "run"), (0, "run/best"), (4, "run"), (3, "run/best")])
def test_the_next_command_takes_the_best_teacher(kept_step, model):
    scores = {} if kept_step is None else {"kept_step": kept_step}
    said = _text(TrainingResult(True, 4, 4, scores), RUN, settings("shards"))
    assert f"; next: sop-index build --model {model} --data" in said


def test_the_next_command_has_the_size_and_pooling_of_the_packaged_encoder_that_the_run_started_from():
    for init, seen in (("lite1", "--size 288 --pooling gem "), ("timm:resnet50", ""), ("", "")):
        assert f"next: sop-index build --model run {seen}--data s" in _text(
            TrainingResult(True, 4, 4, {}), RUN, settings("s", init)
        )


@pytest.mark.parametrize(
    ("verdict", "kept"),
    [(None, False), ("beat step 0", False), ("no difference shown", True), ("worse than step 0", True)],
)
def test_a_training_that_was_not_shown_to_help_does_not_advise_another_index(verdict, kept):
    scores = {"verdict": verdict, "kept_step": 0}
    said = _text(TrainingResult(True, 4, 4, scores), RUN, settings("shards", "lite0"))
    assert (
        "training was not shown to help: keep the index that you have; without one, next: sop-index" in said
    ) == kept


def test_the_next_command_takes_the_folder_that_shards_were_packed_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text, named in (
        ('{"source": "photos/"}', "photos/"),
        ('{"source": "gone/"}', "shards/"),
        ('{"source": ""}', "shards/"),
        ('{"source": 3}', "shards/"),
        ("[1]", "shards/"),
        ("{", "shards/"),
        (None, "shards/"),
    ):
        (tmp_path / "shards").mkdir(exist_ok=True)
        (tmp_path / "photos").mkdir(exist_ok=True)
        manifest = tmp_path / "shards" / "manifest.json"
        manifest.unlink(missing_ok=True) if text is None else manifest.write_text(text)
        said = _text(TrainingResult(True, 4, 4, {}), RUN, settings("shards/"))
        assert f"--data {named} --out" in said
    for data in ("shards/photos-*.tar", "photos-{000..012}.tar", "https://host/photos.tar"):
        assert data in _text(TrainingResult(True, 4, 4, {}), RUN, settings(data))


def test_dry_run_prints_and_writes_nothing(tmp_path, config, shards):
    result = run(config, f"data.train={shards}", "--dry-run")
    assert result.exit_code == 0
    assert '"steps": 12' in result.stdout and '"ends_at_step": 12' in result.stdout
    assert "num_anchors: 8" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.yaml"]


def test_profile_prints_json_and_writes_nothing(tmp_path, config, shards):
    common = (config, f"data.train={shards}", "--profile-data")
    result = run(*common, "--steps", "2", "--step-seconds", "0.5", "--step-seconds", "2")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["steps"] == 2 and set(told["wait_share_by_step_seconds"]) == {"0.5", "2"}
    assert "profiling: 2 of 2 batches" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.yaml"]
    assert "wanted 1 or more" in one_line_error(run(*common, "--steps", "0"))
    assert "go with --profile-data" in run(config, f"data.train={shards}", "--steps", "3").stderr


def test_a_terminal_gets_text_unless_json_is_asked_for(tmp_path, config, shards, monkeypatch):
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    data = f"data.train={shards}"
    monkeypatch.setattr("sop_faiss.verbs.training.dry_run.describe_run", lambda _: {"steps": 12, "bytes": {"a": 1}})
    shown = run(config, data, "--dry-run").stdout
    assert "num_anchors: 8" in shown and "{" not in shown and re.search(r"^steps {10,}12$", shown, re.MULTILINE)
    facts = json.loads(run(config, data, "--dry-run", "--json", "-").stdout)
    assert facts["settings"]["sop.cls.num_anchors"] == 8 and facts["steps"] == 12
    ended = TrainingResult(True, 4, 4, {})
    monkeypatch.setattr("sop_faiss.verbs.training.train.run_training", lambda *_, **__: ended)
    trained = run(config, data, "--output", tmp_path / "run")
    assert trained.exit_code == 0 and trained.stdout == "" and "next: sop-index build" in trained.stderr
    trained = run(config, data, "--output", tmp_path / "run", "--json", "-")
    assert json.loads(trained.stdout)["finished"] is True
    assert run(config, data, "--dry-run", "--json", "facts.json").exit_code == 2


def test_output_is_required(config, shards):
    result = run(config, f"data.train={shards}")
    assert result.exit_code == 2
    assert "--output" in result.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("train.batchsize=4",), "did you mean train.batch_size"),
        (("sop.cls.num_anchors=100",), "exceeds sop.cls.capacity"),
        (("sop.cls.num_supports=60",), "wanted fewer than sop.cls.capacity"),
        (("views.global_size=18",), "not divisible by the backbone's patch"),
        (("train.batch_size=100",), "exceeds the 12 training images"),
        (("model.backbone=vit_huge_patch99",), "timm has no model of this name"),
        (("train.device=cuda:9",), "wanted one of auto, cpu, cuda"),
        (("data.train=missing/",), "missing"),
        (("data.train=",), "data.train"),
        (("data.train=''",), "data.train is empty"),
        (("evaluate.test=missing", "evaluate.train=missing", "evaluate.every_steps=1"), "missing"),
        (("neighbors.exclude_same_image=maybe",), "wanted one of auto, always, never"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(tmp_path, config, shards, overrides, message):
    output = tmp_path / "run"
    result = run(config, f"data.train={shards}", *overrides, "--output", output)
    assert message in one_line_error(result)
    assert not output.exists()


def test_an_output_below_a_file_is_refused(tmp_path, config, shards):
    (tmp_path / "notes.txt").write_text("mine")
    result = run(config, f"data.train={shards}", "--output", tmp_path / "notes.txt" / "run")
    assert f"{tmp_path / 'notes.txt'} is a file, wanted a directory" in one_line_error(result)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_unlabeled_images_cannot_be_scored(tmp_path, config):
    folder = write_folder(tmp_path / "photos", classes=0, per_class=16, size=20)
    result = run(
        config, f"data.train={folder}", "data.holdout_share=0.25", "evaluate.test=holdout", "evaluate.every_steps=1",
        "evaluate.k=2", "--output", tmp_path / "run",
    )  # fmt: skip
    assert "needs a label" in one_line_error(result)


def test_an_unknown_configuration(tmp_path):
    assert "nonsense does not exist" in one_line_error(run("nonsense", "--output", tmp_path / "run"))


def test_a_file_as_output(tmp_path, config, shards):
    output = tmp_path / "file"
    output.write_text("precious")
    assert "already exists" in one_line_error(run(config, f"data.train={shards}", "--output", output))
    assert output.read_text() == "precious"


def test_a_folder_with_files_is_refused_before_the_configuration_is_read(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "exists and is not empty: add --resume" in one_line_error(run("no_such_config", "--output", tmp_path))


def test_a_second_training_into_the_same_run_is_refused(tmp_path, config, shards):
    output = tmp_path / "run"
    output.mkdir()
    arguments = (config, f"data.train={shards}", "train.epochs=1", "--output", output)
    first = RunLock(output)
    first.acquire()
    for more in ((), ("--resume",)):
        assert f"another process is training into {output}" in one_line_error(run(*arguments, *more))
    assert [path.name for path in output.iterdir()] == [LOCK_NAME]
    first.release()
    assert run(*arguments).exit_code == 0  # a lock file alone is no run
    before = (output / "metrics.jsonl").read_text()
    first.acquire()
    for more in ((), ("--resume",)):
        assert f"another process is training into {output}" in one_line_error(run(*arguments, *more))
    first.release()
    assert "add --resume" in one_line_error(run(*arguments))
    assert (output / "metrics.jsonl").read_text() == before
    assert run(*arguments, "--resume").exit_code == 0  # and no run keeps its lock


def test_two_that_start_at_once_do_not_share_a_run(tmp_path, config, shards, monkeypatch):
    from sop_faiss.verbs.training import train

    output = tmp_path / "run"
    real = train.RunState

    def meanwhile(*arguments):
        output.mkdir()
        (output / "config.yaml").write_text("of the other")
        return real(*arguments)

    monkeypatch.setattr(train, "RunState", meanwhile)
    result = run(config, f"data.train={shards}", "--output", output)
    assert "by another process just now" in one_line_error(result)
    assert (output / "config.yaml").read_text() == "of the other"


def test_a_cut_shard_is_named(tmp_path, config, shards):
    shard = sorted(shards.glob("*.tar"))[0]
    cut = tmp_path / "cut-000000.tar"
    cut.write_bytes(shard.read_bytes()[:3000])
    assert "cut-000000.tar" in one_line_error(run(config, f"data.train={cut}", "--output", tmp_path / "run"))


def test_a_checkpoint_of_another_model_is_refused_and_kept(tmp_path, config, shards):
    output = tmp_path / "run"
    common = (config, f"data.train={shards}", "train.epochs=1", "--output", output)
    assert run(*common).exit_code == 0
    before = (output / "config.yaml").read_text()
    result = run(*common, "model.embed_dim=32", "--resume")
    assert "started with model.embed_dim = 24, not 32" in one_line_error(result)
    assert (output / "config.yaml").read_text() == before
