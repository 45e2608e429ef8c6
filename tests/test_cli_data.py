"""`sop-data` as a user types it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from sop_faiss.cli.data import main
from sop_faiss.data.images.source import open_source
from tests.images import write_bad_images, write_folder, write_shards
from tests.runs import tiny_config_file


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def assert_error(result: Result, *parts: str) -> None:
    assert result.exit_code == 1, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and result.stdout == "" and "Traceback" not in result.stderr
    for part in parts:
        assert part in lines[0]


@pytest.mark.parametrize("command", [[], ["pack"], ["check"], ["preview"], ["demo"]])
def test_help_explains_itself_with_an_example(command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0 and "Example" in result.stdout and "sop-data" in result.stdout


def test_pack_then_check(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", classes=2, per_class=3)
    write_bad_images(photos)
    result = run("pack", photos, tmp_path / "out", "--samples-per-shard", "4", "--resize", "16")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("packed 7 images into 2 shards")
    assert "labeled 6 in 2 classes; resized 7" in result.stdout
    assert "dropped 4 (" in result.stdout and "truncated 1" in result.stdout and "cut.jpg: truncated" in result.stdout
    assert re.fullmatch(r"packing: 11 of 11 images, \d+ s\n", result.stderr)
    plain = run("pack", write_folder(tmp_path / "plain", classes=0), tmp_path / "other").stdout
    assert "labeled" not in plain and "resized" not in plain
    result = run("check", tmp_path / "out", "--json", tmp_path / "report.json")
    assert result.exit_code == 0 and result.stdout.endswith("manifest.json agrees\nno problems\n")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] and report["samples"] == 7 and report["command"] == "sop-data check"


def test_check_reports_before_it_fails(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards")
    os.truncate(shards / "photos-000001.tar", 2000)
    result = run("check", shards, "--json", tmp_path / "report.json")
    assert result.exit_code == 1
    assert "6 images in 2 shards" in result.stdout and result.stdout.endswith("\n1 problem\n")
    assert "problem: shard" in result.stdout and "photos-000001.tar is cut off: at offset" in result.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["ok"] and len(report["problems"]) == 1


def test_duplicates_are_told_and_left_out_where_asked(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", classes=0, per_class=3)
    (photos / "copy.jpg").write_bytes((photos / "0001.jpg").read_bytes())
    result = run("pack", photos, tmp_path / "all")
    assert "1 exact" in result.stdout
    result = run("check", tmp_path / "all", "--duplicates", "--json", tmp_path / "report.json")
    assert result.exit_code == 0 and "duplicates: exact 1, near 0" in result.stdout
    found = json.loads((tmp_path / "report.json").read_text())["duplicates"]["exact"]["found"]
    assert found[0]["images"] == ["0001.jpg in photos-000000.tar", "copy.jpg in photos-000000.tar"]
    result = run("pack", photos, tmp_path / "once", "--drop-exact-duplicates")
    assert "packed 3 images" in result.stdout and "duplicates: 1 exact (left out)" in result.stdout


def test_preview(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", classes=0, per_class=5, size=20)
    (photos / "0002.jpg").write_text("text")
    config = tiny_config_file(tmp_path)
    result = run("preview", photos, "--config", config, "--out", tmp_path / "views.png", "views.local_count=3")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("drew 4 images with 5 views each") or "0002: not-an-image" in result.stdout
    result = run("preview", photos, "--config", config, "--out", tmp_path / "all.png", "--images", "9", "--seed", "3")
    assert "drew 5 images with 3 views each" in result.stdout and "0002: not-an-image" in result.stdout
    with Image.open(tmp_path / "all.png") as image:
        assert image.format == "PNG"
    common = ("--config", config, "--out", tmp_path / "no.png")
    assert_error(run("preview", tmp_path / "nothing", *common), "does not exist")
    assert_error(run("preview", photos, *common, "--images", "0"), "wanted 1 or more")
    for epoch in (10**23, -(10**23)):
        assert_error(run("preview", photos, *common, f"--epoch={epoch}"), str(epoch))
    assert_error(run("preview", photos, *common, "views.global_size=18"), "not divisible")
    assert_error(run("preview", photos, *common, "views.color_of_money=1"), "views")
    assert_error(run("preview", photos, "--config", config, "--out", photos), "is a directory")
    assert_error(run("preview", photos, "--config", config, "--out", photos / "0001.jpg"), "0001.jpg")
    assert not (tmp_path / "no.png").exists()


def test_demo(tmp_path: Path) -> None:
    result = run("demo", tmp_path / "digits")
    assert result.exit_code == 0 and "1,397 images" in result.stdout and "100 queries" in result.stdout
    assert len(open_source(tmp_path / "digits" / "test")) == 400
    assert_error(run("demo", tmp_path / "digits"), "not empty")
    assert_error(run("check", tmp_path / "digits"), "name one, such as")


def test_bad_input_of_pack(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", classes=0, per_class=2)
    out = tmp_path / "out"
    assert_error(run("pack", tmp_path / "nothing", out), "nothing does not exist")
    assert_error(run("pack", f"pipe:touch {tmp_path}/mark", out), "never run")
    assert_error(run("pack", "nonsense://localhost/x.tar", out), "nonsense:// is unknown")
    assert_error(run("pack", photos, photos), "not empty")
    assert_error(run("pack", photos, out, "--resize", "0"), "resize")
    assert_error(run("pack", photos, out, "--samples-per-shard", "0"), "samples per shard")
    assert_error(run("pack", photos, out, "--max-bad", "2"), "max_bad")
    assert_error(run("pack", photos, out, "--workers", "-1"), "workers")
    assert_error(run("pack", photos, photos / "0000.jpg" / "out"), "0000.jpg")
    (tmp_path / "list.txt").write_text("photos/0000.jpg\nphotos/0009.jpg\n")
    assert_error(run("pack", tmp_path / "list.txt", out), "line 2")
    for image in photos.iterdir():
        image.write_text("text")
    assert_error(run("pack", photos, out), "2 of the 2 images", "not-an-image 2")
    (tmp_path / "empty").mkdir()
    assert_error(run("pack", tmp_path / "empty", out), "is empty")
    assert run("pack", photos).exit_code == 2
    assert not out.exists() and not (tmp_path / "mark").exists()


def test_check_prints_json_alone(tmp_path: Path) -> None:
    result = run("check", write_shards(tmp_path / "shards"), "--json", "-")
    assert result.exit_code == 0 and json.loads(result.stdout)["ok"] is True


def test_bad_input_of_check(tmp_path: Path) -> None:
    assert_error(run("check", tmp_path / "nothing"), "does not exist")
    assert_error(run("check", f"{tmp_path}/x-*.tar"), "no shard matches")
    assert_error(run("check", tmp_path), "is empty")
    shards = write_shards(tmp_path / "shards")
    result = run("check", shards, "--json", shards / "photos-000000.tar" / "report.json")
    assert result.exit_code == 1 and "error: " in result.stderr and "Traceback" not in result.output


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos")
    photos.chmod(0)
    try:
        assert_error(run("pack", photos, tmp_path / "out"), "Permission denied")
    finally:
        photos.chmod(0o755)


def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", classes=0, per_class=1)
    (photos / "\x1b]0;owned\x07\n.jpg").write_text("text")
    result = run("pack", photos, tmp_path / "out")
    assert result.exit_code == 0 and "\x1b" not in result.output and "\x07" not in result.output
    assert len([line for line in result.stdout.splitlines() if "not-an-image:" in line]) == 1
