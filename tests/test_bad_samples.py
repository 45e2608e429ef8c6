"""What a run says of images it cannot read: one line each in a file, a bounded number in the log."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from sop_faiss.data.batch import BadSample
from sop_faiss.errors import DataError
from sop_faiss.train.log.bad_samples import BadSampleLog, check_bad_share
from sop_faiss.verbs.training.train import run_training
from tests.images import encode, make_image, write_tar
from tests.runs import tiny_config


def bad(number: int, reason: str = "truncated") -> BadSample:
    key = f"{number:03d}"
    return BadSample(number, key, "x.tar", f"{key}.jpg", 512 * number, reason, f"{reason}: as\x1b said", "000")


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "bad_samples.jsonl").read_text().splitlines()]


def test_every_bad_sample_has_a_line(tmp_path: Path) -> None:
    log = BadSampleLog(tmp_path, 0)
    log.add([bad(1), bad(2, "empty")], step=3)
    log.add([bad(4)], step=4)
    assert lines(tmp_path)[0] == {
        "step": 3,
        "position": 1,
        "key": "001",
        "shard": "x.tar",
        "member": "001.jpg",
        "offset": 512,
        "reason": "truncated",
        "message": "truncated: as\x1b said",
        "replacement": "000",
    }
    assert [(line["step"], line["key"]) for line in lines(tmp_path)] == [(3, "001"), (3, "002"), (4, "004")]


def test_the_log_shows_the_first_of_each_reason_and_then_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    log = BadSampleLog(tmp_path, 0)
    for step in range(1, 1001):
        log.add([bad(step)], step)
    log.add([bad(1, "empty")], 1001)
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "bad image 001 in x.tar at offset 512: truncated: as? said; 000 took its place"
    assert [line.startswith("bad image") for line in told] == [True] * 5 + [False] * (len(told) - 6) + [True]
    assert told[5] == "6 bad images so far (truncated 6), all listed in bad_samples.jsonl"
    assert told[6].startswith("12 bad images") and told[7].startswith("24 bad images")
    assert len(told) < 20 and len(lines(tmp_path)) == 1001


def test_a_resumed_run_repeats_no_line_and_goes_on_counting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = BadSampleLog(tmp_path, 0)
    for step in range(1, 11):
        log.add([bad(step)], step)
    with (tmp_path / "bad_samples.jsonl").open("a") as stream:
        stream.write('{"step": 11, "ke')  # what a kill leaves
    caplog.clear()
    log = BadSampleLog(tmp_path, resumed_step=6)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    for step in range(7, 13):
        log.add([bad(step)], step)
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 13))
    assert [record.getMessage()[:13] for record in caplog.records] == ["12 bad images"]
    BadSampleLog(tmp_path, resumed_step=0)
    assert lines(tmp_path) == []


def test_a_run_killed_after_its_checkpoint_lists_each_once(tmp_path: Path) -> None:
    """Steps 4 and 5 are made twice: their lines are those of the second time."""
    image = encode(make_image(np.random.default_rng(0), 20))
    members = [(f"{number:02d}.jpg", image if number % 4 else b"text") for number in range(24)]
    shard = write_tar(tmp_path / "x.tar", members)
    common = (f"data.train={shard}", "data.max_bad_fraction=1", "train.epochs=3")
    run_training(tiny_config(tmp_path, *common), tmp_path / "whole")
    run_training(tiny_config(tmp_path, *common, "train.stop_after_steps=3"), tmp_path / "run")
    after = (tmp_path / "run" / "bad_samples.jsonl").read_text()
    (tmp_path / "run" / "bad_samples.jsonl").write_text(
        after + json.dumps(lines(tmp_path / "run")[-1] | {"step": 4}) + "\n"
    )
    run_training(tiny_config(tmp_path, *common), tmp_path / "run", resume=True)
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    per_epoch = [line["position"] for line in lines(tmp_path / "whole") if line["step"] <= 4]
    assert set(per_epoch) == {0, 4, 8, 12, 16, 20}
    content = shard.read_bytes()
    for line in lines(tmp_path / "whole"):
        assert line["reason"] == "not-an-image" and line["shard"] == "x.tar"
        assert content[line["offset"] : line["offset"] + 4] == b"text"


def test_too_large_a_share_is_fatal() -> None:
    check_bad_share(10, 1000, 500, 0.01)
    check_bad_share(5, 20, 500, 0.01)  # a share is judged on no fewer images than there are
    with pytest.raises(DataError, match=r"11 of 1011 .* data\.max_bad_fraction = 0\.01"):
        check_bad_share(11, 1000, 500, 0.01)


def test_no_more_images_are_bad_than_were_tried() -> None:
    check_bad_share(22, 8, 12, 1.0)  # images that took the place of bad ones were bad, too
    with pytest.raises(DataError, match=r"22 of 30 "):
        check_bad_share(22, 8, 12, 0.5)
