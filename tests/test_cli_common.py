"""Every failure of a command is one line and the right status."""

from __future__ import annotations

import ast
import errno
import io
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from sop_faiss import errors
from sop_faiss.cli import common
from sop_faiss.cli.common import page_footer, run_command, say_written, with_options
from sop_faiss.cli.encoder_options import EncoderCommand
from sop_faiss.errors import CheckpointError, DataError, RunStoppedError, SavedError, WorkerDiedError, one_line
from sop_faiss.model.encoders.spec import EncoderSpec

COMMANDS = ("data", "demo", "doctor", "embed", "export", "index", "knn", "linear", "report", "retrieve", "train")


def run(error: BaseException) -> tuple[int, str, str]:
    @click.command()
    @run_command
    def command() -> None:
        click.echo("result so far")
        raise error

    result = CliRunner().invoke(command)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (DataError("two\nlines  and \x1b[31mcolor"), 1, "error: two lines and ?[31mcolor\n"),
        (CheckpointError("x"), 1, "error: x\n"),
        (RunStoppedError("collapse at step 7"), 3, "error: collapse at step 7\n"),
        (SavedError("stopped by a signal"), 75, "stopped by a signal\n"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out.tar"), 1, "error: No space left on device: out.tar\n"),
        (PermissionError(errno.EACCES, "Permission denied"), 1, "error: Permission denied\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (KeyboardInterrupt("the run is saved"), 130, "the run is saved\n"),
        (
            MemoryError(),
            1,
            "error: out of memory: lower the batch size, the image size or the memories, choose a smaller model",
        ),
    ],
)
def test_errors_are_one_line(error: BaseException, status: int, message: str) -> None:
    code, stdout, stderr = run(error)
    assert code == status and stdout == "result so far\n"
    assert stderr.startswith(message) and stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"), "CUDA out of memory"),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                "to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
            ),
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000 bytes",
        ),
        (
            RuntimeError("[enforce fail] data. DefaultCPUAllocator: not enough memory: you tried to allocate 9 B."),
            "DefaultCPUAllocator: not enough memory: you tried to allocate 9 B",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ),
        (
            RuntimeError(
                "Error in virtual void* faiss::gpu::StandardGpuResourcesImpl::allocMemory(const AllocRequest&) at "
                "x.cpp:489:\nStandardGpuResources: alloc fail type FlatData dev 0 (cudaMalloc error out of memory [2])"
            ),
            "StandardGpuResources: alloc fail type FlatData dev 0 (cudaMalloc error out of memory [2])",
        ),
        (RuntimeError("std::bad_alloc"), "std::bad_alloc"),
        (MemoryError("std::bad_alloc"), "std::bad_alloc"),
        (MemoryError("Unable to allocate 7.28 TiB for an array"), "Unable to allocate 7.28 TiB for an array"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "[Errno 12] Cannot allocate memory"),
    ],
)
def test_no_memory_is_one_line_that_says_what_to_lower(error: Exception, said: str) -> None:
    code, _, stderr = run(error)
    assert code == 1 and stderr.count("\n") == 1
    assert stderr.startswith(f"error: out of memory ({said}): lower the batch size") and "another device" in stderr


def test_no_memory_on_the_cpu_for_real() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert run(caught.value)[2].startswith("error: out of memory (DefaultCPUAllocator: ")


@pytest.mark.parametrize("bug", [ZeroDivisionError(), RuntimeError("shape '[2]' is invalid"), ValueError("bad_alloc")])
def test_bugs_keep_their_traceback(bug: Exception) -> None:
    @click.command()
    @run_command
    def command() -> None:
        raise bug

    assert CliRunner().invoke(command).exception is bug


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("1", False), ("17", False), ("head", True), ("", True)])
def test_of_several_processes_the_first_speaks(monkeypatch: pytest.MonkeyPatch, rank: str, speaks: bool) -> None:
    monkeypatch.setenv("RANK", rank)
    assert run(DataError("x")) == (1, "result so far\n", "error: x\n" if speaks else "")
    assert run(WorkerDiedError("x")) == (1, "result so far\n", "error: x\n")  # which the first does not meet


def test_the_notes_of_an_error_are_told() -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/a")
    error.add_note("free space, then --resume")
    assert run(error)[2] == "error: No space left on device: run/a; free space, then --resume\n"


def test_a_full_disk_is_not_told_by_threads_too() -> None:
    """The thread's own report would make the test fail, as any unhandled error of a thread does."""

    def write() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @click.command()
    @run_command
    def command() -> None:
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()

    assert CliRunner().invoke(command).output == ""


LOGS = """
import logging, sys, click
from sop_faiss.cli.common import log_to_stderr, run_command
@click.command()
@run_command
def main():
    if len(sys.argv) > 1: log_to_stderr(logging.INFO)
    logging.getLogger("sop_faiss.a").info("known %s", "b\\x1b[31m")
    logging.getLogger("botocore").info("found something")
    logging.getLogger("a").warning("bad image %s", "c\\n\\x1b[31m")
main.main([])
"""


@pytest.mark.parametrize(("option", "before"), [([], ""), (["info"], "known b?[31m\n")])
def test_log_messages_are_lines_that_terminals_do_not_obey(option: list[str], before: str) -> None:
    done = subprocess.run([sys.executable, "-c", LOGS, *option], capture_output=True, text=True)
    assert done.stderr == f"{before}bad image c ?[31m\n" and done.returncode == 0


WARNS = """
import warnings, click
from sop_faiss.cli.common import run_command
@click.command()
@run_command
def main():
    warnings.warn("use\\nanother \x1b[31m")
main.main([])
"""


def test_warnings_of_packages_are_lines_without_places_in_their_code() -> None:
    done = subprocess.run([sys.executable, "-c", WARNS], capture_output=True, text=True)
    assert done.stderr == "warning: use another ?[31m\n" and done.returncode == 0


WRITES = """
import pathlib, signal, sys, time, click
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` ignores it, and so would this process
from sop_faiss.cli.common import run_command
from sop_faiss.files import atomic_directory
@click.command()
@run_command
def main():
    with atomic_directory(pathlib.Path(sys.argv[1])) as directory:
        (directory / "half").touch()
        print("writing", flush=True)
        time.sleep(60)
main.main([])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_in_a_line_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    words = [sys.executable, "-c", WRITES, str(tmp_path / "out")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number
    assert len(said.splitlines()) == 1 and number.name in said and "error" not in said
    assert list(tmp_path.iterdir()) == []


def test_signals_are_as_before_after_a_command() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` has it
    during: list[object] = []

    @click.command()
    @run_command
    def command() -> None:
        during.extend(map(signal.getsignal, (signal.SIGHUP, signal.SIGTERM)))

    CliRunner().invoke(command)
    assert during[0] == signal.SIG_IGN and callable(during[1])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    signal.signal(signal.SIGHUP, before)


def test_page_footer() -> None:
    assert re.fullmatch(r"sop-x y, sop-faiss \d+\.\d+\S*, \d{4}-\d\d-\d\d \d\d:\d\d UTC", page_footer("sop-x y"))


def test_a_closed_pipe_is_quiet() -> None:
    code = (
        "import click\nfrom sop_faiss.cli.common import run_command\n"
        "@click.command()\n@run_command\ndef main():\n    for n in range(200000):\n        click.echo(str(n))\nmain()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 1


def test_written_files_are_told_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say_written("page", Path("two\nlines.html"))
    say_written("page", None)
    assert capsys.readouterr() == ("", "page: two lines.html\n")


def test_one_line() -> None:
    assert one_line("a\n  b\tc\0\udce9é写") == "a b c??é写"


def test_log_messages_go_where_a_bar_has_put_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich replaces stderr while it shows a bar; a message written past it would end up in the bar's line."""
    handler = common._CurrentStderr()
    handler.setFormatter(common._OneLine())
    for _ in range(2):
        bar = io.StringIO()
        monkeypatch.setattr(sys, "stderr", bar)
        handler.emit(logging.LogRecord("x", logging.INFO, "x.py", 1, "step %d", (3,), None))
        assert bar.getvalue() == "step 3\n"


def library_messages() -> list[str]:
    """Return every text of the library that names an argument in backquotes, docstrings aside."""
    texts = []
    for file in sorted(Path(errors.__file__).parent.rglob("*.py")):
        if "cli" in file.parts:
            continue
        prose = set()
        for node in ast.walk(ast.parse(file.read_text())):  # an expression comes before its parts
            if isinstance(node, ast.Expr):
                prose.add(node.value)
            elif isinstance(node, ast.Constant | ast.JoinedStr) and node not in prose:
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                texts.append("".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts))
    return sorted({text for text in texts if "`" in text and DataError(text).arguments})


def test_help_shows_the_options_of_a_command_before_those_of_its_encoder() -> None:
    grouped = [each for each in all_commands() if isinstance(each, EncoderCommand)]
    assert {each.name for each in grouped} >= {"build", "search", "serve"} and len(grouped) >= 7
    for command in grouped:
        own, _, encoder = CliRunner().invoke(command, ["--help"]).stdout.partition("\nEncoder options:\n")
        assert "  --model M " in own and "  --pooling " in encoder and "  --model M " not in encoder
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                shown = (
                    encoder if parameter.name in EncoderSpec.__dataclass_fields__ and parameter.name != "model" else own
                )
                assert f"  {parameter.opts[0]}" in shown
            assert parameter.name != "batch_size" or "on a CPU at most 8" in " ".join(own.split())


def all_commands() -> list[click.Command]:
    mains = [import_module(f"sop_faiss.cli.{name}").main for name in COMMANDS]
    return [each for main in mains for each in (main.commands.values() if isinstance(main, click.Group) else [main])]


def test_a_message_shows_no_option_that_the_command_lacks():
    commands, messages = all_commands(), library_messages()
    assert len(commands) > 15
    assert len(messages) > 50
    for command in commands:
        own = {option for parameter in command.params for option in parameter.opts}
        with click.Context(command):
            for message, spelled in zip(messages, with_options("\0".join(messages)).split("\0"), strict=True):
                shown = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", spelled))
                assert shown <= own | set(re.findall(r"--[a-z][a-z-]*", message)), message


def test_arguments_are_shown_as_the_command_has_them():
    @click.command()
    @click.argument("index")
    @click.option("--json", "json_file")
    @click.option("--max-bad-fraction", "-m")
    @click.option("--train-share", "--labels")
    @click.option("-k")
    def command() -> None: ...

    with click.Context(command):
        assert with_options("give `json=FILE`, or `json_file`") == "give --json FILE, or --json"
        assert with_options("raise `max_bad_fraction=0.1`") == "raise --max-bad-fraction 0.1"
        assert with_options("`train_share=1.01`: wanted 1 or less") == "--train-share/--labels 1.01: wanted 1 or less"
        assert with_options("`k=0`") == "-k 0"
        assert with_options("`index` is empty") == "INDEX is empty"
        assert with_options("a `path`, or `output=DIR`") == "a `path`, or `output=DIR`"
    assert with_options("give `json=FILE`") == "give `json=FILE`"


def leaf_commands() -> dict[str, click.Command]:
    mains = {name: import_module(f"sop_faiss.cli.{name}").main for name in COMMANDS}
    groups = {name: main.commands for name, main in mains.items() if isinstance(main, click.Group)}
    inner = {f"{name} {word}": each for name, commands in groups.items() for word, each in commands.items()}
    return mains | inner


@pytest.mark.parametrize(("name", "command"), leaf_commands().items(), ids=str)
def test_help_spells_the_method_out(name: str, command: click.Command) -> None:
    words = CliRunner().invoke(command, ["--help"]).stdout.split()
    shown = " ".join(words).replace("- ", "-")  # a line may end in "Self-"
    assert not re.search(r"\bSOP\b", shown) or "SOP (Self-Organizing Visual Prototypes)" in shown
