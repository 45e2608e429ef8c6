"""`sop-train`: pretrain an image encoder without labels."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import click

from sop_faiss.cli.common import log_to_stderr, progress_reporter, run_command

__all__ = ["main"]

EXIT_REQUEUE = 75
"""Saved on a signal; a scheduler may start the same command with --resume."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--output", type=click.Path(path_type=Path), help="Run directory: new or empty, unless --resume.")
@click.option("--resume", is_flag=True, help="Go on from the newest whole checkpoint; starts if there is none.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration, parameters, steps and memory.")
@run_command
def main(config: str, overrides: tuple[str, ...], output: Path | None, resume: bool, dry_run: bool) -> None:
    """Pretrain an image encoder with SOP, without labels.

    CONFIG is a YAML file, else the name of a packaged configuration (vits16, vitb16, vitl16, swint14,
    ablation_vits16_300ep, imagenette_vit_tiny, cifar10_vit_micro, photos_demo, digits_demo).
    Every field can be overridden by KEY=VALUE.

    \b
    Examples:
      sop-train imagenette_vit_tiny data.train='photos-{000000..000011}.tar' --output runs/photos
      sop-train imagenette_vit_tiny data.train=my_photos/ train.batch_size=64 --output runs/mine
      sop-train imagenette_vit_tiny data.train=my_photos/ train.batch_size=64 --output runs/mine --resume
      torchrun --nproc-per-node 8 -m sop_faiss.cli.train vits16 data.train='/data/in1k-*.tar' --output runs/vits16

    The run directory holds config.yaml, metrics.jsonl, checkpoints/ and TensorBoard events. Exit status: 0 done,
    1 a mistake, 3 the run stopped itself (non-finite loss), 75 saved on SIGTERM or SIGUSR1, 130
    saved on Ctrl-C: run again with --resume.
    """
    from sop_faiss.config import load_config, to_yaml
    from sop_faiss.pipeline.train import describe_run, run_training

    log_to_stderr(logging.INFO)
    resolved = load_config(config, overrides)
    if dry_run:
        click.echo(to_yaml(resolved), nl=False)
        click.echo(json.dumps(describe_run(resolved), indent=1))
        return
    if output is None:
        raise click.UsageError("Missing option '--output': where the run shall be written.")
    if int(os.environ.get("RANK", "0")) > 0:
        result = run_training(resolved, output, resume=resume)
    else:
        with progress_reporter("training", "steps") as progress:
            result = run_training(resolved, output, resume=resume, progress=progress)
        click.echo(json.dumps({"finished": result.finished, "output": str(output), **result.last_metrics}))
    if not result.finished:
        sys.exit(EXIT_REQUEUE)


if __name__ == "__main__":
    main()
