"""An empty path is never the current folder: all that names one refuses it, and nothing is written."""

from __future__ import annotations

import importlib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.images import write_folder

COMMANDS = ("data", "demo", "doctor", "embed", "export", "index", "knn", "linear", "report", "retrieve", "train")
NAMES = {"src", "shards", "data", "train", "test", "dataset", "model", "whiten", "distractors", "images"}
"""Parameters that are text, and name files all the same."""


def leaves(command: click.Command, *words: str) -> list[tuple[click.Command, tuple[str, ...]]]:
    if not isinstance(command, click.Group):
        return [(command, words)]
    return [leaf for name, sub in command.commands.items() for leaf in leaves(sub, *words, name)]


def cases() -> list[tuple[str, str, list[str]]]:
    """Command, parameter, and words that give it an empty value and all that is required a good one."""
    found = []
    for name in COMMANDS:
        for command, words in leaves(importlib.import_module(f"sop_faiss.cli.{name}").main):
            paths = [each for each in command.params if isinstance(each.type, click.Path) or each.name in NAMES]
            for asked in (each for each in paths if each.type is not click.INT):
                line = list(words)
                for each in command.params:
                    if each is asked or each.required or (each.name in ("model", "dataset") and name == "retrieve"):
                        value = "" if each is asked else "photos"
                        line += [f"{each.opts[0]}={value}" if isinstance(each, click.Option) else value]
                found.append((name, str(asked.name), line))
    return found


@pytest.mark.parametrize(("name", "parameter", "words"), cases())
def test_an_empty_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, parameter: str, words: list[str]
) -> None:
    write_folder(tmp_path / "photos", classes=2, per_class=2)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(importlib.import_module(f"sop_faiss.cli.{name}").main, words)
    told = result.stderr.splitlines()[-1]
    assert result.exit_code == 2 and told.lower().startswith("error: "), result.output
    assert "empty" in told, told
    assert sorted(tmp_path.rglob("*")) == before
