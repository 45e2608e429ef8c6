from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from sop_faiss.cli.embed import main  # type: ignore[import-not-found]
from sop_faiss.features.store import FeatureStore
from sop_faiss.model.encoders.spec import EncoderSpec
from tests.encoders import timm_network, write_run
from tests.images import write_folder, write_shards


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "photos")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "photos")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def assert_one_line_error(result: Result, message: str) -> None:
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr


def test_help_explains_itself() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert "sop-embed --model runs/photos --data photos/ --out features/" in result.output
    assert "sop-index build --features OUT --out INDEX" in " ".join(result.output.split())


def test_run_embeds_a_folder(run: Path, photos: Path, tmp_path: Path) -> None:
    out, result_file = tmp_path / "features", tmp_path / "result.json"
    result = invoke("--model", run, "--data", photos, "--out", out, "--json", result_file)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("12 features of dimension 32 in ") and result.stdout.count("\n") == 1
    assert "embedding: 12 of 12 images" in result.stderr
    store = FeatureStore.read(out)
    assert len(store) == 12
    written = json.loads(result_file.read_text())
    assert set(written) == {"command", "dataset", "protocol", "metrics", "encoder", "environment", "seconds"}
    assert written["command"] == "sop-embed" and written["dataset"] == str(photos)
    assert written["encoder"] == store.manifest["encoder"]
    assert (written["metrics"]["images"], written["metrics"]["dropped"]) == (12, 0)
    assert written["protocol"]["pooling"] == "cls"
    again = invoke("--model", run, "--data", photos, "--out", tmp_path / "again", "--json", "-")
    assert json.loads(again.stdout)["metrics"]["images"] == 12  # nothing else on stdout


def test_timm_weights_and_all_options(tmp_path: Path) -> None:
    save_file(timm_network("test_vit").state_dict(), tmp_path / "w.safetensors")
    shards = write_shards(tmp_path / "shards")
    options = ["--pooling", "mean", "--size", 64, "--mean", "0.5", "--std", "0.4,0.5,0.6", "--feature-dtype", "float16"]
    where = ["--data", shards / "photos-{000000..000001}.tar", "--out", tmp_path / "f"]
    how = ["--batch-size", 5, "--workers", 1]
    result = invoke("--model", "timm:test_vit", "--weights", tmp_path / "w.safetensors", *options, *where, *how)
    assert result.exit_code == 0, result.output
    manifest = FeatureStore.read(tmp_path / "f").manifest
    assert (manifest["pooling"], manifest["feature_dtype"], manifest["count"]) == ("mean", "float16", 12)
    assert manifest["preprocess"]["crop"] == 64
    assert (manifest["preprocess"]["mean"], manifest["preprocess"]["std"]) == ([0.5] * 3, [0.4, 0.5, 0.6])


def test_random_weights_of_a_config(run: Path, photos: Path, tmp_path: Path) -> None:
    model = f"config:{run / 'config.yaml'}"
    result = invoke("--model", model, "--random-weights", 0, "--data", photos, "--out", tmp_path / "f")
    assert result.exit_code == 0, result.output
    assert "random weights, seed 0" in result.stdout


def test_dropped_images_are_told(run: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "photos", classes=0, per_class=5)
    (folder / "0001.jpg").write_bytes(b"")
    arguments = ["--model", run, "--data", folder, "--out", tmp_path / "f"]
    assert_one_line_error(invoke(*arguments), "1 of 5 images are unusable")
    assert not (tmp_path / "f").exists()
    result = invoke(*arguments, "--max-bad-fraction", 0.2)
    assert result.exit_code == 0 and "1 images dropped (empty 1)" in result.stdout


def test_occupied_output_is_refused_before_anything_is_computed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(spec: EncoderSpec) -> None:
        raise AssertionError("the encoder was loaded first")

    monkeypatch.setattr("sop_faiss.verbs.finding.embed.encoder_of_spec", load)
    (tmp_path / "mine.txt").write_text("mine")
    result = invoke("--model", "runs/none", "--data", photos, "--out", tmp_path)
    assert_one_line_error(result, "not empty")
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--model": "no/such/run"}, "does not exist"),
        ({"--model": "timm:resnet5"}, "did you mean"),
        ({"--model": "timm:test_vit"}, "comes without weights"),
        ({"--data": "no/such/photos"}, "does not exist"),
        ({"--batch-size": "0"}, "--batch-size 0"),
        ({"--feature-dtype": "int8"}, "wanted one of float32, float16"),
        ({"--max-bad-fraction": "2"}, "a share between 0 and 1"),
        ({"--size": "30"}, "take 24 or 32"),
        ({"--pooling": "max"}, "wanted one of cls, mean"),
        ({"--device": "tpu"}, "device 'tpu'"),
    ],
)
def test_mistakes_are_one_line(run: Path, photos: Path, tmp_path: Path, changes: dict[str, str], message: str) -> None:
    options = {"--model": str(run), "--data": str(photos), "--out": str(tmp_path / "f"), **changes}
    if changes.get("--model", "").startswith("timm:resnet5"):
        options["--random-weights"] = "0"
    assert_one_line_error(invoke(*[word for pair in options.items() for word in pair]), message)
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("arguments", [[], ["--mean", "a,b"], ["--mean", "1,2"], ["--size", "big"]])
def test_usage_mistakes_exit_with_2(arguments: list[str]) -> None:
    assert invoke("--model", "m", "--data", "d", *arguments).exit_code == 2
