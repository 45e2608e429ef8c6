"""sop-eval robustness: accuracy on images with patches dropped or tiles shuffled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sop_faiss.cli.classifier_outputs import max_bad_option, say_left_out
from sop_faiss.cli.common import run_command, say_written
from sop_faiss.cli.encoder_options import EncoderCommand, batch_size_option, encoder_options, workers_option
from sop_faiss.cli.json_output import json_option, put_json
from sop_faiss.cli.labeled_sets_options import labeled_sets_options
from sop_faiss.cli.path_options import NamedPath, force_option, refuse_empty
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.ranks import ranks_of_torchrun
from sop_faiss.cli.tables import print_table
from sop_faiss.evaluate.robustness_choices import GRIDS, QUICK, SHARES, RobustnessChoices
from sop_faiss.files import write_file
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs.output_paths import STDOUT, check_outputs, encoder_files, source_files

if TYPE_CHECKING:
    from sop_faiss.verbs.scoring.task_result import TaskResult

_DEFAULTS = RobustnessChoices()


@click.command("robustness", cls=EncoderCommand, short_help="Accuracy with patches dropped or tiles shuffled.")
@encoder_options
@labeled_sets_options
@click.option(
    "--share",
    "shares",
    type=float,
    multiple=True,
    help="Of the patches dropped; may be repeated.  [default: 0.1 to 0.9]",
)
@click.option(
    "--grid",
    "grids",
    type=int,
    multiple=True,
    metavar="N",
    help="Rows and columns of shuffled tiles; may be repeated.  "
    f"[default: of {', '.join(map(str, GRIDS))} those that divide the images' side]",
)
@click.option(
    "--patches",
    type=int,
    metavar="N",
    help="Rows and columns of patches.  [default: the largest number up to 14 that divides the images' side]",
)
@click.option(
    "--salient-by",
    metavar="M",
    callback=refuse_empty,
    help="The encoder that says which patches are salient: lite0, a run, an export.  [default: the same]",
)
@click.option("--k", default=_DEFAULTS.k, help="Neighbors that vote.")
@click.option("--seed", default=_DEFAULTS.seed, help="Of random patches and tiles.")
@click.option("--out", type=NamedPath(), metavar="FILE.png", help="Draw the curves.")
@click.option(
    "--quick",
    is_flag=True,
    help=f"{QUICK['most_train']:,} training and {QUICK['most_test']:,} test images, and fewer points.",
)
@batch_size_option
@workers_option
@max_bad_option
@json_option
@force_option
@run_command
def robustness_command(
    encoder: EncoderSpec,
    train: str,
    test: str,
    shares: tuple[float, ...],
    grids: tuple[int, ...],
    patches: int | None,
    salient_by: str | None,
    k: int,
    seed: int,
    out: Path | None,
    quick: bool,
    batch_size: int,
    workers: int | None,
    max_bad_fraction: float,
    json_file: Path | None,
    force: bool,
) -> None:
    """Classify test images with patches dropped or tiles shuffled, by k-NN on clean training features: iBOT's curves.

    Patches are dropped at random, the salient ones first, or the others first. Salient is what [CLS] attends to in the
    last block; for networks without it, where the tokens' norm is large. To compare encoders on the same patches, name
    one of them with --salient-by. The test set must be images.

    \b
    Examples:
      sop-eval robustness --model runs/photos --data imagenette/ --out curves.png
      sop-eval robustness --model lite0 --data imagenette/ --quick --json lite0.json
    """
    from sop_faiss.features.extract import ExtractionOptions
    from sop_faiss.verbs.scoring.eval_robustness import RobustnessOptions, evaluate_robustness

    judge = None if salient_by is None else EncoderSpec(salient_by, device=encoder.device)
    read = [*source_files(train), *source_files(test), *encoder_files(encoder), *encoder_files(judge)]
    outputs = {"--json": json_file, "--out": out}
    check_outputs(outputs, read, to_stdout=["--json"], figures=["--out"], force=force)
    given: dict[str, Any] = QUICK if quick else {"shares": SHARES}
    given = {**given, **({"shares": shares} if shares else {}), **({"grids": grids} if grids else {})}
    choices = RobustnessChoices(**given, patches=patches, k=k, seed=seed)
    extraction = ExtractionOptions(batch_size, workers, max_bad_fraction)
    options = RobustnessOptions(choices, extraction, judge, figure=out is not None)
    with (
        ranks_of_torchrun() as is_main,
        progress_reporter("embedding", "images") as progress,
        progress_reporter("distorting", "images") as distorting,
    ):
        result, figure = evaluate_robustness(
            train, test, encoder, options, progress=progress, distorting_progress=distorting
        )
    if not is_main:
        return
    put_json(json_file, result.content())
    if out is not None and figure is not None:
        write_file(out, figure)
    if json_file != STDOUT:
        _print(result)
    say_left_out(result.protocol)
    say_written("JSON", json_file)
    say_written("image", out)


def _print(result: TaskResult) -> None:
    protocol, intervals = result.protocol, result.details["intervals"]
    print_table(
        f"{result.encoder['name']}: {protocol['k']}-NN, {protocol['test_images']:,} test and "
        f"{protocol['train_images']:,} training images, {protocol['classes']:,} classes; "
        f"{protocol['patches']} x {protocol['patches']} patches, salient by {protocol['salient_by']}",
        ["robustness", "top-1 %", "95 % interval"],
        [
            [name.replace("_", " "), f"{value:.2f}", "{:.2f} to {:.2f}".format(*intervals[name])]
            for name, value in result.metrics.items()
        ],
    )
