"""The training runs of `compare_checkouts.py`, their data, and how the commands of a checkout are run."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import timm
import torch
from differences import Rules, renamed
from PIL import Image
from safetensors.torch import save_file

__all__ = ["CASES", "DIGITS", "Case", "Checkout", "RunFailed", "checkout", "commit", "make_data", "training"]

SECONDS = 600.0
"""The most that one command may take."""
VERSION = re.compile(r"\bversion\b|\bsop[-_]faiss (checkpoint )?\d")
"""What a line must have with which a newer version refuses what an older one wrote."""
IMAGES, CLASSES = 240, 4
CONV = "test_efficientnet"
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")}
ALWAYS = ("train.device=cpu", "train.log_every_steps=1", "data.workers=0")


@dataclass(frozen=True)
class Case:
    """A training that both checkouts run; `{digits}`, `{images}` and `{weights}` in its settings are made first."""

    what: str
    config: str
    settings: tuple[str, ...]
    ranks: int = 1
    kill_after_step: int = 0
    """Kill the run (SIGKILL) when it has logged this step, then resume it."""


SMALL_MEMORIES = ("sop.cls.capacity=200", "sop.patch.capacity=150", "sop.patch.num_anchors=32")
MICRO = (
    *("data.train={images}", *SMALL_MEMORIES, "sop.cls.num_anchors=64", "optim.warmup_epochs=1", "model.drop_path=0.1"),
    *("sop.patch.weight=1", "loss.teacher_temp=0.03", "loss.teacher_temp_epochs=2", "train.batch_size=32"),
    *("views.local_count=2", "views.local_size=16", "views.local_scale=[0.1,0.3]", "views.blur_local=0.2"),
)
MEMBERS = ("sop.contributions=similarity", "sop.cls.num_supports=8", "sop.cls.tasks=2", "sop.patch.num_supports=2")
CONVOLUTIONS = (
    *("data.train={images}", "views.global_size=64", "views.local_size=32", "views.local_count=2"),
    *("sop.cls.capacity=200", "sop.cls.num_anchors=64", "optim.warmup_epochs=0.3", "train.batch_size=16"),
)
SWIN = (
    *("data.train={images}", *SMALL_MEMORIES, "model.window_size=2", "model.projector_hidden=256"),
    *("views.global_size=64", "views.local_size=32", "views.local_count=2", "sop.cls.num_anchors=64"),
    *("train.batch_size=8", "train.stop_after_steps=6", "sop.fill=teacher", "neighbors.refresh=incremental"),
)
DIGITS = (
    *("data.train={digits}/train", "evaluate.train={digits}/train", "evaluate.test={digits}/test"),
    *("evaluate.retrieval={digits}/retrieval", "evaluate.view_recall=always", "evaluate.view_images=200"),
    *("evaluate.every_steps=30", "train.stop_after_steps=60"),
)

CASES = {
    "digits": Case("digits_demo, 60 steps with scores", "digits_demo", DIGITS),
    "vit": Case(
        "micro ViT, both losses, accumulate=2, views_apart, 8 supports",
        "cifar10_vit_micro",
        (*MICRO, *MEMBERS, "train.accumulate=2", "train.views_apart=true", "train.stop_after_steps=20"),
    ),
    "swin": Case("Swin-T at 64 px, kept neighbor lists", "swint14", SWIN),
    "conv": Case(
        "pretrained convolutions, projector warm-up",
        "continue_conv",
        (
            *(*CONVOLUTIONS, f"model.init=timm:{CONV}", "model.weights={weights}", "train.stop_after_steps=12"),
            *("optim.projector_warmup_epochs=0.3", "train.epochs=2"),
        ),
    ),
    "conv_scratch": Case(
        "convolutions from scratch, hidden pixels, both losses, IVF memories",
        "continue_conv",
        (
            *(*CONVOLUTIONS, "model.init=''", f"model.backbone={CONV}", "model.batchnorm=batch", *SMALL_MEMORIES),
            *("masks.kind=block", "masks.pixels=true", "sop.patch.weight=1", "neighbors.index=ivf"),
            *("neighbors.rebuild_every_steps=3", "sop.cls.num_supports=3", "train.stop_after_steps=10"),
        ),
    ),
    "ranks": Case(
        "micro ViT on two gloo ranks",
        "cifar10_vit_micro",
        (*MICRO, *MEMBERS, "train.check_ranks_every_steps=3", "train.stop_after_steps=12"),
        ranks=2,
    ),
    "fsdp": Case(
        "micro ViT sharded over two gloo ranks, fixed anchors",
        "cifar10_vit_micro",
        (*MICRO, "train.parallel=fsdp", "sop.anchors=fixed_vectors", "train.stop_after_steps=8"),
        ranks=2,
    ),
    "resumed": Case(
        "micro ViT, killed and resumed, mean tokens, random masks",
        "cifar10_vit_micro",
        (
            *(*MICRO, *MEMBERS, "sop.contributions=smooth", "model.global_token=mean", "masks.kind=random"),
            *("sop.fill=random", "train.checkpoint_every_steps=5", "train.keep_last=1", "train.stop_after_steps=20"),
        ),
        kill_after_step=8,
    ),
}


class RunFailed(Exception):
    """A command ended in another way than expected."""


@dataclass(frozen=True)
class Checkout:
    """One side of the comparison."""

    side: str
    folder: Path
    python: Path
    work: Path
    settings: Rules

    def start(self, words: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Start `python -m WORDS`, the words mapped, with its output in `log`."""
        mapped = [part for word in words for part in renamed(word, self.settings).split("\n") if part]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= ONE_THREAD | {"CUDA_VISIBLE_DEVICES": ""}
        with log.open("wb") as file:
            command = [str(self.python), "-m", *mapped]
            return subprocess.Popen(command, cwd=self.work, env=environment, stdout=file, stderr=subprocess.STDOUT)

    def run(self, words: list[str], name: str, *, may_refuse: bool = False) -> str:
        """Run a command to its end; its output is kept as NAME.log.

        Returns:
            The line with which the command was refused; empty if it succeeded.

        Raises:
            RunFailed: it failed; with `may_refuse`, in another way than with one line that names a version.
        """
        log = self.work / f"{name}.log"
        process = self.start(words, log)
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            process.wait()
            raise RunFailed(f"{self.side}: {name}: longer than {SECONDS:.0f} s") from None
        if status == 0:
            return ""
        said = log.read_text(errors="replace").strip()
        last = said.splitlines()[-1] if said else "no output"
        refused = status == 1 and said.count("error: ") == 1 and last.startswith("error: ") and "Traceback" not in said
        if may_refuse and refused and VERSION.search(last):
            return last
        errors = re.findall(r"^(?:error|\w*Error): .*", said, re.MULTILINE)  # torchrun says much after them
        raise RunFailed(f"{self.side}: {name}: exit status {status}: {(errors or [last])[-1][:300]}")

    def train(self, name: str, case: Case, data: Mapping[str, str]) -> Path:
        """Run a case and return its run directory."""
        run = self.work / name
        words = training(case, data, run)
        if case.kill_after_step:
            self._run_until(case.kill_after_step, words, run)
            words = [*words, "--resume"]
        self.run(words, name)
        return run

    def _run_until(self, step: int, words: list[str], run: Path) -> None:
        log = self.work / f"{run.name}_killed.log"
        process = self.start(words, log)
        metrics, until = run / "metrics.jsonl", time.monotonic() + SECONDS
        try:
            while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
                if process.poll() is not None or time.monotonic() > until:
                    raise RunFailed(f"{self.side}: {run.name}: ended before step {step}: {log.read_text()[-300:]}")
                time.sleep(0.01)
        finally:
            process.kill()
            process.wait()


def training(case: Case, data: Mapping[str, str], run: Path) -> list[str]:
    """Return the words after `python -m` that train a case."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}", "-m"]
    settings = [setting.format_map(data) for setting in (*ALWAYS, *case.settings)]
    words = ["sop_faiss.cli.train", case.config, *settings, "--output", str(run)]
    return [*launcher, *words] if case.ranks > 1 else words


def make_data(old: Checkout, folder: Path) -> dict[str, str]:
    """Make digits by OLD, striped images in class folders, and weights of a network with batch norm statistics."""
    data = {name: str(folder / name) for name in ("digits", "images", "weights.safetensors")}
    old.run(["sop_faiss.cli.data", "demo", data["digits"]], "demo")
    draws = np.random.default_rng(0)
    rows, columns = np.mgrid[0:64, 0:80] / 80
    for number in range(IMAGES):
        place = folder / "images" / f"class_{number % CLASSES}" / f"{number:04d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        angle, phase = np.pi * (number % CLASSES) / CLASSES + draws.normal(0, 0.1), draws.uniform(0, 2 * np.pi)
        wave = 0.5 + 0.5 * np.sin(20 * (np.cos(angle) * columns + np.sin(angle) * rows) + phase)
        image = wave[..., None] * draws.uniform(0, 255, 3) + draws.normal(0, 12, (64, 80, 3))
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(place)
    torch.manual_seed(0)
    network = timm.create_model(CONV).train()
    with torch.no_grad():
        network(torch.rand(8, 3, 64, 64))
    save_file(network.state_dict(), data["weights.safetensors"])
    return data | {"weights": data["weights.safetensors"]}


def checkout(side: str, folder: Path, python: Path | None, work: Path, settings: Rules) -> Checkout:
    """Return one side, whose python must import the packages of that checkout.

    Raises:
        click.UsageError: it imports others, or does not exist.
    """
    python = python or folder / ".venv" / "bin" / "python"
    if not python.exists():
        raise click.UsageError(f"{side.upper()}: no {python}: make its .venv, or name another with --{side}-python")
    (work / side).mkdir(parents=True)
    made = Checkout(side, folder.resolve(), python.absolute(), work / side, settings)
    program = "import sop_faiss, sop_faiss.cli as cli; print(sop_faiss.__file__, cli.__file__, sep=chr(10))"
    done = subprocess.run([python.absolute(), "-c", program], cwd=made.work, capture_output=True, text=True)
    files = [Path(line).resolve() for line in done.stdout.splitlines()]
    if done.returncode or not all(file.is_relative_to(made.folder) for file in files):
        imported = ", ".join(map(str, files)) or done.stderr.strip().rpartition("\n")[2]
        raise click.UsageError(f"{side.upper()}: {python} imports {imported}, wanted the code of {made.folder}")
    return made


def commit(folder: Path) -> str:
    """Return the short name of a checkout's commit."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True)
    return done.stdout.strip() or "no commit"
