"""Ground truth from outside: read, checked, and never executed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sop_faiss.errors import DataError
from sop_faiss.evaluate.sets.ground_truth import GRADED, PLAIN, GroundTruth, read_ground_truth
from tests.ground_truths import GRADED_GND, PLAIN_GND, changed, write_json, write_pickle


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_and_json_read_the_same(tmp_path: Path, protocol: int) -> None:
    from_json = read_ground_truth(write_json(tmp_path / "gnd.json", GRADED_GND))
    from_pickle = read_ground_truth(write_pickle(tmp_path / "gnd_x.pkl", GRADED_GND, protocol))
    for truth in (from_json, from_pickle):
        assert truth.lists == GRADED
        assert truth.images == GRADED_GND["imlist"]
        assert [query.name for query in truth.queries] == ["q0", "q1"]
        assert truth.queries[0].box == (1.0, 2.0, 11.5, 12.0)
        assert {name: values.tolist() for name, values in truth.queries[0].lists.items()} == {
            "easy": [0],
            "hard": [1, 2],
            "junk": [3],
        }


def test_plain_lists_without_junk_and_box(tmp_path: Path) -> None:
    truth = read_ground_truth(write_json(tmp_path / "gnd.json", PLAIN_GND))
    assert truth.lists == PLAIN
    assert truth.queries[1].box is None
    assert truth.queries[1].lists["junk"].tolist() == []


class Evil:
    """Unpickled carelessly, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.path, "executed"))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_hostile_pickle_is_not_executed(tmp_path: Path, protocol: int) -> None:
    trace = tmp_path / "trace"
    content = changed(GRADED_GND, imlist=[*"abcde"])
    content["gnd"][0]["easy"] = Evil(trace)
    file = write_pickle(tmp_path / "gnd_evil.pkl", content, protocol)
    with pytest.raises(DataError, match="would run code, and is not loaded") as caught:
        read_ground_truth(file)
    assert "\n" not in str(caught.value)
    assert not trace.exists()


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"\x80\x02",
        b"not a pickle",
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        b"\x80\x02]r\xff\xff\xff\x7f.",  # memo slot 2**31 - 1: the C unpickler would allocate 32 GB
        b"]p99999999999\n.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",  # bytearray of 2**40 bytes
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\x00\x00\x00abc.",  # text of 2**40 bytes
        b"\x80\x02Pname\n.",
        b"\x80\x02\x82\x01.",
        b"(" * 100_000,
        b"\x80\x02h\x07.",
        b"\x80\x02}K\x01.",
        b"0.",
        pickle.dumps(np.arange(3)),
        pickle.dumps({1, 2, 3}),
    ],
)
def test_damaged_and_foreign_pickles(tmp_path: Path, encoded: bytes) -> None:
    file = tmp_path / "gnd_x.pkl"
    file.write_bytes(encoded)
    with pytest.raises(DataError, match=r"gnd_x\.pkl") as caught:
        read_ground_truth(file)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@given(data=st.data())
def test_a_pickle_with_flipped_bytes_reads_or_is_refused(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    encoded = bytearray(pickle.dumps(GRADED_GND, protocol=data.draw(st.sampled_from([0, 2, 4]))))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.mktemp("gnd") / "gnd_x.pkl"
    file.write_bytes(encoded[: data.draw(st.integers(1, len(encoded)))])
    try:
        assert isinstance(read_ground_truth(file), GroundTruth)
    except DataError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("9" * 10_000, "not JSON"),
        ("[1]", "imlist, qimlist and gnd"),
        ('{"imlist": ["a"]}', "imlist, qimlist and gnd"),
        ("NaN", "imlist, qimlist and gnd"),
        ('{"imlist": ["a"], "qimlist": ["q"], "gnd": [{"ok": [0], "junk": [], "junk": []}]}', "'junk' twice"),
        ('{"imlist": ["a"], "imlist": ["b"], "qimlist": ["q"], "gnd": [{"ok": [0]}]}', "'imlist' twice"),
    ],
)
def test_damaged_json(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "gnd.json"
    file.write_text(text)
    with pytest.raises(DataError, match=message):
        read_ground_truth(file)


def gnd_of(**entry: Any) -> dict[str, Any]:
    return changed(GRADED_GND, gnd=[{"easy": [0], "hard": [1], "junk": [], **entry}, GRADED_GND["gnd"][1]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(GRADED_GND, imlist=[]), "imlist is not a list with at least one name"),
        (changed(GRADED_GND, imlist="abcde"), "imlist is not a list"),
        (changed(GRADED_GND, imlist=[*"abcd", 5]), r"imlist\[4\] is not an image name"),
        (changed(GRADED_GND, imlist=[*"abcda"]), "imlist names 'a' twice"),
        (changed(GRADED_GND, imlist=[*"abcd", "/etc/passwd"]), "leaves the image folder"),
        (changed(GRADED_GND, imlist=[*"abcd", "x/../../y"]), "leaves the image folder"),
        (changed(GRADED_GND, imlist=[*"abcd", "\ud800"]), "not an image name"),
        (changed(GRADED_GND, imlist=[*"abcd", "a\0"]), "not an image name"),
        (changed(GRADED_GND, qimlist=["q0"]), "2 entries, qimlist 1 names"),
        (changed(GRADED_GND, gnd={}), "gnd has dict"),
        (changed(GRADED_GND, gnd=[[], []]), r"gnd\[0\] is not a table"),
        (changed(GRADED_GND, gnd=[{}, {}]), "lacks 'ok'"),
        (changed(GRADED_GND, gnd=[GRADED_GND["gnd"][0], {"ok": [1]}]), r"gnd\[1\] lacks 'easy' \(it has ok\)"),
        (changed(GRADED_GND, gnd=[{"easy": [0]}, GRADED_GND["gnd"][1]]), "lacks 'hard'"),
        (gnd_of(easy=[5]), "holds 5; wanted positions in imlist, 0 to 4"),
        (gnd_of(easy=[-1]), "holds -1"),
        (gnd_of(easy=[True]), "holds True"),
        (gnd_of(easy=[0.0]), "holds 0.0"),
        (gnd_of(easy=["a"]), "holds str"),
        (gnd_of(easy=[10**300]), "holds 1000"),
        (gnd_of(easy=7), "not a list of positions"),
        (gnd_of(easy=[2, 2]), "lists image 2 twice"),
        (gnd_of(easy=[2], hard=[2]), "lists image 2 twice"),
        (gnd_of(bbx=[1, 2, 3]), "not four numbers"),
        (gnd_of(bbx="abcd"), "not four numbers"),
        (gnd_of(bbx=[1, 2, float("nan"), 4]), "not four numbers"),
        (gnd_of(bbx=[1, 2, 10**400, 4]), "not four numbers"),
        (gnd_of(bbx=[5, 2, 3, 4]), "is not a box"),
        (gnd_of(bbx=[-1, 2, 3, 4]), "is not a box"),
        (changed(PLAIN_GND, qimlist=["q", "q"]), "asks 'q' twice"),
        (changed(PLAIN_GND, gnd=[{"ok": [0], "jnk": [1]}, {"ok": [1]}]), r"gnd\[0\] .*'jnk'.*'junk'"),
        (gnd_of(Junk=[2]), r"gnd\[0\] .*'Junk'.*'junk'"),
        (gnd_of(ok=[2]), r"gnd\[0\] .*'ok'"),
        (gnd_of(bbox=[1, 2, 3, 4]), r"gnd\[0\] .*'bbox'.*'bbx'"),
        ({**PLAIN_GND, "qimlists": []}, "'qimlists'.*'qimlist'"),
    ],
)
def test_ground_truth_that_contradicts_itself(tmp_path: Path, content: Any, message: str) -> None:
    for file in (write_json(tmp_path / "gnd.json", content), write_pickle(tmp_path / "gnd_x.pkl", content)):
        with pytest.raises(DataError, match=message) as caught:
            read_ground_truth(file)
        assert "\n" not in str(caught.value)


def test_files_that_are_missing_too_large_or_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_ground_truth(tmp_path / "gnd.json")
    with pytest.raises(DataError, match="is a directory: name the file in it"):
        read_ground_truth(tmp_path)
    with pytest.raises(DataError, match=r"wanted \.json or \.pkl"):
        read_ground_truth(write_json(tmp_path / "gnd.mat", GRADED_GND))
    file = write_json(tmp_path / "gnd.json", GRADED_GND)
    monkeypatch.setattr("sop_faiss.evaluate.sets.ground_truth.MAX_FILE_BYTES", 100)
    with pytest.raises(DataError, match="at most 100 are read"):
        read_ground_truth(file)
