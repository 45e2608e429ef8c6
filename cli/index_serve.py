"""sop-index serve: an index as a web page."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from sop_faiss.cli.common import log_to_stderr, one_line, run_command
from sop_faiss.cli.encoder_options import EncoderCommand
from sop_faiss.cli.optional_encoder import optional_encoder_options
from sop_faiss.cli.path_options import NamedPath
from sop_faiss.errors import ConfigError
from sop_faiss.model.encoders.spec import EncoderSpec

_FOLDER = NamedPath()
_EXTRA = ("fastapi", "starlette", "uvicorn", "pydantic")


@click.command("serve", cls=EncoderCommand, short_help="Open an index as a web page.")
@click.argument("index", type=_FOLDER)
@optional_encoder_options
@click.option("--no-encoder", is_flag=True, help="Open no encoder: only the index's own images can be queries.")
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Where to listen; 0.0.0.0: for all.")
@click.option("--port", default=8000, metavar="N", help="Port; 0: a free one.")
@click.option("--images-root", type=_FOLDER, metavar="DIR", help="Where the index's images are, if they moved.")
@click.option("--table", type=_FOLDER, metavar="FILE", help="More columns for filters, by key: .csv or .parquet.")
@click.option("--max-upload", default="16MB", metavar="SIZE", help="Largest image file accepted.")
@click.option("--max-pixels", default=64_000_000, help="Most pixels of an image.")
@click.option("--threads", default=2, help="Searches that run at once.")
@run_command
def serve_command(
    index: Path,
    encoder: EncoderSpec | None,
    no_encoder: bool,
    host: str,
    port: int,
    images_root: Path | None,
    table: Path | None,
    max_upload: str,
    max_pixels: int,
    threads: int,
) -> None:
    """Open an index as a web page: choose an image, see its neighbors, search on from one of them.

    INDEX is the directory that sop-index build wrote; it knows its encoder, which --model opens from another place. The
    page is reached from this machine alone unless --host says otherwise; there is no password. Ctrl-C ends it. If
    sync, add or remove changes the index, the page shows it as it is now; no restart is needed.

    \b
    Examples:
      sop-index serve photos.index
      sop-index serve photos.index --host 0.0.0.0 --port 8080
      sop-index serve photos.index --table shop.csv
    """
    try:
        from sop_faiss.index.build import parse_bytes
        from sop_faiss.serve.options import ServeOptions
        from sop_faiss.serve.run import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        raise ConfigError(f"{error.name} is not installed: pip install 'sop-faiss[serve]'") from None
    log_to_stderr(logging.WARNING)
    options = ServeOptions(
        host=host,
        port=port,
        images_root=images_root,
        table=table,
        max_upload_bytes=parse_bytes(max_upload),
        max_upload_pixels=max_pixels,
        threads=threads,
    )
    if no_encoder and encoder is not None:
        raise ConfigError("--no-encoder opens none: leave --model and its options out")

    def ready(address: str) -> None:
        click.echo(one_line(f"{address}  (Ctrl-C ends it)"), err=True)

    serve(index, encoder, options, with_encoder=not no_encoder, ready=ready)
