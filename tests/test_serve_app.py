"""The endpoints of sop-index serve, without a network: right answers, bounds, and refusals in one line."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from PIL import Image
from starlette.testclient import TestClient

from sop_faiss.data.images.source import open_source
from sop_faiss.errors import ConfigError, DataError, IndexMismatchError
from sop_faiss.features.extract import extract_features
from sop_faiss.features.store import FeatureStore
from sop_faiss.index.build import IndexOptions, build_index
from sop_faiss.index.change import remove_from_index
from sop_faiss.index.images import index_images
from sop_faiss.index.rerank.settings import TokenSettings
from sop_faiss.index.rerank.token_store import write_tokens
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.write_parts import write_parts
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import load_encoder
from sop_faiss.serve import work_queue
from sop_faiss.serve.app import create_app
from sop_faiss.serve.options import ServeOptions
from sop_faiss.serve.refused import Refused
from sop_faiss.serve.responses import answer_problems_in_one_line
from sop_faiss.serve.searcher import QueryImage, Searcher, Wanted
from tests.images import encode, make_image
from tests.servers_of_indices import write_served

STREAM = {"Content-Type": "application/octet-stream"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, 3 x 12 images in class folders, and an index of them."""
    return write_served(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def encoder(place: Path) -> Encoder:
    return load_encoder(str(place / "run"))


@pytest.fixture(scope="module")
def client(place: Path, encoder: Encoder) -> Iterator[TestClient]:
    app = create_app(FeatureIndex.open(place / "index"), encoder)
    with TestClient(app, base_url="http://127.0.0.1") as opened:
        yield opened


def client_of(place: Path, encoder: Encoder | None = None, **options: Any) -> TestClient:
    app = create_app(FeatureIndex.open(place / "index"), encoder, ServeOptions(**options))
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)


def assert_refused(answer: Any, status: int, message: str) -> None:
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"] and message in answer.json()["error"]
    assert "\n" not in answer.json()["error"] and "Traceback" not in answer.text


def by_brute_force(index: FeatureIndex, query: np.ndarray, rows: list[int]) -> list[tuple[int, float]]:
    """All of these rows by falling similarity, then by rising row."""
    features = index.features(range(len(index))).astype(np.float64)
    return sorted(((row, float(features[row] @ query)) for row in rows), key=lambda each: (-each[1], each[0]))


def assert_found(found: list[dict[str, Any]], wanted: list[tuple[int, float]]) -> None:
    np.testing.assert_allclose([each["similarity"] for each in found], [each[1] for each in wanted], atol=1e-6)
    for place, each in enumerate(found):  # rows within 1e-6 of each other may change places
        assert each["rank"] == place + 1
        assert any(row == each["row"] and abs(value - each["similarity"]) < 2e-6 for row, value in wanted)
    assert len({each["row"] for each in found}) == len(found)


# answers


def test_what_is_served(client: TestClient, place: Path) -> None:
    facts = client.get("/api/index").json()
    assert facts["images"] == 36 and facts["factory"] == "Flat" and facts["accepts_images"] is True
    assert facts["labels"] == [{"name": f"class_{label}", "images": 12} for label in range(3)]
    assert facts["name"] == "index" and str(place) not in json.dumps(facts)  # no folder of the server is told


def test_search_by_key_is_brute_force_over_the_others(client: TestClient, place: Path) -> None:
    index = FeatureIndex.open(place / "index")
    for row in (0, 17, 35):
        answer = client.get("/api/search", params={"key": index.ids.keys[row], "k": 9}).json()
        query = index.features([row])[0].astype(np.float64)
        assert_found(answer["found"], by_brute_force(index, query, [each for each in range(36) if each != row])[:9])
        assert answer["query"]["row"] == row and answer["query"]["label"] == f"class_{row // 12}"
        assert all(each["key"] == index.ids.keys[each["row"]] for each in answer["found"])
        assert all(each["label"] == f"class_{each['row'] // 12}" for each in answer["found"])


def test_search_by_a_sent_image(client: TestClient, place: Path) -> None:
    index = FeatureIndex.open(place / "index")
    for row in (3, 20):
        encoded = (place / "photos" / index.ids.members[row]).read_bytes()
        for kind in ("application/octet-stream", "image/jpeg"):
            answer = client.post("/api/search?k=5", content=encoded, headers={"Content-Type": kind}).json()
            query = index.features([row])[0].astype(np.float64)
            assert_found(answer["found"], by_brute_force(index, query, list(range(36)))[:5])
            assert answer["found"][0]["row"] == row and answer["query"] is None


@pytest.mark.parametrize("size", [32, 96], ids=["no border cropped", "a border cropped"])
def test_a_sent_image_is_seen_as_the_index_saw_it(place: Path, tmp_path: Path, size: int) -> None:
    """Resized and cropped once: an image of the index that is sent is as near to itself as can be."""
    other = load_encoder(str(place / "run"), size=size)
    assert (other.preprocess.resize > other.preprocess.crop) == (size == 96)
    build_index(extract_features(other, open_source(place / "photos")), tmp_path / "index")
    with client_of(tmp_path, other) as client:
        for row, photo in enumerate(sorted((place / "photos").rglob("*.*"))[:12]):
            found = client.post("/api/search?k=1", content=photo.read_bytes(), headers=STREAM).json()["found"]
            assert found[0]["row"] == row and found[0]["similarity"] == pytest.approx(1, abs=1e-6)


def test_more_than_there_are(client: TestClient) -> None:
    key = client.get("/api/images").json()["images"][0]["key"]
    assert len(client.get("/api/search", params={"key": key, "k": 500}).json()["found"]) == 35
    photo = encode(make_image(np.random.default_rng(5)))
    assert len(client.post("/api/search?k=500", content=photo, headers=STREAM).json()["found"]) == 36


@pytest.mark.parametrize("factory", ["Flat", "IVF3,Flat"])
def test_label_and_threshold(tmp_path: Path, factory: str) -> None:
    """A search of a label finds what brute force does."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(300, 8)).astype(np.float32)
    features[40] = features[50]  # a tie
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    labels = rng.integers(-1, 4, 300)
    names = [f"p{row}" for row in range(300)]
    made_by = {"encoder": {"name": "n", "fingerprint": "f"}, "preprocess": {}, "pooling": "cls", "root": str(tmp_path)}
    build_index(
        FeatureStore(names, labels, [""] * 300, names, features, made_by), tmp_path / "index", IndexOptions(factory)
    )
    index = FeatureIndex.open(tmp_path / "index")
    if factory != "Flat":
        index._vectors.search_setting = 3  # type: ignore[union-attr]  # looks at all: exact
    served = Searcher(index, None)
    assert index.ids.labels is not None
    for row in range(0, 300, 23):
        for label in range(4):
            rows = [each for each in np.flatnonzero(index.ids.labels == label).tolist() if each != row]
            query = index.features([row])[0].astype(np.float64)
            wanted = by_brute_force(index, query, rows)
            for k, least in ((7, None), (500, None), (500, 0.3)):
                hits = served.find(Wanted(k, str(label), least), [QueryImage(row)])
                expected = [each for each in wanted if least is None or each[1] >= least][:k]
                assert_found(
                    [{"rank": place + 1, **dataclasses.asdict(hit)} for place, hit in enumerate(hits)], expected
                )


def test_an_index_of_one_image(tmp_path: Path) -> None:
    made_by = {"encoder": {"name": "n", "fingerprint": "f"}, "preprocess": {}, "pooling": "cls", "root": str(tmp_path)}
    build_index(FeatureStore(["a"], None, [""], ["a.jpg"], np.eye(1, 3, dtype=np.float32), made_by), tmp_path / "index")
    with client_of(tmp_path) as client:
        assert client.get("/api/search?key=a").json()["found"] == []
        assert client.get("/api/index").json()["labels"] == []
        assert_refused(client.get("/api/search?key=a&label=x"), 404, "no image of the index has this label")
        assert [each["key"] for each in client.get("/api/images?mixed=true").json()["images"]] == ["a"]


def test_looking_through_the_index(client: TestClient) -> None:
    for mixed in ("false", "true"):
        rows = []
        for offset in range(0, 48, 7):
            page = client.get("/api/images", params={"offset": offset, "limit": 7, "mixed": mixed}).json()
            assert page["total"] == 36
            rows += [each["row"] for each in page["images"]]
        assert sorted(rows) == list(range(36)) and (rows == sorted(rows)) == (mixed == "false")
    page = client.get("/api/images?label=class_1").json()
    assert page["total"] == 12 and [each["row"] for each in page["images"]] == list(range(12, 24))


def test_what_is_known_of_an_image(client: TestClient, place: Path, encoder: Encoder, tmp_path: Path) -> None:
    file = place / "photos" / "class_1" / "0001.jpg"
    details = client.get("/api/images/13").json()
    assert details["path"] == "class_1/0001.jpg" and details["folder"] == "class_1" and details["folder_images"] == 12
    with Image.open(file) as image:
        assert (details["width"], details["height"]) == image.size
    assert details["file_bytes"] == file.stat().st_size and details["label"] == "class_1"
    with client_of(place, images_root=tmp_path) as moved:
        lost = moved.get("/api/images/13").json()
    assert lost["path"] == "class_1/0001.jpg" and lost["width"] is lost["height"] is lost["file_bytes"] is None
    assert str(tmp_path) not in json.dumps(lost) and str(place) not in json.dumps(details)
    assert_refused(client.get("/api/images/36"), 404, "the index has 36 images")


def test_only_a_folder(client: TestClient, place: Path) -> None:
    index = FeatureIndex.open(place / "index")
    page = client.get("/api/images", params={"folder": "class_2", "limit": 5}).json()
    assert page["total"] == 12 and [each["row"] for each in page["images"]] == list(range(24, 29))
    for label, rows in ((None, range(24, 36)), ("class_2", range(24, 36)), ("class_1", ())):
        wanted = {"key": index.ids.keys[24], "k": 50, "folder": "class_2"} | ({} if label is None else {"label": label})
        answer = client.get("/api/search", params=wanted).json()
        query = index.features([24])[0].astype(np.float64)
        assert_found(answer["found"], by_brute_force(index, query, [row for row in rows if row != 24]))
        assert answer["folder"] == "class_2"
    for folder in ("", "class", "class_2/", "../photos", "\0"):  # the top folder has no images of its own
        assert_refused(client.get("/api/images", params={"folder": folder}), 404, "folder")
        assert_refused(client.get("/api/search", params={"key": index.ids.keys[0], "folder": folder}), 404, "folder")


def test_thumbnails_are_small_jpegs_of_the_right_image(client: TestClient, place: Path) -> None:
    index = FeatureIndex.open(place / "index")
    for row in (0, 13):
        address = client.get("/api/images", params={"offset": row, "limit": 1}).json()["images"][0]["thumbnail"]
        answer = client.get(address)
        assert answer.headers["content-type"] == "image/jpeg" and "immutable" in answer.headers["cache-control"]
        ours = np.asarray(Image.open(io.BytesIO(answer.content)), np.int64)
        theirs = np.asarray(Image.open(place / "photos" / index.ids.members[row]).convert("RGB"), np.int64)
        assert np.abs(ours - theirs).mean() < 3
        assert client.get(address).content == answer.content
    assert client.get("/api/images/0/thumbnail").headers["cache-control"] == "no-cache"
    for address in ("/api/images/0/thumbnail?version=old", "/api/images/0?version=old"):  # the row may be another image
        assert_refused(client.get(address), 404, "has changed")


def test_an_index_that_is_replaced_is_served(place: Path, encoder: Encoder, tmp_path: Path, caplog: Any) -> None:
    directory = Path(shutil.copytree(place / "index", tmp_path / "index"))
    app = create_app(FeatureIndex.open(directory), encoder)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        before, images = client.get("/api/index").json(), client.get("/api/images").json()["images"]
        remove_from_index(directory, [images[0]["key"]])
        after = client.get("/api/index").json()
        assert (before["images"], after["images"]) == (36, 35) and after["version"] != before["version"]
        listed = client.get("/api/images").json()["images"]
        assert [image["key"] for image in listed] == [image["key"] for image in images[1:]]
        found = client.get("/api/search", params={"key": images[1]["key"], "k": 50}).json()["found"]
        assert len(found) == 34 and images[0]["key"] not in {image["key"] for image in found}
        assert client.get(images[0]["thumbnail"]).status_code == 404  # row 0 is another image now
        assert client.get(listed[0]["thumbnail"]).status_code == 200
        (directory / "manifest.json").write_text("{}")
        assert client.get("/api/index").json() == after and "start again" in caplog.text
        shutil.rmtree(directory)
        assert client.get("/api/index").json() == after


def test_parts_and_tokens_that_are_made_meanwhile_are_served(place: Path, encoder: Encoder, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(place / "index", tmp_path / "index"))
    index = FeatureIndex.open(directory)
    with TestClient(create_app(index, encoder), base_url="http://127.0.0.1") as client:
        before = client.get("/api/index").json()
        assert before["has_parts"] is False and "local" not in before["rerank"]
        write_parts(index, encoder, index_images(index), [2])
        after = client.get("/api/index").json()
        assert after["has_parts"] is True and after["version"] == before["version"]
        write_tokens(index, encoder, index_images(index), TokenSettings(32))
        assert "local" in client.get("/api/index").json()["rerank"]


# refusals


def test_images_are_reached_by_row_alone(client: TestClient) -> None:
    assert_refused(client.get("/api/images/36/thumbnail"), 404, "the index has 36 images")
    assert_refused(client.get("/api/images/-1/thumbnail"), 422, "row")
    assert_refused(client.get("/api/images/class_0%2F0000.jpg/thumbnail"), 404, "Not Found")
    assert_refused(client.get("/api/images/..%2f..%2fetc%2fpasswd"), 404, "Not Found")
    assert_refused(client.get("/page.py"), 404, "Not Found")


def test_a_lost_image_is_told_without_its_place(place: Path, encoder: Encoder, tmp_path: Path) -> None:
    with client_of(place, images_root=tmp_path) as client:
        answer = client.get("/api/images/0/thumbnail")
        assert_refused(answer, 404, "cannot be shown: missing")
        assert str(tmp_path) not in answer.text


def test_bad_parameters(client: TestClient) -> None:
    key = client.get("/api/images").json()["images"][0]["key"]
    for wrong in ({"k": 0}, {"k": 501}, {"k": "x"}, {"threshold": 1.1}, {"threshold": "nan"}):
        assert_refused(client.get("/api/search", params={"key": key, **wrong}), 422, f"{next(iter(wrong))}: ")
    assert_refused(client.get("/api/search"), 422, "key: Field required")
    assert_refused(client.get("/api/search?key=nobody"), 404, "no image of the index has this key")
    assert_refused(client.get("/api/search", params={"key": key, "label": "none"}), 404, "has this label")
    refused = client.delete("/api/search")
    assert_refused(refused, 405, "Method Not Allowed")
    assert refused.headers["allow"] == "GET, POST"


def test_bad_images(place: Path, encoder: Encoder) -> None:
    good = encode(make_image(np.random.default_rng(0), 64))
    cases = [
        (b"", 400, "empty: "),
        (good[: len(good) // 2], 400, "truncated: "),
        (b"not an image", 415, "not-an-image: "),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", 415, "not-an-image: "),
        (encode(Image.new("1", (300, 300)), "PNG"), 413, "too-many-pixels: 300 x 300"),
        (encode(Image.new("1", (1, 60_000)), "PNG"), 413, "elongated: 1 x 60000"),
        (b"\xff\xd8" + bytes(99_000), 413, "too-large: "),
    ]
    with client_of(place, encoder, max_upload_bytes=50_000, max_upload_pixels=80_000) as client:
        for body, status, message in cases:
            assert_refused(client.post("/api/search", content=body, headers=STREAM), status, message)
            chunks = iter([body[:100], body[100:]])  # without Content-Length
            assert_refused(client.post("/api/search", content=chunks, headers=STREAM), status, message)
        for kind in ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", ""):
            headers = {"Content-Type": kind}
            assert_refused(client.post("/api/search", content=good, headers=headers), 415, "octet-stream")
        assert_refused(client.post("/api/search?label=none", content=good, headers=STREAM), 404, "label")
        assert client.post("/api/search?k=1", content=good, headers=STREAM).status_code == 200


def test_without_an_encoder_only_the_index_is_searched(place: Path) -> None:
    with client_of(place) as client:
        assert client.get("/api/index").json()["accepts_images"] is False
        assert_refused(client.post("/api/search", content=b"x", headers=STREAM), 409, "without an encoder")
        key = client.get("/api/images").json()["images"][0]["key"]
        assert len(client.get("/api/search", params={"key": key}).json()["found"]) == 24


def test_another_encoder_is_refused(place: Path, tmp_path: Path) -> None:
    other = load_encoder(str(place / "run"), student=True)
    with pytest.raises(IndexMismatchError, match="fingerprint"):
        create_app(FeatureIndex.open(place / "index"), other)


def test_a_failure_of_ours_tells_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret /home/someone")

    with client_of(place) as client:
        key = client.get("/api/images").json()["images"][0]["key"]
        monkeypatch.setattr(Searcher, "find", fail)
        answer = client.get("/api/search", params={"key": key})
        assert_refused(answer, 500, "log")
        assert "secret" not in answer.text and answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/page.js", "/part.js", "/query.js", "/results.js", "/viewer.js"),
        *("/page.css", "/viewer.css", "/page.svg"),
        *("/docs", "/openapi.json", "/api/index", "/nothing"),
    ],
)
def test_security_headers(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == (404 if path == "/nothing" else 200)
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["x-frame-options"] == "DENY"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert "http://" not in answer.text.replace("http://www.w3.org", "").replace("http://127.0.0.1", "")
    assert "https://" not in answer.text


def test_a_foreign_name_for_this_machine_is_refused(place: Path) -> None:
    local, open_to_all = client_of(place), client_of(place, host="0.0.0.0")
    for host in ("localhost", "localhost:8000", "127.0.0.1:80", "[::1]:8000"):
        assert local.get("/api/index", headers={"Host": host}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "[::2]", ""):
        assert_refused(local.get("/api/index", headers={"Host": host}), 400, "this machine only")
    assert open_to_all.get("/api/index", headers={"Host": "shop.example"}).status_code == 200


def test_what_arrives_too_late_is_not_waited_for_any_longer() -> None:
    app = FastAPI()
    answer_problems_in_one_line(app)

    @app.get("/{status}")
    def refuse(status: int) -> None:
        raise Refused(status, "no")

    for status in (408, 503):
        assert (TestClient(app).get(f"/{status}").headers.get("connection") == "close") is (status == 408)


def test_every_status_is_described(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {path: sorted(methods) for path, methods in paths.items()} == {
        "/api/index": ["get"],
        "/api/images": ["get"],
        "/api/images/{row}": ["get"],
        "/api/images/{row}/thumbnail": ["get"],
        "/api/images/{row}/match": ["get", "post"],
        "/api/search": ["get", "post"],
        "/api/search/together": ["post"],
    }
    statuses = set(paths["/api/search"]["post"]["responses"])
    assert statuses == {"200", "400", "404", "408", "409", "413", "415", "422", "503"}
    page = client.get("/docs").text
    assert all(path in page for path in paths) and "SearchAnswer" in page


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 65_536},
        {"host": ""},
        {"threads": 0},
        {"max_upload_bytes": 10},
        {"max_upload_bytes": 10**9},
        {"max_upload_pixels": 10**9},
        {"upload_seconds": 0.0},
        {"header_seconds": 0.0},
    ],
)
def test_impossible_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="wanted"):
        ServeOptions(**wrong)
    with pytest.raises(DataError, match="images_root"):
        ServeOptions(images_root=Path("/no/such/folder"))


# load


def test_answers_of_many_clients_are_not_mixed_up(client: TestClient, place: Path) -> None:
    """Every image of the index is sent and asked for by several threads at once: each finds itself."""
    index = FeatureIndex.open(place / "index")
    photos = [(place / "photos" / member).read_bytes() for member in index.ids.members]

    def ask(number: int) -> bool:
        row = number % 36
        if number % 2:
            answer = client.post("/api/search?k=1", content=photos[row], headers=STREAM).json()
            return bool(answer["found"][0]["row"] == row)
        answer = client.get("/api/search", params={"key": index.ids.keys[row], "k": 3}).json()
        return bool(answer["query"]["row"] == row)

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        assert all(threads.map(ask, range(144)))


def test_too_many_are_turned_away_and_the_rest_served(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold, started = threading.Event(), threading.Semaphore(0)
    original = Searcher.find

    def slow(self: Searcher, *asked: Any) -> Any:
        started.release()
        hold.wait(20)
        return original(self, *asked)

    monkeypatch.setattr(Searcher, "find", slow)
    with client_of(place, threads=1, max_waiting=2) as client, concurrent.futures.ThreadPoolExecutor(8) as threads:
        key = client.get("/api/images").json()["images"][0]["key"]
        answers = [threads.submit(client.get, "/api/search", params={"key": key}) for _ in range(8)]
        assert started.acquire(timeout=20)
        deadline = time.monotonic() + 20
        while sum(answer.done() for answer in answers) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        hold.set()
        statuses = sorted(answer.result().status_code for answer in answers)
        assert statuses == [200] * 3 + [503] * 5
        refused = next(answer.result() for answer in answers if answer.result().status_code == 503)
        assert_refused(refused, 503, "try again")
        assert refused.headers["retry-after"] == "2"
        assert client.get("/api/search", params={"key": key}).status_code == 200  # there is room again


def test_no_memory_for_a_image_is_told() -> None:
    import asyncio

    def no_memory() -> None:
        raise MemoryError

    async def run() -> None:
        queue = work_queue.WorkQueue(1, 1)
        with pytest.raises(Refused, match="not enough memory") as refused:
            await queue.run(no_memory)
        assert refused.value.status == 503
        queue.close()

    asyncio.run(run())


def test_thumbnails_kept_are_bounded(place: Path) -> None:
    from sop_faiss.index.images import index_images
    from sop_faiss.serve.thumbnails import Thumbnails

    images = index_images(FeatureIndex.open(place / "index"))
    whole = Thumbnails(images, 10**9)
    sizes = [len(whole.make(row, "small")) for row in range(36)]
    some = Thumbnails(images, sum(sizes[-5:]))
    for row in range(36):
        some.make(row, "small")
    kept = [row for row in range(36) if some.kept(row, "small") is not None]
    assert kept and kept[-1] == 35 and sum(sizes[row] for row in kept) <= sum(sizes[-5:])
    none = Thumbnails(images, 0)
    assert none.make(0, "small") == whole.kept(0, "small") and none.kept(0, "small") is None
