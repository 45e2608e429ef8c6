"""An encoder that hardly tells images apart is named wherever its index is used; old indices say nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from sop_faiss.cli.index import main
from sop_faiss.features.store import FeatureStore
from sop_faiss.files import read_json, write_json
from sop_faiss.index.build import IndexOptions, build_index
from sop_faiss.index.change import add_to_index, merge_indices, remove_from_index
from sop_faiss.index.encoder_doubts import random_pairs_cosine
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.store import IndexManifest
from sop_faiss.model.encoders.load import load_encoder
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.serve.options import ServeOptions
from sop_faiss.serve.run import serve
from sop_faiss.verbs.finding.embed import embed
from sop_faiss.verbs.finding.index_build import build
from tests.encoders import write_run
from tests.images import write_shards


def store(towards: float, names: str = "image", count: int = 60, **manifest: object) -> FeatureStore:
    rows = np.random.default_rng(len(names)).normal(size=(count, 16)).astype(np.float32) + towards
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    made_by = {
        "encoder": {"name": "useless", "fingerprint": "f"},
        "preprocess": {},
        "pooling": "cls",
        "root": "/photos",
    }
    keys = [f"{names}{number}" for number in range(count)]
    return FeatureStore(keys, None, [""] * count, keys, rows, made_by | manifest)


def forget_facts(index: Path) -> None:
    """Make an index what it would be without the facts of its encoder."""
    manifest = IndexManifest.read(index)
    search = {name: value for name, value in manifest.search.items() if name not in ("mean_cosine", "scores")}
    replace(manifest, search=search).write(index)


@pytest.mark.parametrize("factory", ["Flat", "IVF4,SQ8"])
@pytest.mark.parametrize("towards", [0, 1, 5])
def test_what_the_manifest_says_is_the_mean_over_pairs(tmp_path: Path, towards: int, factory: str) -> None:
    given = store(towards, count=200)
    build_index(given, tmp_path / "index", IndexOptions(factory))
    similarities = given.features @ given.features.T
    wanted = similarities[~np.eye(len(similarities), dtype=bool)].mean()
    assert FeatureIndex.open(tmp_path / "index").mean_cosine == pytest.approx(wanted, abs=1e-4)
    forget_facts(tmp_path / "index")
    assert FeatureIndex.open(tmp_path / "index").mean_cosine == pytest.approx(wanted, abs=2e-2)


def test_few_images_say_nothing_of_an_encoder() -> None:
    assert random_pairs_cosine(19, lambda rows: np.ones((len(rows), 1), np.float32)) is None
    assert random_pairs_cosine(20, lambda rows: np.ones((len(rows), 1), np.float32)) == 1


def test_many_images_are_sampled() -> None:
    asked: list[int] = []

    def features(rows: np.ndarray) -> np.ndarray:
        asked.extend(rows.tolist())
        return np.ones((len(rows), 1), np.float32)

    assert random_pairs_cosine(10**9, features) == 1
    assert len(set(asked)) == 2000 and asked == sorted(asked)


@pytest.mark.parametrize("command", ["build", "search", "duplicates"])
def test_commands_name_the_encoder(tmp_path: Path, caplog: pytest.LogCaptureFixture, command: str) -> None:
    for name, towards, told in (("alike", 5, True), ("apart", 0, False)):
        store(towards).write(tmp_path / f"{name}.store")
        index = str(tmp_path / f"{name}.index")
        words = ["build", "--features", str(tmp_path / f"{name}.store"), "--out", index]
        if command != "build":
            build_index(store(towards), Path(index))
            words = [command, index, *(["--key", "image3"] if command == "search" else [])]
        caplog.clear()
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output
        warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert any("encoder useless" in message for message in warned) == told


def test_serve_names_the_encoder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_index(store(5), tmp_path / "index")
    caplog.clear()
    monkeypatch.setattr("sop_faiss.serve.run._Server.run", lambda *_, **__: None)
    serve(tmp_path / "index", options=ServeOptions(port=0))
    assert any("encoder useless" in message for message in caplog.messages)


def test_a_group_of_nearly_all_is_laid_to_the_encoder_if_it_is_its_fault(tmp_path: Path) -> None:
    build_index(store(5), tmp_path / "alike")
    forget_facts(tmp_path / "alike")
    done = CliRunner().invoke(main, ["duplicates", str(tmp_path / "alike")])
    assert done.exit_code == 0 and "encoder" in done.stderr and "--threshold" not in done.stderr
    build_index(store(0), tmp_path / "apart")
    done = CliRunner().invoke(main, ["duplicates", str(tmp_path / "apart"), "--threshold", "-1"])
    assert done.exit_code == 0 and "encoder" not in done.stderr and "--threshold" in done.stderr


def test_indices_without_these_facts_open_as_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_index(store(5), tmp_path / "index")
    forget_facts(tmp_path / "index")
    caplog.clear()
    assert len(FeatureIndex.open(tmp_path / "index").search_rows([0], 3).keys[0]) == 3
    assert not caplog.messages
    assert "not measured" in CliRunner().invoke(main, ["info", str(tmp_path / "index")]).stdout


def changed_by_adding(folder: Path) -> Path:
    build_index(store(5, count=20), folder / "index")
    add_to_index(folder / "index", store(0, "other", 400))
    return folder / "index"


def changed_by_removing(folder: Path) -> Path:
    rows = np.concatenate([store(5, count=200).features, store(0, count=30).features])
    mixed = store(0, count=230)
    build_index(replace(mixed, features=rows), folder / "index")
    remove_from_index(folder / "index", mixed.keys[:200])
    return folder / "index"


def changed_by_merging(folder: Path) -> Path:
    build_index(store(5, count=20), folder / "one")
    build_index(store(0, "other", 400), folder / "two")
    merge_indices([folder / "one", folder / "two"], folder / "index")
    return folder / "index"


@pytest.mark.parametrize("change", [changed_by_adding, changed_by_removing, changed_by_merging])
def test_a_changed_flat_index_is_measured_again(tmp_path: Path, change: Callable[[Path], Path]) -> None:
    assert abs(IndexManifest.read(change(tmp_path)).search["mean_cosine"]) < 0.15


def scored_run(run: Path, first: float | None, best: float | None, difference: list[float] | None = None) -> Path:
    """A run whose newest checkpoint remembers these scores."""
    checkpoint = next((write_run(run) / "checkpoints").iterdir())
    scores = {"best_by": "map", "first_score": first, "best_score": best, "difference": difference}
    write_json(checkpoint / "state.json", read_json(checkpoint / "state.json") | scores)
    return run


@pytest.mark.parametrize(
    ("first", "best", "difference", "doubted"),
    [
        (30.0, 29.0, None, True),
        (30.0, 30.0, None, True),
        (30.0, 31.0, None, False),  # of a version that kept no values of queries
        (None, 5.0, None, False),
        (30.0, 31.0, [1.0, 0.5, 1.5], False),
        (30.0, 31.0, [1.0, -0.5, 2.5], True),
        (30.0, 29.0, [-1.0, -1.5, -0.5], True),
    ],
)
def test_a_run_that_was_not_shown_to_beat_its_start_is_named(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    first: float | None,
    best: float,
    difference: list[float] | None,
    doubted: bool,
) -> None:
    caplog.set_level(logging.WARNING)
    spec = EncoderSpec(str(scored_run(tmp_path / "run", first, best, difference)), device="cpu")
    shards = str(write_shards(tmp_path / "shards"))
    embed(spec, shards, tmp_path / "store")
    numbers = "30.00 % at step 0" if difference is None else "({:+.2f} points [{:+.2f}, {:+.2f}])".format(*difference)
    for index, made_of in (("one", {"encoder": spec, "data": shards}), ("two", {"features": tmp_path / "store"})):
        caplog.clear()
        build(tmp_path / index, **made_of)
        assert any("was not shown to help" in message and numbers in message for message in caplog.messages) == doubted
        assert all(len(message) < 250 for message in caplog.messages)
        caplog.clear()
        FeatureIndex.open(tmp_path / index)  # the build has said it
        assert not caplog.messages
        shown = CliRunner().invoke(main, ["info", str(tmp_path / index)]).stdout
        assert ("\ntraining   training was not shown to help (" in shown and numbers in shown) == doubted


def test_best_has_the_scores_of_its_run(tmp_path: Path) -> None:
    run = scored_run(tmp_path / "run", 30.0, 29.0)
    checkpoint = next((run / "checkpoints").iterdir())
    best = run / "best"
    best.mkdir()
    for file in checkpoint.iterdir():
        (best / file.name).write_bytes(file.read_bytes())
    state = read_json(best / "state.json")
    write_json(best / "state.json", {name: state[name] for name in ("format", "sha256", "step")})
    expected = {"best_by": "map", "first_score": 30.0, "best_score": 29.0, "difference": None}
    assert load_encoder(str(best)).scores == expected
