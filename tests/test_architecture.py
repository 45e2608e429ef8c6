"""The floors of the house: imports only go down, click stays in the commands, FAISS in its package."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Set
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = [
    {"errors", "paths"},
    {"output_checks"},
    {"bootstrap", "files", "progress", "unit_rows"},
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
# Test files that mirror no module, and why.
SPANNING_TESTS = {
    "activations": "activation checkpointing is in the backbone, compilation in the loop; both leave training as it is",
    "architecture": "all source files",
    "cli_imports": "what every command imports",
    "cluster_scripts": "the scripts of docs/cluster.md",
    "corruption": "index directories as a whole, damaged at random",
    "data_demo": "data/demo.py, which the command of the same name calls",
    "data_preview": "verbs/training/data_preview.py and the command of the same name",
    "examples": "examples/",
    "gpu": "what needs a CUDA device, of several packages",
    "hostile_data": "bad and changing data on every path by which images are read",
    "kill_series": "training commands killed at many moments",
    "kills": "all other commands, killed while they write",
    "loss_properties": "properties of the loss for any input; test_loss has its cases",
    "makefile": "the Makefile",
    "own_results": "verbs/output_paths.py on the results of every command; test_output_paths has its other cases",
    "paper_suite": "configs/eval/paper.yaml, with every command in it",
    "retrieval_page": "the page of sop-retrieve in a browser",
    "recipes": "docs/python.md",
    "rope_backbones": "timm's Eva, DINOv2 and DINOv3 families through every part of model/backbones",
    "search_above": "search, duplicates and export, which share the search of all rows above a similarity",
    "seen_images": "one image in every format, through every way of reading it",
    "serve_openapi": "all endpoints against their own description",
    "serve_page": "the served page in a browser",
    "site": "docs/, README.md and mkdocs.yml",
    "small_indices": "index/build.py and neighbors/disk with vectors on disk, and targets for memory and time",
    "tasks": "evaluate/*_task.py against the command, the online score and the demo that hold the same task",
    "torchrun_commands": "all commands that run on several ranks",
    "tutorials": "docs/tutorials/ and examples/notebooks/",
    "wheel": "the package as built",
}


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


def imports_when_loaded(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Find imports that run with the module: not those in functions, nor those for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from imports_when_loaded(ast.Module(child.orelse, []))
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports_when_loaded(child)


def loaded_modules(tree: ast.Module, own: str, modules: Set[str]) -> set[str]:
    """Return which of the modules are loaded before this one is; a module's packages are, unless they are its own."""
    named: set[str] = set()
    for node in imports_when_loaded(tree):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        else:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            named |= full & modules
            if not full <= modules:  # names in the module itself
                named.add(node.module or "")
    parts = [name.split(".") for name in named]
    loaded = {".".join(name[:end]) for name in parts for end in range(1, len(name) + 1)} & modules
    return {name for name in loaded if name in named or not own.startswith(f"{name}.")} - {own}


def assert_no_cycle(sources: dict[str, str]) -> None:
    graph = {name: loaded_modules(ast.parse(text), name, sources.keys()) for name, text in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules that import each other: {' <- '.join(error.args[1])}")


def test_no_modules_import_each_other():
    sources = {}
    for path in SOURCES:
        parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"]
        sources[".".join(["sop_faiss", *parts] if parts[0] == "cli" else parts)] = path.read_text()
    assert_no_cycle(sources)


@pytest.mark.parametrize("inner", ["from p import a", "from p.a import x", "import p.a"])
def test_a_cycle_is_found(inner):
    pair = {"p": "", "p.a": "from p.b import y"}
    for text in (inner, f"class C:\n    {inner}", f"try:\n    {inner}\nfinally:\n    pass"):
        with pytest.raises(pytest.fail.Exception, match=r"p\.a"):
            assert_no_cycle({**pair, "p.b": text})
        with pytest.raises(pytest.fail.Exception, match="p"):
            assert_no_cycle({"p": text, "p.a": "from p import x"})
    for text in (f"def later():\n    {inner}", f"if TYPE_CHECKING:\n    {inner}"):
        assert_no_cycle({**pair, "p.b": text})


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


def test_test_files_mirror_modules():
    """`test_loop` mirrors train/loop.py; where two modules share a name, their package is put first: `test_cli_knn`."""
    modules_by_name: dict[str, set[str]] = defaultdict(set)
    for path in [*SOURCES, *(ROOT / "benchmarks").rglob("*.py")]:
        parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"]
        for first in range(len(parts)):
            modules_by_name["_".join(parts[first:])].add(".".join(parts))
    tested: dict[str, str] = {}
    names = {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_*.py")}
    assert SPANNING_TESTS.keys() <= names, "the table names test files that do not exist"
    for name in sorted(names - SPANNING_TESTS.keys()):
        modules = modules_by_name[name]
        assert len(modules) == 1, f"test_{name} mirrors {sorted(modules) or 'no module'}: rename it or give the reason"
        (module,) = modules
        assert module not in tested, f"test_{name} and test_{tested[module]} both mirror {module}"
        tested[module] = name


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
