"""Commands that open the encoder of an index without being told it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sop_faiss.cli.embed import main as embed
from sop_faiss.cli.index import main
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.store import IndexManifest
from tests.encoders import write_run
from tests.images import write_folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A run, photos, and an index of them."""
    write_run(tmp_path / "run")
    write_folder(tmp_path / "photos", classes=0, per_class=6)
    invoke("build", tmp_path / "photos", "--model", tmp_path / "run", "--out", tmp_path / "index", ok=True)
    return tmp_path


def invoke(*arguments: object, ok: bool = False) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert not ok or result.exit_code == 0, result.output
    return result


def found(place: Path, *words: object) -> list[str]:
    query = next((place / "photos").glob("0003.jpg"))
    result = invoke("search", place / "index", query, "-k", 2, "--json", "-", *words, ok=True)
    return [neighbor["key"] for neighbor in json.loads(result.stdout)["queries"][0]["neighbors"]]


def assert_refused(result: Result, *messages: str) -> None:
    assert result.exit_code == 1 and result.stdout == "", result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ") and all(message in last for message in messages), result.stderr


def test_no_command_needs_the_model_again(place: Path) -> None:
    expected = found(place, "--model", place / "run")
    assert found(place) == expected and expected[0] == "0003"
    write_folder(place / "more", classes=0, per_class=1, seed=5)
    (place / "more" / "0000.jpg").rename(place / "more" / "more.jpg")
    assert "7 vectors" in invoke("add", place / "index", place / "more", ok=True).stdout
    assert found(place, "--device", "cpu", "--cache", place / "cache") == expected
    assert f"model {place / 'run'}/checkpoints" in invoke("info", place / "index", ok=True).stdout


def test_the_default_encoder_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr(
        "sop_faiss.verbs.finding.index_build.encoder_of_spec", lambda spec: opened.append(spec) or 1 / 0
    )
    result = invoke("build", place / "photos", "--size", 64, "--out", place / "new")
    assert isinstance(result.exception, ZeroDivisionError)
    assert (opened[0].model, opened[0].size) == ("lite0", 64)


def test_an_index_of_features_remembers_it_too(place: Path) -> None:
    words = ["--model", place / "run", "--whiten", place / "photos", "--whiten-dim", 3, "--size", 40]
    words += ["--data", place / "photos", "--out", place / "features"]
    result = CliRunner().invoke(embed, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    shutil.rmtree(place / "index")
    invoke("build", "--features", place / "features", "--out", place / "index", ok=True)
    assert found(place)[0] == "0003"
    assert "whitened" in FeatureIndex.open(place / "index").manifest.pooling


def test_a_run_that_moved(place: Path) -> None:
    (place / "run").rename(place / "moved")
    query = place / "photos" / "0003.jpg"
    assert_refused(invoke("search", place / "index", query), "run/checkpoints", "does not exist", "--model")
    assert found(place, "--model", place / "moved")[0] == "0003"
    assert_refused(invoke("search", place / "index", query), "does not exist")  # a search changes nothing
    invoke("sync", place / "index", "--model", place / "moved", ok=True)
    assert found(place)[0] == "0003"


def test_all_that_moved_together(place: Path) -> None:
    folder = place / "inner"
    folder.mkdir()
    for name in ("run", "index", "photos"):
        (place / name).rename(folder / name)
    assert found(folder)[0] == "0003"
    invoke("sync", folder / "index", folder / "photos", ok=True)
    assert found(folder)[0] == "0003"


def test_a_run_that_changed(place: Path) -> None:
    checkpoint = place / "run" / "checkpoints" / "step_00000010"
    shutil.copy(checkpoint / "student.safetensors", checkpoint / "teacher.safetensors")
    state = json.loads((checkpoint / "state.json").read_text())
    state["sha256"]["teacher.safetensors"] = state["sha256"]["student.safetensors"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    query = place / "photos" / "0003.jpg"
    for words in (("search", place / "index", query), ("serve", place / "index", "--port", 0)):
        assert_refused(invoke(*words), str(checkpoint), "has changed", "--model")
    result = invoke("search", place / "index", query, "--model", place / "run")
    assert_refused(result, "another encoder than the index")


def test_damaged_weights_name_the_index(place: Path) -> None:
    (place / "run" / "checkpoints" / "step_00000010" / "teacher.safetensors").write_bytes(b"x")
    assert_refused(invoke("search", place / "index", place / "photos" / "0003.jpg"), str(place / "index"), "--model")


def test_an_index_of_an_earlier_version_asks_for_the_model(place: Path) -> None:
    manifest = IndexManifest.read(place / "index")
    old = replace(manifest, encoder_spec=None, folder=None)
    old.write(place / "index")
    written = json.loads((place / "index" / "manifest.json").read_text())
    assert written["format_version"] == 2 and not {"encoder_spec", "folder"} & written.keys()
    for words in (("search", place / "index", place / "photos" / "0003.jpg"), ("add", place / "index", place / "run")):
        if words[0] == "search":
            assert_refused(invoke(*words), "give --model", manifest.encoder["name"])
    assert found(place, "--model", place / "run")[0] == "0003"
    invoke("sync", place / "index", place / "photos", "--model", place / "run", ok=True)
    assert found(place)[0] == "0003"


def test_options_without_a_model_are_those_of_the_index_changed(place: Path) -> None:
    query = place / "photos" / "0003.jpg"
    assert_refused(invoke("search", place / "index", query, "--size", 64), "another preprocessing", "64 instead of 32")
    assert_refused(invoke("search", place / "index", query, "--arch", "resnet18"), "--arch does not apply")
    assert_refused(
        invoke("search", place / "index", "--key", "0003", "--size", 64), "leave --model and its options out"
    )


def test_merged_indices_remember_the_encoder(place: Path) -> None:
    write_folder(place / "more", classes=0, per_class=1, seed=5)
    (place / "more" / "0000.jpg").rename(place / "more" / "more.jpg")
    (place / "deep").mkdir()
    invoke("build", place / "more", "--model", place / "run", "--out", place / "deep" / "more", ok=True)
    invoke("merge", place / "deep" / "more", place / "index", "--out", place / "all", ok=True)
    spec = IndexManifest.read(place / "all").encoder_spec
    assert spec is not None and spec["relative"]["model"] == "../run/checkpoints/step_00000010"
    assert IndexManifest.read(place / "all").folder is None
