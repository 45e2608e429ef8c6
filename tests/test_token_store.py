"""Tokens beside an index: made once, kept through changes, refused when damaged or of others."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from sop_faiss.cli.index import main
from sop_faiss.errors import ConfigError, IndexMismatchError
from sop_faiss.files import sha256_file
from sop_faiss.index.images import index_images
from sop_faiss.index.own_encoder import encoder_of_index
from sop_faiss.index.rerank.settings import Rerank, TokenSettings
from sop_faiss.index.rerank.token_store import TokenStore, write_tokens
from sop_faiss.index.search import FeatureIndex
from sop_faiss.progress import ProgressCallback
from sop_faiss.verbs.finding.index_search import SearchOptions, search_index
from tests.encoders import tiny_config, write_run
from tests.images import write_folder
from tests.messages import command_fails

COUNT = 8


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, photos, and an index of them with tokens."""
    place = tmp_path_factory.mktemp("tokens")
    write_run(place / "run")
    write_folder(place / "photos", classes=0, per_class=COUNT)
    invoke(
        "build", place / "photos", "--model", place / "run", "--tokens", "--token-count", 9, "--out", place / "index"
    )
    return place


@pytest.fixture
def place(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy"))


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def open_store(place: Path) -> tuple[FeatureIndex, TokenStore]:
    index = FeatureIndex.open(place / "index")
    return index, TokenStore.open(index)


def test_tokens_on_disk_are_those_of_each_image(place: Path) -> None:
    index, store = open_store(place)
    store.require_complete(index)
    images = index_images(index, place / "photos")
    tokenizer = store.tokenizer(encoder_of_index(index))
    made = dict(tokenizer.tokens(COUNT, images.read, index.ids.keys))
    for row, tokens in enumerate(store.of(range(COUNT))):
        assert len(tokens) == 9
        assert tokens.dtype == np.float16
        assert np.abs(tokens.astype(np.float32) - made[row].astype(np.float32)).max() < 2e-3


def test_changes_keep_tokens_and_only_new_images_are_read(place: Path) -> None:
    before = open_store(place)[1].of([3])[0]
    invoke("remove", place / "index", "0001")
    write_folder(place / "more", classes=0, per_class=1, seed=5)
    (place / "more" / "0000.jpg").rename(place / "more" / "more.jpg")
    invoke("add", place / "index", place / "more")
    index, store = open_store(place)
    assert np.array_equal(store.of([index.row_of("0003")])[0], before)
    with pytest.raises(IndexMismatchError, match=r"1 of 8 .*'more'"):
        store.require_complete(index)
    query = place / "photos" / "0003.jpg"
    assert "sop-index tokens" in command_fails(main, "search", place / "index", query, "--rerank", "local")
    assert "tokens of 1 images made" in invoke("tokens", place / "index")
    assert "all images have their tokens" in invoke("tokens", place / "index", "--token-count", 9)
    index, store = open_store(place)
    store.require_complete(index)
    assert np.array_equal(store.of([index.row_of("0003")])[0], before)
    assert "tokens of 8 images made" in invoke("tokens", place / "index", "--token-count", 5)
    assert len(open_store(place)[1].of([0])[0]) == 5


@pytest.mark.parametrize("inside", [False, True])
def test_links_stay_links_and_tokens_inside_the_index_are_kept(place: Path, inside: bool) -> None:
    before = open_store(place)[1].of([3])[0]
    disk = place / "disk"
    disk.mkdir()
    (place / "index").rename(disk / "index")
    (place / "index").symlink_to("disk/index")
    tokens = disk / "index" / "own" if inside else disk / "tokens"
    (disk / "index" / "tokens").rename(tokens)
    (disk / "index" / "tokens").symlink_to("own" if inside else "../tokens")
    invoke("remove", place / "index", "0001")
    invoke("add", place / "index", place / "photos" / "0001.jpg")
    index, store = open_store(place)
    store.require_complete(index)
    assert np.array_equal(store.of([index.row_of("0003")])[0], before)
    assert "tokens of 8 images made" in invoke("tokens", place / "index", "--token-count", 5)
    assert (place / "index").is_symlink() and (disk / "index" / "tokens").is_symlink() != inside
    assert sorted(path.name for path in disk.iterdir()) == ["index", *(["tokens"] if not inside else [])]
    assert len(open_store(place)[1].of([0])[0]) == 5


def test_more_dimensions_need_other_tokens(place: Path) -> None:
    index, store = open_store(place)
    encoder, images = encoder_of_index(index), index_images(index)
    fewer = TokenSettings(dimension=3, most=9)
    assert [write_tokens(FeatureIndex.open(place / "index"), encoder, images, fewer) for _ in range(2)] == [COUNT, 0]
    assert write_tokens(FeatureIndex.open(place / "index"), encoder, images, store.settings) == COUNT
    assert open_store(place)[1].whitening.matrix.shape == store.whitening.matrix.shape


def test_an_image_with_another_content_needs_new_tokens(place: Path) -> None:
    write_folder(place / "other", classes=0, per_class=1, seed=9)
    shutil.copyfile(place / "other" / "0000.jpg", place / "photos" / "0002.jpg")
    invoke("sync", place / "index", place / "photos")
    index, store = open_store(place)
    assert [index.ids.keys[row] for row in np.flatnonzero(store.places < 0)] == ["0002"]
    with pytest.raises(IndexMismatchError, match=r"1 of 8 .*'0002'; there are tokens of 1 with another content"):
        store.require_complete(index)


def test_tokens_of_another_size_are_named(place: Path) -> None:
    invoke("build", place / "photos", "--model", place / "run", "--size", 48, "--out", place / "larger")
    shutil.copytree(place / "index" / "tokens", place / "larger" / "tokens")
    query = place / "photos" / "0003.jpg"
    for words in (("tokens", place / "larger"), ("search", place / "larger", query, "--rerank", "local")):
        said = command_fails(main, *words)
        assert "tokens of another preprocessing" in said and "instead of 48" in said and "sop-index tokens" in said


def test_search_orders_the_first_by_their_tokens(built: Path) -> None:
    index, store = open_store(built)
    query, other = built / "photos" / "0003.jpg", built / "photos" / "0006.jpg"
    plain, first = (
        search_index(index, images=[query, other], options=SearchOptions(k, rerank=rerank)).queries
        for k, rerank in ((COUNT, None), (4, Rerank("local", depth=6)))
    )
    from sop_faiss.index.rerank.local import local_scores

    for before, after in zip(plain, first, strict=True):
        rows = [each.row for each in before.found]
        own = store.of([index.row_of(before.key)])[0].astype(np.float32)
        scores = local_scores(own, store.of(rows[:6]))
        assert [each.row for each in after.found] == [rows[at] for at in np.argsort(-scores, kind="stable")][:4]
        assert after.found[0].key == before.key
        cosines = {each.row: each.similarity for each in before.found}
        assert all(each.similarity == cosines[each.row] for each in after.found)
        assert [each.rank for each in after.found] == [1, 2, 3, 4]


@pytest.mark.parametrize("method", ["local", "global", "diffusion"])
def test_by_key_with_a_depth_above_all(built: Path, method: str) -> None:
    found = json.loads(invoke("search", built / "index", "--key", "0003", "-k", 7, "--rerank", method, "--json", "-"))
    keys = [each["key"] for each in found["queries"][0]["neighbors"]]
    assert sorted(keys) == [f"{number:04d}" for number in range(COUNT) if number != 3]
    assert found["rerank"]["method"] == method


def test_damage_is_one_line(place: Path) -> None:
    folder = place / "index" / "tokens"
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    for name, content in whole.items():
        for damaged in (content[:-2], b""):
            (folder / name).write_bytes(damaged)
            with pytest.raises(IndexMismatchError, match="tokens"):
                open_store(place)
        (folder / name).write_bytes(content)
    (folder / "tokens.f16").write_bytes(whole["tokens.f16"][:-1] + bytes([whole["tokens.f16"][-1] ^ 1]))
    store = open_store(place)[1]
    store.of(range(COUNT - 1))
    with pytest.raises(IndexMismatchError, match=r"tokens\.f16 is damaged"):
        store.of([0, COUNT - 1])
    assert "tokens.f16 was changed" in command_fails(main, "info", place / "index")
    (folder / "tokens.f16").write_bytes(whole["tokens.f16"])
    assert "tokens 0.0 MB, every byte verified" in invoke("info", place / "index")
    nan = np.full(len(whole["tokens.f16"]) // 2, np.nan, np.float16)
    (folder / "tokens.f16").write_bytes(nan.tobytes())
    with pytest.raises(IndexMismatchError, match=r"tokens\.f16 is damaged"):
        replace(open_store(place)[1], checksums=None).of([0])
    good = json.loads(whole["manifest.json"])
    wrong_settings = ({"size": "big"}, {"size": -5}, {"size": True}, {"most": 3.5}, {"most": 0})
    wrong_values = [good | {"settings": good["settings"] | each} for each in wrong_settings]
    lacking = [{name: each for name, each in good.items() if name != left_out} for left_out in good]
    for wrong in ({}, [], {"format": "sop_faiss.tokens", "format_version": 2}, *wrong_values, *lacking):
        (folder / "manifest.json").write_text(json.dumps(wrong))
        with pytest.raises(IndexMismatchError):
            open_store(place)


def test_what_is_kept_is_verified_before_it_gets_a_new_checksum(place: Path) -> None:
    write_folder(place / "more", classes=0, per_class=1, seed=5)
    (place / "more" / "0000.jpg").rename(place / "more" / "more.jpg")
    invoke("add", place / "index", place / "more")
    content = place / "index" / "tokens" / "tokens.f16"
    whole = content.read_bytes()
    content.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert "tokens.f16 was changed" in command_fails(main, "tokens", place / "index")
    content.write_bytes(whole)
    assert "tokens of 1 images made" in invoke("tokens", place / "index")


def test_tokens_from_before_checksums_of_images_are_read_and_get_them(place: Path) -> None:
    folder = place / "index" / "tokens"
    before = open_store(place)[1].of([3])[0]
    pq.write_table(pq.read_table(folder / "images.parquet").drop_columns("crc32"), folder / "images.parquet")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["images.parquet"] = {
        "sha256": sha256_file(folder / "images.parquet"),
        "bytes": (folder / "images.parquet").stat().st_size,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    store = open_store(place)[1]
    assert store.checksums is None and np.array_equal(store.of([3])[0], before)
    write_folder(place / "more", classes=0, per_class=1, seed=5)
    (place / "more" / "0000.jpg").rename(place / "more" / "more.jpg")
    invoke("add", place / "index", place / "more")
    invoke("tokens", place / "index")
    store = open_store(place)[1]
    assert store.checksums is not None and np.array_equal(store.of([3])[0], before)


def test_a_pipe_in_place_of_the_manifest_is_not_waited_for(place: Path) -> None:
    manifest = place / "index" / "tokens" / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(IndexMismatchError, match=r"is damaged \(manifest\.json "):
        TokenStore.open(FeatureIndex.open(place / "index"))


def test_damaged_tokens_do_not_stop_a_change(place: Path) -> None:
    (place / "index" / "tokens" / "whitening.safetensors").unlink()
    invoke("remove", place / "index", "0002")
    with pytest.raises(IndexMismatchError, match="tokens"):
        open_store(place)


@pytest.fixture(scope="module")
def quantized(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of larger images, with product-quantized tokens."""
    place = tmp_path_factory.mktemp("quantized")
    write_folder(place / "photos", classes=0, per_class=COUNT)
    words = ("build", place / "photos", "--model", built / "run", "--tokens", "--token-count", 9, "--token-size", 48)
    invoke(*words, "--token-codes", "pq4", "--out", place / "index")
    return place


def test_quantized_tokens_are_the_decoded_ones(quantized: Path) -> None:
    index, store = open_store(quantized)
    assert store.settings == TokenSettings(48, most=9, codes="pq4")
    assert {path.name for path in store.directory.iterdir()} == {*store.manifest["files"], "manifest.json"}
    assert store.manifest["files"]["tokens.pq"]["bytes"] == COUNT * 9 * (4 + 2)
    made = dict(store.tokenizer(encoder_of_index(index)).tokens(COUNT, index_images(index).read, index.ids.keys))
    assert store.codes.quantizer is not None
    for row, tokens in enumerate(store.of(range(COUNT))):
        exact = made[row].astype(np.float32)
        roots = np.linalg.norm(exact, axis=1, keepdims=True)
        decoded = store.codes.quantizer.decode(store.codes.quantizer.encode(exact / roots))
        wanted = decoded / np.linalg.norm(decoded, axis=1, keepdims=True) * roots
        close = np.abs(tokens - wanted).max(axis=1) < 2e-3
        assert close.mean() > 0.8  # where two centroids are equally near, another batch may prefer the other


def test_quantized_tokens_are_searched_and_kept_through_changes(quantized: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(quantized, tmp_path / "copy"))
    query = place / "photos" / "0003.jpg"
    found = json.loads(invoke("search", place / "index", query, "--rerank", "local", "--json", "-"))
    assert found["queries"][0]["neighbors"][0]["key"] == "0003"
    before = open_store(place)[1].of([3, 5])
    invoke("remove", place / "index", "0001")
    write_folder(place / "more", classes=0, per_class=1, seed=5)
    (place / "more" / "0000.jpg").rename(place / "more" / "more.jpg")
    invoke("add", place / "index", place / "more")
    assert "tokens of 1 images made" in invoke("tokens", place / "index")
    index, store = open_store(place)
    store.require_complete(index)
    after = store.of([index.row_of(key) for key in ("0003", "0005")])
    assert all(np.array_equal(*each) for each in zip(before, after, strict=True))
    assert "tokens of 8 images made" in invoke("tokens", place / "index", "--token-codes", "float16")
    assert not (place / "index" / "tokens" / "tokens.pq").exists()
    assert open_store(place)[1].settings == TokenSettings(48, most=9)  # what is not given is as before


def test_damaged_codes_are_one_line(quantized: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(quantized, tmp_path / "copy"))
    folder = place / "index" / "tokens"
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    for name, content in whole.items():
        for damaged in (content[:-2], b""):
            (folder / name).write_bytes(damaged)
            assert "is damaged" in command_fails(main, "search", place / "index", "--key", "0001", "--rerank", "local")
        (folder / name).write_bytes(content)
    manifest = json.loads(whole["manifest.json"])
    for codes in ("float16", "pq5", "pq", "pq0", "PQ4", None, 4, "pq99999999"):
        changed = manifest | {"settings": manifest["settings"] | {"codes": codes}}
        (folder / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(IndexMismatchError):
            open_store(place)
    (folder / "manifest.json").write_bytes(whole["manifest.json"])
    (folder / "tokens.pq").write_bytes(b"\xff" * len(whole["tokens.pq"]))  # weights that are no numbers
    assert "tokens.pq is damaged" in command_fails(
        main, "search", place / "index", "--key", "0001", "--rerank", "local"
    )


def test_codes_that_cannot_be(built: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(built, tmp_path / "copy"))
    words = ("tokens", place / "index", "--token-codes")
    for codes in ("pq", "pq0", "pq129", "pq-1", "pq4.5", "int8", ""):
        assert f"--token-codes {codes}: wanted float16, or pq1 to pq128" in command_fails(main, *words, codes)
    assert "wanted as many bytes or fewer" in command_fails(main, *words, "pq128")
    assert "too few to learn product quantization" in command_fails(main, *words, "pq4")
    assert len(open_store(place)[1].of([0])[0]) == 9


def test_a_build_that_was_stopped_before_its_tokens(place: Path) -> None:
    shutil.rmtree(place / "index" / "tokens")
    words = ("build", place / "photos", "--model", place / "run", "--out", place / "index", "--tokens")
    assert "sop-index tokens" in command_fails(main, *words)


def test_tokens_of_another_encoder_are_refused(place: Path) -> None:
    write_run(place / "other", tiny_config(embed_dim=16))
    invoke("build", place / "photos", "--model", place / "other", "--out", place / "second")
    shutil.copytree(place / "index" / "tokens", place / "second" / "tokens")
    index = FeatureIndex.open(place / "second")
    with pytest.raises(IndexMismatchError, match="another encoder"):
        TokenStore.open(index)
    shutil.rmtree(place / "second" / "tokens")
    with pytest.raises(ConfigError, match=rf"no tokens.*`sop-index tokens {re.escape(str(index.directory))}`"):
        search_index(index, keys=["0001"], options=SearchOptions(rerank=Rerank("local")))
    with pytest.raises(IndexMismatchError):
        write_tokens(index, encoder_of_index(FeatureIndex.open(place / "index")), index_images(index), TokenSettings())


def test_learning_and_making_report_each_image(place: Path) -> None:
    calls: dict[str, list[tuple[int, int]]] = {}

    @contextlib.contextmanager
    def stage(what: str, unit: str) -> Iterator[ProgressCallback]:
        yield lambda done, total: calls.setdefault(f"{what}, {unit}", []).append((done, total))

    index = FeatureIndex.open(place / "index")
    write_tokens(index, encoder_of_index(index), index_images(index), TokenSettings(most=5), stage)
    each = [(done, COUNT) for done in range(1, COUNT + 1)]
    assert calls == {"learning tokens, images": each, "tokens, images": each}


def test_what_cannot_go_together(built: Path, tmp_path: Path) -> None:
    query = built / "photos" / "0003.jpg"
    local = ("search", built / "index", "--rerank", "local")
    other = built / "photos" / "0004.jpg"
    assert "--rerank local" in command_fails(main, *local, query, other, "--together")
    assert "--rerank-depth says" in command_fails(main, "search", built / "index", query, "--rerank-depth", 9)
    words = ("build", built / "photos", "--model", built / "run", "--out", tmp_path / "new")
    assert "give --tokens too" in command_fails(main, *words, "--token-size", 64)
    assert "--tokens are made of images" in command_fails(
        main, "build", "--features", tmp_path, "--tokens", "--out", tmp_path / "new"
    )
    for option in ("--token-size", "--token-count"):
        assert f"{option} -1" in command_fails(main, "tokens", built / "index", option, -1)
    assert "--cache" in command_fails(main, "tokens", built / "index", "--cache", tmp_path / "kept")
