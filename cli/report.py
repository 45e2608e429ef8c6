"""sop-report: one page about a training run."""

from __future__ import annotations

from pathlib import Path

import click

from sop_faiss.cli.common import CONTEXT_SETTINGS, one_line, page_footer, run_command, say_written
from sop_faiss.cli.path_options import NamedPath, force_option, refuse_empty
from sop_faiss.cli.progress_reporter import progress_reporter

_FILE = NamedPath(allow_dash=True)


@click.command(context_settings=CONTEXT_SETTINGS, no_args_is_help=True)
@click.version_option(package_name="sop-faiss")
@click.argument("run", type=NamedPath())
@click.option("--out", type=_FILE, metavar="FILE", help="The page.  [default: report.html in RUN]")
@click.option("--no-images", is_flag=True, help="Only curves and tables; the images are not opened.")
@click.option("--data", metavar="SRC", callback=refuse_empty, help="Where the training images are now, if they moved.")
@click.option(
    "--gallery",
    default=2000,
    metavar="N",
    help="The most training images to search for nearest neighbors; 0: no sheet of neighbors.",
)
@force_option
@run_command
def main(run: Path, out: Path | None, no_images: bool, data: str | None, gallery: int, force: bool) -> None:
    """Write one self-contained page about a training run, which may still be running.

    RUN is the --output of sop-train. The page has the curves with their floors, the scores, what the prototypes look
    like now and early in training, nearest neighbors, and the settings. The images are read where the run read them.

    \b
    Examples:
      sop-report runs/mine
      sop-report runs/mine --out mine.html --data /mnt/moved/shards/
    """
    from sop_faiss.model.encoders.spec import EncoderSpec
    from sop_faiss.verbs.output_paths import check_outputs, encoder_files, source_files
    from sop_faiss.verbs.run_page.report import ReportOptions, report_run

    own_page = run / "report.html"
    page = own_page if out is None else out
    read = [*encoder_files(EncoderSpec(str(run))), *source_files(data)]
    check_outputs({"--out": page}, read, force=force, expected=own_page)
    options = ReportOptions(not no_images, data, gallery)
    report = report_run(run, page, progress_reporter, options, page_footer("sop-report"))
    for line in (*report.missing, report.verdict):
        click.echo(one_line(line), err=True)
    say_written("page", page)


if __name__ == "__main__":
    main()
