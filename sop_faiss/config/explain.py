"""What each setting means: its kind, default, accepted values, and the packaged configurations that set it.

The meanings are the docstrings of the fields, the accepted values those that the checks ask for.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from sop_faiss.config.checks import shown
from sop_faiss.config.config_files import packaged_configs, read_mapping
from sop_faiss.config.load import flat_settings, flatten
from sop_faiss.config.renamed import RENAMED
from sop_faiss.config.schema import Config
from sop_faiss.config.unknown_keys import called, known_keys, meant_by
from sop_faiss.config.wanted import wanted
from sop_faiss.errors import ConfigError

ALL = "all"
"""Explains every setting."""

_WIDTH = 120
_PROBES: dict[type, Any] = {str: "?", int: -(2**62), float: -1e300}
"""Values that no limited setting of a type takes, so that its check says what it wants."""
_HEAD = f"""# Settings

Every setting of a run. `sop-train --explain {ALL} > docs/config.md` writes this page; `sop-train --explain FIELD`
explains one setting, a section, or all settings that a word occurs in. They are set in a YAML file, or in the command,
as in `sop-train CONFIG sop.cls.num_anchors=256`. Each line has the default, the kind of value, and what is accepted.

Every run writes TensorBoard events, without a setting: `tensorboard --logdir runs`. Weights & Biases gets the same
numbers with `train.wandb_project`; it reads WANDB_MODE, WANDB_API_KEY and so on from the environment.
"""


def explain(what: str) -> str:
    """Explain settings, as lines of Markdown.

    Args:
        what: a dotted field (`sop.cls.num_anchors`), its last part or its symbol in the paper, an earlier name, a
            section (`sop.cls`), a word in names or meanings, or `all`: then the text is that of docs/config.md.

    Raises:
        ConfigError: nothing is called so; settings that may be meant are suggested.
    """
    meanings = _meanings()
    if what == ALL:
        return "\n".join([_HEAD, *(_entry(name, meanings[name], is_page=True) for name in known_keys())])
    return "\n".join(_entry(name, meanings[name]) for name in _named(what, meanings)).lstrip("\n")


def _named(what: str, meanings: dict[str, str]) -> list[str]:
    """Return the sections and fields that a word names; else those that it occurs in."""
    name = RENAMED.get(what, what)
    found = [key for key in known_keys() if key == name or key.startswith(f"{name}.")]
    found = found or called(name)
    if not found and 2 < len(what) < 100:  # a word may be of any case; one or two letters occur everywhere
        word = what.lower()
        is_word = re.compile(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])")
        found = [key for key in known_keys() if word in key or is_word.search(meanings[key].lower())]
    if not found:
        near = meant_by(what)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        sections = ", ".join(entry.name for entry in fields(Config))
        raise ConfigError(
            f"`explain={shown(what) or repr('')}`: no setting is called so: wanted a field such as "
            f"sop.cls.num_anchors, a section of {sections}, a word, or {ALL}{hint}"
        )
    return found


def _entry(name: str, meaning: str, is_page: bool = False) -> str:
    """Explain one field in a list item; a section in a paragraph, on the page below a heading."""
    if is_dataclass(_kind(name)):
        head, text = (f"\n## {name}\n\n", meaning) if is_page else ("\n", f"**{name}**: {meaning}")
        return f"{head}{_filled(text)}\n"
    kind, accepted = wanted(name).removeprefix("wanted "), _accepted(name)
    limits = f"{kind}: {accepted}" if accepted and accepted != kind else kind
    lines = [f"- `{name}` = {_written(_defaults()[name])} ({limits}). {meaning}"]
    set_by = {config: of[name] for config, of in _packaged().items() if name in of}
    if set_by:
        lines.append("Set by " + ", ".join(f"{config}: {_written(value)}" for config, value in set_by.items()) + ".")
    if not is_page:  # old names are spelled otherwise
        lines += [f"Up to version 0.1: {old}." for old, new in RENAMED.items() if new == name]
    return "\n".join([_filled(lines[0], "  "), *(_filled(f"  {line}", "  ") for line in lines[1:])])


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, tabsize=1
    )


def _written(value: Any) -> str:
    """Write a value as in YAML; floats with six digits."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value) or "''"


@functools.cache
def _default_config() -> Config:
    return Config()


@functools.cache
def _defaults() -> dict[str, Any]:
    return flat_settings(_default_config())


@functools.cache
def _packaged() -> dict[str, dict[str, Any]]:
    """Return what each packaged configuration sets, by its name and the field's dotted name."""
    return {name: flatten(read_mapping(path)) for name, path in sorted(packaged_configs().items())}


def _kind(name: str) -> Any:
    """Return the value that a section or field has by default."""
    return functools.reduce(getattr, name.split("."), _default_config())


@functools.cache
def _meanings() -> dict[str, str]:
    """Return the docstring of every section and field, by its dotted name, as one line."""
    return {name: " ".join(text.split()) for name, text in _docstrings(_default_config())}


def _docstrings(section: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(type(section)))).body
    assert isinstance(node, ast.ClassDef)
    texts = {
        field.target.id: text.value.value
        for field, text in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
    for entry in fields(section):
        name, value = f"{prefix}{entry.name}", getattr(section, entry.name)
        text = str(texts.get(entry.name, ""))
        if is_dataclass(value):
            yield name, text or inspect.cleandoc(type(value).__doc__ or "")
            yield from _docstrings(value, f"{name}.")
        else:
            yield name, text


def _accepted(name: str) -> str:
    """Return which values a field's check accepts, in its words; empty if it takes any of its kind."""
    default = _kind(name)
    one = default[0] if default and isinstance(default, tuple) else default
    if one is None:
        one = 0.0 if wanted(name).startswith("wanted a number") else 0
    probe = _PROBES.get(type(one))
    if probe is None:  # true or false
        return ""
    section, *path = name.split(".")
    try:
        _with(_kind(section), path, (probe,) * len(default) if isinstance(default, tuple) else probe)
    except (ConfigError, TypeError) as error:  # TypeError: of a check that cannot compare the value
        match = re.match(rf"{re.escape(name)} = .*?: wanted ([^;]*)", str(error))
        return match[1] if match else ""
    return ""


def _with(section: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    return replace(section, **{first: _with(getattr(section, first), rest, value) if rest else value})
