"""sop-report: one page about a training run."""

from __future__ import annotations

from pathlib import Path

import click

from sop_faiss.cli.common import (
    CONTEXT_SETTINGS,
    one_line,
    page_footer,
    progress_reporter,
    run_command,
    say_written,
)

__all__ = ["main"]

_FILE = click.Path(path_type=Path, allow_dash=True)


@click.command(context_settings=CONTEXT_SETTINGS, no_args_is_help=True)
@click.version_option(package_name="sop-faiss")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", type=_FILE, metavar="FILE", help="The page.  [default: report.html in RUN]")
@click.option("--no-pictures", is_flag=True, help="Curves and tables alone; the images are not opened.")
@click.option("--data", metavar="SRC", help="Where the training images are now, if they moved.")
@click.option(
    "--gallery",
    type=int,
    default=2000,
    show_default=True,
    metavar="N",
    help="Training images searched for nearest neighbours, at most; 0: no such sheet.",
)
@run_command
def main(run: Path, out: Path | None, no_pictures: bool, data: str | None, gallery: int) -> None:
    """Write one self-contained page about a training run, which may still be going on.

    RUN is the --output of sop-train. The page has the curves with their floors, the scores, what the prototypes look
    like now and early in training, nearest neighbours, and the settings. The images are read where the run read them.

    \b
    Examples:
      sop-report runs/mine
      sop-report runs/mine --out mine.html --data /mnt/moved/shards/
    """
    from sop_faiss.model.spec import EncoderSpec
    from sop_faiss.pipeline.outputs import check_outputs, encoder_files, source_files
    from sop_faiss.pipeline.report import ReportOptions, report_run

    page = run / "report.html" if out is None else out
    check_outputs({"--out": page}, [*encoder_files(EncoderSpec(str(run))), *source_files(data)])
    options = ReportOptions(not no_pictures, data, gallery)
    missing = report_run(run, page, progress_reporter, options, page_footer("sop-report"))
    for line in missing:
        click.echo(one_line(line), err=True)
    say_written("page", page)


if __name__ == "__main__":
    main()
