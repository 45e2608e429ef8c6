"""sop-index sync and add --skip-existing as a user types them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from sop_faiss.cli.index import main
from sop_faiss.data.images import listing
from sop_faiss.data.images.heif import HEIF_SUFFIXES
from sop_faiss.index.left_out import LEFT_OUT_FILE
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.store import STATES_FILE, IndexManifest
from sop_faiss.model.encoders.load import load_encoder
from sop_faiss.verbs.finding import index_sync
from tests.encoders import write_run
from tests.images import encode, make_image, write_folder, write_shards


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, photos in class folders and in the folder itself, and an index of them."""
    root = tmp_path_factory.mktemp("built")
    write_run(root / "run")
    write_folder(root / "photos", classes=2, per_class=3)
    write_folder(root / "photos", classes=0, per_class=2, seed=9)
    invoke("build", root / "photos", "--model", root / "run", "--out", root / "index", ok=True)
    return root


@pytest.fixture
def place(built: Path, tmp_path: Path) -> Path:
    """A copy whose index follows the copied photos."""
    for name in ("photos", "index"):
        shutil.copytree(built / name, tmp_path / name)
    invoke("sync", tmp_path / "index", tmp_path / "photos", ok=True)
    return tmp_path


def invoke(*arguments: object, ok: bool = False) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert not ok or result.exit_code == 0, result.output
    return result


def assert_refused(result: Result, *messages: str) -> None:
    assert result.exit_code == 1 and result.stdout == "", result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ") and all(message in last for message in messages), result.stderr


def write_image(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(make_image(np.random.default_rng(seed))))


def content(index: Path) -> dict[str, tuple[Any, ...]]:
    """All that an index says of each file, whatever its row."""
    opened = FeatureIndex.open(index)
    features = opened.features(range(len(opened))).round(5)
    columns = zip(opened.ids.members, opened.ids.keys, features.tolist(), strict=True)
    return {member: (key, opened.label_name(row), line) for row, (member, key, line) in enumerate(columns)}


def assert_as_built(place: Path, run: Path) -> None:
    """The slow way: the index is what a new one of the folder would be."""
    invoke("build", place / "photos", "--model", run, "--out", place / "again", "--max-bad-fraction", 1, ok=True)
    synced, again = content(place / "index"), content(place / "again")
    assert synced.keys() == again.keys()
    for member, (key, label, features) in again.items():
        assert synced[member][:2] == (key, label)
        np.testing.assert_allclose(synced[member][2], features, atol=1e-4)
    ours, theirs = (IndexManifest.read(place / name) for name in ("index", "again"))
    for field in ("class_names", "root", "folder", "dropped", "count"):
        assert getattr(ours, field) == getattr(theirs, field), field


def test_added_changed_and_removed(place: Path, built: Path) -> None:
    photos = place / "photos"
    write_image(photos / "new" / "0001.jpg", 1)  # whose name other images have: keys get their folder
    write_image(photos / "class_0" / "0000.jpg", 2)
    (photos / "class_1" / "0002.jpg").unlink()
    os.utime(photos / "class_0" / "0002.jpg")  # another time, the same content
    before = (place / "index" / "manifest.json").read_bytes()
    listed = invoke("sync", place / "index", "--dry-run", ok=True).stdout.splitlines()
    assert listed[:3] == ["+ new/0001.jpg", "~ class_0/0000.jpg", "- class_1/0002.jpg"]
    assert listed[3].startswith("1 to add, 1 to replace, 1 to remove, 6 unchanged")
    assert (place / "index" / "manifest.json").read_bytes() == before
    said = invoke("sync", place / "index", ok=True).stdout
    assert said.startswith("1 added, 1 changed, 1 removed, 6 unchanged, 0 left out: ")
    assert_as_built(place, built / "run")
    assert sorted(path.name for path in place.iterdir()) == ["again", "index", "photos"]


def test_nothing_to_do_reads_and_writes_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sop_faiss.data.images.listing.FileSource.read", lambda *_: pytest.fail("a file was read"))
    before = (place / "index").stat().st_ino
    assert "8 unchanged" in invoke("sync", place / "index", ok=True).stdout
    assert (place / "index").stat().st_ino == before


def test_unusable_images_are_left_out(place: Path, built: Path) -> None:
    (place / "photos" / "class_0" / "0000.jpg").write_bytes(b"not an image")
    (place / "photos" / "b.jpg").write_bytes(b"")
    (place / "photos" / "film.mp4").write_bytes(b"film")
    assert_refused(
        invoke("sync", place / "index", "--max-bad-fraction", 0.1), "--max-bad-fraction", "b.jpg", "0000.jpg"
    )
    for removed in (1, 0):
        result = invoke("sync", place / "index", ok=True)
        assert result.stdout.startswith(f"0 added, 0 changed, {removed} removed, 7 unchanged, 2 left out (")
        assert "left out: b.jpg: empty" in result.stderr and "class_0/0000.jpg: not-an-image" in result.stderr
    assert_refused(invoke("sync", place / "index", "--max-bad-fraction", 0.1), "--max-bad-fraction")
    assert_as_built(place, built / "run")


def test_what_is_known_to_be_bad_is_tried_again_only_if_it_changes(
    place: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = place / "photos"
    (photos / "bad.jpg").write_bytes(b"not an image")
    (photos / "empty.jpg").write_bytes(b"")
    (photos / "nowhere.jpg").symlink_to(place / "nowhere")
    for step in ("build", "sync"):
        if step == "build":  # an index of them knows it from the start
            words = ("--model", built / "run", "--out", place / "other.index")
            result = invoke("build", photos, *words, ok=True)
            assert "left out: bad.jpg: not-an-image" in result.stderr and "8 vectors" in result.stdout
            named = invoke("info", place / "other.index", "--left-out", ok=True).stdout
            assert "empty.jpg: empty" in named and "nowhere.jpg: missing" in named
        index = place / ("other.index" if step == "build" else "index")
        invoke("sync", index, ok=True)
        os.utime(photos / "bad.jpg")  # another time, the same content
        with monkeypatch.context() as patch:
            patch.setattr(
                "sop_faiss.index.own_encoder.encoder_of_spec", lambda *_: pytest.fail("an encoder was opened")
            )
            said = invoke("sync", index, "--dry-run", ok=True).stdout
            assert "bad.jpg" not in said and said.startswith("0 to add") and "3 left out" in said
            invoke("sync", index, ok=True)
            before = (index.stat().st_ino, len(FeatureIndex.open(index)))
            invoke("sync", index, ok=True)
            assert (index.stat().st_ino, len(FeatureIndex.open(index))) == before, "nothing to do writes nothing"
        listed = invoke("sync", index, "--dry-run", "--again", ok=True).stdout
        assert "+ bad.jpg" in listed and "+ nowhere.jpg" in listed
    write_image(place / "nowhere", 11)
    write_image(photos / "bad.jpg", 12)
    assert invoke("sync", place / "index", ok=True).stdout.startswith(
        "2 added, 0 changed, 0 removed, 8 unchanged, 1 left"
    )
    assert IndexManifest.read(place / "index").dropped == {"empty": 1}
    (photos / "empty.jpg").unlink()
    invoke("sync", place / "index", ok=True)
    assert not (place / "index" / LEFT_OUT_FILE).exists()


def test_a_damaged_list_of_what_is_left_out_is_noticed(place: Path) -> None:
    (place / "photos" / "bad.jpg").write_bytes(b"not an image")
    invoke("sync", place / "index", ok=True)
    (place / "index" / LEFT_OUT_FILE).write_text("[]")
    assert_refused(invoke("sync", place / "index"), LEFT_OUT_FILE)


def test_what_the_user_removed_stays_away(place: Path, built: Path) -> None:
    photos, index = place / "photos", place / "index"
    key = FeatureIndex.open(index).ids.keys[0]
    member = FeatureIndex.open(index).ids.members[0]
    result = invoke("remove", index, key, ok=True)
    assert "--again" in result.stderr
    shutil.copytree(photos, place / "copy", copy_function=shutil.copy)  # with other times
    for folder in (photos, place / "copy", photos):
        said = invoke("sync", index, folder, ok=True).stdout
        assert (
            said.startswith("0 added, 0 changed, 0 removed")
            and "1 kept out by sop-index remove: " in said
            and "is up to date with" in said
        )
    assert "removed by you 1" in invoke("info", index, ok=True).stdout
    assert IndexManifest.read(index).dropped == {}
    assert f"+ {member}" in invoke("sync", index, "--again", "--dry-run", ok=True).stdout
    write_image(photos / member, 77)
    assert invoke("sync", index, ok=True).stdout.startswith("1 added")
    invoke("remove", index, key, ok=True)
    assert invoke("sync", index, "--again", ok=True).stdout.startswith("1 added")
    assert_as_built(place, built / "run")


def test_what_was_added_from_elsewhere_is_left_alone(place: Path, built: Path) -> None:
    photos, index = place / "photos", place / "index"
    write_image(place / "other" / "trip" / "x.jpg", 21)
    write_image(place / "other" / "trip" / "y.jpg", 22)
    (place / "other" / "z.jpg").write_bytes(b"not an image")
    result = invoke("add", index, place / "other", ok=True)
    assert "10 vectors now" in result.stdout and "not-an-image 1 left out" in result.stdout and "z.jpg" in result.stderr
    before = content(index)
    write_image(photos / "x.jpg", 23)  # whose key is taken
    (photos / "class_0" / "0001.jpg").unlink()
    said = invoke("sync", index, ok=True).stdout
    assert said.startswith("1 added, 0 changed, 1 removed, 7 unchanged, 0 left out, 2 from elsewhere")
    inode = index.stat().st_ino
    assert "8 unchanged" in invoke("sync", index, ok=True).stdout and index.stat().st_ino == inode
    after = content(index)
    for member in ("other/trip/x.jpg", "other/trip/y.jpg"):
        assert after[member] == before[member]
    assert after["photos/x.jpg"][0] == "x.jpg" and "photos/class_0/0001.jpg" not in after and len(after) == 10
    manifest = IndexManifest.read(index)
    assert manifest.folder == str(photos) and manifest.root == str(place) and manifest.dropped == {"not-an-image": 1}
    photos.rename(place / "moved")
    shutil.rmtree(place / "other")
    said = invoke("sync", index, place / "moved", ok=True).stdout
    assert said.startswith("0 added, 0 changed, 0 removed, 8 unchanged") and "2 from elsewhere" in said
    assert {member: after[f"photos/{member}"] for member in map(str, [Path("x.jpg"), Path("0000.jpg")])} == {
        member: content(index)[f"moved/{member}"] for member in ("x.jpg", "0000.jpg")
    }
    assert invoke("sync", index, "--dry-run", ok=True).stdout.startswith("0 to add, 0 to replace, 0 to remove, 8 un")


def test_a_moved_folder_is_recorded_and_not_embedded_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "photos").rename(place / "moved")
    assert_refused(invoke("sync", place / "index"), "does not exist", "stays as it is", "DIR")
    monkeypatch.setattr("sop_faiss.index.own_encoder.encoder_of_spec", lambda *_: pytest.fail("an encoder was opened"))
    assert "8 unchanged" in invoke("sync", place / "index", place / "moved", ok=True).stdout
    assert IndexManifest.read(place / "index").root == str(place / "moved")
    shutil.copytree(place / "moved", place / "copy", copy_function=shutil.copy)  # with other times
    assert "8 unchanged" in invoke("sync", place / "index", place / "copy", ok=True).stdout


def test_a_part_of_the_folder_can_be_followed(place: Path) -> None:
    assert_refused(invoke("sync", place / "index", place / "photos" / "class_0"), "5 of the 8 images", "--force")
    said = invoke("sync", place / "index", place / "photos" / "class_0", "--force", ok=True).stdout
    assert said.startswith("0 added, 0 changed, 5 removed, 3 unchanged")
    said = invoke("sync", place / "index", place / "photos", ok=True).stdout
    assert said.startswith("5 added, 0 changed, 0 removed, 3 unchanged")


def test_an_empty_folder_does_not_empty_the_index(place: Path) -> None:
    shutil.rmtree(place / "photos")
    (place / "photos").mkdir()
    for words in ((), ("--force",), ("--dry-run",)):
        assert_refused(invoke("sync", place / "index", *words), "is empty", "stays as it is")
    write_image(place / "photos" / "other.jpg", 3)
    assert_refused(invoke("sync", place / "index"), "8 of the 8 images", "--force")
    assert len(FeatureIndex.open(place / "index")) == 8
    assert "1 added, 0 changed, 8 removed" in invoke("sync", place / "index", "--force", ok=True).stdout
    (place / "photos" / "other.jpg").write_bytes(b"not an image")
    result = invoke("sync", place / "index", "--max-bad-fraction", 1)
    assert_refused(result, "no image would be left")
    assert len(FeatureIndex.open(place / "index")) == 1


def test_heic_photos_are_not_dropped_where_they_cannot_be_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    photo = Image.fromarray(make_image(np.random.default_rng(3), (64, 64)))
    pillow_heif.from_pillow(photo).save(place / "photos" / "phone.heic")
    invoke("sync", place / "index", ok=True)
    before = content(place / "index")
    monkeypatch.setattr(index_sync, "READS_HEIF", False)
    monkeypatch.setattr(listing, "IMAGE_SUFFIXES", tuple(set(listing.IMAGE_SUFFIXES) - set(HEIF_SUFFIXES)))
    assert_refused(invoke("sync", place / "index"), "phone.heic", "sop-faiss[heic]")
    assert content(place / "index") == before


def test_what_is_not_a_folder_is_refused(built: Path, tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", classes=2, per_class=3)
    listed = tmp_path / "list.txt"
    listed.write_text("\n".join(str(path) for path in sorted((built / "photos").rglob("*.jpg"))))
    for source, message in ((tmp_path / "shards", "shards"), (listed, "which folder it follows")):
        invoke("build", source, "--model", built / "run", "--out", tmp_path / f"{source.stem}.index", ok=True)
        assert_refused(invoke("sync", tmp_path / f"{source.stem}.index"), message, "sop-index add")
    assert_refused(invoke("sync", tmp_path / "list.index", tmp_path / "shards"), "holds shards")
    assert "8 unchanged" in invoke("sync", tmp_path / "list.index", built / "photos", ok=True).stdout
    assert shards


def test_a_graph_cannot_lose_rows_but_grow(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built / "photos", tmp_path / "photos")
    words = ("--model", built / "run", "--factory", "HNSW8", "--out", tmp_path / "index")
    invoke("build", tmp_path / "photos", *words, ok=True)
    write_image(tmp_path / "photos" / "new.jpg", 4)
    assert "1 added" in invoke("sync", tmp_path / "index", ok=True).stdout
    (tmp_path / "photos" / "new.jpg").unlink()
    assert_refused(invoke("sync", tmp_path / "index"), "HNSW8 cannot lose rows")


def test_an_index_without_states_gets_them(place: Path, built: Path) -> None:
    """As one of a feature store, or of an earlier version: what is there counts as unchanged."""
    shutil.rmtree(place / "index")
    from sop_faiss.data.images.source import open_source
    from sop_faiss.features.extract import extract_features

    store = extract_features(load_encoder(str(built / "run")), open_source(place / "photos"))
    store.write(place / "features")
    invoke("build", "--features", place / "features", "--out", place / "index", ok=True)
    assert not (place / "index" / STATES_FILE).exists()
    write_image(place / "photos" / "new.jpg", 5)
    assert invoke("sync", place / "index", ok=True).stdout.startswith("1 added, 0 changed, 0 removed, 8 unchanged")
    write_image(place / "photos" / "0000.jpg", 6)
    assert invoke("sync", place / "index", ok=True).stdout.startswith("0 added, 1 changed, 0 removed, 8 unchanged")
    shutil.rmtree(place / "features")
    assert_as_built(place, built / "run")


def test_a_kill_before_the_exchange_changes_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_image(place / "photos" / "new.jpg", 7)
    (place / "photos" / "class_0" / "0000.jpg").unlink()
    before = content(place / "index")
    encoded: list[int] = []

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("sop_faiss.files._put_in_place", killed)
        with pytest.raises(Killed):
            invoke("sync", place / "index")
    assert content(place / "index") == before and (place / "index.partial").is_dir()
    monkeypatch.setattr("sop_faiss.features.extract.features_of_batch", lambda *_: encoded.append(1))
    assert invoke("sync", place / "index", ok=True).stdout.startswith("1 added, 0 changed, 1 removed")
    assert not encoded, "the features were kept"
    assert not (place / "index.partial").exists()


def test_under_torchrun_it_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_refused(invoke("sync", place / "index"), "torchrun")


# add --skip-existing


def test_existing_images_are_skipped(place: Path) -> None:
    write_image(place / "photos" / "one_more.jpg", 8)
    assert_refused(invoke("add", place / "index", place / "photos"), "--skip-existing")
    for number, count in ((1, 8), (0, 9)):
        said = invoke("add", place / "index", place / "photos", "--skip-existing", ok=True).stdout
        assert said.startswith(f"{number} added, {count} skipped that were there already: 9 vectors now")
    write_image(place / "photos" / "one_more.jpg", 9)
    result = invoke("add", place / "index", "--data", place / "photos", "--skip-existing")
    assert_refused(result, "1 keys", "another content", "one_more")
    invoke("sync", place / "index", ok=True)
    assert_refused(invoke("add", place / "index", "--features", place, "--skip-existing"), "--skip-existing")


def test_existing_images_of_shards_are_skipped(built: Path, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", classes=2, per_class=3)
    invoke("build", tmp_path / "shards", "--model", built / "run", "--out", tmp_path / "index", ok=True)
    said = invoke("add", tmp_path / "index", tmp_path / "shards", "--skip-existing", ok=True).stdout
    assert said.startswith("0 added, 6 skipped")
