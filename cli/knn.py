"""sop-knn: weighted k-NN classification with frozen features."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sop_faiss.cli.classifier_outputs import ClassifierOutputs, classifier_output_options, max_bad_option, say_left_out
from sop_faiss.cli.common import CONTEXT_SETTINGS, run_command
from sop_faiss.cli.encoder_options import EncoderCommand, batch_size_option, workers_option
from sop_faiss.cli.labeled_part_options import labeled_part_options
from sop_faiss.cli.labeled_sets_options import labeled_sets_options
from sop_faiss.cli.optional_encoder import optional_encoder_options
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.ranks import ranks_of_torchrun
from sop_faiss.cli.tables import print_baselines, print_table
from sop_faiss.evaluate.knn_choices import KS, TEMPERATURE
from sop_faiss.evaluate.sets.labeled_part import LabeledPart
from sop_faiss.model.encoders.spec import EncoderSpec

if TYPE_CHECKING:
    from sop_faiss.verbs.scoring.classifier_result import ClassifierResult


@click.command(cls=EncoderCommand, context_settings=CONTEXT_SETTINGS, no_args_is_help=True)
@click.version_option(package_name="sop-faiss")
@optional_encoder_options
@labeled_sets_options
@click.option(
    "-k",
    "ks",
    type=int,
    multiple=True,
    help="Neighbors, at most as many as training images; may be repeated, all from one search.  "
    f"[default: {', '.join(map(str, KS))}]",
)
@click.option(
    "--temperature",
    default=TEMPERATURE,
    help="Of the votes, exp(similarity / temperature): the smaller, the more the nearest decide.",
)
@click.option(
    "--baselines",
    is_flag=True,
    help="Score raw pixels, a dictionary of image patches, and the same network with random weights, too.",
)
@labeled_part_options
@batch_size_option
@workers_option
@max_bad_option
@classifier_output_options("Write each class's accuracy at the best k.")
@run_command
def main(
    encoder: EncoderSpec | None,
    train: str,
    test: str,
    ks: tuple[int, ...],
    temperature: float,
    baselines: bool,
    batch_size: int,
    workers: int | None,
    max_bad_fraction: float,
    outputs: ClassifierOutputs,
    part: LabeledPart,
) -> None:
    """Classify images by their nearest training images: how much does an encoder know without any training?

    DINO's protocol: each of the k nearest votes for its class with weight exp(similarity / 0.07).

    \b
    Examples:
      sop-knn --model runs/photos --train shards/train --test shards/test
      sop-knn --model timm:resnet50 --weights resnet50.safetensors \\
          --train photos/train --test photos/test --json knn.json
      sop-knn --model runs/photos --data imagenette/ --baselines
      sop-knn --train features/train --test features/test -k 20
      sop-knn --train features/train --test features/test --train-share 0.01 --confusion who.png
    """
    from sop_faiss.features.extract import ExtractionOptions
    from sop_faiss.progress import silent_stage
    from sop_faiss.verbs.scoring.knn import KnnOptions, evaluate_knn

    outputs.check(train, test, encoder, part)
    extraction = ExtractionOptions(batch_size, workers, max_bad_fraction)
    options = KnnOptions(ks or None, temperature, extraction, part, baselines)
    with ranks_of_torchrun() as is_main:
        stage = progress_reporter if is_main else silent_stage
        result = evaluate_knn(train, test, encoder, options, stage=stage)
    if not is_main:
        return
    title = f"k-NN, k = {result.protocol['best_k']}: {result.metrics['top1_best']:.2f} % top-1"
    outputs.write(result, title)
    if outputs.prints:
        _print(result)
    say_left_out(result.protocol)
    outputs.say()


def _print(result: ClassifierResult) -> None:
    protocol, metrics = result.protocol, result.metrics
    between = {name: f"{each.low:.2f} to {each.high:.2f}" for name, each in result.intervals().items()}
    print_table(
        f"{result.encoder['name']}: {protocol['test_images']:,} test and {protocol['train_images']:,} training "
        f"images, {protocol['classes']:,} classes",
        ["k", "top-1 %", "95 % interval", "top-5 %", ""],
        [
            [
                str(k),
                f"{metrics[f'top1_k{k}']:.2f}",
                between[f"top1_k{k}"],
                f"{metrics[f'top5_k{k}']:.2f}",
                "best" * (k == protocol["best_k"]),
            ]
            for k in protocol["ks"]
        ],
    )
    print_baselines(result.baselines, metrics, {f"k = {k}": f"top1_k{k}" for k in protocol["ks"]}, "top-1 %")


if __name__ == "__main__":
    main()
