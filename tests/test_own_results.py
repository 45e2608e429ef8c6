"""A result file replaces results of these commands alone, and no store, index, shard folder, run or export gets one."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sop_faiss.data.images.source import open_source
from sop_faiss.data.pack import pack
from sop_faiss.errors import ConfigError
from sop_faiss.features.extract import extract_features
from sop_faiss.index.build import build_index
from sop_faiss.model.encoders.load import load_encoder
from sop_faiss.verbs import doctor
from sop_faiss.verbs.output_paths import check_outputs, is_own_result
from tests.encoders import write_run
from tests.images import write_folder
from tests.runs import tiny_config_file

FOREIGN = b"notes that nobody else has"

COMMANDS = {
    "knn": ("knn --train features --test other -k 2", "--json a.json --per-class a.csv --confusion a.png"),
    "linear": (
        "linear --train features --test other --lr 0.1 --epochs 2",
        "--json a.json --per-class a.csv --confusion a.png",
    ),
    "retrieve": ("retrieve --model run --dataset photos", "--json a.json --html a.html --per-query a.csv"),
    "make-gnd": ("retrieve --dataset photos", "--make-gnd a.json"),
    "compare": ("retrieve --compare one.json two.json", "--plot a.png"),
    "search": ("index search index --key 0000 -k 2", "--json a.json --csv a.csv --html a.html"),
    "duplicates": ("index duplicates index", "--json a.json --csv a.csv --html a.html"),
    "info": ("index info index", "--json a.json"),
    "export": ("index export index", "--out a.parquet"),
    "check": ("data check shards", "--json a.json"),
    "preview": ("data preview photos --config tiny.yaml --images 1", "--out a.png"),
    "embed": ("embed --model run --data photos --out features{count}", "--json a.json"),
    "report": ("report run --no-images", "--out a.html"),
    "doctor": ("doctor", "--json a.json"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos, shards, a run, its features and an index of them, a result, and a configuration."""
    root = tmp_path_factory.mktemp("place")
    write_run(root / "run")
    (root / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    pack(str(write_folder(root / "photos", classes=2, per_class=2)), root / "shards")
    for name in ("features", "other"):
        extract_features(load_encoder(str(root / "run")), open_source(root / "photos")).write(root / name)
    store = extract_features(load_encoder(str(root / "run")), open_source(root / "photos"))
    store.keys = [f"{row:04d}" for row in range(4)]
    build_index(store, root / "index")
    tiny_config_file(root).rename(root / "tiny.yaml")
    for name in ("one", "two"):
        result = run(f"retrieve --model {root}/run --dataset {root}/photos --json {root}/{name}.json")
        assert result.exit_code == 0, result.output
    return root


@pytest.fixture
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    answer = {"problems": [], "devices": [], "faiss_gpus": 0, "openmp": []}
    monkeypatch.setattr(doctor, "run_probe", lambda *_: answer)  # a process that imports all; see test_verbs_doctor.py
    for file in made.glob("a.*"):
        file.unlink()
    return made


counts = iter(range(1000))


def run(words: str) -> Result:
    command, *arguments = words.replace("{count}", str(next(counts))).split()
    return CliRunner().invoke(importlib.import_module(f"sop_faiss.cli.{command}").main, arguments)


def refused(words: str, *parts: str) -> None:
    result = run(words)
    assert result.exit_code == 1 and result.stdout == "", result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert all(part in result.stderr for part in (*parts, "--force")), result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_results_replace_results_and_nothing_else(here: Path, name: str) -> None:
    command, outputs = COMMANDS[name]
    options = dict(zip(outputs.split()[::2], outputs.split()[1::2], strict=True))
    for option, file in options.items():
        Path(file).write_bytes(FOREIGN)
        refused(f"{command} {option} {file}", option, file)
        assert Path(file).read_bytes() == FOREIGN
        for whole in ("features", "index", "shards", "run"):
            before = sorted(Path(whole).rglob("*"))
            if whole not in command.split():
                refused(f"{command} {option} {whole}/new/{file}", option, whole)
            assert sorted(Path(whole).rglob("*")) == before
    first = run(f"{command} {outputs} --force")
    assert first.exit_code == 0, first.output
    assert all(Path(file).read_bytes() != FOREIGN for file in options.values())
    again = run(f"{command} {outputs}")  # onto its own results, without --force
    assert again.exit_code == 0 or name == "make-gnd", again.output  # a ground truth is made to be changed by hand


def test_another_stores_manifest_is_not_lost(here: Path) -> None:
    before = Path("other/manifest.json").read_bytes()
    refused("knn --train features --test features2 -k 2 --json other/manifest.json", "--json", "other/manifest.json")
    Path("link").symlink_to("other/manifest.json")
    refused("knn --train features --test features2 -k 2 --json link", "--json", "link")
    assert Path("other/manifest.json").read_bytes() == before
    result = run("index info index --json index/facts.json --force")  # what is read stays, forced or not
    assert result.exit_code == 1 and "read by this command" in result.stderr


def test_the_page_of_a_run_lies_in_it(here: Path) -> None:
    for words in ("report run --no-images", "report run --no-images --out run/report.html"):
        result = run(words)
        assert result.exit_code == 0, result.output
        assert is_own_result(Path("run/report.html"))
    Path("run/report.html").unlink()


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (("manifest.json", "index.faiss"), "an index"),
        (("manifest.json", "features-00000.parquet"), "a feature store"),
        (("manifest.json", "photos-000000.tar"), "a folder of shards"),
        (("config.yaml", "checkpoints"), "a run"),
        (("state.json", "student.safetensors"), "a checkpoint"),
        (("config.json", "model.safetensors"), "an export"),
    ],
)
def test_what_a_directory_is(tmp_path: Path, files: tuple[str, ...], kind: str) -> None:
    (tmp_path / "photos.tar").write_bytes(b"")  # a stray shard, photos or a table do not make a directory a whole
    check_outputs({"--json": tmp_path / "a.json"}, [])
    for file in files:
        (tmp_path / "whole" / file).parent.mkdir(exist_ok=True)
        (tmp_path / "whole" / file).write_bytes(b"")
    for place in ("a.json", "deep/down/a.json"):
        with pytest.raises(ConfigError, match=f"{kind}.*`force`"):
            check_outputs({"--json": tmp_path / "whole" / place}, [])
        check_outputs({"--json": tmp_path / "whole" / place}, [], force=True)


def test_files_that_are_no_results(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for content in (
        b"{}",
        b'{"command": "rm"}',
        b'{"name": "a", "command": "sop-knn"}',
        b"query,file,relevance\n",
        b"image,group\n",
        b"<!DOCTYPE html><title>mine</title>",
        b"\x89PNG\r\n\x1a\n" + bytes(40),
        b"PAR1" + bytes(20) + b"PAR1",
        b"PAR1",
    ):
        file.write_bytes(content)
        assert not is_own_result(file), content
    file.write_bytes(b"")
    assert is_own_result(file)
