"""The floors of the house: imports only go down, click stays in the commands, FAISS in its package."""

from __future__ import annotations

import ast
import tomllib
from importlib import import_module
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = [
    {"errors", "paths"},
    {"files", "progress", "unit_rows"},
    {"config"},
    {"distributed"},
    {"neighbors"},
    {"sop"},
    {"data"},
    {"model"},
    {"objectives"},
    {"train"},
    {"features"},
    {"index"},
    {"evaluate"},
    {"report"},
    {"serve"},
    {"verbs"},
    {"cli"},
]
HEIGHT = {name: height for height, names in enumerate(FLOORS) for name in names}
SOURCES = sorted([*(ROOT / "sop_faiss").rglob("*.py"), *(ROOT / "cli").glob("*.py")])


def floor_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "cli" if parts[0] == "cli" else parts[1]


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names if module == "sop_faiss"}
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_the_floors(path):
    own = floor_of(path)
    if path == ROOT / "sop_faiss" / "__init__.py":
        return  # lazy, and exempt
    assert own in HEIGHT, f"{path} stands on no floor"
    for module in imported_modules(path):
        parts = module.split(".")
        if parts[0] == "click":
            assert own == "cli", f"{path} imports click"
        if parts[0] == "faiss":
            assert own == "neighbors", f"{path} imports faiss"
        if parts[0] == "sop_faiss" and len(parts) > 1 and parts[1] in HEIGHT:
            target = parts[1]
            assert target == own or HEIGHT[target] < HEIGHT[own], f"{path} imports {module}, which stands higher"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_that_lead_to_themselves_are_no_traceback(path):
    """`Path.resolve` raises RuntimeError at one; `paths.real_path` does not."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    assert not any(node.attr == "resolve" for node in calls), f"{path} calls resolve: use real_path"


def test_every_package_is_listed_for_the_wheel():
    listed = (ROOT / "pyproject.toml").read_text()
    for folder in {path.parent for path in (ROOT / "sop_faiss").rglob("*.py")}:
        name = ".".join(folder.relative_to(ROOT).parts)
        assert f'"{name}",' in listed, f"{name} is missing from [tool.setuptools] packages"


def test_the_step_stays_readable():
    tree = ast.parse((ROOT / "sop_faiss" / "train" / "loop.py").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    step = functions["train_step"]
    assert (step.end_lineno or 0) - step.lineno < 60


def commands() -> list[tuple[str, str]]:
    """Return the command and the module of each `sop-A` and `sop-A B`."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    found = []
    for script, place in scripts.items():
        module, name = place.split(":")
        command = getattr(import_module(module), name)
        if isinstance(command, click.Group):
            modules = {each: inner.callback.__module__ for each, inner in command.commands.items()}
            found += [(f"{script} {each}", module.rpartition(".")[2]) for each, module in modules.items()]
        else:
            found.append((script, module.rpartition(".")[2]))
    return found


def verb_files(words: str, cli_module: str) -> list[Path]:
    """Return the files that may hold a command's verb (CONTRIBUTING.md, "Where things are")."""
    library = ROOT / "sop_faiss"
    name = words.removeprefix("sop-").replace(" ", "_")
    files = [file for each in (name, cli_module) for file in (library / "verbs").rglob(f"{each}.py")]
    if "_" in name:
        files += [
            library / cli_module.partition("_")[0] / f"{each.partition('_')[2]}.py" for each in (name, cli_module)
        ]
        files += (library / name.partition("_")[2]).glob("*.py")
    return [file for file in files if file.is_file()]


@pytest.mark.parametrize(("words", "cli_module"), commands())
def test_a_verb_is_where_its_command_says(words, cli_module):
    called = imported_modules(ROOT / "cli" / f"{cli_module}.py")
    if words == "sop-index info":
        assert "sop_faiss.index.store" in called  # it prints what opening an index reads
        return
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in verb_files(words, cli_module)}
    assert names & called, f"cli/{cli_module}.py calls none of {sorted(names)}"
