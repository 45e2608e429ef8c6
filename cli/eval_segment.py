"""sop-eval segment: the class of each pixel, by a linear head on frozen tokens or by UPerNet."""

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
from sop_faiss.evaluate.trained.segment_choices import HEADS, QUICK, SegmentChoices
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import silent_stage
from sop_faiss.verbs.output_paths import STDOUT, check_outputs, encoder_files
from sop_faiss.verbs.scoring.task_result import TaskResult

_OPTIONS = {
    "head": f"{HEADS[0]}: batch norm and a 1 x 1 convolution on frozen tokens; {HEADS[1]}: the network is trained.",
    "steps": "Batches to train on.",
    "batch_size": "",
    "learning_rate": "Highest learning rate of the head.  [default: 8e-4; UPerNet 3e-5, ViT-B 8e-5]",
    "warmup_steps": "Steps in which the learning rate rises.  [default: 1500 of 160000]",
    "weight_decay": "",
    "min_scale": "Images are resized to a random multiple of --size, from this one.",
    "max_scale": "See --min-scale.",
    "flip": "",
    "distort": "Probability of each change of color.",
    "blocks": "Linear, of ViTs: 4 joins the tokens of four blocks, as in iBOT's config.",
    "stride": "Linear: from token to token; of convolutional networks, which map.  [default: last]",
    "layer_decay": "UPerNet: learning rate of a layer relative to the next.  [default: 0.9; ViT-B 0.65, ViT-L 0.95]",
    "drop_path": "UPerNet: stochastic depth of the last block.  [default: 0.1; ViT-L 0.2]",
    "channels": "UPerNet: of the decoder.  [default: a ViT's width, else 512]",
    "auxiliary": "UPerNet: weight of the second head's loss.",
    "precision": "",
    "seed": "",
}


@click.command("segment", cls=EncoderCommand, short_help="The class of each pixel (ADE20K): mIoU.")
@encoder_options
@click.option(
    "--data",
    required=True,
    type=NamedPath(),
    metavar="DIR",
    help="Laid out as ADE20K, or images/ and semantic/ with train/ and val/, and semantic/classes.yaml.",
)
@click.option("--supercategories", is_flag=True, help="Of COCO's categories: the 27 groups of them are the classes.")
@recipe_options(SegmentChoices(), _OPTIONS, f"{spelled(QUICK[HEADS[0]])}; with UPerNet {spelled(QUICK[HEADS[1]])}")
@json_option
@force_option
@run_command
def segment_command(
    encoder: EncoderSpec,
    data: Path,
    supercategories: bool,
    given: dict[str, Any],
    quick: bool,
    workers: int,
    out: Path | None,
    json_file: Path | None,
    force: bool,
) -> None:
    """Train a head that names the class of each pixel, and test it by sliding windows: iBOT's protocol on ADE20K.

    --size is the side of crops and windows and the shorter side of the images (512).

    \b
    Examples:
      sop-eval segment --model runs/photos --data ADEChallengeData2016/ --out linear/
      sop-eval segment --model lite0 --stride 16 --data coco_small/ --supercategories --quick
    """
    from sop_faiss.verbs.scoring.eval_segment import SegmentOptions, evaluate_segment

    read = [data, *encoder_files(encoder), *([out] if out else [])]
    check_outputs({"--json": json_file}, read, to_stdout=["--json"], force=force)
    given |= {"size": encoder.size} if encoder.size is not None else {}
    of_quick = QUICK.get(given.get("head", SegmentChoices.head), {}) if quick else {}
    options = SegmentOptions(SegmentChoices(**{**of_quick, **given}), supercategories, workers, out)
    with ranks_of_torchrun() as is_main:
        result = evaluate_segment(data, encoder, options, stage=progress_reporter if is_main else silent_stage)
    if not is_main:
        return
    put_json(json_file, result.content())
    if json_file != STDOUT:
        _print_scores(result)
    say_written("JSON", json_file)
    say_written("state", out)


def _print_scores(result: TaskResult) -> None:
    protocol, details = result.protocol, result.details
    low, high = details["miou_interval"]
    floor = details["largest_class_everywhere"]
    rows = {protocol["head"]: result.metrics, f"{floor['class']} everywhere": floor}
    print_table(
        f"{result.encoder['name']}: {protocol['test_images']:,} test and {protocol['train_images']:,} training images, "
        f"{protocol['steps']:,} steps at {protocol['size']} pixels; mIoU {result.metrics['miou']:.1f}, 95 % of the "
        f"images' bootstrap {low:.1f} to {high:.1f}",
        ["head", "mIoU", "mAcc", "aAcc"],
        [[name, *(f"{row[key]:.1f}" for key in ("miou", "macc", "aacc"))] for name, row in rows.items()],
    )
    if left := details["classes_left_out"]:
        click.echo(
            f"{len(left)} of {protocol['classes']} classes are neither in the test masks nor predicted, and left out "
            f"of the mean: {', '.join(left[:5])}{', ...' if len(left) > 5 else ''}",
            err=True,
        )
