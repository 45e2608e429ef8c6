"""sop-index export: an index as Parquet, for a vector database."""

from __future__ import annotations

from pathlib import Path

import click

from sop_faiss.cli.common import one_line, run_command
from sop_faiss.cli.path_options import NamedPath, force_option
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.verbs.output_paths import check_outputs


@click.command("export", short_help="Write an index as Parquet, for a vector database.")
@click.argument("index", type=NamedPath())
@click.option("--out", required=True, type=NamedPath(), metavar="FILE", help="The Parquet file to write.")
@force_option
@run_command
def export_command(index: Path, out: Path, force: bool) -> None:
    """Write names, classes and vectors of an index as Parquet, which Milvus, Qdrant and LanceDB import.

    The columns are id, key, source, member, label, label_name, and vector (a fixed-size list of float32, of unit norm).
    Of an index with shortened codes, the vectors are what the codes make.

    \b
    Example:
      sop-index export photos.index --out photos.parquet
    """
    from sop_faiss.index.export import export_parquet
    from sop_faiss.index.search import FeatureIndex

    check_outputs({"--out": out}, [index], force=force)
    opened = FeatureIndex.open(index)
    with progress_reporter("exporting", "vectors") as progress:
        export_parquet(opened, out, progress=progress)
    click.echo(one_line(f"{len(opened):,} vectors of dimension {opened.dimension} in {out}"))
