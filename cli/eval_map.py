"""sop-eval map: features of images in a plane, as a figure."""

from __future__ import annotations

from pathlib import Path

import click

from sop_faiss.cli.common import run_command, say_written
from sop_faiss.cli.encoder_options import EncoderCommand, batch_size_option, workers_option
from sop_faiss.cli.index_output import max_bad_option
from sop_faiss.cli.optional_encoder import optional_encoder_options
from sop_faiss.cli.path_options import NamedPath, force_option
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.files import write_file
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs.output_paths import check_outputs, encoder_files, source_files


@click.command("map", cls=EncoderCommand, short_help="A figure of features in a plane: t-SNE, PCA or UMAP.")
@click.argument("sources", nargs=-1, required=True, metavar="SRC...")
@optional_encoder_options
@click.option("--out", required=True, type=NamedPath(), metavar="FILE.png", help="The figure.")
@click.option("--method", default="tsne", metavar="NAME", help="tsne, pca, or umap (umap-learn).")
@click.option("--perplexity", default=30.0, help="Of t-SNE; of UMAP the number of neighbors.")
@click.option("--limit", default=2000, help="The most images, drawn from --seed.")
@click.option("--show-images", is_flag=True, help="Draw the images in place of points.")
@click.option("--seed", default=0, help="Seed of the draw and of the method.")
@batch_size_option
@workers_option
@max_bad_option
@force_option
@run_command
def map_command(
    sources: tuple[str, ...],
    encoder: EncoderSpec | None,
    out: Path,
    method: str,
    perplexity: float,
    limit: int,
    show_images: bool,
    seed: int,
    batch_size: int,
    workers: int | None,
    max_bad_fraction: float,
    force: bool,
) -> None:
    """Draw images in a plane by their features; colors are classes, where the images have labels.

    SRC is images (--model), or feature stores of the same images by several encoders, which are drawn side by side.
    Near points are similar images; distances between groups mean nothing.

    \b
    Examples:
      sop-eval map photos/ --model runs/photos --out map.png
      sop-eval map photos/ --model lite0 --show-images --limit 300 --out map.png
      sop-eval map features/before features/after --out both.png
    """
    from sop_faiss.features.extract import ExtractionOptions
    from sop_faiss.verbs.scoring.eval_map import MapOptions, draw_map

    read = [*(file for source in sources for file in source_files(source)), *encoder_files(encoder)]
    check_outputs({"--out": out}, read, figures=["--out"], force=force)
    extraction = ExtractionOptions(batch_size, workers, max_bad_fraction)
    options = MapOptions(method, perplexity, limit, show_images, seed, extraction)
    with progress_reporter("embedding", "images") as progress:
        figure = draw_map(sources, encoder, options, progress=progress)
    write_file(out, figure)
    say_written("image", out)
