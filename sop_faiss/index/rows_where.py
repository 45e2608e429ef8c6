"""Rows of an index by a condition on their columns, and on those of a user's own table."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from jaxtyping import Int64

from sop_faiss.errors import ConfigError, DataError
from sop_faiss.files import require_readable
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.where import columns_of, parse_condition, passing
from sop_faiss.paths import path_state

_log = logging.getLogger(__name__)
_KEY = "key"
_OWN = (_KEY, "source", "member", "label")
_SHOWN = 12
_COMPARABLE = {pa.string_view(): pa.string(), pa.float16(): pa.float32()}
"""Types that pyarrow does not compare, and what they are read as."""


def rows_where(index: FeatureIndex, where: str, table: Path | None = None) -> Int64[np.ndarray, " m"]:
    """Find the rows of an index that pass a condition, rising; for the argument `among` of `FeatureIndex.search`.

    Args:
        index: with the columns `key`, `source` (the shard), `member` (the file) and `label` (the name of the class, or
            its number where the index has no names).
        where: as SQL writes it after WHERE: `label = 'shoe' and price < 50`; see `parse_condition`.
        table: a .parquet or .csv file with a column `key` and more. Images without a line have empty values.

    Raises:
        ConfigError: the condition is not one, names an unknown column, compares what cannot be compared, or no image
            passes it.
        DataError: the table cannot be used.
    """
    tree = parse_condition(where)
    wanted = columns_of(tree)
    own = [name for name in wanted if name in _OWN]
    columns = _own_columns(index, own)
    if table is not None:
        others, names = _read_table(table, wanted)
        clash = [name for name in own if name in names and name != _KEY]
        if clash:
            raise ConfigError(
                f"`where` names {clash[0]}, which both the index and the table have: rename it in the table"
            )
        _require(wanted, list(dict.fromkeys([*_OWN, *names])), table)
        columns |= _joined(index, others, table)
    else:
        _require(wanted, _OWN, None)
    rows = passing(tree, pa.table({name: columns[name] for name in wanted}))
    if not len(rows):
        raise ConfigError(f"no image of the index passes `where={where[:200].replace('`', chr(39))}`: change it")
    return rows


def column_names(index: FeatureIndex, table: Path | None = None) -> list[str]:
    """Return the names that a condition may have, those of the index first.

    Raises:
        DataError: the table cannot be used.
    """
    if table is None:
        return list(_OWN)
    keys, names = _read_table(table, [])
    _joined(index, keys, table)
    both = {name for name in names if name in _OWN and name != _KEY}
    return [name for name in dict.fromkeys([*_OWN, *names]) if name not in both]


def _require(wanted: Sequence[str], present: Sequence[str], table: Path | None) -> None:
    missing = [name for name in wanted if name not in present]
    if missing:
        near = difflib.get_close_matches(missing[0], present, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        names = ", ".join(present[:_SHOWN]) + (", ..." if len(present) > _SHOWN else "")
        remedy = "(texts are in single quotes)" if table else "(texts are in single quotes; others are in a `table`)"
        raise ConfigError(f"`where` names column {missing[0]!r}, wanted {names} {remedy}{hint}")


def _own_columns(index: FeatureIndex, names: Sequence[str]) -> dict[str, pa.Array]:
    ids = index.ids
    columns = {}
    for name, values in (("key", ids.keys), ("source", ids.sources), ("member", ids.members)):
        if name in names:
            columns[name] = pa.array(values, pa.string())
    if "label" in names:
        columns["label"] = _label_column(index)
    return columns


def _label_column(index: FeatureIndex) -> pa.Array:
    labels, class_names = index.ids.labels, index.manifest.class_names
    if labels is None:
        return pa.nulls(len(index), pa.string())
    numbers = pa.array(labels, mask=labels < 0)
    if class_names is None:
        return numbers
    known = [index.class_name(number) for number in range(max(int(labels.max()) + 1, 0))]
    return pc.take(pa.array(known, pa.string()), numbers)


def _joined(index: FeatureIndex, table: pa.Table, file: Path) -> dict[str, pa.ChunkedArray]:
    """Return the columns of a table by row of the index; empty where it has no line for the image."""
    keys = pa.array(index.ids.keys, pa.string())
    lines = pc.index_in(keys, value_set=table[_KEY])
    matched = len(keys) - lines.null_count
    if matched == 0:
        first = (
            f"its first is {table[_KEY][0].as_py()!r}, the index's {index.ids.keys[0]!r}"
            if len(table)
            else "it is empty"
        )
        raise DataError(f"`table={file}` has no key of the index ({first}): wanted a line for each image")
    if matched < max(len(table), len(keys)):
        _log.warning("%s: %d of %d lines have a key of the index, %d images", file, matched, len(table), len(keys))
    try:
        return {name: pc.take(table[name], lines) for name in table.column_names if name not in _OWN}
    except pa.ArrowException as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"`table={file}` has a column of a type that cannot be used ({why}): save it as text") from None


def _read_table(path: Path, wanted: Sequence[str]) -> tuple[pa.Table, list[str]]:
    """Read the keys and the wanted columns of a Parquet or CSV file, as far as it has them; and the names of all."""
    if path.suffix.lower() not in (".parquet", ".csv"):
        raise DataError(f"`table={path}`: wanted a name that ends in .parquet or .csv")
    if not path.is_file():
        raise DataError(f"`table={path}` {path_state(path)}, wanted a .parquet or .csv file")
    require_readable(path)
    try:
        with pa.OSFile(str(path)) as stream:  # a name alone could be an address
            table, names = _parsed(stream, path.suffix.lower(), [_KEY, *wanted])
        keys = table[_KEY].cast(pa.string())
    except KeyError:
        raise DataError(f"`table={path}` lacks a column {_KEY}, or has a name twice: wanted one of each") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"`table={path}` cannot be read ({why}): wanted a .parquet or .csv file") from None
    if keys.null_count or pc.count_distinct(keys).as_py() != len(keys):
        why = "is empty in some lines" if keys.null_count else f"repeats {_repeated(keys)!r}"
        raise DataError(f"`table={path}`: column {_KEY} {why}: wanted one line for each image")
    return table.set_column(table.column_names.index(_KEY), _KEY, keys), names


def _parsed(stream: pa.NativeFile, suffix: str, wanted: Sequence[str]) -> tuple[pa.Table, list[str]]:
    if suffix == ".csv":  # keys such as 007 are texts
        table = pa.csv.read_csv(stream, convert_options=pa.csv.ConvertOptions(column_types={_KEY: pa.string()}))
        names = table.column_names
    else:
        file = pq.ParquetFile(stream)
        names = file.schema_arrow.names
        table = file.read([name for name in dict.fromkeys(wanted) if name in names])
    table = table.select([name for name in dict.fromkeys(wanted) if name in names])  # KeyError: a name occurs twice
    for place, field in enumerate(table.schema):
        plain = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        plain = _COMPARABLE.get(plain, plain)
        if plain != field.type:
            table = table.set_column(place, field.name, table[place].cast(plain))
    return table, names


def _repeated(keys: pa.ChunkedArray) -> str:
    counts = keys.value_counts()
    place = pc.index(pc.greater(counts.field("counts"), 1), True).as_py()
    return str(counts.field("values")[place].as_py())
