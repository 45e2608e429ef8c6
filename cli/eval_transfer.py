"""sop-eval transfer: the complete network trained on one of six smaller sets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from sop_faiss.cli.classifier_outputs import ClassifierOutputs, classifier_output_options, report_trained
from sop_faiss.cli.common import run_command, say_written
from sop_faiss.cli.encoder_options import EncoderCommand, encoder_options
from sop_faiss.cli.eval_finetune import FINETUNE_OPTIONS, words_of
from sop_faiss.cli.idle_options import refuse_unchosen
from sop_faiss.cli.labeled_part_options import labeled_part_options
from sop_faiss.cli.path_options import NamedPath
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.ranks import ranks_of_torchrun
from sop_faiss.cli.recipe_options import recipe_options, spelled
from sop_faiss.evaluate.sets.labeled_part import LabeledPart
from sop_faiss.evaluate.trained.finetune_choices import DEIT, QUICK, QUICK_SIZE, FinetuneChoices
from sop_faiss.evaluate.trained.transfer_choices import QUICK_IMAGES, SETS, TRANSFER_QUICK
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import silent_stage

_OPTIONS = {
    **{name: text.partition("  [default")[0] for name, text in FINETUNE_OPTIONS.items() if name != "head_layer"},
    "learning_rates": "Peak learning rate at a batch of 1024, scaled with the batch; of several, held-out training "
    "images choose. May be repeated.  [default: 1.5e-5; cars 1.5e-4; iNaturalist, ViT-S 1e-4 and 5e-5]",
    "epochs": "Passes over the training images.  [default: 1000; iNaturalist 360]",
    "erasing": "Probability of random erasing; of iNaturalist 0.1.",
}


@click.command("transfer", cls=EncoderCommand, short_help="The complete network trained on CIFAR, iNaturalist, ...")
@encoder_options
@click.option(
    "--data", required=True, type=NamedPath(), metavar="DIR", help="A set as its authors give it out, unpacked."
)
@click.option("--set", "name", metavar="NAME", help=f"{', '.join(SETS)}.  [default: by the files in DIR]")
@recipe_options(
    FinetuneChoices(**DEIT),
    _OPTIONS,
    f"--size {QUICK_SIZE}, {spelled(QUICK)}, --end-rate 1e-6, --repeats 1, about {QUICK_IMAGES:,} images of each "
    "of the two sets",
)
@labeled_part_options
@classifier_output_options("Write each class's accuracy.")
@run_command
def transfer_command(
    encoder: EncoderSpec,
    data: Path,
    name: str | None,
    given: dict[str, Any],
    quick: bool,
    part: LabeledPart,
    workers: int,
    out: Path | None,
    outputs: ClassifierOutputs,
) -> None:
    """Train the complete network and a classifier on CIFAR-10 or 100, iNaturalist 2018 or 2019, Flowers-102 or Cars.

    DeiT's recipe, as iBOT's evaluation has it for each set. Nothing is downloaded: DIR holds the set's own files
    (cifar-10-batches-py or -bin; train2018.json, val2018.json and images; jpg/, imagelabels.mat and setid.mat; ...).

    \b
    Examples:
      sop-eval transfer --model runs/photos --data cifar-10-batches-py/ --out cifar10 --precision bf16
      sop-eval transfer --model lite0 --data flowers-102/ --quick
    """
    from sop_faiss.verbs.scoring.eval_transfer import TransferOptions, evaluate_transfer

    outputs.check(str(data), str(data), encoder, part)
    if quick and encoder.size is None:
        encoder = replace(encoder, size=QUICK_SIZE)
    chosen = {**(TRANSFER_QUICK if quick else {}), **given}
    rates = chosen.get("learning_rates", DEIT["learning_rates"])  # the recipe of every set has one
    refuse_unchosen("--lr", rates, "held_out", "sweep_epochs")
    options = TransferOptions(name, chosen, part, QUICK_IMAGES if quick else None, workers, out)
    with ranks_of_torchrun() as is_main:
        result = evaluate_transfer(data, encoder, options, stage=progress_reporter if is_main else silent_stage)
    if not is_main:
        return
    report_trained(result, words_of(result), outputs)
    say_written("state", out)
