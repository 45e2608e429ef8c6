"""sop-embed: frozen features of any encoder, on disk."""

from __future__ import annotations

import os
from pathlib import Path

import click

from sop_faiss.cli.common import CONTEXT_SETTINGS, one_line, run_command, say_written
from sop_faiss.cli.encoder_options import EncoderCommand, batch_size_option, encoder_options, workers_option
from sop_faiss.cli.json_output import json_option, put_json
from sop_faiss.cli.path_options import NamedPath, force_option, refuse_empty
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs.output_paths import STDOUT


@click.command(
    cls=EncoderCommand,
    context_settings=CONTEXT_SETTINGS,
    no_args_is_help=True,
    epilog="Any Parquet reader opens the result. To search it: sop-index build --features OUT --out INDEX.",
)
@click.version_option(package_name="sop-faiss")
@encoder_options
@click.option(
    "--data",
    required=True,
    metavar="SRC",
    callback=refuse_empty,
    help="Images: .tar shards, a folder, or a .txt or .csv list.",
)
@click.option("--out", required=True, type=NamedPath(), metavar="DIR", help="A new or empty directory.")
@click.option(
    "--whole", is_flag=True, help="Whole images, longer side --size, as sop-retrieve sees them; not a square crop."
)
@batch_size_option
@workers_option
@click.option("--feature-dtype", default="float32", metavar="NAME", help="float32, or float16: half the size.")
@click.option(
    "--whiten",
    metavar="SRC",
    callback=refuse_empty,
    help="Learn a PCA whitening from these images, apply it, and keep it.",
)
@click.option(
    "--whiten-dim",
    type=int,
    metavar="D",
    help="With --whiten: dimensions to keep.  [default: all that the images span]",
)
@click.option(
    "--max-bad-fraction",
    default=0.01,
    help="Unusable images up to this share are dropped and listed; more is an error.",
)
@json_option
@force_option
@run_command
def main(
    encoder: EncoderSpec,
    data: str,
    out: Path,
    whole: bool,
    batch_size: int,
    workers: int | None,
    feature_dtype: str,
    whiten: str | None,
    whiten_dim: int | None,
    max_bad_fraction: float,
    json_file: Path | None,
    force: bool,
) -> None:
    """Write unit-norm features of images: a feature store of Parquet files and a manifest.

    After a kill, the same command continues where it was. Several GPUs share the images under
    torchrun -m sop_faiss.cli.embed.

    \b
    Examples:
      sop-embed --model lite0 --data photos/ --out features/
      sop-embed --model runs/photos --data photos/ --out features/
      sop-embed --model timm:resnet50 --weights resnet50.safetensors \\
          --data 'shards/photos-{000..012}.tar' --out features/
      sop-embed --model dino:dino_vits16.pth --arch vit_small_patch16_224 \\
          --data photos/ --out features/
      sop-embed --model runs/photos --size 512 --scales 1,0.7071,0.5 --pooling gem \\
          --whiten more_photos/ --whiten-dim 128 --data photos/ --out features/
    """
    from sop_faiss.distributed import leave_process_group
    from sop_faiss.features.extract import ExtractionOptions
    from sop_faiss.verbs.finding.embed import EmbedOptions, embed

    extraction = ExtractionOptions(batch_size, workers, max_bad_fraction)
    options = EmbedOptions(extraction, feature_dtype, whole, whiten, whiten_dim)
    with progress_reporter("embedding", "images") as progress:
        try:
            done = embed(encoder, data, out, options, result_json=json_file, force=force, progress=progress)
        finally:
            leave_process_group()
    if int(os.environ.get("RANK", "0")) > 0:
        return
    put_json(json_file, done.measurement)
    if json_file == STDOUT:
        return
    manifest, dropped = done.manifest, done.manifest["dropped"]
    reasons = ", ".join(f"{reason} {count}" for reason, count in dropped["reasons"].items())
    click.echo(
        one_line(
            f"{manifest['count']:,} features of dimension {manifest['dimension']} in {out}"
            + (f", {dropped['count']:,} images dropped ({reasons})" if reasons else "")
            + f"; encoder {manifest['encoder']['name']}, fingerprint {manifest['encoder']['fingerprint'][:12]}"
        )
    )
    say_written("JSON", json_file)


if __name__ == "__main__":
    main()
