"""Rows of an index that pass a condition, such as `label = 'shoe' and price < 50`.

sqlglot reads the condition, as SQL writes it after WHERE, and runs nothing. What it read may hold columns, values,
comparisons, IN, BETWEEN, LIKE, IS NULL, AND, OR and NOT; all else is refused by name, every function included. pyarrow
compares the columns. A comparison with an empty value is unknown, as in SQL, and does not pass.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import sqlglot
from jaxtyping import Int64
from sqlglot import exp
from sqlglot.errors import SqlglotError

from sop_faiss.errors import ConfigError

_LONGEST = 4096
"""Letters; a longer condition is a list of keys, which belongs into a table."""
_SHOWN = 60
_WANTED = "wanted columns, values, =, <>, <, <=, >, >=, IN, BETWEEN, LIKE, IS NULL, AND, OR, NOT"
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    exp.EQ: pc.equal,
    exp.NEQ: pc.not_equal,
    exp.LT: pc.less,
    exp.LTE: pc.less_equal,
    exp.GT: pc.greater,
    exp.GTE: pc.greater_equal,
}
_PARTS = (
    *(*_COMPARISONS, exp.And, exp.Or, exp.Not, exp.Paren, exp.Neg, exp.In, exp.Between, exp.Like, exp.ILike, exp.Is),
    *(exp.Column, exp.Identifier, exp.Literal, exp.Boolean, exp.Null),
)
_ARGUMENTS = {"this", "expression", "expressions", "low", "high", "quoted", "is_string"}
"""What of these parts is looked at; one with more, as the table of a column or the query of an IN, is refused."""


def parse_condition(text: str) -> exp.Expr:
    """Read a condition; nothing is executed.

    Raises:
        ConfigError: it is empty or not a condition, or has a function, a query or another part that is not allowed.
    """
    shown = (text if len(text) <= _SHOWN else text[:_SHOWN] + "...").replace("`", "'")  # which name arguments
    if not text.strip() or len(text) > _LONGEST:
        what = "is empty" if not text.strip() else f"has {len(text):,} letters"
        raise ConfigError(f"`where` {what}: wanted a condition of 1 to {_LONGEST:,} letters, as label = 'shoe'")
    try:
        text.encode()  # a command's arguments may hold bytes that are no text, which Arrow refuses
        tree = sqlglot.parse_one(text, into=exp.Condition)
        parts = list(tree.walk())
    except (SqlglotError, RecursionError, ValueError):
        raise ConfigError(
            f"`where={shown}` is not a condition: wanted one such as label = 'shoe' and not price >= 50 (texts in "
            'single quotes, columns with spaces or named as a word of SQL in "double" ones)'
        ) from None
    for part in parts:
        more = {name for name, value in part.args.items() if value} - _ARGUMENTS
        if isinstance(part, exp.Like | exp.ILike):
            more -= {"negate"}
        if type(part) not in _PARTS or more or (isinstance(part, exp.In) and not part.expressions):
            raise ConfigError(f"`where={shown}` has {_name_of(part)}, which is not allowed: {_WANTED}")
    if not columns_of(tree):
        raise ConfigError(f"`where={shown}` names no column: {_WANTED}")
    return tree


def _name_of(part: exp.Expr) -> str:
    """Return a part as SQL, where that says what it is and is not too deep to write, else its kind."""
    if type(part) in _PARTS or isinstance(part, exp.Func):
        with contextlib.suppress(RecursionError):
            return part.sql()[:_SHOWN].replace("`", "'")
    return part.key.upper()


def columns_of(tree: exp.Expr) -> list[str]:
    """Return the names of the columns in a condition, each once."""
    return list(dict.fromkeys(column.name for column in tree.find_all(exp.Column)))


def passing(tree: exp.Expr, table: pa.Table) -> Int64[np.ndarray, " m"]:
    """Return the rows of a table that pass a condition, rising.

    Args:
        tree: of `parse_condition`.
        table: has the columns that the condition names.

    Raises:
        ConfigError: a column and a value cannot be compared.
    """
    try:
        mask = _truth(tree, table)
    except (pa.ArrowException, RecursionError) as error:
        raise ConfigError(f"`where` cannot be computed ({next(iter(str(error).splitlines()), 'too deep')})") from None
    return np.flatnonzero(mask.fill_null(False).to_numpy()).astype(np.int64)


def _truth(node: exp.Expr, table: pa.Table) -> pa.ChunkedArray:
    """Return whether each row passes; null where that is unknown."""
    if isinstance(node, exp.Paren):
        return _truth(node.this, table)
    if isinstance(node, exp.Not):
        return pc.invert(_truth(node.this, table))
    if isinstance(node, exp.And | exp.Or):
        join = pc.and_kleene if isinstance(node, exp.And) else pc.or_kleene
        return functools.reduce(join, [_truth(part, table) for part in node.flatten()])
    if isinstance(node, exp.Column):
        column = table[node.name]
        if not pa.types.is_boolean(column.type):
            raise ConfigError(
                f"`where`: column {node.name} is {column.type}, not true or false: compare it with a value"
            )
        return column
    if isinstance(node, exp.Is):
        return _is(node, table)
    if isinstance(node, exp.Like | exp.ILike):
        return _like(node, table)
    if isinstance(node, exp.Between):
        above = _compared(pc.greater_equal, node.this, node.args["low"], table)
        return pc.and_kleene(above, _compared(pc.less_equal, node.this, node.args["high"], table))
    if isinstance(node, exp.In):
        return functools.reduce(
            pc.or_kleene, [_compared(pc.equal, node.this, value, table) for value in node.expressions]
        )
    if type(node) in _COMPARISONS:
        return _compared(_COMPARISONS[type(node)], node.this, node.expression, table)
    raise ConfigError(f"`where`: {node.sql()[:_SHOWN]} is a value, wanted a comparison with a column")


def _is(node: exp.Is, table: pa.Table) -> pa.ChunkedArray:
    if not isinstance(node.this, exp.Column) or not isinstance(node.expression, exp.Null | exp.Boolean):
        raise ConfigError(f"`where`: {node.sql()[:_SHOWN]}: wanted a column IS NULL, IS TRUE or IS FALSE")
    if isinstance(node.expression, exp.Null):
        return pc.is_null(table[node.this.name])
    return pc.equal(_truth(node.this, table), node.expression.this).fill_null(False)


def _like(node: exp.Expr, table: pa.Table) -> pa.ChunkedArray:
    pattern = node.expression
    if not isinstance(node.this, exp.Column) or not (isinstance(pattern, exp.Literal) and pattern.is_string):
        raise ConfigError(f"`where`: {node.sql()[:_SHOWN]}: wanted a column LIKE 'text', with % for any letters")
    column = table[node.this.name]
    if not _is_text(column.type):
        raise ConfigError(f"`where`: column {node.this.name} is {column.type}, and LIKE is for text")
    found = pc.match_like(column, pattern.this, ignore_case=isinstance(node, exp.ILike))
    return pc.invert(found) if node.args.get("negate") else found


def _compared(compare: Callable[[Any, Any], Any], left: exp.Expr, right: exp.Expr, table: pa.Table) -> pa.ChunkedArray:
    """Compare a column with a value, a value with a column, or two columns."""
    columns = [table[side.name] if isinstance(side, exp.Column) else None for side in (left, right)]
    if columns[0] is None and columns[1] is None:
        raise ConfigError(f"`where` compares {left.sql()[:_SHOWN]} with {right.sql()[:_SHOWN]}: wanted a column")
    if columns[0] is not None and columns[1] is not None:
        if _kind(columns[0].type) != _kind(columns[1].type):
            types = f"{columns[0].type}, and {right.sql()} is {columns[1].type}"
            raise ConfigError(f"`where`: column {left.sql()} is {types}: wanted two of a kind")
        return compare(columns[0], columns[1])
    if columns[0] is not None:
        return compare(columns[0], _value(right, left, columns[0].type))
    assert columns[1] is not None
    return compare(_value(left, right, columns[1].type), columns[1])


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _kind(kind: pa.DataType) -> str:
    """Return which values a column can be compared with."""
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "a number"
    if pa.types.is_boolean(kind):
        return "TRUE or FALSE"
    if pa.types.is_temporal(kind) and not pa.types.is_duration(kind):
        if pa.types.is_time(kind):
            return "a time, as '08:30'"
        has_zone = pa.types.is_timestamp(kind) and kind.tz is not None
        return "a time, as '2026-01-31 08:30:00+01:00'" if has_zone else "a time, as '2026-01-31'"
    return "a text in single quotes" if _is_text(kind) else "IS NULL"


def _value(node: exp.Expr, column: exp.Expr, kind: pa.DataType) -> pa.Scalar:
    """Return a value for comparisons with a column of a type."""
    wanted, value = _kind(kind), _literal(node)
    fits = {str: wanted.startswith("a t"), bool: wanted == "TRUE or FALSE"}.get(type(value), wanted == "a number")
    if value is None or not fits:
        raise ConfigError(f"`where` compares column {column.name} ({kind}) with {node.sql()[:_SHOWN]}: wanted {wanted}")
    if isinstance(value, str) and not _is_text(kind):
        try:  # Arrow casts no text to a time of day
            if pa.types.is_time(kind):
                return pa.scalar(datetime.time.fromisoformat(value), kind)
            return pa.scalar(value).cast(kind)
        except (pa.ArrowException, ValueError):
            which = f"which column {column.name} is: wanted {wanted}"
            raise ConfigError(f"`where`: {value[:_SHOWN]!r} is not a {kind}, {which}") from None
    # a column of 32 bits has no 0.1, only what 0.1 is rounded to
    return pa.scalar(value, kind if pa.types.is_float32(kind) and isinstance(value, float) else None)


def _literal(node: exp.Expr) -> Any:
    """Return the value of a literal; None for anything else."""
    if isinstance(node, exp.Paren):
        return _literal(node.this)
    if isinstance(node, exp.Boolean):
        return bool(node.this)
    if isinstance(node, exp.Neg):
        inside = _literal(node.this)
        return -inside if type(inside) in (int, float) else None
    if not isinstance(node, exp.Literal):
        return None
    if node.is_string:
        return str(node.this)
    try:
        number = int(node.this)
        return number if abs(number) < 2**63 else float(number)
    except ValueError:
        return float(node.this)
    except OverflowError:
        return float("inf")
