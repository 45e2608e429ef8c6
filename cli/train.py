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

from sop_faiss.cli.common import (
    CONTEXT_SETTINGS,
    EXIT_REQUEUE,
    log_to_stderr,
    one_line,
    progress_reporter,
    run_command,
)
from sop_faiss.cli.path_options import NamedPath
from sop_faiss.cli.tables import print_table

if TYPE_CHECKING:
    from sop_faiss.config import Config
    from sop_faiss.verbs.training.train import TrainingResult

__all__ = ["main"]


class _Command(click.Command):
    """A command whose help lists the packaged configurations with the first sentences of their opening comments."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list; called by click."""
        from sop_faiss.config import config_summary, packaged_configs

        with formatter.section("Packaged configurations"):
            formatter.write_dl([(name, config_summary(path)) for name, path in sorted(packaged_configs().items())])


@click.command(cls=_Command, context_settings=CONTEXT_SETTINGS, no_args_is_help=True)
@click.version_option(package_name="sop-faiss")
@click.argument("config")
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
    help="Weights of model.init=timm:NAME, .safetensors, .pth or .bin; the same as model.weights=FILE.",
)
@click.option("--resume", is_flag=True, help="Continue from the newest complete checkpoint; start if there is none.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration, data, parameters, steps and memory.")
@click.option("--profile-data", is_flag=True, help="Do not train: time the data stream, stage by stage.")
@click.option("--steps", type=int, metavar="N", help="With --profile-data: batches to make.  [default: 10]")
@click.option(
    "--step-seconds",
    type=float,
    multiple=True,
    metavar="S",
    help="With --profile-data: report how long a trainer waits if its step takes S seconds; may be repeated.",
)
@run_command
def main(
    config: str,
    overrides: tuple[str, ...],
    output: Path | None,
    weights: Path | None,
    resume: bool,
    dry_run: bool,
    profile_data: bool,
    steps: int | None,
    step_seconds: tuple[float, ...],
) -> None:
    """Pretrain an image encoder with SOP, without labels.

    CONFIG is a YAML file, else the name of a packaged configuration, listed below. Every field can be overridden by
    KEY=VALUE: --dry-run lists all fields with their values, sop_faiss/config/ says what each means.

    \b
    Examples:
      sop-train photos_demo data.train=shards/ train.epochs=30 --output runs/mine
      sop-train photos_demo data.train=shards/ train.epochs=30 --dry-run
      sop-train photos_demo data.train=shards/ train.epochs=30 --output runs/mine --resume
      sop-train continue_conv data.train=shards/ model.init=timm:resnet50 --weights resnet50.pth --output runs/mine
      sop-train vits16 data.train='/data/in1k-*.tar' --profile-data --steps 20
      torchrun --nproc-per-node 8 -m sop_faiss.cli.train vits16 data.train='/data/in1k-*.tar' --output runs/vits16

    The run directory holds config.yaml, metrics.jsonl, prototypes.jsonl, checkpoints/ and TensorBoard events;
    sop-report makes a page of it. The last line, JSON on stdout, has the step reached, the steps in all, the last
    measured values, and in "signs" the alarms whose signs the run ends with. Exit status: 0 done, 1 a mistake, 3 the
    run stopped itself (numbers not finite, collapse: see stopped.json), 75 saved on SIGTERM or SIGUSR1 (a file
    `requeue` in the run directory says so, too), 130 saved on Ctrl-C: run again with --resume.
    """
    from sop_faiss.config import load_config, to_yaml
    from sop_faiss.model.initial_weights import resolve_init
    from sop_faiss.verbs.training.train import describe_run, run_training

    log_to_stderr(logging.INFO)
    resolved = load_config(config, overrides, weights=weights)
    if dry_run:
        resolved = resolve_init(resolved)
        described = describe_run(resolved)
        if int(os.environ.get("RANK", "0")) == 0:
            click.echo(to_yaml(resolved), nl=False)
            click.echo(json.dumps(described, indent=1))
        return
    if profile_data:
        _profile(resolved, steps, step_seconds)
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
        with progress_reporter("training", "steps") as progress:
            result = run_training(resolved, output, resume=resume, progress=progress)
        click.echo(json.dumps(_summary(result, output)))
        click.echo(_text(result, output, resolved.data.train), err=True)
    if not result.finished:
        sys.exit(EXIT_REQUEUE)


def _summary(result: TrainingResult, output: Path) -> dict[str, Any]:
    """Return the end of the run as JSON values, floats with six significant digits."""
    measured = {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in result.last_metrics.items()
    }
    place = {"finished": result.step == result.steps, "step": result.step, "steps": result.steps}
    return {**place, "output": str(output), **measured}


def _text(result: TrainingResult, output: Path, data: str) -> str:
    """Return the end of the run for people, with the command that comes next."""
    reached = f"{result.step:,} of {result.steps:,} steps; saved in {output}; "
    if not result.finished:
        return one_line(f"{reached}stopped by a signal: continue with the same command and --resume")
    is_last_best = result.last_metrics.get("best_step", result.step) in (0, result.step)
    model = output if is_last_best else output / "best"
    build = shlex.join(["sop-index", "build", "--model", str(model), "--data", data, "--out", "photos.index"])
    return one_line(f"{reached}next: {build}")


def _profile(config: Config, steps: int | None, step_seconds: tuple[float, ...]) -> None:
    """Print a table on a terminal, JSON elsewhere."""
    from sop_faiss.verbs.training.profile_data import STEP_SECONDS, profile_data

    with progress_reporter("profiling", "batches") as progress:
        result = profile_data(
            config,
            steps=10 if steps is None else steps,
            step_seconds=step_seconds or STEP_SECONDS,
            progress=progress,
        )
    if not sys.stdout.isatty():
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
    waits = [[f"{seconds} s", f"{share:.0%}"] for seconds, share in result["wait_share_by_step_seconds"].items()]
    print_table("Share of time that a trainer waits for data", ["its step takes", "waits"], waits)
    mix = result["shuffle"]
    click.echo(
        f"A batch holds images of {mix['distinct']:.1f} of the {mix['groups']:,} shards or folders; a uniform draw: "
        f"{mix['ideal']:.1f} ({mix['share_of_ideal']:.0%})"
    )


if __name__ == "__main__":
    main()
