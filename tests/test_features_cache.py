from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load, save

from sop_faiss.cli.embed import main  # type: ignore[import-not-found]
from sop_faiss.data.images.source import open_source
from sop_faiss.errors import FeatureError
from sop_faiss.features import cache as cache_module
from sop_faiss.features.cache import FeatureCache, kept_until_whole, remove_cache
from sop_faiss.features.extract import ExtractionOptions, extract_features
from sop_faiss.features.store import FeatureStore
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import load_encoder
from tests.encoders import write_run
from tests.images import encode, make_image, write_folder
from tests.messages import command_fails

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "photos")


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images went through an encoder, batch by batch."""
    counts: list[int] = []
    forward = Encoder.forward

    def counted(self: Encoder, images: torch.Tensor) -> torch.Tensor:
        counts.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(Encoder, "forward", counted)
    return counts


def encoder_with(run: Path, cache: Path | None, **options: Any) -> Encoder:
    return load_encoder(str(run), cache=cache, **options)


def extract(run: Path, photos: Path, cache: Path | None, **options: Any) -> FeatureStore:
    return extract_features(encoder_with(run, cache, **options), open_source(photos), ExtractionOptions(batch_size=5))


def test_second_time_nothing_is_encoded(run: Path, tmp_path: Path, encoded: list[int]) -> None:
    photos = write_folder(tmp_path / "photos")
    first = extract(run, photos, tmp_path / "cache")
    probes = 1  # an encoder looks at one black image when it is loaded
    assert sum(encoded) == 12 + probes
    encoded.clear()
    again = extract(run, photos, tmp_path / "cache")
    assert sum(encoded) == probes
    assert np.array_equal(first.features, again.features)
    assert first.manifest == again.manifest
    plain = extract(run, photos, None)
    np.testing.assert_allclose(again.features, plain.features, atol=TOLERANCE)


def test_changed_and_added_images_are_encoded(run: Path, tmp_path: Path, encoded: list[int]) -> None:
    photos = write_folder(tmp_path / "photos")
    extract(run, photos, tmp_path / "cache")
    changed = photos / "class_1" / "0002.jpg"
    status = changed.stat()
    other = encode(make_image(np.random.default_rng(99)), quality=50)
    changed.write_bytes(other.ljust(status.st_size, b"\0"))
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert changed.stat().st_size == status.st_size  # nothing but the content tells
    (photos / "class_0" / "9999.jpg").write_bytes(encode(make_image(np.random.default_rng(97))))
    encoded.clear()
    store = extract(run, photos, tmp_path / "cache")
    assert sum(encoded) == 2 + 1
    np.testing.assert_allclose(store.features, extract(run, photos, None).features, atol=TOLERANCE)


def test_same_images_elsewhere_are_at_hand(run: Path, tmp_path: Path, encoded: list[int]) -> None:
    extract(run, write_folder(tmp_path / "photos"), tmp_path / "cache")
    encoded.clear()
    (tmp_path / "moved").mkdir()
    for number, image in enumerate(sorted((tmp_path / "photos").rglob("*.jpg"), reverse=True)):
        shutil.copy(image, tmp_path / "moved" / f"{number:02d}.jpg")
    store = extract(run, tmp_path / "moved", tmp_path / "cache")
    assert sum(encoded) == 1
    np.testing.assert_allclose(store.features, extract(run, tmp_path / "moved", None).features, atol=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {"pooling": "mean"},
        {"size": 48},
        {"student": True},
        {"scales": (1.0, 0.5)},
        {"mirrored": True},
        {"mean": (0.1, 0.1, 0.1)},
    ],
)
def test_other_features_are_never_read(run: Path, tmp_path: Path, encoded: list[int], options: dict[str, Any]) -> None:
    photos = write_folder(tmp_path / "photos")
    extract(run, photos, tmp_path / "cache")
    encoded.clear()
    store = extract(run, photos, tmp_path / "cache", **options)
    assert sum(encoded) >= 12
    np.testing.assert_allclose(store.features, extract(run, photos, None, **options).features, atol=TOLERANCE)


def test_damaged_part_is_left_out(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    photos = write_folder(tmp_path / "photos")
    first = extract(run, photos, tmp_path / "cache")
    (part,) = (tmp_path / "cache").rglob("part-*.safetensors")
    content = bytearray(part.read_bytes())
    content[-3] ^= 1  # within a feature
    part.write_bytes(content)
    again = extract(run, photos, tmp_path / "cache")
    assert "is damaged and left out" in caplog.text
    np.testing.assert_allclose(first.features, again.features, atol=TOLERANCE)


def test_parts_of_version_0_1_are_read(run: Path, tmp_path: Path, encoded: list[int]) -> None:
    photos = write_folder(tmp_path / "photos")
    first = extract(run, photos, tmp_path / "cache")
    (part,) = (tmp_path / "cache").rglob("part-*.safetensors")
    tensors = load(part.read_bytes())
    content = save({"pictures": tensors["images"], "features": tensors["features"]})
    part.unlink()
    part.with_name(f"part-{hashlib.sha256(content).hexdigest()}.safetensors").write_bytes(content)
    encoded.clear()
    again = extract(run, photos, tmp_path / "cache")
    assert sum(encoded) == 1  # the black image of loading
    assert np.array_equal(first.features, again.features)


def test_cache_of_another_key_is_refused(run: Path, tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos")
    extract(run, photos, tmp_path / "cache")
    (key_file,) = (tmp_path / "cache").rglob("key.json")
    key_file.write_text(json.dumps({**json.loads(key_file.read_text()), "pooling": "mean"}))
    with pytest.raises(FeatureError, match="of another encoder"):
        extract(run, photos, tmp_path / "cache")
    key_file.write_text("{")
    with pytest.raises(FeatureError, match=r"cannot be read as JSON.*once the folder .* is removed, its images are"):
        extract(run, photos, tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("features-00000.parquet", "a feature store"),
        ("manifest.json", "a feature store, an index or a folder of shards"),
        ("config.yaml", "a run"),
        ("state.json", "a checkpoint"),
        ("step_00000003", "the checkpoints of a run"),
        ("index.faiss", "an index"),
        ("photos-000000.tar", "a folder of shards"),
        ("key.json", "one part of a cache"),
    ],
)
def test_directory_of_something_else_is_no_cache(run: Path, tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / name).write_text("")
    with pytest.raises(FeatureError, match=f"is {what}, so features are not written into it"):
        extract(run, write_folder(tmp_path / "photos"), tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [name]


def test_parts_are_written_as_they_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "PART_ROWS", 4)
    cache = FeatureCache(tmp_path / "c", {"format": "x"}, 2)
    for number in range(6):
        cache.add([bytes([number]) * 32], np.full((1, 2), number, np.float32))
    assert len(list((tmp_path / "c").glob("part-*"))) == 1
    cache.flush()
    reread = FeatureCache(tmp_path / "c", {"format": "x"}, 2)
    assert len(reread) == 6
    for number in range(6):
        found = reread.find(bytes([number]) * 32)
        assert found is not None and found.tolist() == [number, number]
    assert reread.find(bytes(32 * [77])) is None


def test_only_what_is_a_caches_is_removed(tmp_path: Path, run: Path) -> None:
    extract(run, write_folder(tmp_path / "photos"), tmp_path / "cache")
    (tmp_path / "cache" / "mine.txt").write_text("mine")
    remove_cache(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["mine.txt"]
    (tmp_path / "cache" / "mine.txt").unlink()
    remove_cache(tmp_path / "cache")
    remove_cache(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


# multi-scale


@pytest.mark.parametrize("mirrored", [False, True])
def test_scales_and_the_mirrored_image_add_up_unit_norm_features(run: Path, tmp_path: Path, mirrored: bool) -> None:
    photos = open_source(write_folder(tmp_path / "photos"))
    encoder = load_encoder(str(run), scales=(1.0, 0.5), mirrored=mirrored)
    found = extract_features(encoder, photos).features
    total = np.zeros_like(found)
    for position in range(len(photos)):
        pixels = torch.from_numpy(encoder.preprocess.apply(np.asarray(_decoded(photos.read(position)))))
        images = encoder.preprocess.normalize(pixels.unsqueeze(0))
        small = torch.nn.functional.interpolate(images, scale_factor=0.5, mode="bilinear", align_corners=False)
        for seen in (images, small, *((images.flip(3), small.flip(3)) if mirrored else ())):
            with torch.no_grad():
                total[position] += torch.nn.functional.normalize(encoder(seen), dim=1)[0].numpy()
    total /= np.linalg.norm(total, axis=1, keepdims=True)
    np.testing.assert_allclose(found, total, atol=TOLERANCE)


def _decoded(content: bytes) -> np.ndarray:
    from sop_faiss.data.images.decode import decode_image

    return decode_image(content)


def test_scales_travel_and_a_single_one_goes_without_saying(run: Path, tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", classes=0, per_class=2)
    assert extract(run, photos, None, scales=(1.0, 0.7071)).manifest["preprocess"]["scales"] == [1.0, 0.7071]
    plain = encoder_with(run, None, scales=(1.0,)).preprocess
    assert extract(run, photos, None, mirrored=True).manifest["preprocess"]["mirrored"] is True
    assert not {"scales", "mirrored"} & set(plain.to_dict()) and plain == encoder_with(run, None).preprocess
    several = replace(plain, scales=(1.0, 0.5), mirrored=True)
    assert type(several).from_dict(several.to_dict()) == several


# the command


def embed(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stderr


def test_command_takes_what_is_at_hand(
    run: Path, tmp_path: Path, encoded: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    photos = write_folder(tmp_path / "photos")
    where = ["--model", run, "--data", photos, "--cache", tmp_path / "cache"]
    embed(*where, "--out", tmp_path / "one")
    encoded.clear()
    embed(*where, "--whiten", photos, "--whiten-dim", 3, "--out", tmp_path / "two")
    assert sum(encoded) == 1
    assert "holds 12 features of this encoder" in caplog.text
    assert FeatureStore.read(tmp_path / "two").features.shape == (12, 3)


def test_mistakes_are_one_line(run: Path, tmp_path: Path) -> None:
    where = ["--model", run, "--data", write_folder(tmp_path / "photos"), "--out", tmp_path / "f"]
    (tmp_path / "file").write_text("")
    assert "is a file: name a directory" in command_fails(main, *where, "--cache", tmp_path / "file")
    assert "wanted 1 to 16 different numbers" in command_fails(main, *where, "--scales", "1,1")
    assert "wanted 1 to 16 different numbers" in command_fails(main, *where, "--scales", "1,nan")
    assert CliRunner().invoke(main, [*map(str, where), "--scales", "a"]).exit_code == 2
    assert not (tmp_path / "f").exists()


def test_interrupted_command_goes_on(
    run: Path, tmp_path: Path, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = write_folder(tmp_path / "photos")
    where = ["--model", run, "--data", photos, "--batch-size", 2, "--out", tmp_path / "f"]
    counted = Encoder.forward

    def interrupted(self: Encoder, images: torch.Tensor) -> torch.Tensor:
        if sum(encoded) >= 1 + 6:
            raise KeyboardInterrupt
        return counted(self, images)

    monkeypatch.setattr(Encoder, "forward", interrupted)
    assert CliRunner().invoke(main, [str(word) for word in where]).exit_code == 130
    assert not (tmp_path / "f").exists()
    monkeypatch.setattr(Encoder, "forward", counted)
    encoded.clear()
    embed(*where)
    assert sum(encoded) == 1 + 6
    np.testing.assert_allclose(
        FeatureStore.read(tmp_path / "f").features, extract(run, photos, None).features, atol=1e-5
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "photos"]


SLOWLY = """
import sys, time
import sop_faiss.features.cache as cache, sop_faiss.model.encoders.encoder as encoder
cache.PART_ROWS = 3
forward = encoder.Encoder.forward
encoder.Encoder.forward = lambda self, images: (time.sleep(0.15), forward(self, images))[1]
from sop_faiss.cli.embed import main
main()
"""


@pytest.mark.slow
def test_killed_command_goes_on(
    run: Path, tmp_path: Path, encoded: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    photos = write_folder(tmp_path / "photos", classes=5, per_class=10)
    where = ["--model", str(run), "--data", str(photos), "--batch-size", "2", "--out", str(tmp_path / "f")]
    process = subprocess.Popen([sys.executable, "-c", SLOWLY, *where], stderr=subprocess.DEVNULL)
    parts = tmp_path / "f.partial"
    while process.poll() is None and len(list(parts.rglob("part-*"))) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was done before it was killed"
    assert not (tmp_path / "f").exists()
    embed(*where)
    assert "its images are not encoded again" in caplog.text
    assert 0 < sum(encoded) - 1 < 50
    plain = extract(run, photos, None)
    np.testing.assert_allclose(FeatureStore.read(tmp_path / "f").features, plain.features, atol=TOLERANCE)
    assert not parts.exists()


def test_a_file_in_the_place_of_unfinished_features_stays(run: Path, tmp_path: Path) -> None:
    encoder, message = load_encoder(str(run)), r"f.partial .* until .*f is complete, but it is a file: move"
    (tmp_path / "f.partial").write_text("mine")
    with pytest.raises(FeatureError, match=message), kept_until_whole(encoder, tmp_path / "f"):
        pytest.fail("not reached")
    assert (tmp_path / "f.partial").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_give_what_one_gives(run: Path, tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", per_class=5)
    (photos / "class_1" / "0001.jpg").write_bytes(b"")
    options = ["--model", str(run), "--data", str(photos), "--max-bad-fraction", "0.1", "--device", "cpu"]
    embed(*options, "--out", tmp_path / "one")
    launched = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*launched, "-m", "sop_faiss.cli.embed", *options, "--out", str(tmp_path / "two")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("14 features of dimension 32 in ") and done.stdout.count("\n") == 1
    one, two = FeatureStore.read(tmp_path / "one"), FeatureStore.read(tmp_path / "two")
    assert one.keys == two.keys and np.array_equal(one.labels, two.labels)  # type: ignore[arg-type]
    np.testing.assert_allclose(one.features, two.features, atol=TOLERANCE)
    assert one.manifest["dropped"] == two.manifest["dropped"]
    assert not (tmp_path / "two.partial").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_error_of_any_rank_is_told_once(run: Path, tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", classes=0, per_class=6)
    (photos / "0001.jpg").write_bytes(b"")  # rank 1 meets it
    launched = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    where = ["--model", str(run), "--data", str(photos), "--device", "cpu", "--out", str(tmp_path / "f")]
    done = subprocess.run([*launched, "-m", "sop_faiss.cli.embed", *where], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.count("error: ") == 1 and "1 of 6 images are unusable" in done.stderr
    assert not (tmp_path / "f").exists()
