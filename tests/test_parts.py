"""Parts beside an index: found as by brute force over all crops, kept through changes, refused when damaged."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from sop_faiss.cli.index import main
from sop_faiss.data.images.decode import decode_image
from sop_faiss.errors import ConfigError, IndexMismatchError
from sop_faiss.index.images import index_images
from sop_faiss.index.own_encoder import encoder_of_index
from sop_faiss.index.part_source import boxes_of_grids
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.write_parts import write_parts
from tests.encoders import tiny_config, write_run
from tests.images import encode, make_image, write_folder
from tests.messages import command_fails

COUNT = 6
WHOLE = (0.0, 0.0, 1.0, 1.0)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, photos, and an index of them with parts; one photo is of 3 x 40 pixels."""
    place = tmp_path_factory.mktemp("parts")
    write_run(place / "run")
    write_folder(place / "photos", classes=0, per_class=COUNT - 1, size=(48, 64))
    (place / "photos" / "thin.png").write_bytes(encode(make_image(np.random.default_rng(8), (3, 40)), "PNG"))
    words = ("build", place / "photos", "--model", place / "run", "--parts", "--part-grid", "2,3")
    assert f"parts of {COUNT} images made" in invoke(*words, "--out", place / "index")
    return place


@pytest.fixture
def place(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy"))


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def brute_force(
    index: FeatureIndex, photos: Path, query: np.ndarray, grids: list[int]
) -> list[tuple[str, float, tuple]]:
    """Each image with its best similarity and that box, nearest first: crops by numpy, encoded one by one."""
    encoder, found = encoder_of_index(index), []
    for key in index.ids.keys:
        pixels = decode_image(next(photos.glob(f"{key}.*")).read_bytes())
        height, width = pixels.shape[:2]
        best, where = float((query @ encoder.encode(pixels)[0]).item()), WHOLE
        for n in grids:
            for top in range(n):
                for left in range(n):
                    box = tuple(round(each / (n + 1), 4) for each in (left, top, left + 2, top + 2))
                    x, y = round(box[0] * width), round(box[1] * height)
                    crop = pixels[y : max(y + 1, round(box[3] * height)), x : max(x + 1, round(box[2] * width))]
                    similarity = float((query @ encoder.encode(crop)[0]).item())
                    if similarity > best:
                        best, where = similarity, box
        found.append((key, best, where))
    return sorted(found, key=lambda each: -each[1])


def test_a_search_is_that_of_brute_force_over_all_crops(built: Path, tmp_path: Path) -> None:
    index = FeatureIndex.open(built / "index")
    pixels = decode_image((built / "photos" / "0003.jpg").read_bytes())
    part = pixels[12:36, 16:48]
    Image.fromarray(part).save(tmp_path / "part.png")
    query = encoder_of_index(index).encode(part)[0]
    wanted = brute_force(index, built / "photos", query, [2, 3])
    assert wanted[0][0] == "0003"
    assert wanted[0][1] == pytest.approx(1)
    assert wanted[0][2] == (0.25, 0.25, 0.75, 0.75)
    page = tmp_path / "page.html"
    search = ("search", built / "index", tmp_path / "part.png", "--parts")
    found = json.loads(invoke(*search, "-k", COUNT, "--json", "-", "--html", page))
    assert found["parts"] is True
    assert "parts, which are outlined" in page.read_text()
    for (key, similarity, box), each in zip(wanted, found["queries"][0]["neighbors"], strict=True):
        assert each["key"] == key
        assert abs(each["similarity"] - similarity) < 1e-5
        assert each["box"] == pytest.approx(box, abs=1e-4)
    table = list(csv.DictReader(io.StringIO(invoke(*search, "-k", 1, "--csv", "-"))))
    text = ",".join(f"{each:g}" for each in wanted[0][2])
    assert table[0]["box"] == text
    assert f"part {text}" in invoke(*search)


def test_a_box_of_the_query_a_threshold_a_condition_and_folding(built: Path) -> None:
    index, photo = FeatureIndex.open(built / "index"), built / "photos" / "0002.jpg"
    pixels = decode_image(photo.read_bytes())
    query = encoder_of_index(index).encode(pixels[0:32, 0:32])[0]
    best = brute_force(index, built / "photos", query, [2, 3])
    search = ("search", built / "index", photo, "--box", "0,0,32,32", "--parts", "--json", "-")

    def neighbors(*more: object) -> list[str]:
        return [each["key"] for each in json.loads(invoke(*search, *more))["queries"][0]["neighbors"]]

    limit = (best[2][1] + best[3][1]) / 2
    assert neighbors("--threshold", limit) == [key for key, *_ in best[:3]]
    wanted = [key for key, *_ in best if key != best[0][0]]
    assert neighbors("--where", f"key <> '{best[0][0]}'") == wanted
    assert neighbors("--where", f"key <> '{best[0][0]}'", "--threshold", limit) == wanted[:2]
    assert neighbors("--unique", -1) == [best[0][0]]
    by_key = json.loads(invoke("search", built / "index", "--key", "0002", "--parts", "-k", 2, "--json", "-"))
    own = brute_force(index, built / "photos", index.unit_features([index.row_of("0002")])[0], [2, 3])
    assert [each["key"] for each in by_key["queries"][0]["neighbors"]] == [key for key, *_ in own if key != "0002"][:2]


def test_in_python_neighbors_have_boxes(built: Path) -> None:
    index = FeatureIndex.open(built / "index")
    assert index.search(index.unit_features([0]), 2).boxes is None
    found = index.with_parts(verify="sizes").search(index.unit_features([0, 1]), 2)
    assert found.boxes is not None
    assert found.boxes.shape == (2, 2, 4)
    assert found.boxes[:, 0].tolist() == [list(WHOLE)] * 2
    assert found.lines()[1].of([1]).boxes.tolist() == [[found.boxes[1, 1].tolist()]]


def test_info_names_what_is_beside(built: Path) -> None:
    size = sum(file.stat().st_size for file in (built / "index" / "parts").iterdir())
    facts = json.loads(invoke("info", built / "index", "--json", "-"))
    assert facts["beside"] == {"parts": size}
    assert f"parts {size / 1e6:,.1f} MB, every byte verified" in invoke("info", built / "index")


def test_changes_keep_parts_and_only_new_images_are_encoded(place: Path) -> None:
    invoke("remove", place / "index", "0001")
    write_folder(place / "more", classes=0, per_class=1, seed=5, size=(48, 64))
    (place / "more" / "0000.jpg").rename(place / "photos" / "more.jpg")
    invoke("sync", place / "index", place / "photos")
    query = place / "photos" / "0003.jpg"
    before = (place / "index" / "parts" / "index.faiss").read_bytes()
    missing = command_fails(main, "search", place / "index", query, "--parts")
    assert "1 of 6 images" in missing and "'more'" in missing and "sop-index parts" in missing
    assert "parts of 1 images made" in invoke("parts", place / "index")
    assert "all images have their parts" in invoke("parts", place / "index", "--part-grid", "3,2")
    assert (place / "index" / "parts" / "index.faiss").read_bytes() != before
    index = FeatureIndex.open(place / "index")
    parts = FeatureIndex.open(place / "index" / "parts")
    assert len(parts) == 13 * COUNT
    assert not any(key.endswith("0001") for key in parts.ids.keys)
    feature = encoder_of_index(index).encode(decode_image(query.read_bytes()))[0]
    wanted = [key for key, *_ in brute_force(index, place / "photos", feature, [2, 3])]
    assert index.with_parts().search(feature, COUNT).keys == [wanted]


def test_removed_images_are_not_found_before_new_parts_are_made(place: Path) -> None:
    query = place / "photos" / "0001.jpg"
    invoke("remove", place / "index", "0001")
    found = json.loads(invoke("search", place / "index", query, "--parts", "-k", 5, "--json", "-"))
    assert sorted(each["key"] for each in found["queries"][0]["neighbors"]) == ["0000", "0002", "0003", "0004", "thin"]
    assert "all images have" in invoke("parts", place / "index")


def test_an_image_with_another_content_needs_new_parts(place: Path) -> None:
    write_folder(place / "other", classes=0, per_class=1, seed=9)
    shutil.copyfile(place / "other" / "0000.jpg", place / "photos" / "0002.jpg")
    invoke("sync", place / "index", place / "photos")
    with pytest.raises(IndexMismatchError, match=r"1 of 6 .*'0002'"):
        FeatureIndex.open(place / "index").with_parts()
    assert "parts of 1 images made" in invoke("parts", place / "index")
    keys = FeatureIndex.open(place / "index" / "parts").ids.keys
    assert len(set(keys)) == len(keys) == 13 * COUNT


def test_an_image_that_changed_since_the_build_is_refused_until_the_index_follows(place: Path) -> None:
    shutil.rmtree(place / "index" / "parts")
    shutil.copyfile(place / "photos" / "0001.jpg", place / "photos" / "0002.jpg")
    for what in ("parts", "tokens"):
        said = command_fails(main, what, place / "index", "--images-root", place / "photos")
        assert "0002.jpg is no longer the image that was indexed" in said and "sop-index sync" in said
        assert not (place / "index" / what).exists()
    invoke("sync", place / "index", place / "photos")
    invoke("parts", place / "index")
    FeatureIndex.open(place / "index").with_parts()


def test_a_place_that_cannot_be_written_is_found_before_the_work(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mode of a folder does not stop root, so the system's answer is made."""
    shutil.rmtree(place / "index" / "parts")
    for module, encodes in (("write_parts", "extract_features"), ("rerank.token_store", "learn_tokenizer")):
        monkeypatch.setattr(f"sop_faiss.index.{module}.{encodes}", None)
    for what in ("parts", "tokens"):
        (place / "index" / what).symlink_to(tmp_path / "unplugged")
        said = command_fails(main, what, place / "index")
        assert f"index/{what} does not exist (a link to nowhere), wanted a folder" in said
        (place / "index" / what).unlink()
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: (mode, Path(path)) != (os.W_OK, place / "index") and access(path, mode)
    )
    for what in ("parts", "tokens"):
        assert f"{place / 'index'} is not writable" in command_fails(main, what, place / "index")
    (place / "more").mkdir()
    shutil.copyfile(place / "photos" / "0001.jpg", place / "more" / "new.jpg")
    monkeypatch.setattr("sop_faiss.verbs.finding.index_build.extract_features", None)
    monkeypatch.setattr("sop_faiss.verbs.finding.index_sync.extract_features", None)
    for words in (("add", place / "index", place / "more"), ("sync", place / "index", place / "more", "--force")):
        assert f"{place / 'index'} is not writable" in command_fails(main, *words)


def test_another_grid_or_kind_makes_all_again(place: Path) -> None:
    assert f"parts of {COUNT} images made" in invoke("parts", place / "index", "--part-grid", 2)
    assert len(FeatureIndex.open(place / "index" / "parts")) == 4 * COUNT
    assert f"parts of {COUNT} images made" in invoke("parts", place / "index", "--factory", "HNSW8")
    parts = FeatureIndex.open(place / "index" / "parts")
    assert (len(parts), parts.manifest.factory) == (4 * COUNT, "HNSW8")


def test_a_graph_keeps_parts_of_removed_images_unseen(place: Path) -> None:
    invoke("parts", place / "index", "--factory", "HNSW8", "--part-grid", 2)
    invoke("remove", place / "index", "0001")
    write_folder(place / "more", classes=0, per_class=1, seed=5)
    (place / "more" / "0000.jpg").rename(place / "more" / "more.jpg")
    invoke("add", place / "index", place / "more")
    invoke("parts", place / "index")
    assert len(FeatureIndex.open(place / "index" / "parts")) == 4 * (COUNT + 1)
    found = FeatureIndex.open(place / "index").with_parts().search(place / "photos" / "0001.jpg", COUNT)
    assert sorted(found.keys[0]) == ["0000", "0002", "0003", "0004", "more", "thin"]


def test_a_merged_index_has_none(place: Path) -> None:
    write_folder(place / "more", classes=0, per_class=1, prefix="x")
    (place / "more" / "0000.jpg").rename(place / "more" / "more.jpg")
    invoke("build", place / "more", "--model", place / "run", "--out", place / "second")
    invoke("merge", place / "index", place / "second", "--out", place / "both")
    query = place / "photos" / "0003.jpg"
    assert "no parts: make them with `sop-index parts" in command_fails(
        main, "search", place / "both", query, "--parts"
    )


def test_damage_is_one_line_and_does_not_stop_a_change(place: Path) -> None:
    folder, query = place / "index" / "parts", place / "photos" / "0003.jpg"
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    for name, content in whole.items():
        for damaged in (content[:-2], b"", content[:-1] + bytes([content[-1] ^ 1])):
            (folder / name).write_bytes(damaged)
            assert "sop-index parts" in command_fails(main, "search", place / "index", query, "--parts")
            assert "sop-index parts" in command_fails(main, "parts", place / "index")
            assert "sop-index parts" in command_fails(main, "info", place / "index")
        (folder / name).write_bytes(content)
    (folder / "ids.parquet").unlink()
    invoke("remove", place / "index", "0002")
    assert "sop-index parts" in command_fails(main, "search", place / "index", query, "--parts")
    shutil.rmtree(folder)
    assert "parts of 5 images made" in invoke("parts", place / "index")


def test_an_index_of_something_else_is_refused(place: Path) -> None:
    shutil.rmtree(place / "index" / "parts")
    shutil.copytree(place / "index", place / "copy")
    (place / "copy").rename(place / "index" / "parts")
    with pytest.raises(IndexMismatchError, match="does not hold parts"):
        FeatureIndex.open(place / "index").with_parts()
    shutil.rmtree(place / "index" / "parts")
    write_run(place / "other", tiny_config(embed_dim=16))
    invoke("build", place / "photos", "--model", place / "other", "--parts", "--out", place / "second")
    shutil.copytree(place / "second" / "parts", place / "index" / "parts")
    with pytest.raises(IndexMismatchError, match="another encoder"):
        FeatureIndex.open(place / "index").with_parts()
    index = FeatureIndex.open(place / "second")
    with pytest.raises(IndexMismatchError):
        write_parts(index, encoder_of_index(FeatureIndex.open(place / "index")), index_images(index))


def test_an_image_that_is_gone_is_named(place: Path) -> None:
    (place / "photos" / "0004.jpg").unlink()
    before = {file.name: file.read_bytes() for file in (place / "index" / "parts").iterdir()}
    words = ("parts", place / "index", "--part-grid", 4, "--images-root", place / "photos")
    assert "0004" in command_fails(main, *words)
    assert {file.name: file.read_bytes() for file in (place / "index" / "parts").iterdir()} == before


def test_what_cannot_go_together(built: Path, tmp_path: Path) -> None:
    query = built / "photos" / "0003.jpg"
    for method in ("global", "diffusion"):
        said = command_fails(main, "search", built / "index", query, "--parts", "--rerank", method)
        assert "--rerank local" in said
    words = ("build", built / "photos", "--model", built / "run", "--out", tmp_path / "new")
    assert "give --parts too" in command_fails(main, *words, "--part-grid", 3)
    assert "--parts are made of images" in command_fails(
        main, "build", "--features", tmp_path, "--parts", "--out", tmp_path / "new"
    )
    for grid in ("1", "11", "2,2", "x", "", "2.5"):
        assert "--part-grid" in command_fails(main, *words, "--parts", "--part-grid", grid)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError):
        boxes_of_grids([])


def test_a_build_that_was_stopped_before_its_parts(place: Path) -> None:
    shutil.rmtree(place / "index" / "parts")
    words = ("build", place / "photos", "--model", place / "run", "--out", place / "index", "--parts")
    remedy = f"`sop-index parts {place / 'index'} --part-grid 2`"
    assert remedy in command_fails(main, *words, "--part-grid", "2")


def test_boxes_overlap_by_half_and_cover_the_image() -> None:
    assert boxes_of_grids([3])[:2] == [(0, 0, 0.5, 0.5), (0.25, 0, 0.75, 0.5)]
    assert boxes_of_grids([3])[-1] == (0.5, 0.5, 1, 1)
    assert len(boxes_of_grids([2, 4])) == 20
    assert boxes_of_grids([2])[-1] == (0.3333, 0.3333, 1, 1)
