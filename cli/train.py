"""`sop-train`: pretrain an image encoder without labels."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from sop_faiss.cli.common import CONTEXT_SETTINGS, EXIT_REQUEUE, log_to_stderr, one_line, run_command
from sop_faiss.cli.idle_options import refuse_idle
from sop_faiss.cli.path_options import NamedPath
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.tables import print_table
from sop_faiss.paths import real_path
from sop_faiss.verbs.output_paths import STDOUT

if TYPE_CHECKING:
    from sop_faiss.config import Config
    from sop_faiss.verbs.training.train import TrainingResult


class _Command(click.Command):
    """A command whose help lists the packaged configurations with the first sentences of their opening comments."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list; called by click."""
        from sop_faiss.config import config_summary, packaged_configs

        with formatter.section("Packaged configurations"):
            formatter.write_dl([(name, config_summary(path)) for name, path in sorted(packaged_configs().items())])


def _complete_config(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the packaged configurations that begin so; else let the shell complete a file."""
    from sop_faiss.config import packaged_configs

    names = [CompletionItem(name) for name in sorted(packaged_configs()) if name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]


@click.command(cls=_Command, context_settings=CONTEXT_SETTINGS, no_args_is_help=True)
@click.version_option(package_name="sop-faiss")
@click.argument("config", required=False, shell_complete=_complete_config)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--output",
    type=NamedPath(),
    metavar="DIR",
    help="Run directory: new or empty, unless --resume.  [required unless --dry-run or --profile-data]",
)
@click.option(
    "--weights",
    type=NamedPath(),
    metavar="FILE",
    help="Weights of timm:NAME, .safetensors, .pth or .bin: of --teacher where that is given (the same as "
    "distill.weights=FILE), else of model.init (the same as model.weights=FILE).",
)
@click.option(
    "--teacher",
    metavar="M",
    help="Distill this frozen encoder: lite0, lite1, lite2, a run directory, a checkpoint, an export, timm:NAME with "
    "--weights, or dino:FILE; the same as objective.kind=distill distill.teacher=M.",
)
@click.option("--resume", is_flag=True, help="Continue from the newest complete checkpoint; start if there is none.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration, data, parameters, steps and memory.")
@click.option(
    "--explain",
    metavar="FIELD",
    help="Say what a setting means, its default, and which packaged configurations set it: a field, a section, a "
    "symbol of the paper, a word, or all.",
)
@click.option("--profile-data", is_flag=True, help="Do not train: time the data stream, stage by stage.")
@click.option("--steps", type=int, metavar="N", help="With --profile-data: batches to make.  [default: 10]")
@click.option(
    "--step-seconds",
    type=float,
    multiple=True,
    metavar="S",
    help="With --profile-data: report how long a trainer waits if its step takes S seconds; may be repeated.",
)
@click.option(
    "--json",
    "json_to",
    type=click.Choice([str(STDOUT)]),
    metavar="-",
    help="Print JSON alone, also on a terminal.  [default: JSON where stdout is not a terminal]",
)
@run_command
def main(
    config: str | None,
    overrides: tuple[str, ...],
    output: Path | None,
    weights: Path | None,
    teacher: str | None,
    resume: bool,
    dry_run: bool,
    explain: str | None,
    profile_data: bool,
    steps: int | None,
    step_seconds: tuple[float, ...],
    json_to: str | None,
) -> None:
    """Pretrain an image encoder with SOP (Self-Organizing Visual Prototypes), without labels.

    CONFIG is a YAML file, else the name of a packaged configuration, listed below. Every field can be overridden by
    KEY=VALUE: --dry-run lists all fields with their values, --explain says what each means.

    \b
    Examples:
      sop-train imagenette_resnet_small data.train=shards/ evaluate.every_steps=400 --output runs/scratch
      sop-train imagenette_resnet_small data.train=shards/ evaluate.every_steps=400 --dry-run
      sop-train imagenette_resnet_small data.train=shards/ evaluate.every_steps=400 --output runs/scratch --resume
      sop-train --explain sop.cls.num_anchors
      sop-train continue_conv data.train=shards/ model.init=lite0 --output runs/mine
      sop-train continue_conv data.train=shards/ model.init=timm:resnet50 --weights resnet50.pth --output runs/mine
      sop-train vits16 data.train='/data/in1k-*.tar' --profile-data --steps 20
      torchrun --nproc-per-node 8 -m sop_faiss.cli.train vits16 data.train='/data/in1k-*.tar' --output runs/vits16

    The run directory holds config.yaml, metrics.jsonl, prototypes.jsonl, checkpoints/ and TensorBoard events;
    sop-report makes a page of it. Where stdout is not a terminal, the last line is JSON on stdout: the step reached,
    the steps in all, the last measured values, and in "signs" the alarms whose signs the run ends with.

    Exit status: 0 done, 1 a mistake, 3 the run stopped itself (numbers not finite, collapse: see stopped.json), 75
    saved on SIGTERM or SIGUSR1 (a file `requeue` in the run directory says so, too), 130 saved on Ctrl-C: run again
    with --resume.
    """
    if explain is not None:
        from sop_faiss.config.explain import explain as explain_setting

        refuse_idle("--explain", ["explain"])
        click.echo(explain_setting(explain))
        return
    if config is None:
        raise click.UsageError("Missing argument 'CONFIG'.")
    if output is not None and not (resume or dry_run or profile_data):
        _refuse_started(output)
    from sop_faiss.config import load_config
    from sop_faiss.model.initial_weights import resolve_init
    from sop_faiss.verbs.training.dry_run import describe_run
    from sop_faiss.verbs.training.train import run_training

    as_json = json_to is not None or not sys.stdout.isatty()
    log_to_stderr(logging.INFO)
    resolved = load_config(config, overrides, weights=weights, teacher=teacher)
    if dry_run:
        resolved = resolve_init(resolved)
        described = describe_run(resolved)
        if int(os.environ.get("RANK", "0")) == 0:
            _print_dry_run(resolved, described, json_to is not None, as_json)
        return
    if profile_data:
        _profile(resolved, steps, step_seconds, as_json)
        return
    if steps is not None or step_seconds:
        raise click.UsageError(
            "--steps and --step-seconds go with --profile-data; train.stop_after_steps=N ends a run."
        )
    if output is None:
        raise click.UsageError("Missing option '--output': the run directory to write.")
    if int(os.environ.get("RANK", "0")) > 0:
        result = run_training(resolved, output, resume=resume)
    else:
        result = run_training(resolved, output, resume=resume, stage=progress_reporter)
        click.echo(_text(result, output, resolved), err=True)
        if as_json:  # after all lines for people
            click.echo(json.dumps(_summary(result, output)))
    if not result.finished:
        sys.exit(EXIT_REQUEUE)


def _refuse_started(output: Path) -> None:
    """Refuse a folder that is not empty before the imports that take long; `run_training` checks it again."""
    from sop_faiss.errors import ConfigError
    from sop_faiss.train.checkpoints.run_lock import LOCK_NAME, RunLock

    try:
        names = {path.name for path in output.iterdir()}
    except OSError:  # there is none; what else is wrong is said later
        return
    if names - {LOCK_NAME}:
        if LOCK_NAME in names:  # another process may be training there
            lock = RunLock(output)
            lock.acquire()
            lock.release()
        raise ConfigError(f"output {output} exists and is not empty: add `resume` to continue it, or choose another")


def _summary(result: TrainingResult, output: Path) -> dict[str, Any]:
    """Return the end of the run as JSON values, floats with six significant digits."""
    measured = {name: _rounded(value) for name, value in result.last_metrics.items()}
    place = {"finished": result.step == result.steps, "step": result.step, "steps": result.steps}
    return {**place, "output": str(output), **measured}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _text(result: TrainingResult, output: Path, config: Config) -> str:
    """Return the end of the run for people, with the command that comes next."""
    from sop_faiss.model.encoders.packaged import PACKAGED, PACKAGED_POOLING, PACKAGED_SIZE
    from sop_faiss.train.verdict import Outcome

    last = min(filter(None, (config.train.stop_after_steps, result.steps)), default=None)
    of_all = "" if last is None else f" of {last:,}"
    saved = f"saved in {output}; " if result.step else ""
    reached = f"{result.step:,}{of_all} steps; {saved}"
    if not result.finished:
        return one_line(f"{reached}stopped by a signal: continue with the same command and --resume")
    if result.last_metrics.get("verdict") not in (None, Outcome.BEAT):
        reached += "training was not shown to help: keep the index that you have; without one, "
    model = output if result.last_metrics.get("kept_step") in (None, result.step) else output / "best"
    # as good or better after training than the run's own (docs/own_photos.md), and without training the same encoder
    seen = ["--size", str(PACKAGED_SIZE), "--pooling", PACKAGED_POOLING] if config.model.init in PACKAGED else []
    index = f"{real_path(output).name}.index"
    build = ["sop-index", "build", "--model", str(model), *seen, "--data", _unpacked(config.data.train), "--out", index]
    return one_line(f"{reached}next: {shlex.join(build)}")


def _unpacked(data: str) -> str:
    """Return the folder that shards were packed from, if it is known and still there; else what was trained on."""
    from sop_faiss.data.shards.shard_source import MANIFEST_NAME
    from sop_faiss.errors import SopError
    from sop_faiss.files import read_json

    try:
        packed = read_json(Path(data) / MANIFEST_NAME)
        source = packed.get("source") if isinstance(packed, dict) else None
        return source if isinstance(source, str) and source and Path(source).is_dir() else data
    except (OSError, ValueError, SopError):
        return data


def _print_dry_run(config: Config, facts: dict[str, Any], json_alone: bool, as_json: bool) -> None:
    """Print the settings, and the facts as lines on a terminal, as JSON elsewhere; or one JSON object with both."""
    from sop_faiss.config import flat_settings, to_yaml

    if json_alone:
        click.echo(json.dumps({"settings": flat_settings(config), **facts}, indent=1))
        return
    click.echo(to_yaml(config), nl=False)
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    for name, value in facts.items():
        click.echo(f"{name:<30}{one_line(_cell(name, value))}")


def _cell(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(key, inner)}" for key, inner in value.items())
    if isinstance(value, int) and name.endswith(("bytes", "bytes_estimate")):
        return f"{value / 1e6:,.1f} MB"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if value is None:
        return "decided in the run"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _profile(config: Config, steps: int | None, step_seconds: tuple[float, ...], as_json: bool) -> None:
    """Print a table, or JSON."""
    from sop_faiss.verbs.training.profile_data import STEP_SECONDS, profile_data

    with progress_reporter("profiling", "batches") as progress:
        result = profile_data(
            config, steps=10 if steps is None else steps, step_seconds=step_seconds or STEP_SECONDS, progress=progress
        )
    if as_json:
        click.echo(json.dumps(result))
        return
    stages = [
        [name, f"{stage['milliseconds_per_image']:.2f}", f"{stage['images_per_second']:,.0f}", f"{stage['share']:.0%}"]
        for name, stage in result["stages"].items()
    ]
    print_table(
        f"{result['images_per_second']:,.1f} images/s with {result['workers']} workers of {result['threads']} threads, "
        f"in {result['steps']} batches of {result['batch_size']:,} ({result['seconds_per_batch']:.2f} s). One thread:",
        ["stage", "ms per image", "images/s", "share"],
        stages,
    )
    if phases := result.get("images_per_second_of_phases"):
        click.echo(f"In earlier phases: {', '.join(f'{speed:,.1f}' for speed in phases)} images/s")
    waits = [[f"{seconds} s", f"{share:.0%}"] for seconds, share in result["wait_share_by_step_seconds"].items()]
    print_table("Share of time that a trainer waits for data", ["its step takes", "waits"], waits)
    mix = result["shuffle"]
    click.echo(
        f"A batch holds images of {mix['distinct']:.1f} of the {mix['groups']:,} shards or folders; a uniform draw: "
        f"{mix['ideal']:.1f} ({mix['share_of_ideal']:.0%})"
    )


if __name__ == "__main__":
    main()
