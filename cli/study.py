"""sop-study: many runs that differ in few settings, with seeds and a budget, and what they show together."""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path

import click

from sop_faiss.cli.common import (
    CONTEXT_SETTINGS,
    EXIT_REQUEUE,
    EXIT_USER,
    Ended,
    log_to_stderr,
    one_line,
    page_footer,
    run_command,
    say_written,
)
from sop_faiss.cli.path_options import NamedPath
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.tables import print_table

_CONTINUES = "the runs under way are saved; the same command continues them"


class _Command(click.Command):
    """A command whose help lists the packaged studies with the first sentences of their opening comments."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list; called by click."""
        from sop_faiss.config import config_summary
        from sop_faiss.config.study import packaged_studies

        with formatter.section("Packaged studies"):
            formatter.write_dl([(name, config_summary(path)) for name, path in sorted(packaged_studies().items())])


@click.command(cls=_Command, context_settings=CONTEXT_SETTINGS, no_args_is_help=True)
@click.version_option(package_name="sop-faiss")
@click.argument("study")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--out", type=NamedPath(), metavar="DIR", required=True, help="The study's directory: new, or of the same."
)
@click.option("--quick", is_flag=True, help="The small size, which the study's section `quick` describes.")
@click.option("--compare", metavar="ARM", help="Give the differences to this arm.  [default: the first]")
@click.option("--cluster", metavar="ADDRESS", help="Make the runs on a Ray cluster: HOST:PORT, or ray for its default.")
@click.option("--slurm", type=NamedPath(), metavar="FILE", help="Run nothing: write the script of a Slurm array.")
@click.option("--run", "name", metavar="ARM/seed_N", hidden=True, help="Make one run of a planned study.")
@click.option("--probe", metavar="ARM", hidden=True, help="Measure an arm's speed.")
@click.option("--driver", default=0, hidden=True, help="Process that has started this one.")
@run_command
def main(
    study: str,
    overrides: tuple[str, ...],
    out: Path,
    quick: bool,
    compare: str | None,
    cluster: str | None,
    slurm: Path | None,
    name: str | None,
    probe: str | None,
    driver: int,
) -> None:
    """Make a study: every arm with every seed, each trained as sop-train does and scored, side by side.

    STUDY is a YAML file, else the name of a packaged study, listed below. KEY=VALUE overrides a key of the study
    (seeds=[0,1], budget.minutes=5, jobs=2) or a field of the configuration of all runs (data.train=shards/).

    \b
    Examples:
      sop-study num_sops --quick --out num_sops
      sop-study num_sops data.train=train/ evaluate.train=train/ evaluate.test=test/ --out num_sops
      sop-study mine.yaml jobs=2 --out mine --compare base
      sop-study mine.yaml --out mine --slurm mine.sbatch && sbatch mine.sbatch

    DIR/study.html, study.md and study.parquet have the results, DIR/runs/ARM/seed_N each run. A run that is done is not
    made again: after a kill or a failure the same command continues. Exit status: 0 done, 1 a mistake or a run that
    failed (the others are made), 75 runs were saved on a signal, 130 Ctrl-C, which saves them, too.
    """
    if name is not None or probe is not None:
        _work(out, name, probe, driver)
        return
    from sop_faiss.config.study import find_study, load_study
    from sop_faiss.verbs.study.study import Where, run_study

    log_to_stderr(logging.INFO)
    if cluster is not None and slurm is not None:
        raise click.UsageError("--cluster and --slurm exclude each other: take one.")
    loaded = load_study(study, overrides, quick=quick)
    where = Where((sys.executable, "-m", "sop_faiss.cli.study"), cluster, slurm)
    title = f"Study {find_study(study).stem}"
    try:
        with progress_reporter("training", "steps") as progress:
            result = run_study(
                loaded,
                out,
                where,
                title=title,
                compare=compare,
                progress=progress,
                footer=lambda: page_footer("sop-study"),
            )
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(f"interrupted: {_CONTINUES}") from interrupt
    except Ended as ended:
        if ended.number != signal.SIGTERM:
            raise
        click.echo(f"{ended}: {_CONTINUES}", err=True)
        sys.exit(EXIT_REQUEUE)
    for table in result.tables:
        print_table(table.caption, table.columns, table.rows)
    say_written("page", out / "study.html")
    for run in result.failed:
        click.echo(one_line(f"failed: {run.planned.name}: {run.error}"), err=True)
    if slurm is not None:
        say_written("script", slurm if result.unfinished or result.failed else None)
    elif result.failed:
        sys.exit(EXIT_USER)
    elif result.unfinished:
        sys.exit(EXIT_REQUEUE)


def _work(out: Path, name: str | None, probe: str | None, driver: int) -> None:
    """Do the work of one process of a study."""
    from sop_faiss.verbs.study.one_run import probe_arm, run_one

    log_to_stderr(logging.INFO)
    if probe is not None:
        probe_arm(out, probe)
    elif name is not None and not run_one(out, name, driver):
        sys.exit(EXIT_REQUEUE)


if __name__ == "__main__":
    main()
