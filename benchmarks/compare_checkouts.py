"""The same short trainings in two checkouts, compared bit for bit: the proof that a restructuring computed nothing new.

    python benchmarks/compare_checkouts.py OLD NEW [--only NAME,...] [--features] [--map FILE] [--json FILE] [--record]
        [--old-python FILE] [--new-python FILE] [--work DIR]

Each checkout runs with its given python (by default that of its .venv) on one thread of the CPU, both at the same
time. All cases take about 6 minutes of processor time with `--features`, that is 3 or 4 minutes on 2 idle cores. Run
the script of OLD: its cases use OLD's names, and a map translates them to NEW's. Every loss, every other number of
metrics.jsonl (including scores, but not time and memory), and every tensor of the last checkpoint and of best/ is
compared. The data are made here: digits by OLD's `sop-data demo`, images and pretrained weights from seeds. `ratio`
in the table is the number of values that differ. Exit status 1: values differ, a name is on one side only, or a run
failed.

`--features` adds results from the digits run: features of its last teacher, k-NN and retrieval scores. It also tests
whether NEW opens the files of OLD: a feature store, an index, and a run directory, which NEW must evaluate and resume
as OLD does, or refuse in one line that names a version.

`--map FILE` is a JSON object with rules that translate OLD's names to NEW's:

    {"settings": {"loss.cls_weight=": "sop.cls.weight=", "sop.contributions=": "sop.member_weights="},
     "metrics": {"re:_over_lnK$": "_over_ln_k"},
     "tensors": {"memories/": "objective/", "re:^(student|teacher)/backbone[.]trunk[.]": "\\\\1/backbone."}}

All rules of a section are applied in order. `re:PATTERN` is replaced wherever the regular expression matches (anchor
it with ^ and $), any other text only at the beginning of a name. Names of tensors are FILE/NAME, so that a rule can
move them to another file. `settings` are applied to each word of a command line, module and configuration names
included; a word that becomes empty is dropped, and a word with line breaks becomes several words. `metrics` are also
applied to the names in JSON results, flattened as in `metrics.top1_k20`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from checkout_runs import CASES, DIGITS, Case, Checkout, RunFailed, checkout, commit, make_data, training
from differences import Differences, Rules, compare, load_map, read_features, read_json, read_numbers, read_tensors
from report import Row, finish


class Comparison:
    """Runs both sides of each case at once, and collects the rows of the table."""

    def __init__(self, old: Checkout, new: Checkout, rules: Mapping[str, Rules], data: Mapping[str, str]) -> None:
        self.old, self.new, self.rules, self.data = old, new, rules, data
        self.against = f"OLD ({commit(old.folder)})"
        self.rows: list[Row] = []

    def both(self, work: Callable[[Checkout], Any]) -> list[Any]:
        """Return the result of each side."""
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(work, (self.old, self.new)))

    def add(self, what: str, difference: Differences, **detail: Any) -> None:
        """Add a row; if nothing could be compared, its target is not met."""
        met = difference.count == 0 and difference.compared > 0
        self.rows.append(Row(what, self.against, float(difference.count), "<= 0", met, difference.detail() | detail))

    @contextmanager
    def reported(self, what: str) -> Iterator[None]:
        """Report the work on stderr, with its time and whether it was equal; a failure becomes a row."""
        print(f"{what} ...", file=sys.stderr, flush=True)
        started, before = time.monotonic(), len(self.rows)
        try:
            yield
        except (RunFailed, OSError, ValueError, KeyError) as error:
            self.rows.append(Row(what, self.against, None, "<= 0", False, {"failed": f"{error}"}))
        said = "equal" if all(row.met for row in self.rows[before:]) else "NOT EQUAL"
        print(f"{what}: {said}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    def case(self, name: str) -> None:
        """Train a case on both sides and compare the two runs."""
        case = CASES[name]
        with self.reported(f"{name}: {case.what}"):
            old, new = self.both(lambda checkout: checkout.train(name, case, self.data))
            self.runs(name, old, new)

    def runs(self, what: str, old: Path, new: Path, after_step: int = -1) -> None:
        """Add rows for losses, other numbers and tensors; of a resumed run only for what follows its resume step."""
        numbers = read_numbers(old, self.rules["metrics"], after_step), read_numbers(new, {}, after_step)
        for kind, wanted in (("losses", True), ("other metrics and scores", False)):
            parts = [{name: v for name, v in side.items() if ("loss" in name) == wanted} for side in numbers]
            self.add(f"{what}: {kind}", compare(*parts))
        best = after_step < 0
        tensors = read_tensors(old, self.rules["tensors"], best=best), read_tensors(new, {}, best=best)
        self.add(f"{what}: tensors", compare(*tensors))

    def features(self) -> None:
        """Compare the results from the digits run, and check that NEW opens the files of OLD."""
        runs = {side.side: side.work / "digits" for side in (self.old, self.new)}
        with self.reported("features, k-NN and retrieval of the digits run"):
            self.both(lambda side: self.evaluate(side, runs[side.side], ""))
            stores = [read_features(side.work / "features") for side in (self.old, self.new)]
            self.add("digits: features of the last teacher", compare(*stores))
            self.add("digits: k-NN and retrieval", self.scores("", ""))
        with self.reported("OLD's feature store and index, opened by NEW"):
            store, index = self.old.work / "features", self.old.work / "index"
            self.old.run(["sop_faiss.cli.index", "build", "--features", f"{store}", "--out", f"{index}"], "build")
            found = self.both(lambda side: self.search(side, store, index))
            self.add("OLD's store and index, opened by NEW", compare(*found))
        with self.reported("OLD's run, evaluated by NEW"):
            refused = self.evaluate(self.new, runs["old"], "_of_old", may_refuse=True)
            difference = Differences(1, {}, [], []) if refused else self.scores("", "_of_old")
            self.add("OLD's run, evaluated by NEW", difference, **({"refused": refused} if refused else {}))
        with self.reported("OLD's run, resumed by NEW"):
            self.resume(runs["old"])

    def evaluate(self, side: Checkout, run: Path, suffix: str, *, may_refuse: bool = False) -> str:
        """Write features, k-NN and retrieval results of a run; return the line of a refusal, else an empty one."""
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
        """Return the facts of an index and the rows it finds for the features of a store."""
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
        self.runs("OLD's run, resumed by NEW", old, new, after_step=60)


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
        try:
            comparison = Comparison(*sides, rules, make_data(sides[0], place))
        except RunFailed as error:
            raise click.ClickException(f"no data: {error}") from None
        for name in names:
            comparison.case(name)
        if features:
            comparison.features()
    finish(f"checkouts, NEW ({commit(new)})", comparison.rows, json_file=json_file, record=record)
    if not all(row.met for row in comparison.rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
