"""A task, the command, the scores of a run and the demo give the same numbers for one encoder."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sop_faiss.config import Config
from sop_faiss.data.images.source import open_source
from sop_faiss.data.views.view_pairs import ViewPairs
from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.knn_task import KnnTask
from sop_faiss.evaluate.linear_choices import LinearChoices
from sop_faiss.evaluate.linear_task import LinearTask
from sop_faiss.evaluate.retrieval import choose_protocol
from sop_faiss.evaluate.retrieval_task import RetrievalTask
from sop_faiss.evaluate.sets.feature_sets import open_feature_set
from sop_faiss.evaluate.sets.labeled_part import LabeledPart
from sop_faiss.evaluate.sets.labeled_sets import LabeledSets
from sop_faiss.evaluate.sets.retrieval_set import open_retrieval_set
from sop_faiss.evaluate.task import EvaluationTask, percents
from sop_faiss.evaluate.view_recall_task import ViewRecallTask
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import load_encoder
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs import demo
from sop_faiss.verbs.scoring.knn import KnnOptions, evaluate_knn
from sop_faiss.verbs.scoring.linear import LinearOptions, evaluate_linear
from sop_faiss.verbs.scoring.retrieve import evaluate_retrieval
from sop_faiss.verbs.training.dry_run import describe_run
from sop_faiss.verbs.training.online_scores import open_evaluation, scored_encoder
from sop_faiss.verbs.training.training_images import open_training_images
from tests.images import write_folder
from tests.runs import networks_of, tiny_config
from tests.test_cli_retrieve import graded_gnd, plain_gnd, write_set

CHOICES = LinearChoices(learning_rates=(0.1, 1.0), epochs=3)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labeled images, retrieval sets of both kinds and one whose queries are images of its gallery."""
    root = tmp_path_factory.mktemp("tasks")
    write_folder(root / "train", classes=4, per_class=6, seed=1)
    write_folder(root / "test", classes=4, per_class=5, seed=2)
    shutil.rmtree(root / "test" / "class_0")  # numbers of the two sides differ
    write_set(root / "retrieval", plain_gnd())
    write_set(root / "graded", graded_gnd())
    write_folder(root / "classes", classes=3, per_class=4, seed=3)
    return root


def labeled(place: Path, **options: object) -> LabeledSets:
    train, test = (open_feature_set(str(place / name)) for name in ("train", "test"))
    return LabeledSets(train, test, "a test", **options)  # type: ignore[arg-type]


def retrieval(dataset: Path) -> RetrievalTask:
    data = open_retrieval_set(str(dataset))
    return RetrievalTask(data, choose_protocol(None, data.truth))


@pytest.fixture(scope="module")
def config(place: Path) -> Config:
    """A run that is scored by all that a run can be scored by."""
    return tiny_config(
        place, f"data.train={place / 'train'}", "evaluate.every_steps=5", f"evaluate.train={place / 'train'}",
        f"evaluate.test={place / 'test'}", "evaluate.k=5", f"evaluate.retrieval={place / 'graded'}",
        "evaluate.view_recall=always",
    )  # fmt: skip


@pytest.fixture(scope="module")
def spec(config: Config) -> EncoderSpec:
    """The teacher that `config` starts with, as commands name it."""
    return EncoderSpec(f"config:{config_file(config)}", random_weights=config.train.seed, device="cpu")


def config_file(config: Config) -> Path:
    return Path(config.data.train).parent / "tiny.yaml"


@pytest.fixture(scope="module")
def encoder(spec: EncoderSpec) -> Encoder:
    return load_encoder(spec.model, random_weights=spec.random_weights)


def test_online_scores_are_those_of_the_tasks_and_commands(place: Path, config: Config, spec, encoder: Encoder) -> None:
    online = open_evaluation(config, *open_training_images(config))
    assert online is not None
    scores = percents(online(networks_of(config)[1]))
    pairs = ViewPairs(open_source(place / "train"), np.arange(24), config)
    tasks: list[EvaluationTask] = [KnnTask(labeled(place), (5,)), retrieval(place / "graded"), ViewRecallTask(pairs)]
    assert scores == {name: score for task in tasks for name, score in task.measure(encoder).items()}
    assert tuple(scores) == online.names == tuple(name for task in tasks for name in task.names)
    assert len(set(scores.values())) > 1
    command = evaluate_knn(str(place / "train"), str(place / "test"), spec, KnnOptions(ks=(5, 3, 5)))
    assert scores["knn_top1_k5"] == command.metrics["top1_k5"]
    metrics = evaluate_retrieval(spec, str(place / "graded")).scores.metrics
    assert (scores["map_medium"], scores["map_hard"]) == (metrics["mAP_medium"], metrics["mAP_hard"])


def test_online_scores_with_another_pooling_are_those_of_the_command(place: Path, config: Config, spec) -> None:
    changed = replace(config, evaluate=replace(config.evaluate, retrieval="", pooling="quadrants", mirrored=True))
    online = open_evaluation(changed, *open_training_images(changed))
    assert online is not None
    scores = percents(online(networks_of(changed)[1]))
    options = KnnOptions(ks=(5,))
    command = evaluate_knn(
        str(place / "train"), str(place / "test"), replace(spec, pooling="quadrants", mirrored=True), options
    )
    assert scores["knn_top1_k5"] == command.metrics["top1_k5"]
    assert scored_encoder(networks_of(changed)[1].backbone, changed).token_dimension == 4 * (
        config.model.embed_dim or 0
    )


def test_a_pooling_that_the_backbone_lacks_is_refused_before_the_run(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.pooling = pooled"):
        describe_run(replace(config, evaluate=replace(config.evaluate, pooling="pooled")))


def test_a_probe_is_that_of_the_command(place: Path, spec: EncoderSpec, encoder: Encoder) -> None:
    part = LabeledPart(images_per_class=5)
    task = LinearTask(labeled(place, part=part), CHOICES)
    options = LinearOptions(CHOICES, part=part)
    command = evaluate_linear(str(place / "train"), str(place / "test"), spec, options)
    assert task.measure(encoder) == {"linear_top1": command.metrics["top1"]}
    assert task.names == ("linear_top1",)


@pytest.mark.parametrize("dataset", ["retrieval", "classes"])
def test_retrieval_is_that_of_the_command(place: Path, spec: EncoderSpec, encoder: Encoder, dataset: str) -> None:
    task = retrieval(place / dataset)
    assert (task.data.query_rows is not None) == (dataset == "classes")
    metrics = evaluate_retrieval(spec, str(place / dataset)).scores.metrics
    assert task.measure(encoder) == {"map": metrics["mAP"]}
    assert task.names == ("map",)


def test_the_demo_measures_what_the_commands_do(place: Path, spec: EncoderSpec, encoder: Encoder) -> None:
    for name, other in (("known", "train"), ("asked", "test")):
        (place / name).symlink_to(place / other)
    scores = demo.open_demo_tasks(place).score_encoder("digits", encoder)
    command = evaluate_knn(str(place / "train"), str(place / "test"), spec, KnnOptions(ks=(4,)))
    assert scores.knn_top1 == command.metrics["top1_k4"]
    assert scores.mean_average_precision == evaluate_retrieval(spec, str(place / "retrieval")).scores.metrics["mAP"]


def test_tasks_refuse_impossible_settings_before_any_work(place: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        KnnTask(labeled(place), (3, 25))
    assert "ks" in caught.value.arguments
    config = tiny_config(
        place, f"data.train={place / 'train'}", "evaluate.every_steps=5", f"evaluate.train={place / 'train'}",
        f"evaluate.test={place / 'test'}", "evaluate.k=25",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"evaluate\.k = 25, but 24 training images"):
        open_evaluation(config, *open_training_images(config))
    with pytest.raises(ConfigError, match="temperature"):
        KnnTask(labeled(place), (3,), temperature=0.0)
    with pytest.raises(ConfigError, match="epochs"):
        LinearTask(labeled(place), LinearChoices(epochs=0))
    with pytest.raises(ConfigError, match="train_share"):
        labeled(place, part=LabeledPart(train_share=2.0))
