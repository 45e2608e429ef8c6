"""sop-eval detect: boxes and masks of the objects in images, by Mask R-CNN over the encoder's network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sop_faiss.cli.common import run_command, say_written
from sop_faiss.cli.encoder_options import EncoderCommand, encoder_options
from sop_faiss.cli.json_output import json_option, put_json
from sop_faiss.cli.path_options import NamedPath, force_option
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.ranks import ranks_of_torchrun
from sop_faiss.cli.recipe_options import recipe_options, spelled
from sop_faiss.cli.tables import print_table
from sop_faiss.evaluate.trained.detect_choices import QUICK, DetectChoices
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import silent_stage
from sop_faiss.verbs.output_paths import STDOUT, check_outputs, encoder_files
from sop_faiss.verbs.scoring.task_result import TaskResult

_OPTIONS = {
    "cascade": "Three heads one after the other: Cascade Mask R-CNN.",
    "images": "Train on the first images only.  [default: all]",
    "epochs": "Passes over the training images.",
    "batch_size": "",
    "learning_rate": "Learning rate of the new layers, whatever the batch.",
    "warmup_steps": "Steps in which the learning rate rises.",
    "layer_decay": "Learning rate of a layer relative to the one above.  [default: 0.8; ViT-B 0.75; not a ViT 1]",
    "drop_path": "Stochastic depth of the last block.  [default: 0.2; ViT-S 0.1]",
    "weight_decay": "",
    "min_scale": "Smallest of 11 sides of training images, relative to --size.",
    "crop": "Probability of a random crop.",
    "flip": "",
    "width": "Channels of the feature pyramid and the heads.",
    "anchor": "Side of the anchors relative to their map's stride.",
    "rois": "Proposals of an image that the heads learn from.",
    "batchnorm": "The network's batch norms: frozen, or batch.",
    "precision": "",
    "seed": "",
}
_METRICS = {
    "AP": "ap",
    "AP50": "ap50",
    "AP75": "ap75",
    "small": "ap_small",
    "medium": "ap_medium",
    "large": "ap_large",
}


@click.command("detect", cls=EncoderCommand, short_help="Objects found and cut out (COCO): AP of boxes and masks.")
@encoder_options
@click.option("--data", required=True, type=NamedPath(), metavar="DIR", help="A folder laid out as COCO 2017.")
@click.option(
    "--test-split",
    default="val",
    show_default=True,
    metavar="NAME",
    help="val; or train: the training images themselves.",
)
@recipe_options(DetectChoices(), _OPTIONS, spelled(QUICK))
@json_option
@force_option
@run_command
def detect_command(
    encoder: EncoderSpec,
    data: Path,
    test_split: str,
    given: dict[str, Any],
    quick: bool,
    workers: int,
    out: Path | None,
    json_file: Path | None,
    force: bool,
) -> None:
    """Train Mask R-CNN on the complete network, and measure the AP of its boxes and masks: iBOT's recipe on COCO.

    --size is the shorter side of the images (800). DIR has annotations/instances_train2017.json, train2017/ and the
    same of val; instances_train.json and images/train/ do, too.

    \b
    Examples:
      sop-eval detect --model runs/photos --data coco/ --out detector/ --precision bf16
      sop-eval detect --model lite0 --data coco_small/ --quick
    """
    from sop_faiss.verbs.scoring.eval_detect import DetectOptions, evaluate_detection

    read = [data, *encoder_files(encoder), *([out] if out else [])]
    check_outputs({"--json": json_file}, read, to_stdout=["--json"], force=force)
    given |= {"size": encoder.size} if encoder.size is not None else {}
    choices = DetectChoices(**{**(QUICK if quick else {}), **given})
    options = DetectOptions(choices, test_split, workers, out)
    with ranks_of_torchrun() as is_main:
        result = evaluate_detection(data, encoder, options, stage=progress_reporter if is_main else silent_stage)
    if not is_main:
        return
    put_json(json_file, result.content())
    if json_file != STDOUT:
        _print_scores(result)
    say_written("JSON", json_file)
    say_written("state", out)


def _print_scores(result: TaskResult) -> None:
    protocol, metrics = result.protocol, result.metrics
    rows = [
        [kind, *(f"{metrics[f'{kind}_{key}']:.1f}" if f"{kind}_{key}" in metrics else "-" for key in _METRICS.values())]
        for kind in ("box", "mask")
    ]
    print_table(
        f"{result.encoder['name']}, {protocol['detector']}: {protocol['test_images']:,} test images "
        f"({protocol['test_split']}) and {protocol['train_images']:,} training images, {protocol['epochs']:,} epochs "
        f"at {protocol['size']} pixels",
        ["of", *_METRICS],
        rows,
    )
    if small := protocol["train_instances_left_out"]:
        click.echo(
            f"{small:,} training instances are smaller than a pixel, or have no mask, and were left out", err=True
        )
