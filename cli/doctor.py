"""sop-doctor: is this machine fit to train and search, and what to do if not."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from sop_faiss.cli.common import CONTEXT_SETTINGS, EXIT_USER, one_line, run_command, say_written
from sop_faiss.cli.json_output import json_option, put_json
from sop_faiss.cli.path_options import force_option
from sop_faiss.verbs.doctor import Diagnosis, examine
from sop_faiss.verbs.output_paths import STDOUT, check_outputs

_MARKS = {"ok": "ok     ", "warning": "WARNING", "broken": "BROKEN "}


@click.command(context_settings=CONTEXT_SETTINGS)
@click.version_option(package_name="sop-faiss")
@json_option
@force_option
@run_command
def main(json_file: Path | None, force: bool) -> None:
    """Check versions, devices, FAISS against torch, OpenMP clashes and free space; say what to do.

    Exits with 1 if something is broken; warnings alone exit with 0.

    \b
    Example:
      sop-doctor --json doctor.json
    """
    check_outputs({"--json": json_file}, [], to_stdout=("--json",), force=force)
    click.echo("testing FAISS, some seconds per device ...", err=True)
    diagnosis = examine()
    put_json(json_file, diagnosis.to_dict())
    if json_file != STDOUT:
        click.echo(_text(diagnosis))
    say_written("JSON", json_file)
    if not diagnosis.healthy:
        sys.exit(EXIT_USER)


def _text(diagnosis: Diagnosis) -> str:
    lines = [f"{name:<24}{version or 'not installed'}" for name, version in diagnosis.versions.items()]
    lines += ["", *(f"{device['name']:<24}{one_line(device['description'])}" for device in diagnosis.devices), ""]
    for check in diagnosis.checks:
        lines.append(f"{_MARKS[check.status]} {check.name}: {one_line(check.detail)}")
        if check.remedy:
            lines.append(f"        -> {one_line(check.remedy)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
