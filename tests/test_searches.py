"""Searches by HTTP with filters, several images, boxes, folding and re-ranking: as the library's, or one line."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from sop_faiss.data.images.box import encoded_part
from sop_faiss.errors import DataError
from sop_faiss.index.find import find, find_others
from sop_faiss.index.images import index_images
from sop_faiss.index.narrowed import Narrowing, combined_query
from sop_faiss.index.rerank.reranker import open_reranker
from sop_faiss.index.rerank.settings import Rerank, TokenSettings
from sop_faiss.index.rerank.token_store import write_tokens
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.write_parts import write_parts
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import load_encoder
from sop_faiss.serve.app import create_app
from sop_faiss.serve.options import ServeOptions
from tests.images import encode, make_image
from tests.servers_of_indices import write_served
from tests.test_serve_app import STREAM, assert_refused

BOX = "0.1,0.2,0.7,0.9"
SHARES = (0.1, 0.2, 0.7, 0.9)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, 3 x 6 images, one of them twice, their index with tokens, and a table."""
    root = write_served(tmp_path_factory.mktemp("place"), per_class=6)
    index = FeatureIndex.open(root / "index")
    write_tokens(index, load_encoder(str(root / "run")), index_images(index), TokenSettings(most=9))
    write_parts(index, load_encoder(str(root / "run")), index_images(index), [2])
    lines = [f"{key},{number},{'ab'[number % 2]}\n" for number, key in enumerate(index.ids.keys)]
    (root / "shop.csv").write_text("key,price,brand\n" + "".join(lines))
    return root


@pytest.fixture(scope="module")
def encoder(place: Path) -> Encoder:
    return load_encoder(str(place / "run"))


@pytest.fixture(scope="module")
def index(place: Path) -> FeatureIndex:
    return FeatureIndex.open(place / "index")


@pytest.fixture(scope="module")
def client(place: Path, encoder: Encoder) -> Iterator[TestClient]:
    options = ServeOptions(table=place / "shop.csv", max_upload_bytes=50_000)
    with TestClient(
        create_app(FeatureIndex.open(place / "index"), encoder, options), base_url="http://127.0.0.1"
    ) as it:
        yield it


def photo(place: Path, index: FeatureIndex, row: int) -> bytes:
    return (place / "photos" / index.ids.members[row]).read_bytes()


def rows_of(answer: Any) -> list[int]:
    assert answer.status_code == 200, answer.text
    return [each["row"] for each in answer.json()["found"]]


def in_base64(encoded: bytes) -> str:
    return base64.b64encode(encoded).decode()


def together(client: TestClient, body: Any, **wishes: Any) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    return client.post("/api/search/together", params=wishes, content=content, headers=headers)


# filters


def test_a_condition_on_columns_of_the_index_and_of_the_table(client: TestClient, index: FeatureIndex) -> None:
    assert client.get("/api/index").json()["columns"] == ["key", "source", "member", "label", "price", "brand"]
    key = index.ids.keys[0]
    for where, passes in (
        ("price < 5 and brand = 'a'", [2, 4]),
        ("label = 'class_1'", range(6, 12)),
        (f"key = '{key}'", []),
    ):
        answer = client.get("/api/search", params={"key": key, "k": 50, "where": where})
        assert sorted(rows_of(answer)) == list(passes) and answer.json()["where"] == where
    both = client.get("/api/search", params={"key": key, "where": "price > 8", "label": "class_1", "k": 2})
    wanted = find_others(index, [0], 2, None, Narrowing(np.array([9, 10, 11])))[0][0]
    assert rows_of(both) == wanted.rows[0].tolist()
    page = client.get("/api/images", params={"where": "price >= 15", "limit": 2}).json()
    assert page["total"] == 3 and [image["row"] for image in page["images"]] == [15, 16]


def test_a_condition_on_a_sent_image(client: TestClient, place: Path, index: FeatureIndex) -> None:
    answer = client.post(
        "/api/search", params={"where": "brand = 'b'", "k": 4}, content=photo(place, index, 4), headers=STREAM
    )
    wanted = find(index, index.unit_features([4]), 4, None, Narrowing(np.arange(1, 18, 2)))[0][0]
    assert rows_of(answer) == wanted.rows[0].tolist()


@pytest.mark.parametrize(
    "where",
    [
        *("", " ", "price", "price <", "hue = 'x'", "label = 3", "price < 'x'", "price > 1000", "1 = 1", "price; drop"),
        "key in (select key from 'shop.csv')",
        "read_csv('/etc/passwd') = key",
        "read_parquet('/etc/passwd')",
        "key = (select content from read_text('/etc/passwd'))",
        *("(" * 4000, "not " * 1000 + "price = 1", "price = 1 or " * 300 + "price = 2 or", "x" * 4096),
        *("`price` = 1", "\0"),
    ],
)
@pytest.mark.parametrize("path", ["/api/images", "/api/search"])
def test_what_is_no_condition_is_refused_in_one_line(
    client: TestClient, place: Path, index: FeatureIndex, path: str, where: str
) -> None:
    answer = client.get(path, params={"where": where, "key": index.ids.keys[0]})
    assert_refused(answer, 422, "where")
    assert str(place) not in answer.text and "root:" not in answer.text
    assert_refused(client.get(path, params={"where": "x" * 4097, "key": index.ids.keys[0]}), 422, "where: ")


def test_the_table_is_the_servers_own(place: Path, encoder: Encoder, index: FeatureIndex, tmp_path: Path) -> None:
    """One that cannot be used is refused at the start; one that is lost later is a refusal without its place."""
    for name in ("no.csv", "bad.csv", "foreign.csv"):
        (tmp_path / "bad.csv").write_text("price\n1\n")
        (tmp_path / "foreign.csv").write_text("key,price\nnobody,1\n")
        with pytest.raises(DataError) as raised:
            create_app(FeatureIndex.open(place / "index"), None, ServeOptions(table=tmp_path / name))
        assert raised.value.arguments == ("table",)
    table = Path(shutil.copyfile(place / "shop.csv", tmp_path / "shop.csv"))
    app = create_app(FeatureIndex.open(place / "index"), None, ServeOptions(table=table))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        wishes = {"key": index.ids.keys[0], "where": "price < 3", "table": "/etc/passwd"}
        assert sorted(rows_of(client.get("/api/search", params=wishes))) == [1, 2]
        table.write_text("key,price\n" + "".join(f"{key},{row % 2}\n" for row, key in enumerate(index.ids.keys)))
        assert len(rows_of(client.get("/api/search", params=wishes))) == 17  # read again
        table.unlink()
        answer = client.get("/api/search", params=wishes)
        assert_refused(answer, 503, "table")
        assert str(tmp_path) not in answer.text
        assert len(rows_of(client.get("/api/search", params={"key": wishes["key"]}))) == 17


# several images


def test_the_mean_of_images_less_others(client: TestClient, place: Path, index: FeatureIndex) -> None:
    keys = index.ids.keys
    sides = {"plus": [{"key": keys[0]}, {"image": in_base64(photo(place, index, 7))}], "minus": [{"key": keys[12]}]}
    answer = together(client, sides, k=5)
    query = combined_query(index.unit_features([0, 7]), index.unit_features([12]))
    wanted = find(index, query, 5, None, Narrowing(without=np.array([0, 12])))[0][0]
    assert rows_of(answer) == wanted.rows[0].tolist()
    content = answer.json()
    assert content["query"] is None and content["plus"][0]["key"] == keys[0] and content["plus"][1] is None
    assert [image["key"] for image in content["minus"]] == [keys[12]]
    one = together(client, {"plus": [{"key": keys[3]}]}, k=5)
    assert one.json()["found"] == client.get("/api/search", params={"key": keys[3], "k": 5}).json()["found"]
    narrowed = together(client, sides, k=50, where="price < 4")
    assert sorted(rows_of(narrowed)) == [1, 2, 3]
    assert rows_of(together(client, {"plus": [{"key": key} for key in keys[:16]]}, k=50)) != []


def test_bodies_that_are_no_query(client: TestClient, index: FeatureIndex) -> None:
    key = {"key": index.ids.keys[0]}
    deep = b'{"plus": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    for body, status in (
        *((b"{", 422), (b"[]", 422), (b"null", 422), (b"\xff", 422), (deep, 422), (b"", 400), ({}, 422)),
        *(({"plus": []}, 422), ({"plus": [{}]}, 422), ({"plus": [key], "more": 1}, 422), ({"plus": key}, 422)),
        ({"minus": [key]}, 422),
        ({"plus": [key], "minus": [key]}, 422),
        ({"plus": [key] * 1000}, 422),
        ({"plus": [{"key": "nobody"}]}, 404),
        ({"plus": [{**key, "image": "AAAA"}]}, 422),
        ({"plus": [{"image": "not base64"}]}, 422),
        ({"plus": [{"image": ""}]}, 400),
        ({"plus": [{"image": "AAAA"}]}, 415),
        ({"plus": [key, {"key": 3}]}, 422),
        ({"plus": [{"key": "x" * 5000}]}, 422),
        ({"plus": [{"image": "A" * 300_000}]}, 413),
        ({"plus": [key, {"image": in_base64(encode(make_image(np.random.default_rng(0)))[:300])}]}, 400),
        ({"plus": [{**key, "box": [0, 0, 1]}]}, 422),
        ({"plus": [{**key, "box": [0, 0, float("nan"), 1]}]}, 422),
        (b'{"plus": [{"key": "a", "box": [0, 0, 1e999, 1]}]}', 422),
        ({"plus": [{**key, "box": [0, 0, 5000, 9]}]}, 422),
    ):
        assert_refused(together(client, body), status, "")
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "application/octet-stream"):
        answer = client.post("/api/search/together", content=b"{}", headers={"Content-Type": kind})
        assert_refused(answer, 415, "JSON")


# a part of an image


def test_a_box_is_what_is_searched_by(client: TestClient, place: Path, index: FeatureIndex, encoder: Encoder) -> None:
    encoded = photo(place, index, 8)
    feature = encoder.encode([encoded_part(encoded, SHARES, "it")])
    whole = find(index, feature, 5)[0][0]
    sent = client.post("/api/search", params={"k": 5, "box": BOX}, content=encoded, headers=STREAM)
    assert rows_of(sent) == whole.rows[0].tolist()
    others = find(index, feature, 5, None, Narrowing(without=np.array([8])))[0][0]
    by_key = client.get("/api/search", params={"key": index.ids.keys[8], "k": 5, "box": BOX})
    assert rows_of(by_key) == others.rows[0].tolist() and by_key.json()["query"]["row"] == 8
    in_pixels = client.get("/api/search", params={"key": index.ids.keys[8], "k": 5, "box": "3,6,22,29"})
    assert in_pixels.json()["found"] == by_key.json()["found"]
    body = {"plus": [{"key": index.ids.keys[8], "box": list(SHARES)}]}
    assert together(client, body, k=5).json()["found"] == by_key.json()["found"]


@pytest.mark.parametrize(
    "box",
    [
        *("", "1", "0,0,1", "a,b,c,d", "nan,0,1,1", "0,0,inf,1", "-1,0,1,1", "1,0,0,1"),
        *("0,0,33,20", "0,0,1e-9,1", "0,0,1,1,1"),
    ],
)
def test_boxes_outside(client: TestClient, place: Path, index: FeatureIndex, box: str) -> None:
    sent = client.post("/api/search", params={"box": box}, content=photo(place, index, 8), headers=STREAM)
    by_key = client.get("/api/search", params={"key": index.ids.keys[8], "box": box})
    match = client.get("/api/images/2/match", params={"key": index.ids.keys[8], "box": box})
    for answer in (sent, by_key, match):
        assert_refused(answer, 422, "box")


# near-duplicates


def test_near_duplicates_are_folded(client: TestClient, index: FeatureIndex) -> None:
    key = index.ids.keys[0]
    answer = client.get("/api/search", params={"key": key, "k": 50, "unique": -1})
    (found,) = answer.json()["found"]
    assert found["folded_count"] == 16 and len({each["row"] for each in found["folded"]} | {found["row"]}) == 17
    some = client.get("/api/search", params={"key": key, "k": 5, "unique": 0.9}).json()["found"]
    line, folded = find_others(index, [0], 5, None, Narrowing(None, 0.9))[0]
    assert folded is not None and [each["row"] for each in some] == line.rows[0].tolist()
    assert [[one["row"] for one in each["folded"]] for each in some] == folded
    plain = client.get("/api/search", params={"key": key, "k": 5}).json()["found"]
    assert all(each["folded"] == [] and each["folded_count"] == 0 for each in plain)
    for wrong in (2, -1.5, "nan", "x"):
        assert_refused(client.get("/api/search", params={"key": key, "unique": wrong}), 422, "unique: ")


# re-ranking, and where it matches


@pytest.mark.parametrize("method", ["global", "diffusion", "local"])
def test_reranked_as_the_library_does(client: TestClient, place: Path, index: FeatureIndex, method: str) -> None:
    assert client.get("/api/index").json()["rerank"] == ["global", "local", "diffusion"]
    reranker = open_reranker(index, Rerank(method))
    wanted = find_others(index, [5], 7, None, None, reranker)[0][0].rows[0].tolist()
    answer = client.get("/api/search", params={"key": index.ids.keys[5], "k": 7, "rerank": method})
    assert rows_of(answer) == wanted and answer.json()["rerank"] == method
    sent = client.post("/api/search", params={"k": 8, "rerank": method}, content=photo(place, index, 5), headers=STREAM)
    tokens = None if reranker is None else reranker.tokens_of_rows([5])
    wanted = find(index, index.unit_features([5]), 8, None, None, reranker, tokens)[0][0].rows[0].tolist()
    assert rows_of(sent) == wanted
    narrowing = Narrowing(np.arange(0, 18, 2), 0.95)
    folded = find_others(index, [5], 4, None, narrowing, reranker)[0][0].rows[0].tolist()
    wishes = {"key": index.ids.keys[5], "k": 4, "rerank": method, "where": "brand = 'a'", "unique": 0.95}
    assert rows_of(client.get("/api/search", params=wishes)) == folded


def test_found_by_parts_as_the_library_does(client: TestClient, place: Path, index: FeatureIndex) -> None:
    assert client.get("/api/index").json()["has_parts"] is True
    parted = index.with_parts()
    key, wishes = index.ids.keys[5], {"k": 7, "parts": True}
    answer = client.get("/api/search", params={"key": key, **wishes})
    wanted = parted.search_rows([5], 7)
    assert rows_of(answer) == wanted.rows[0].tolist() and answer.json()["parts"] is True
    assert wanted.boxes is not None
    assert np.allclose([each["box"] for each in answer.json()["found"]], wanted.boxes[0])
    narrowing = Narrowing(np.arange(0, 18, 2), 0.95)
    folded = find_others(parted, [5], 4, None, narrowing)[0][0].rows[0].tolist()
    narrow = {"key": key, "k": 4, "parts": True, "where": "brand = 'a'", "unique": 0.95}
    assert rows_of(client.get("/api/search", params=narrow)) == folded
    part = encoded_part(photo(place, index, 5), SHARES, "it")
    sent = client.post("/api/search", params=wishes, content=part, headers=STREAM)
    boxed = client.post("/api/search", params=wishes | {"box": BOX}, content=photo(place, index, 5), headers=STREAM)
    assert rows_of(sent) == rows_of(boxed)
    plain = client.get("/api/search", params={"key": key, "k": 7}).json()
    assert plain["parts"] is False and all(each["box"] is None for each in plain["found"])
    for method in ("global", "diffusion"):
        answer = client.get("/api/search", params={"key": key, "rerank": method, "parts": True})
        assert_refused(answer, 422, "rerank=local")
    local = client.get("/api/search", params={"key": key, "k": 7, "rerank": "local", "parts": True})
    assert len(rows_of(local)) == 7


def test_several_images_are_reranked_by_their_mean_alone(client: TestClient, index: FeatureIndex) -> None:
    body = {"plus": [{"key": key} for key in index.ids.keys[:2]]}
    query = combined_query(index.unit_features([0, 1]))
    narrowing = Narrowing(without=np.array([0, 1]))
    wanted = find(index, query, 6, None, narrowing, open_reranker(index, Rerank("global")))[0][0]
    assert rows_of(together(client, body, k=6, rerank="global")) == wanted.rows[0].tolist()
    assert_refused(together(client, body, rerank="local"), 422, "rerank=local")


def test_where_it_matches_is_drawn(client: TestClient, place: Path, index: FeatureIndex) -> None:
    assert client.get("/api/index").json()["shows_matches"] is True
    key = index.ids.keys[0]
    by_key = client.get("/api/images/3/match", params={"key": key})
    sent = client.post("/api/images/3/match", content=photo(place, index, 0), headers=STREAM)
    boxed = client.get("/api/images/3/match", params={"key": key, "box": BOX})
    for answer in (by_key, sent, boxed):
        assert answer.status_code == 200 and answer.headers["content-type"] == "image/png"
    seen = [np.asarray(Image.open(io.BytesIO(answer.content)).convert("RGB")) for answer in (by_key, sent, boxed)]
    assert np.array_equal(seen[0], seen[1]) and not np.array_equal(seen[0], seen[2])
    assert_refused(client.get("/api/images/99/match", params={"key": key}), 404, "18 images")
    assert_refused(client.get("/api/images/3/match", params={"key": "nobody"}), 404, "key")
    assert_refused(client.get("/api/images/3/match", params={"key": key, "version": "old"}), 404, "changed")
    assert_refused(client.post("/api/images/3/match", content=b"x", headers=STREAM), 415, "not-an-image")


def test_without_tokens_or_without_an_encoder(
    place: Path, encoder: Encoder, index: FeatureIndex, tmp_path: Path
) -> None:
    key = index.ids.keys[0]
    plain = tmp_path / "index"
    shutil.copytree(place / "index", plain, ignore=shutil.ignore_patterns("tokens", "parts"))
    with TestClient(create_app(FeatureIndex.open(plain), encoder), base_url="http://127.0.0.1") as client:
        facts = client.get("/api/index").json()
        assert facts["rerank"] == ["global", "diffusion"] and facts["shows_matches"] is False
        assert_refused(client.get("/api/search", params={"key": key, "rerank": "local"}), 409, "no tokens")
        assert facts["has_parts"] is False
        assert_refused(client.get("/api/search", params={"key": key, "parts": True}), 409, "no parts")
        assert_refused(client.get("/api/images/1/match", params={"key": key}), 409, "no tokens")
        assert_refused(client.get("/api/search", params={"key": key, "rerank": "best"}), 422, "rerank: ")
    with TestClient(create_app(index), base_url="http://127.0.0.1") as client:
        assert client.get("/api/index").json()["shows_matches"] is False
        assert len(rows_of(client.get("/api/search", params={"key": key, "rerank": "local"}))) == 17
        assert_refused(client.get("/api/images/1/match", params={"key": key}), 409, "encoder")
        assert_refused(client.get("/api/search", params={"key": key, "box": BOX}), 409, "encoder")
        encoded = in_base64(photo(place, index, 0))
        assert_refused(together(client, {"plus": [{"image": encoded}]}), 409, "encoder")
        assert len(rows_of(together(client, {"plus": [{"key": key}], "minus": [{"key": index.ids.keys[9]}]}))) == 16


def test_damaged_tokens_are_not_served(place: Path, encoder: Encoder, index: FeatureIndex, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(place / "index", tmp_path / "index"))
    (copy / "tokens" / "images.parquet").write_bytes(b"x")
    (copy / "parts" / "ids.parquet").write_bytes(b"x")
    app = create_app(FeatureIndex.open(copy), encoder, ServeOptions(images_root=tmp_path))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        assert client.get("/api/index").json()["rerank"] == ["global", "diffusion"]
        lost = client.get("/api/search", params={"key": index.ids.keys[0], "box": BOX})
        assert_refused(lost, 404, "cannot be read: missing")
        assert str(tmp_path) not in lost.text
