"""sop-eval segment: the class of each pixel, by a linear head on frozen tokens or by UPerNet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from sop_faiss.cli.common import progress_reporter, run_command, say_written
from sop_faiss.cli.encoder_options import EncoderCommand, encoder_options
from sop_faiss.cli.json_output import json_option, put_json
from sop_faiss.cli.path_options import NamedPath, force_option
from sop_faiss.cli.tables import print_table
from sop_faiss.evaluate.segment_choices import HEADS, QUICK, SegmentChoices
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs.output_paths import STDOUT, check_outputs, encoder_files
from sop_faiss.verbs.scoring.task_result import TaskResult

R = TypeVar("R")
_DEFAULTS = SegmentChoices()
_NUMBERS: tuple[tuple[str, str, type, str], ...] = (
    ("steps", "--steps", int, "Batches to train on."),
    ("batch_size", "--batch-size", int, "Crops of a step."),
    ("learning_rate", "--lr", float, "Highest learning rate of the head.  [default: 8e-4; UPerNet 3e-5, ViT-B 8e-5]"),
    ("warmup_steps", "--warmup-steps", int, "Steps in which the learning rate rises.  [default: 1500 of 160000]"),
    ("weight_decay", "--weight-decay", float, "Weight decay of AdamW."),
    ("min_scale", "--min-scale", float, "Images are resized to a random multiple of --size, from this one."),
    ("max_scale", "--max-scale", float, "See --min-scale."),
    ("flip", "--flip", float, "Probability of a mirrored crop."),
    ("distort", "--distort", float, "Probability of each change of color."),
    ("blocks", "--blocks", int, "Linear, of ViTs: 4 joins the tokens of four blocks, as in iBOT's config."),
    ("stride", "--stride", int, "Linear: from token to token; of convolutional networks, which map.  [default: last]"),
    (
        "layer_decay",
        "--layer-decay",
        float,
        "UPerNet: learning rate of a layer relative to the one above.  [default: 0.9; ViT-B 0.65, ViT-L 0.95]",
    ),
    ("drop_path", "--drop-path", float, "UPerNet: stochastic depth of the last block.  [default: 0.1; ViT-L 0.2]"),
    ("channels", "--channels", int, "UPerNet: of the decoder.  [default: a ViT's width, else 512]"),
    ("auxiliary", "--auxiliary", float, "UPerNet: weight of the second head's loss."),
)
_OPTION_OF = {"size": "--size", **{name: option for name, option, *_ in _NUMBERS}}


def _recipe_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give a click command the options of the recipe; it receives `choices: SegmentChoices` without a size."""

    @functools.wraps(command)
    def with_choices(*args: Any, head: str, quick: bool, precision: str, seed: int, **options: Any) -> R:
        chosen = {name: options.pop(name) for name, *_ in _NUMBERS}
        given = {name: value for name, value in chosen.items() if value is not None}
        quick_form = QUICK.get(head, {}) if quick else {}
        choices = SegmentChoices(head, precision=precision, seed=seed, **{**quick_form, **given})
        return command(*args, choices=choices, **options)

    decorated: Callable[..., R] = with_choices
    forms = [", ".join(f"{_OPTION_OF[name]} {value:g}" for name, value in QUICK[head].items()) for head in HEADS]
    decorated = click.option(
        "--quick",
        is_flag=True,
        help=f"A short training. Where not given: {forms[0]}; with UPerNet {forms[1]}.",
    )(decorated)
    decorated = click.option("--seed", type=int, default=0, show_default=True, help="Of everything that is drawn.")(
        decorated
    )
    decorated = click.option(
        "--precision", default=_DEFAULTS.precision, show_default=True, metavar="NAME", help="fp32, or bf16 (autocast)."
    )(decorated)
    for name, option, kind, text in reversed(_NUMBERS):
        default = getattr(_DEFAULTS, name)
        shown = text if default is None else f"{text}  [default: {default:g}]"
        decorated = click.option(option, name, type=kind, help=shown)(decorated)
    return click.option(
        "--head",
        default=_DEFAULTS.head,
        show_default=True,
        metavar="NAME",
        help=f"{HEADS[0]}: batch norm and a 1 x 1 convolution on frozen tokens; {HEADS[1]}: the network is trained.",
    )(decorated)


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
@_recipe_options
@click.option("--workers", type=int, default=0, show_default=True, help="Processes that decode; 0: this one alone.")
@click.option(
    "--out",
    type=NamedPath(),
    metavar="DIR",
    help="Keep the state after each pass over the images; the same command continues from it, exactly.",
)
@json_option
@force_option
@run_command
def segment_command(
    encoder: EncoderSpec,
    data: Path,
    supercategories: bool,
    choices: SegmentChoices,
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
    if encoder.size is not None:
        choices = replace(choices, size=encoder.size)
    options = SegmentOptions(choices, supercategories, workers, out)
    result = evaluate_segment(data, encoder, options, stage=progress_reporter)
    if json_file is not None:
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
