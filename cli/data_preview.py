"""sop-data preview: a figure of the views that training would see."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from sop_faiss.cli.common import run_command
from sop_faiss.cli.data_output import number
from sop_faiss.cli.path_options import NamedPath, force_option, refuse_empty
from sop_faiss.errors import one_line
from sop_faiss.verbs.output_paths import check_outputs, source_files


@click.command("preview", short_help="A figure of the views that training would see.")
@click.argument("shards", callback=refuse_empty)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--config", required=True, metavar="C", help="YAML file or packaged configuration: views and masks.")
@click.option("--out", required=True, type=NamedPath(), metavar="FILE.png", help="The figure to write.")
@click.option("--images", default=4, help="How many to draw.")
@click.option("--epoch", default=0, help="Whose order, views and masks.")
@click.option("--seed", type=int, help="In place of the configuration's train.seed.")
@force_option
@run_command
def preview_command(
    shards: str,
    overrides: tuple[str, ...],
    config: str,
    out: Path,
    images: int,
    epoch: int,
    seed: int | None,
    force: bool,
) -> None:
    """Draw the views and masks that a training on SHARDS with the configuration C would see.

    One row an image, the first ones of the epoch: the source with its crops, the global views as the teacher sees them
    whole and the student masked, and the local views; pixel for pixel what training on a CPU gets. SHARDS may also be a
    folder or list of images. Settings are overridden by KEY=VALUE as in sop-train.

    \b
    Examples:
      sop-data preview shards/ --config photos_demo --out views.png
      sop-data preview my_photos/ --config vits16 --out views.png --epoch 3 masks.kind=random views.local_count=4
    """
    from sop_faiss.config import load_config
    from sop_faiss.verbs.training.data_preview import draw_preview

    check_outputs({"--out": out}, source_files(shards), figures=["--out"], force=force)
    if seed is not None:
        overrides = (*overrides, f"train.seed={seed}")
    resolved = load_config(config, overrides)
    resolved = replace(resolved, data=replace(resolved.data, train=shards))
    preview = draw_preview(resolved, out, images=images, epoch=epoch)
    click.echo(f"drew {number(len(preview.keys), 'image')} with {number(preview.views, 'view')} each: {out}")
    for sample in preview.bad:
        click.echo(one_line(f"  {sample.key}: {sample.message}; {sample.replacement} took its place"))
