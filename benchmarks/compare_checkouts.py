"""The same short trainings in two checkouts, compared bit for bit: the proof that a restructuring computed nothing new.

    python benchmarks/compare_checkouts.py OLD NEW [--only NAME,...] [--features] [--map FILE] [--json FILE] [--record]
        [--old-python FILE] [--new-python FILE] [--work DIR]

Each checkout runs with the python it is given (by default that of its .venv), on one thread of the CPU, both at once:
all cases in about four minutes on 2 quiet cores, with `--features` in five. Compared are every loss and every other
number of metrics.jsonl (scores included; not time and memory), and every tensor of the last checkpoint and of best/.
Data are made here: digits by OLD's `sop-data demo`, images and pretrained weights from seeds. `ratio` in the table is
how many values differ. Exit status 1: something differs, a name is on one side only, or a run failed.

`--features` adds what is made of the digits run: features of its last teacher, k-NN and retrieval scores; and whether
NEW opens what OLD wrote: a feature store, an index, and a run directory, which it evaluates and resumes as OLD does, or
refuses in one line that names a version.

`--map FILE` is a JSON object with rules that make NEW's names of OLD's:

    {"settings": {"loss.cls_weight=": "sop.cls.weight=", "sop.contributions=": "sop.member_weights="},
     "metrics": {"re:_over_lnK$": "_over_ln_k"},
     "tensors": {"memories/": "objective/", "re:^(student|teacher)/backbone[.]trunk[.]": "\\\\1/backbone."}}

All rules of a section are applied in order. `re:PATTERN` is replaced wherever the regular expression matches (anchor it
with ^ and $), any other text where a name begins with it. Names of tensors are FILE/NAME, so that a rule can move them
to another file. `settings` are applied to each word of a command line, module and configuration names included; a word
that becomes empty is left out, and one with line breaks becomes several words. `metrics` are also applied to the names
in JSON results, flattened as in `metrics.top1_k20`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import timm
import torch
from differences import (
    Differences,
    Rules,
    compare,
    load_map,
    read_features,
    read_json,
    read_numbers,
    read_tensors,
    renamed,
)
from PIL import Image
from report import Row, finish
from safetensors.torch import save_file

SECONDS = 600.0
"""The most that one command may take."""
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


SMALL_MEMORIES = ("memory.cls_capacity=200", "memory.patch_capacity=150", "sop.patch.num_anchors=32")
MICRO = (
    *("data.train={images}", *SMALL_MEMORIES, "sop.cls.num_anchors=64", "optim.warmup_epochs=1", "model.drop_path=0.1"),
    *("loss.patch_weight=1", "loss.teacher_temp=0.03", "loss.teacher_temp_epochs=2", "train.batch_size=32"),
    *("views.local_count=2", "views.local_size=16", "views.local_scale=[0.1,0.3]", "views.blur_local=0.2"),
)
MEMBERS = ("sop.contributions=similarity", "sop.cls.num_supports=8", "sop.cls.tasks=2", "sop.patch.num_supports=2")
CONVOLUTIONS = (
    *("data.train={images}", "views.global_size=64", "views.local_size=32", "views.local_count=2"),
    *("memory.cls_capacity=200", "sop.cls.num_anchors=64", "optim.warmup_epochs=0.3", "train.batch_size=16"),
)
SWIN = (
    *("data.train={images}", *SMALL_MEMORIES, "model.window_size=2", "model.projector_hidden=256"),
    *("views.global_size=64", "views.local_size=32", "views.local_count=2", "sop.cls.num_anchors=64"),
    *("train.batch_size=8", "train.stop_after_steps=6", "memory.fill=teacher", "neighbors.refresh=incremental"),
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
            *("masks.kind=block", "masks.pixels=true", "loss.patch_weight=1", "neighbors.index=ivf"),
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
            *("memory.fill=random", "train.checkpoint_every_steps=5", "train.keep_last=1", "train.stop_after_steps=20"),
        ),
        kill_after_step=8,
    ),
}


class RunFailed(Exception):
    """A command ended otherwise than it should have."""


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
            The line with which it was refused, empty where it went well.

        Raises:
            RunFailed: it failed, or where `may_refuse`, it did so in another way than one line that names a version.
        """
        log = self.work / f"{name}.log"
        process = self.start(words, log)
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"{self.side}: {name}: longer than {SECONDS:.0f} s") from None
        finally:
            process.kill()
        if status == 0:
            return ""
        said = log.read_text(errors="replace").strip()
        last = said.splitlines()[-1] if said else "no output"
        refused = status == 1 and said.count("error: ") == 1 and last.startswith("error: ") and "Traceback" not in said
        if may_refuse and refused and re.search(r"version|\d+[.]\d+", last):
            return last
        raise RunFailed(f"{self.side}: {name}: exit status {status}: {last[:300]}")

    def train(self, name: str, case: Case, data: Mapping[str, str]) -> Path:
        """Run a case; its run directory."""
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
    """The words that train a case, after `python -m`."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}", "-m"]
    settings = [setting.format_map(data) for setting in (*ALWAYS, *case.settings)]
    words = ["sop_faiss.cli.train", case.config, *settings, "--output", str(run)]
    return [*launcher, *words] if case.ranks > 1 else words


def make_data(old: Checkout, folder: Path) -> dict[str, str]:
    """Digits by OLD; images of stripes in class folders; weights of a network with batch norms that have seen some."""
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


class Comparison:
    """Runs both sides of each case at once, and collects the rows of the table."""

    def __init__(self, old: Checkout, new: Checkout, rules: Mapping[str, Rules], data: Mapping[str, str]) -> None:
        self.old, self.new, self.rules, self.data = old, new, rules, data
        self.against = f"OLD ({commit(old.folder)})"
        self.rows: list[Row] = []

    def both(self, work: Callable[[Checkout], Any]) -> list[Any]:
        """The result of each side, and the seconds both took in the next rows."""
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(work, (self.old, self.new)))

    def add(self, what: str, difference: Differences, **detail: Any) -> None:
        """A row; where nothing could be compared it is not met."""
        met = difference.count == 0 and difference.compared > 0
        self.rows.append(Row(what, self.against, float(difference.count), "<= 0", met, difference.detail() | detail))

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Say on stderr how long something took; what fails becomes a row."""
        print(f"{what} ...", file=sys.stderr, flush=True)
        started = time.monotonic()
        try:
            yield
        except (RunFailed, OSError, ValueError, KeyError) as error:
            self.rows.append(Row(what, self.against, None, "<= 0", False, {"failed": f"{error}"}))
        failed = self.rows and self.rows[-1].what == what and "failed" in self.rows[-1].detail
        print(f"{what}: {'FAILED after ' if failed else ''}{time.monotonic() - started:.0f} s", file=sys.stderr)

    def case(self, name: str) -> None:
        """Train a case on both sides and compare the two runs."""
        case = CASES[name]
        with self.told(f"{name}: {case.what}"):
            old, new = self.both(lambda checkout: checkout.train(name, case, self.data))
            self.runs(name, old, new)

    def runs(self, what: str, old: Path, new: Path, rules: Mapping[str, Rules] | None = None) -> None:
        """Three rows: losses, all other numbers, tensors."""
        rules = self.rules if rules is None else rules
        numbers = read_numbers(old, rules["metrics"]), read_numbers(new, {})
        for kind, wanted in (("losses", True), ("other metrics and scores", False)):
            parts = [{name: v for name, v in side.items() if ("loss" in name) == wanted} for side in numbers]
            self.add(f"{what}: {kind}", compare(*parts))
        self.add(f"{what}: tensors", compare(read_tensors(old, rules["tensors"]), read_tensors(new, {})))

    def features(self) -> None:
        """What is made of the digits run, and whether NEW opens what OLD wrote."""
        runs = {side.side: side.work / "digits" for side in (self.old, self.new)}
        with self.told("features, k-NN and retrieval of the digits run"):
            self.both(lambda side: self.evaluate(side, runs[side.side], ""))
            stores = [read_features(side.work / "features") for side in (self.old, self.new)]
            self.add("digits: features of the last teacher", compare(*stores))
            self.add("digits: k-NN and retrieval", self.scores("", ""))
        with self.told("OLD's feature store and index, opened by NEW"):
            store, index = self.old.work / "features", self.old.work / "index"
            self.old.run(["sop_faiss.cli.index", "build", "--features", f"{store}", "--out", f"{index}"], "build")
            found = self.both(lambda side: self.search(side, store, index))
            self.add("OLD's store and index, opened by NEW", compare(*found))
        with self.told("OLD's run, evaluated by NEW"):
            refused = self.evaluate(self.new, runs["old"], "_of_old", may_refuse=True)
            difference = Differences(1, {}, [], []) if refused else self.scores("", "_of_old")
            self.add("OLD's run, evaluated by NEW", difference, **({"refused": refused} if refused else {}))
        with self.told("OLD's run, resumed by NEW"):
            self.resume(runs["old"])

    def evaluate(self, side: Checkout, run: Path, suffix: str, *, may_refuse: bool = False) -> str:
        """Write features, k-NN and retrieval results of a run; the line with which it was refused, if it was."""
        digits, model = self.data["digits"], ["--model", str(run), "--device", "cpu", "--workers", "1"]
        commands = {
            "features": ["embed", *model, "--data", f"{digits}/test", "--out", f"{side.work}/features{suffix}"],
            "knn": ["knn", *model, "--train", f"{digits}/train", "--test", f"{digits}/test"],
            "retrieve": ["retrieve", *model, "--dataset", f"{digits}/retrieval"],
        }
        for name, (command, *words) in commands.items():
            file = [] if name == "features" else ["--json", str(side.work / f"{name}{suffix}.json")]
            words = [f"sop_faiss.cli.{command}", *words, *file]
            if refused := side.run(words, f"{name}{suffix}", may_refuse=may_refuse):
                return refused
        return ""

    def scores(self, old_suffix: str, new_suffix: str) -> Differences:
        """Compare the metrics of the JSON results, and the encoder's fingerprint."""
        sides = []
        for side, suffix, rules in ((self.old, old_suffix, self.rules["metrics"]), (self.new, new_suffix, {})):
            results = {n: json.loads((side.work / f"{n}{suffix}.json").read_text()) for n in ("knn", "retrieve")}
            kept = {n: {k: v[k] for k in ("metrics", "encoder")} for n, v in results.items()}
            for result in kept.values():
                del result["encoder"]["name"]  # the run directory
            sides.append({f"{n}: {k}": v for n, part in kept.items() for k, v in read_json(part, rules).items()})
        return compare(*sides)

    def search(self, side: Checkout, store: Path, index: Path) -> dict[str, Any]:
        """What an index says of itself and finds for the features of a store."""
        info, found = side.work / "info.json", side.work / "found.json"
        side.run(["sop_faiss.cli.index", "info", str(index), "--json", str(info)], "info")
        words = ["search", str(index), "--features", str(store), "-k", "5", "--json", str(found)]
        side.run(["sop_faiss.cli.index", *words], "search")
        rules = self.rules["metrics"] if side is self.old else {}
        return read_json({"info": json.loads(info.read_text()), **json.loads(found.read_text())}, rules)

    def resume(self, run: Path) -> None:
        """Resume copies of OLD's run on both sides for four steps."""
        case = Case("", CASES["digits"].config, (*DIGITS, "train.stop_after_steps=64"))

        def go_on(side: Checkout) -> str:
            copy = shutil.copytree(run, side.work / "digits_of_old")
            words = [*training(case, self.data, copy), "--resume"]
            return side.run(words, "resumed_of_old", may_refuse=side is self.new)

        refused = self.both(go_on)[1]
        if refused:
            self.add("OLD's run, resumed by NEW", Differences(1, {}, [], []), refused=refused)
            return
        old, new = (side.work / "digits_of_old" for side in (self.old, self.new))
        self.runs("OLD's run, resumed by NEW", old, new)


def checkout(side: str, folder: Path, python: Path | None, work: Path, settings: Rules) -> Checkout:
    """One side, whose python must import the packages of that very checkout.

    Raises:
        click.UsageError: it does not, or there is none.
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
    """The short name of a checkout's commit."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True)
    return done.stdout.strip() or "no commit"


def chosen(context: click.Context, parameter: click.Parameter, value: str | None) -> list[str]:
    names = list(CASES) if value is None else [name.strip() for name in value.split(",") if name.strip()]
    if unknown := [name for name in names if name not in CASES]:
        raise click.BadParameter(f"no case {', '.join(unknown)}: wanted some of {', '.join(CASES)}")
    return names


@click.command()
@click.argument("old", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("new", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--old-python", type=click.Path(path_type=Path), help="Python of OLD.  [default: OLD/.venv/bin/python]")
@click.option("--new-python", type=click.Path(path_type=Path), help="Python of NEW.  [default: NEW/.venv/bin/python]")
@click.option("--only", "names", callback=chosen, metavar="NAME,...", help=f"Only these cases, of {', '.join(CASES)}.")
@click.option("--features", is_flag=True, help="Also features, scores, and what OLD wrote read by NEW; needs digits.")
@click.option("--map", "map_file", type=click.Path(path_type=Path, exists=True), help="Rules that rename (see above).")
@click.option("--work", type=click.Path(path_type=Path), help="A new folder for runs and logs, kept; else they go.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here.")
@click.option("--record", is_flag=True, help="Append the figures to benchmarks/RESULTS.md.")
def main(
    old: Path,
    new: Path,
    old_python: Path | None,
    new_python: Path | None,
    names: list[str],
    features: bool,
    map_file: Path | None,
    work: Path | None,
    json_file: Path | None,
    record: bool,
) -> None:
    """Compare the same short trainings in the checkouts OLD and NEW, bit for bit."""
    try:
        rules = load_map(map_file)
    except ValueError as error:
        raise click.UsageError(f"--map {error}") from None
    if work is not None and work.exists():
        raise click.UsageError(f"--work {work} exists: wanted a new folder")
    if features and "digits" not in names:
        names = ["digits", *names]
    with tempfile.TemporaryDirectory() as temporary:
        place = (work or Path(temporary)).resolve()
        sides = checkout("old", old, old_python, place, {}), checkout("new", new, new_python, place, rules["settings"])
        comparison = Comparison(*sides, rules, make_data(sides[0], place))
        for name in names:
            comparison.case(name)
        if features:
            comparison.features()
    finish(f"checkouts, NEW ({commit(new)})", comparison.rows, json_file=json_file, record=record)
    if not all(row.met for row in comparison.rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
