"""sop-retrieve as a user types it: what it prints and writes, and one clear line for every mistake."""

from __future__ import annotations

import csv
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from torch import Tensor

from sop_faiss.cli.retrieve import main
from sop_faiss.model.encoders.encoder import Encoder
from tests.images import encode, make_image
from tests.messages import command_fails

RESNET = ("--model", "timm:test_resnet", "--random-weights", "0", "--size", "32")
PER_CLASS = 4
CLASSES = 3


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def fails(*arguments: object) -> str:
    """Run, check that it fails as commands do, and return its line."""
    return command_fails(main, *arguments)


def plain_gnd() -> dict[str, Any]:
    """One query per class, whose images are relevant but for the last, which is junk."""
    return {
        "imlist": [f"{label}-{number}" for label in range(CLASSES) for number in range(PER_CLASS)],
        "qimlist": [f"q{label}" for label in range(CLASSES)],
        "gnd": [
            {"ok": [label * PER_CLASS + n for n in range(PER_CLASS - 1)], "junk": [label * PER_CLASS + PER_CLASS - 1]}
            for label in range(CLASSES)
        ],
    }


def graded_gnd() -> dict[str, Any]:
    gnd = plain_gnd()
    for entry in gnd["gnd"]:
        ok = entry.pop("ok")
        entry |= {"easy": ok[:1], "hard": ok[1:], "bbx": [0, 0, 20, 20]}
    return gnd


def write_set(root: Path, gnd: dict[str, Any], size: tuple[int, int] = (30, 40)) -> Path:
    """A data set in jpg/ whose images of one class look alike; a query is the left part of a class's image."""
    rng = np.random.default_rng(0)
    (root / "jpg").mkdir(parents=True)
    for name in gnd["imlist"]:
        (root / "jpg" / f"{name}.jpg").write_bytes(encode(make_image(rng, size, label=int(name[0]))))
    for name in gnd["qimlist"]:
        (root / "jpg" / f"{name}.jpg").write_bytes(encode(make_image(rng, size, label=int(name[1:]))))
    (root / "gnd.json").write_text(json.dumps(gnd))
    return root


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_set(tmp_path / "plain", plain_gnd())


@pytest.fixture
def graded(tmp_path: Path) -> Path:
    return write_set(tmp_path / "graded", graded_gnd())


# ---- what it does ---------------------------------------------------------------------------------------------------


def test_plain_set_with_all_outputs(plain: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / "out" / name for name in ("r.json", "r.html", "r.csv")}
    outputs = ("--json", files["r.json"], "--html", files["r.html"], "--per-query", files["r.csv"], "--top", 5)
    result = run(*RESNET, "--dataset", plain, *outputs)
    assert result.exit_code == 0, result.output
    assert "3 queries in 12 images" in result.stdout and "protocol plain" in result.stdout
    assert "embedding" in result.stderr and "embedding" not in result.stdout
    assert result.stderr.splitlines()[-3:] == [
        f"JSON: {files['r.json']}",
        f"CSV: {files['r.csv']}",
        f"page: {files['r.html']}",
    ]

    content = json.loads(files["r.json"].read_text())
    keys = {"command", "dataset", "protocol", "metrics", "encoder", "environment", "seconds"}
    assert set(content) == keys | {"per_query", "confidence"}
    names = {"mAP", "mP@1", "mP@5", "mP@10", "R@1", "R@5", "R@10", "R-precision", "mAP@R", "nDCG"}
    names |= {"mAP_standard"}
    assert set(content["metrics"]) == names and all(name in result.stdout for name in names)
    assert content["metrics"]["mAP_standard"] >= content["metrics"]["mAP"]
    low, high = content["confidence"]["mAP"]
    assert low <= content["metrics"]["mAP"] <= high and content["confidence"]["level"] == 0.95
    assert content["per_query"]["queries"] == ["q0", "q1", "q2"]
    assert np.mean(content["per_query"]["AP"]) == pytest.approx(content["metrics"]["mAP"])
    assert content["protocol"]["name"] == "plain"
    assert content["protocol"]["queries_counted"] == {"all": 3}
    assert content["protocol"]["preprocess"]["keep_aspect"] is True
    assert len(content["encoder"]["fingerprint"]) == 64

    with files["r.csv"].open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["query"] for row in rows] == ["q0", "q1", "q2"]
    assert np.mean([float(row["AP"]) for row in rows]) == pytest.approx(content["metrics"]["mAP"], abs=1e-3)
    assert np.mean([float(row["nDCG"]) for row in rows]) == pytest.approx(content["metrics"]["nDCG"], abs=1e-3)
    assert all(row["relevant"] == "3" and row["top_5"] for row in rows) and "top_6" not in rows[0]

    page = files["r.html"].read_text()
    assert page.count("data:image/") >= 3
    assert f"{content['metrics']['mAP']:.2f}" in page
    assert "http://" not in page and "https://" not in page


def test_page_marks_relevant_wrong_and_junk(graded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sop_faiss.report.contact_sheet import Strip, Verdict
    from sop_faiss.verbs.scoring import retrieve_output

    shown: list[Strip] = []
    monkeypatch.setattr(retrieve_output, "write_contact_sheet", lambda path, title, strips, **_: shown.extend(strips))
    monkeypatch.setattr(retrieve_output, "PAGE_QUERIES", 2)
    result = run(*RESNET, "--dataset", graded, "--html", tmp_path / "r.html", "--top", 100)
    assert result.exit_code == 0, result.output
    assert len(shown) == 2  # the best and the worst of three
    scores = [float(re.search(r"AP ([\d.]+) %", strip.note).group(1)) for strip in shown]  # type: ignore[union-attr]
    assert scores == sorted(scores, reverse=True)
    for strip in shown:
        label = strip.query.name[1:]
        assert len(strip.hits) == 12
        for hit in strip.hits:
            own, number = hit.image.name.split("-")
            wanted = Verdict.WRONG if own != label else Verdict.JUNK if number == "3" else Verdict.RIGHT
            assert hit.verdict is wanted
        similarities = [hit.similarity for hit in strip.hits]
        assert similarities == sorted(similarities, reverse=True)


def test_revisited_protocols_crop_or_not(graded: Path, tmp_path: Path) -> None:
    contents = {}
    for protocol in (None, "revisitop", "dino"):
        chosen = () if protocol is None else ("--protocol", protocol)
        result = run(*RESNET, "--dataset", "graded", "--data-root", tmp_path, *chosen, "--json", "-")
        assert result.exit_code == 0, result.output
        contents[protocol] = json.loads(result.stdout)  # nothing else is printed there
    assert contents[None]["protocol"] == contents["revisitop"]["protocol"]
    assert contents[None]["metrics"] == contents["revisitop"]["metrics"]
    assert contents["revisitop"]["protocol"]["queries_cropped"] == 3
    assert contents["dino"]["protocol"]["queries_cropped"] == 0
    names = {f"{metric}_{level}" for metric in ("mAP", "mP@1", "mP@5", "mP@10") for level in ("medium", "hard")}
    assert set(contents["dino"]["metrics"]) == names
    assert set(contents["revisitop"]["metrics"]) > names


def seen_shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the batches that reach the encoder from now on."""
    shapes: list[tuple[int, ...]] = []
    forward = Encoder.forward

    def noting_forward(self: Encoder, images: Tensor) -> Tensor:
        shapes.append(tuple(images.shape))
        return forward(self, images)

    monkeypatch.setattr(Encoder, "forward", noting_forward)
    return shapes


def test_the_encoder_sees_cropped_queries_and_whole_images(graded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = seen_shapes(monkeypatch)
    assert run(*RESNET, "--dataset", graded).exit_code == 0
    assert shapes[1:] == [(3, 3, 32, 32), (8, 3, 24, 32), (4, 3, 24, 32)]  # the first is the encoder's own trial
    shapes.clear()
    assert run(*RESNET, "--dataset", graded, "--square", "--protocol", "dino").exit_code == 0
    assert shapes[1:] == [(3, 3, 32, 32), (8, 3, 32, 32), (4, 3, 32, 32)]


def test_another_ground_truth(plain: Path, tmp_path: Path) -> None:
    gnd = plain_gnd()
    gnd["qimlist"], gnd["gnd"] = ["q1"], gnd["gnd"][1:2]
    other = tmp_path / "gnd_other.pkl"
    other.write_bytes(pickle.dumps(gnd))
    result = run(*RESNET, "--dataset", plain, "--gnd", other)
    assert result.exit_code == 0, result.output
    assert "1 queries in 12 images" in result.stdout


@pytest.mark.parametrize("method", ["global", "local", "diffusion"])
def test_rerank_changes_only_what_it_says(plain: Path, tmp_path: Path, method: str) -> None:
    """With a depth of 4 of 12, the images behind stay where they are; the file says how."""
    tables = []
    for name, options in (("none", ()), (method, ("--rerank", method, "--rerank-depth", 4))):
        table = tmp_path / f"{name}.csv"
        files = ("--json", tmp_path / f"{name}.json", "--per-query", table, "--top", 12)
        run_ok = run(*RESNET, "--dataset", plain, *options, *files)
        assert run_ok.exit_code == 0, run_ok.output
        tables.append(list(csv.DictReader(table.read_text().splitlines())))
    for before, after in zip(*tables, strict=True):
        old, new = ([each for name, each in row.items() if name.startswith("top_")] for row in (before, after))
        assert old[4:] == new[4:]
        assert sorted(old[:4]) == sorted(new[:4])
    protocol = json.loads((tmp_path / f"{method}.json").read_text())["protocol"]
    assert protocol["rerank"]["method"] == method
    assert protocol["rerank"]["depth"] == 4
    assert "rerank" not in json.loads((tmp_path / "none.json").read_text())["protocol"]


def test_help_shows_an_example_and_a_ground_truth_that_works(tmp_path: Path) -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "sop-retrieve --model runs/photos --dataset" in result.stdout
    shown = re.search(r"^    \{\n.*?^    \}\n", result.stdout, re.MULTILINE | re.DOTALL)
    assert shown is not None
    gnd = json.loads(shown.group())
    root = tmp_path / "my_products"
    for folder, names in (("query", gnd["qimlist"]), ("database", gnd["imlist"])):
        (root / folder).mkdir(parents=True)
        for name in names:
            image = make_image(np.random.default_rng(0), 40, label=name.startswith("shoe"))
            (root / folder / name).write_bytes(encode(image))
    (root / "gnd.json").write_text(shown.group())
    result = run(*RESNET, "--dataset", root)
    assert result.exit_code == 0 and "2 queries in 4 images" in result.stdout
    for entry, query in zip(gnd["gnd"], gnd["qimlist"], strict=True):  # it says what its names say
        kind = query.partition("_")[0]
        alike = {place for place, name in enumerate(gnd["imlist"]) if name.startswith(kind)}
        assert set(entry["ok"]) <= alike and set(entry["ok"]) | set(entry["junk"]) == alike


# ---- what a user gets wrong -----------------------------------------------------------------------------------------


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.path, "executed"))


def test_hostile_ground_truth_is_not_executed(plain: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    hostile = tmp_path / "gnd_evil.pkl"
    hostile.write_bytes(pickle.dumps({**plain_gnd(), "extra": Evil(trace)}))
    assert "would run code" in fails(*RESNET, "--dataset", plain, "--gnd", hostile)
    (plain / "gnd.json").unlink()
    hostile.rename(plain / "gnd_evil.pkl")
    assert "would run code" in fails(*RESNET, "--dataset", plain)
    assert not trace.exists()


def test_protocols_that_do_not_fit(plain: Path, graded: Path) -> None:
    assert "choose --protocol plain" in fails(*RESNET, "--dataset", plain, "--protocol", "revisitop")
    assert "--protocol revisitop or --protocol dino" in fails(*RESNET, "--dataset", graded, "--protocol", "plain")
    assert "wanted one of revisitop, dino, plain" in fails(*RESNET, "--dataset", plain, "--protocol", "gld")


def test_data_sets_that_are_not_there(plain: Path, tmp_path: Path) -> None:
    assert "--data-root" in fails(*RESNET, "--dataset", "roxford5k", "--data-root", tmp_path)
    assert "is not a directory" in fails(*RESNET, "--dataset", plain, "--data-root", tmp_path / "nowhere")
    assert "is not a directory" in fails(*RESNET, "--dataset", plain / "gnd.json")
    assert "does not exist" in fails(*RESNET, "--dataset", plain, "--gnd", tmp_path / "nowhere.json")
    (plain / "jpg" / "0-1.jpg").unlink()
    assert "1 of 12 database images are missing" in fails(*RESNET, "--dataset", plain)
    (plain / "gnd.json").write_text("{")
    assert "not JSON" in fails(*RESNET, "--dataset", plain)
    (plain / "gnd.json").unlink()
    assert "neither gnd.json nor gnd_*.pkl" in fails(*RESNET, "--dataset", plain)


@pytest.mark.parametrize("content", [b"", b"no image", "cut"])
def test_one_unusable_image_is_an_error(plain: Path, content: bytes | str) -> None:
    image = plain / "jpg" / "1-2.jpg"
    image.write_bytes(image.read_bytes()[:300] if isinstance(content, str) else content)
    message = fails(*RESNET, "--dataset", plain)
    assert "1-2" in message and "1 of 12" in message


def test_a_box_outside_its_image(graded: Path) -> None:
    gnd = graded_gnd()
    gnd["gnd"][1]["bbx"] = [500, 500, 600, 600]
    (graded / "gnd.json").write_text(json.dumps(gnd))
    assert "outside" in fails(*RESNET, "--dataset", graded)
    assert run(*RESNET, "--dataset", graded, "--protocol", "dino").exit_code == 0


def test_features_with_nan(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Encoder.forward
    monkeypatch.setattr(Encoder, "forward", lambda self, images: forward(self, images) * float("nan"))
    assert "NaN" in fails(*RESNET, "--dataset", plain)


def test_methods_values_stand_beside_ours(graded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the ground truth is a published one, known by its checksum; every difference of protocol is named."""
    from sop_faiss.files import sha256_file
    from sop_faiss.verbs.scoring import retrieve_output

    assert "next to published values" not in run(*RESNET, "--dataset", graded).stdout
    monkeypatch.setattr(retrieve_output, "KNOWN_SETS", {"rparis6k": sha256_file(graded / "gnd.json")})
    page = tmp_path / "page.html"
    shown = run(*RESNET, "--dataset", graded, "--qe", 1, "--html", page).stdout
    assert all(value in shown for value in ("67.3", "41.3", "64.1", "35.6", "38.1", "SOP", "iBOT", "MaSSL"))
    for difference in (
        *("queries are cropped", "32 px (published: 512)", "1 scale (published: 3)", "pooling pooled"),
        *("query expansion (published: none)", "network timm:test_resnet"),
    ):
        assert difference in shown and difference in page.read_text(), difference
    whole = run(*RESNET, "--dataset", graded, "--protocol", "dino", "--square").stdout
    assert "cropped" not in whole and "square images (published: whole)" in whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--qe", -1), "--qe -1"),
        (("--qe-alpha", 3), "--qe-alpha says how --qe works: give --qe N too"),
        (("--qe", 2, "--dba-alpha", 1), "--dba-alpha says how --dba works"),
        (("--make-gnd", "new.json"), "--model, --random-weights, --size: not used with --make-gnd: leave them out"),
        (("--dba", 12), "--dba 12"),
        (("--distractors", "nowhere"), "nowhere does not exist"),
        (("--rerank", "best"), "--rerank best"),
        (("--rerank", "local", "--rerank-beta", 1), "--rerank-beta is not of --rerank local"),
        (("--rerank-depth", 9), "--rerank-depth says how --rerank works"),
        (("--rerank", "global", "--token-size", 64), "give --rerank local too"),
        (("--rerank", "local", "--token-count", 0), "--token-count 0"),
        (("--rerank", "global", "--baselines"), "without distractors, expansion and re-ranking"),
        (("--rerank", "global", "--distractors", "x"), "distractors are only counted"),
        (("--top", 0), "--top 0"),
        (("--batch-size", 0), "--batch-size 0"),
        (("--workers", -1), "--workers -1"),
        (("--json", "."), "is a directory"),
        (("--html", "."), "is a directory"),
        (("--per-query", Path(__file__) / "x.csv"), "cannot be written"),
        (("--size", 0), "image size"),
        (("--size", 100_000), "image size"),
        (("--pooling", "nonsense"), "--pooling nonsense"),
        (("--device", "tpu"), "device 'tpu'"),
        (("--arch", "vit_base_patch16_224"), "--arch does not apply"),
    ],
)
def test_impossible_options(plain: Path, arguments: tuple[object, ...], message: str) -> None:
    assert message in fails(*RESNET, "--dataset", plain, *arguments)


def test_options_that_are_not_read_are_refused(plain: Path) -> None:
    assert "--top: not used with --compare: leave it out" in fails("--compare", "a.json", "b.json", "--top", 10)
    message = fails("--compare", "a.json", "b.json", "--dataset", plain, "--make-gnd", "new.json", "--qe", 2)
    assert "--dataset, --qe, --make-gnd" in message and "--compare" in message
    assert "--protocol: not used with --make-gnd" in fails("--dataset", plain, "--make-gnd", "n.json", "--protocol", 1)


def test_models_that_are_not_there(plain: Path, tmp_path: Path) -> None:
    assert "runs/nothing does not exist" in fails("--model", "runs/nothing", "--dataset", plain)
    assert "without weights" in fails("--model", "timm:test_resnet", "--dataset", plain)
    weights = tmp_path / "w.pth"
    weights.write_bytes(b"no weights")
    assert "w.pth" in fails("--model", "timm:test_resnet", "--weights", weights, "--dataset", plain)


def test_usage_errors_of_click() -> None:
    assert run().exit_code == 2
    assert run("--model", "timm:test_resnet").exit_code == 2
    assert run("--model", "m", "--dataset", "d", "--top", "ten").exit_code == 2
