"""What needs no network loads neither torch nor timm; every command runs by `python -m` and knows -h."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from sop_faiss.features.store import FeatureStore
from sop_faiss.index.build import build_index
from tests.images import write_shards

HEAVY = ("torch", "torchvision", "timm", "faiss")
OF_NETWORKS = ("torchvision", "timm", "torch._dynamo")
Run = Callable[..., tuple[str, int, list[str]]]

# In a fresh process: imports the modules that are named first, then runs each line of stdin in a process of its own,
# forked: a module as `python -m` does. Prints in one line what that printed, its exit status, and what it has loaded.
RUN = f"""
import importlib, json, os, runpy, sys, tempfile
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile("w+") as left:
        child = os.fork()
        if not child:
            sys.argv = json.loads(line)
            os.dup2(printed.fileno(), 1)
            status = None
            try:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            except SystemExit as leaving:
                status = leaving.code
            sys.stdout.flush()
            json.dump([status or 0, [name for name in {HEAVY + OF_NETWORKS} if name in sys.modules]], left)
            left.flush()
            os._exit(0)
        os.waitpid(child, 0)
        printed.seek(0), left.seek(0)
        print(json.dumps([printed.read().decode(), *json.load(left)]), flush=True)
"""


def runner(*imported: str) -> Iterator[Run]:
    words = [sys.executable, "-c", RUN, *imported]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def run(command: str, *arguments: object) -> tuple[str, int, list[str]]:
            """What it printed, its exit status, and which heavy modules it loaded."""
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps([f"sop_faiss.cli.{command}", *map(str, arguments)]) + "\n")
            process.stdin.flush()
            printed, status, loaded = json.loads(process.stdout.readline())
            return printed, status, loaded

        yield run
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    yield from runner("click", "numpy", "sop_faiss.config")


@pytest.fixture(scope="module")
def run_with_torch() -> Iterator[Run]:
    """To find out what it loads beyond torch and faiss."""
    yield from runner("torch", "faiss", "pyarrow.parquet")


@pytest.mark.parametrize(
    "command",
    [
        ("data",),
        ("data", "check"),
        ("data", "demo"),
        ("data", "pack"),
        ("data", "preview"),
        ("demo",),
        ("doctor",),
        ("embed",),
        ("eval", "segment"),
        ("eval", "video"),
        ("export",),
        ("index",),
        ("index", "add"),
        ("index", "build"),
        ("index", "duplicates"),
        ("index", "export"),
        ("index", "info"),
        ("index", "merge"),
        ("index", "remove"),
        ("index", "search"),
        ("index", "serve"),
        ("knn",),
        ("linear",),
        ("report",),
        ("retrieve",),
        ("study",),
        ("train",),
    ],
    ids=" ".join,
)
def test_help_loads_nothing_heavy(run: Run, command: tuple[str, ...]) -> None:
    printed, status, loaded = run(*command, "--help")
    assert "Usage: " in printed and "-h, --help" in printed and status == 0
    assert loaded == []


@pytest.mark.parametrize(
    "command", ["data", "demo", "doctor", "embed", "export", "index", "knn", "linear", "retrieve", "study", "train"]
)
def test_every_command_tells_its_version(command: str) -> None:
    main = importlib.import_module(f"sop_faiss.cli.{command}").main
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0 and importlib.metadata.version("sop-faiss") in result.stdout


@pytest.mark.parametrize("command", ["data", "embed", "export", "index", "knn", "linear", "retrieve", "study", "train"])
def test_a_bare_command_shows_its_help(command: str) -> None:
    main = importlib.import_module(f"sop_faiss.cli.{command}").main
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 2 and "Example" in result.stderr and result.stdout == ""


@pytest.mark.parametrize("command", ["data", "index"])
def test_summaries_of_subcommands_are_whole(command: str) -> None:
    main = importlib.import_module(f"sop_faiss.cli.{command}").main
    printed = CliRunner().invoke(main, ["--help"]).stdout.partition("Commands:")[2]
    assert printed.count("\n") > 3 and "..." not in printed


def small_store(folder: Path, names: str) -> FeatureStore:
    made_by = {"encoder": {"name": "n", "fingerprint": "f"}, "preprocess": {}, "pooling": "cls", "root": str(folder)}
    labels = np.arange(len(names)) % 2
    return FeatureStore([*names], labels, [""] * len(names), [*names], np.eye(len(names), dtype=np.float32), made_by)


def test_info_loads_nothing_heavy(run: Run, tmp_path: Path) -> None:
    build_index(small_store(tmp_path, "abc"), tmp_path / "index")
    printed, status, loaded = run("index", "info", tmp_path / "index")
    assert "3 of dimension 3" in printed and "every byte verified" in printed and status == 0
    assert loaded == []


@pytest.mark.parametrize(
    "command",
    [
        "index add INDEX --features OTHER",
        "index build --features STORE --out NEW",
        "index duplicates INDEX --html PAGE",
        "index export INDEX --out NEW",
        "index merge INDEX SECOND --out NEW",
        "index remove INDEX a",
        "index search INDEX --features OTHER",
        "index search INDEX --key a --html PAGE",
        "knn --train STORE --test OTHER -k 1",
    ],
    ids=lambda command: " ".join(command.split()[:2]),
)
def test_what_needs_no_encoder_loads_no_networks(run_with_torch: Run, tmp_path: Path, command: str) -> None:
    first, second = small_store(tmp_path, "abcd"), small_store(tmp_path, "efgh")
    first.write(tmp_path / "STORE")
    second.write(tmp_path / "OTHER")
    build_index(first, tmp_path / "INDEX")
    build_index(second, tmp_path / "SECOND")
    words = [str(tmp_path / word) if word.isupper() else word for word in command.split()]
    _, status, loaded = run_with_torch(*words)
    assert status == 0 and not {*loaded} & {*OF_NETWORKS}


def test_checking_shards_loads_nothing_heavy(run: Run, tmp_path: Path) -> None:
    printed, status, loaded = run("data", "check", write_shards(tmp_path))
    assert "no problems" in printed and status == 0
    assert loaded == []
