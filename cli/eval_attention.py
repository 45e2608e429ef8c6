"""sop-eval attention: what an encoder looks at, as a figure."""

from __future__ import annotations

from pathlib import Path

import click

from sop_faiss.cli.common import one_line, run_command, say_written
from sop_faiss.cli.encoder_options import EncoderCommand, encoder_options
from sop_faiss.cli.path_options import NamedPath, force_option, refuse_empty
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.files import write_file
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs.output_paths import check_outputs, encoder_files, source_files


@click.command("attention", cls=EncoderCommand, short_help="A figure of [CLS] attention and patch tokens.")
@click.argument("src", metavar="SRC", callback=refuse_empty)
@encoder_options
@click.option("--out", required=True, type=NamedPath(), metavar="FILE.png", help="The figure.")
@click.option("--limit", default=8, help="The most images, spread evenly over SRC.")
@force_option
@run_command
def attention_command(src: str, encoder: EncoderSpec, out: Path, limit: int, force: bool) -> None:
    """Draw what an encoder looks at: [CLS] attention of each head, and patch tokens as colors.

    Colors are the first three principal components of the patch tokens of all shown images: the same color means the
    same kind of patch. Attention is of the last block of ViTs; other networks show colors alone. A larger --size shows
    more detail.

    \b
    Examples:
      sop-eval attention photos/ --model runs/photos --out attention.png
      sop-eval attention video_frames/ --model dino:dino_deitsmall8_pretrain.pth --arch vit_small_patch8_224 \\
        --size 480 --out attention.png
    """
    from sop_faiss.verbs.scoring.eval_attention import draw_looks

    check_outputs({"--out": out}, [*source_files(src), *encoder_files(encoder)], figures=["--out"], force=force)
    with progress_reporter("looking", "images") as progress:
        looks = draw_looks(src, encoder, limit=limit, progress=progress)
    write_file(out, looks.figure)
    for reason in looks.unreadable:
        click.echo(one_line(f"left out: {reason}"), err=True)
    if not looks.has_attention:
        click.echo("the encoder has no [CLS] attention to show: the figure has patch tokens alone", err=True)
    say_written("image", out)
