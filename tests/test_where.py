"""Conditions: what passes is what SQL would let pass, and nothing else is read or run."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sop_faiss.errors import ConfigError
from sop_faiss.index.where import columns_of, parse_condition, passing

ROWS = [
    ("shoe", 1, 1.5, 1),
    ("hat", 2, None, 0),
    (None, 3, -2.0, None),
    ("Shoe", None, 1.5, 1),
    ("it's", -1, 0.0, 0),
]
TABLE = pa.table(
    {
        "label": [row[0] for row in ROWS],
        "year": [row[1] for row in ROWS],
        "a b": [row[2] for row in ROWS],
        "ok": [None if row[3] is None else bool(row[3]) for row in ROWS],
        "day": pa.array([0, 18_000, None, 20_000, 1], pa.date32()),
        "list": [[1], [], None, [2], [3]],
    }
)


@pytest.mark.parametrize(
    "condition",
    [
        "label = 'shoe'",
        "not label = 'shoe'",
        "label <> 'shoe' and year > 0",
        "label != 'shoe' or year is null",
        "year in (1, 3)",
        "year not in (1, 3)",
        "year between 1 and 2",
        'not (year between 1 and 2) or "a b" = 1.5',
        "year not between 1 and 2",
        "label like '%o%'",
        "label not like 's_oe'",
        "label = 'it''s'",
        "ok",
        "not ok and year = -1",
        "ok is null",
        "ok is not true",
        '1 < year and year < "a b"',
        '"a b" >= -2 and "a b" <= 1e0',
        "year = 2 or label = 'shoe' and year = 9",
        "(year = 2 or label = 'shoe') and year = 9",
        "year = 99999999999999999999",
        "label > 'hat' -- a comment",
    ],
)
def test_as_sqlite(condition: str) -> None:
    with sqlite3.connect(":memory:") as database:
        database.execute('create table t (label text, year integer, "a b" real, ok integer)')
        database.executemany("insert into t values (?, ?, ?, ?)", ROWS)
        database.execute("pragma case_sensitive_like = on")
        wanted = [row - 1 for (row,) in database.execute(f"select rowid from t where {condition}\norder by rowid")]
    database.close()
    assert passing(parse_condition(condition), TABLE).tolist() == wanted


def test_times_and_any_case() -> None:
    assert passing(parse_condition("day > '2019-04-01'"), TABLE).tolist() == [1, 3]
    assert passing(parse_condition("label ilike 'SHOE'"), TABLE).tolist() == [0, 3]
    assert columns_of(parse_condition("label = 'x' and (year = 1 or label = 'y')")) == ["label", "year"]


@pytest.mark.parametrize(
    "condition",
    [
        "",
        " \n",
        "label",
        "'x'",
        "1 = 1",
        "true",
        "label = ",
        "label = 'x",
        "label = 'x'; drop table t",
        "label = 1",
        "year = 'x'",
        "year = null",
        "year = label",
        "ok = 1",
        "ok > 'x'",
        "day = 5",
        "day = 'yesterday'",
        "list = 1",
        "year like '1%'",
        "label like label",
        "label in ()",
        "label in (select label from t)",
        "label = (select 1)",
        "t.label = 'x'",
        "year + 1 = 2",
        "length(label) = 4",
        "read_csv('/etc/passwd') = label",
        "pg_read_file('/etc/passwd') = label",
        "label = read_text('/etc/passwd')",
        "copy t to '/tmp/x'",
        "cast(year as text) = '1'",
        "case when ok then true else false end",
        "exists (select 1)",
        "label = ?",
        "label = :name",
        "label = @@version",
        "label || 'x' = 'y'",
        "label regexp 'x'",
        "*",
        "true and ok",
        "(" * 1500 + "ok" + ")" * 1500,
        "not " * 1000 + "ok",
        "ok or " * 1000 + "ok",
        "label = `x`",
        "label->" * 400 + "ok",  # is read, and too deep to be shown
        "year" + "::int" * 400 + " = 1",
        "label = '\udcff'",  # a byte of a command's argument that is no text
    ],
)
def test_refused_in_one_line(condition: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("a file was opened")

    monkeypatch.setattr("builtins.open", opened)
    with pytest.raises(ConfigError) as raised:
        passing(parse_condition(condition), TABLE)
    assert raised.value.arguments[0] == "where" and "\n" not in str(raised.value).split("`")[-1]


def test_long_conditions_are_computed() -> None:
    condition = " or ".join(f"year = {number}" for number in range(300))
    np.testing.assert_array_equal(passing(parse_condition(condition), TABLE), [0, 1, 2])


def test_types_of_parquet() -> None:
    """Times of day, times with a zone, and numbers of 32 bits, which have no 0.1."""
    times = pa.array([0, 8 * 3600, 23 * 3600], pa.time32("s"))
    zoned = pa.array([0, 3600, 7200], pa.timestamp("s", "UTC"))
    table = pa.table({"at": times, "seen": zoned, "small": pa.array([0.1, 0.2, None], pa.float32())})
    for condition, wanted in (
        ("at < '08:30'", [0, 1]),
        ("at = '23:00:00'", [2]),
        ("seen >= '1970-01-01 02:00:00+01:00'", [1, 2]),
        ("small = 0.1", [0]),
        ("small > 0.1", [1]),
        ("small < 1e300", [0, 1]),
    ):
        assert passing(parse_condition(condition), table).tolist() == wanted
    for condition in ("at < '25:00'", "at = 8", "seen > '1970-01-01'"):
        with pytest.raises(ConfigError) as raised:
            passing(parse_condition(condition), table)
        assert raised.value.arguments[0] == "where"
