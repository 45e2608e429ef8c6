"""sop-export: a run's backbone for timm and Hugging Face."""

from __future__ import annotations

from pathlib import Path

import click

from sop_faiss.cli.common import CONTEXT_SETTINGS, one_line, run_command
from sop_faiss.cli.path_options import NamedPath


@click.command(
    context_settings=CONTEXT_SETTINGS,
    no_args_is_help=True,
    epilog="The README.md in OUT says how to load it. Every --model of this package takes OUT too.",
)
@click.version_option(package_name="sop-faiss")
@click.argument("run", type=NamedPath())
@click.argument("out", type=NamedPath())
@click.option("--student", is_flag=True, help="The student instead of the teacher.")
@click.option(
    "--adapter",
    is_flag=True,
    help="Of a run with model.lora: only what it has learned, a small file that belongs to what it started from.",
)
@click.option("--onnx", is_flag=True, help="Also write model.onnx (pip install 'sop-faiss[onnx]').")
@click.option("--torch-export", is_flag=True, help="Also write model.pt2, a program of torch.export.")
@run_command
def main(run: Path, out: Path, student: bool, adapter: bool, onnx: bool, torch_export: bool) -> None:
    """Write the backbone of RUN to OUT as timm and Hugging Face load it: model.safetensors and config.json.

    RUN is a run directory, a checkpoint in it, or its best/; OUT a new or empty directory. The mask token and the
    projector are left out. Before OUT appears, timm rebuilds the network from it, and its features are compared. What
    model.lora has learned is merged into the weights, unless --adapter asks for it alone.

    \b
    Examples:
      sop-export runs/photos exports/photos
      sop-export runs/photos/best exports/best --onnx
      sop-export runs/few/best exports/adapter --adapter
    """
    from sop_faiss.verbs.training.export import ExportOptions, export_run

    result = export_run(run, out, ExportOptions(student, onnx, torch_export, adapter))
    if adapter:
        more = f"{result.size_bytes / 1e6:.2f} MB, to be added to {result.belongs_to}"
    else:
        more = f"rebuilt by timm, cosine {result.cosine:.6f}" + (f"; {result.caveat}" if result.caveat else "")
    click.echo(
        one_line(
            f"{', '.join(result.files)} in {out}: {result.name}, {result.architecture}, {result.parameters:,} "
            f"parameters, features of dimension {result.feature_dim}, fingerprint {result.fingerprint[:12]}; {more}"
        )
    )


if __name__ == "__main__":
    main()
