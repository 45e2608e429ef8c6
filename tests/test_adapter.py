"""Adapters: the encoder of their run on the weights that they belong to, on no others, and never from bad files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from sop_faiss import load_encoder
from sop_faiss.cli.export import main as export
from sop_faiss.cli.index import main as index
from sop_faiss.errors import CheckpointError, ConfigError, SopError
from sop_faiss.files import sha256_file
from sop_faiss.model.adapter import base_name, read_adapter
from sop_faiss.model.encoders.spec import ADAPTER_FILE
from sop_faiss.model.initial_weights import resolve_init
from sop_faiss.verbs.training.export import ExportOptions, export_run
from tests.encoders import random_images, timm_network, write_run
from tests.images import write_folder
from tests.low_rank_runs import low_rank_config, write_low_rank_run
from tests.runs import conv_config, tiny_config

TENSORS = "adapter.safetensors"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A run with additions, the run `base` that it started from, its adapter and its complete export."""
    folder = tmp_path_factory.mktemp("adapters")
    run = write_low_rank_run(folder / "run", low_rank_config(folder))
    export_run(run, folder / "adapter", ExportOptions(adapter=True))
    export_run(run, folder / "merged")
    return folder


@torch.no_grad()
def test_base_and_adapter_are_the_merged_encoder(place):
    run, merged = load_encoder(str(place / "run")), load_encoder(str(place / "merged"))
    adapted = load_encoder(str(place / "adapter"), weights=place / "base")
    images = random_images(16)
    torch.testing.assert_close(adapted(images), merged(images), rtol=1e-5, atol=1e-5)
    assert run.fingerprint == merged.fingerprint == adapted.fingerprint
    assert adapted.preprocess == merged.preprocess == run.preprocess and adapted.pooling == merged.pooling
    base = load_encoder(str(place / "base"))
    assert base.fingerprint != adapted.fingerprint and (base(images) - adapted(images)).abs().max() > 1e-3
    student = export_run(place / "run", place / "student", ExportOptions(student=True, adapter=True))
    assert student.fingerprint == load_encoder(str(place / "run"), student=True).fingerprint


@torch.no_grad()
def test_of_a_convolutional_network_by_a_weights_file(tmp_path):
    network = timm_network("test_efficientnet")
    tensors = {name: value.contiguous() for name, value in network.state_dict().items()}
    save_file(tensors, tmp_path / "w.safetensors")
    settings = ("model.backbone=vit_small_patch16_224", "model.init=timm:test_efficientnet", "model.lora.rank=2")
    config = resolve_init(conv_config(tmp_path, *settings, f"model.weights={tmp_path / 'w.safetensors'}"))
    run = write_low_rank_run(tmp_path / "run", config)
    result = export_run(run, tmp_path / "adapter", ExportOptions(adapter=True))
    assert (
        result.belongs_to == "timm:test_efficientnet"
        and result.size_bytes == (tmp_path / "adapter" / TENSORS).stat().st_size
    )
    assert str(tmp_path) not in (tmp_path / "adapter" / ADAPTER_FILE).read_text()
    adapted = load_encoder(str(tmp_path / "adapter"), weights=tmp_path / "w.safetensors")
    assert adapted.fingerprint == load_encoder(str(run)).fingerprint
    torch.testing.assert_close(adapted(random_images(64)), load_encoder(str(run))(random_images(64)))
    save_file({name: value * 1.5 for name, value in tensors.items()}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="timm:test_efficientnet"):
        load_encoder(str(tmp_path / "adapter"), weights=tmp_path / "other.safetensors")


def test_other_weights_and_missing_ones_are_refused(place, tmp_path):
    with pytest.raises(ConfigError, match="weights"):
        load_encoder(str(place / "adapter"))
    with pytest.raises(CheckpointError, match="weights"):
        load_encoder(str(place / "adapter"), weights=tmp_path / "none")
    other = write_run(tmp_path / "other", tiny_config(tmp_path, "model.depth=1"))
    with pytest.raises(SopError):
        load_encoder(str(place / "adapter"), weights=other)
    swapped = shutil.copytree(place / "base", tmp_path / "swapped")
    checkpoint = next((swapped / "checkpoints").iterdir())
    shutil.copy(checkpoint / "student.safetensors", checkpoint / "teacher.safetensors")
    state = json.loads((checkpoint / "state.json").read_text())
    state["sha256"]["teacher.safetensors"] = state["sha256"]["student.safetensors"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="run:base"):
        load_encoder(str(place / "adapter"), weights=swapped)
    with pytest.raises(ConfigError, match="adapter"):
        resolve_init(tiny_config(tmp_path, f"model.init={place / 'adapter'}"))


def test_damaged_and_hostile_adapters_are_refused(place, tmp_path):
    def broken(name: str, change) -> Path:
        copied = shutil.copytree(place / "adapter", tmp_path / name)
        change(copied)
        return copied

    def edit(**entries):
        def change(folder):
            content = json.loads((folder / ADAPTER_FILE).read_text())
            for key, value in entries.items():
                section, _, field = key.partition("__")
                content[section] = {**content[section], field: value} if field else value
            (folder / ADAPTER_FILE).write_text(json.dumps(content))

        return change

    def retensor(make):
        def change(folder):
            save_file(make(load_file(folder / TENSORS)), folder / TENSORS)
            edit(tensors_sha256=sha256_file(folder / TENSORS))(folder)

        return change

    def cut(folder):
        (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-7])

    def cut_and_signed(folder):
        cut(folder)
        edit(tensors_sha256=sha256_file(folder / TENSORS))(folder)

    lora = {"rank": 3, "alpha": 16.0, "layers": "all"}
    cases = {
        "cut": cut,
        "signed": cut_and_signed,
        "gone": lambda folder: (folder / TENSORS).unlink(),
        "text": lambda folder: (folder / ADAPTER_FILE).write_text("{"),
        "list": lambda folder: (folder / ADAPTER_FILE).write_text("[]"),
        "format": edit(format="sop_faiss adapter 9"),
        "base": edit(base=None),
        "fingerprint": edit(base__fingerprint="0" * 64),
        "model": edit(model=3),
        "rank": edit(model__lora={**lora, "rank": 4}),
        "huge": edit(model__lora={**lora, "rank": 10**9}),
        "none": edit(model__lora={"rank": 0}),
        "layers": edit(model__lora={**lora, "layers": "pointwise"}),
        "init": edit(model__init=str(place / "base")),
        "wide": edit(model__embed_dim=48),
        "few": retensor(lambda found: dict(list(found.items())[:2])),
        "nan": retensor(lambda found: {name: value * torch.nan for name, value in found.items()}),
        "big": retensor(lambda found: {name: value * 1e30 for name, value in found.items()}),
        "names": retensor(lambda found: {f"x.{name}": value for name, value in found.items()}),
        "whole": retensor(lambda found: {name: value.long() for name, value in found.items()}),
    }
    for name, change in cases.items():
        with pytest.raises(SopError) as caught:
            load_encoder(str(broken(name, change)), weights=place / "base")
        assert "\n" not in str(caught.value), name


def test_names_have_no_places(place):
    assert base_name("lite0") == "lite0" and base_name("timm:resnet50") == "timm:resnet50"
    assert base_name("dino:/a/b/c.pth") == "dino:c.pth" and base_name("/a/lite0") == "run:lite0"
    content = (place / "adapter" / ADAPTER_FILE).read_text() + (place / "adapter" / "README.md").read_text()
    assert str(place) not in content
    assert read_adapter(place / "adapter").config.model.init == "run:base"


def test_an_index_is_bound_to_base_and_adapter(place, tmp_path):
    def invoke(*words: object):
        return CliRunner().invoke(index, [str(word) for word in words])

    write_folder(tmp_path / "photos", classes=0, per_class=6)
    shutil.copytree(place / "adapter", tmp_path / "adapter")
    named = ("--model", tmp_path / "adapter", "--weights", place / "base")
    built = invoke("build", tmp_path / "photos", *named, "--out", tmp_path / "index")
    assert built.exit_code == 0, built.output
    query = tmp_path / "photos" / "0003.jpg"
    for words in ((), named, ("--model", place / "run"), ("--model", place / "merged")):
        found = invoke("search", tmp_path / "index", query, "-k", 1, "--json", "-", *words)
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout)["queries"][0]["neighbors"][0]["key"] == "0003"
    base = invoke("search", tmp_path / "index", query, "--model", place / "base")
    assert base.exit_code == 1 and base.stderr.splitlines()[-1].startswith("error: ")
    export_run(place / "run", tmp_path / "other", ExportOptions(student=True, adapter=True))
    tensors = load_file(tmp_path / "other" / TENSORS)
    save_file({name: value * 0.5 for name, value in tensors.items() if "pos" not in name} | {
        name: value for name, value in tensors.items() if "pos" in name
    }, tmp_path / "other" / TENSORS)  # fmt: skip
    content = json.loads((tmp_path / "other" / ADAPTER_FILE).read_text())
    content["tensors_sha256"] = sha256_file(tmp_path / "other" / TENSORS)
    (tmp_path / "other" / ADAPTER_FILE).write_text(json.dumps(content))
    shutil.rmtree(tmp_path / "adapter")
    missing = invoke("search", tmp_path / "index", query)
    assert missing.exit_code == 1 and missing.stderr.splitlines()[-1].startswith("error: ")
    shutil.copytree(tmp_path / "other", tmp_path / "adapter")
    changed = invoke("search", tmp_path / "index", query)
    assert changed.exit_code == 1 and "changed" in changed.stderr.splitlines()[-1]


def test_commands_that_export_it(place, tmp_path):
    def run(*words: object):
        return CliRunner().invoke(export, [str(word) for word in words])

    result = run(place / "run", tmp_path / "out", "--adapter")
    assert result.exit_code == 0 and "run:base" in result.stdout
    for words in (
        (place / "base", tmp_path / "x", "--adapter"),
        (place / "run", tmp_path / "x", "--adapter", "--onnx"),
    ):
        refused = run(*words)
        assert refused.exit_code == 1 and "--adapter" in refused.stderr and not (tmp_path / "x").exists()
