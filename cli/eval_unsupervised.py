"""sop-eval unsupervised: clusters of frozen features, compared with classes."""

from __future__ import annotations

from pathlib import Path

import click

from sop_faiss.cli.classifier_outputs import max_bad_option, say_dropped
from sop_faiss.cli.common import run_command, say_written
from sop_faiss.cli.encoder_options import EncoderCommand, batch_size_option, workers_option
from sop_faiss.cli.json_output import json_option, put_json
from sop_faiss.cli.labeled_sets_options import labeled_sets_options
from sop_faiss.cli.optional_encoder import optional_encoder_options
from sop_faiss.cli.path_options import force_option
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.ranks import ranks_of_torchrun
from sop_faiss.cli.tables import print_table
from sop_faiss.evaluate.cluster_choices import ClusterChoices
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs.output_paths import STDOUT, check_outputs, encoder_files, source_files

_DEFAULTS = ClusterChoices()


@click.command("unsupervised", cls=EncoderCommand, short_help="k-means clusters of frozen features against classes.")
@optional_encoder_options
@labeled_sets_options
@click.option("--clusters", type=int, metavar="N", help="Number of clusters.  [default: one for each class]")
@click.option("--iterations", default=_DEFAULTS.iterations, help="Iterations of k-means.")
@click.option("--restarts", default=_DEFAULTS.restarts, help="Starts of k-means; the best counts.")
@click.option("--seed", default=_DEFAULTS.seed, help="Seed of the starts.")
@batch_size_option
@workers_option
@max_bad_option
@json_option
@force_option
@run_command
def unsupervised_command(
    encoder: EncoderSpec | None,
    train: str,
    test: str,
    clusters: int | None,
    iterations: int,
    restarts: int,
    seed: int,
    batch_size: int,
    workers: int | None,
    max_bad_fraction: float,
    json_file: Path | None,
    force: bool,
) -> None:
    """Cluster the training images without labels; how well do the clusters of the test images match their classes?

    ACC matches clusters and classes one to one (Hungarian method); ARI, NMI and FMI compare the partitions without
    matching. The published figures take a head with 1,000 outputs instead of k-means: compare encoders measured here.

    \b
    Examples:
      sop-eval unsupervised --model runs/photos --data imagenette/
      sop-eval unsupervised --train features/train --test features/test --clusters 20
    """
    from sop_faiss.features.extract import ExtractionOptions
    from sop_faiss.verbs.scoring.eval_unsupervised import UnsupervisedOptions, evaluate_unsupervised

    read = [*source_files(train), *source_files(test), *encoder_files(encoder)]
    check_outputs({"--json": json_file}, read, to_stdout=["--json"], force=force)
    choices = ClusterChoices(clusters, iterations, restarts, seed)
    options = UnsupervisedOptions(choices, ExtractionOptions(batch_size, workers, max_bad_fraction))
    with ranks_of_torchrun() as is_main, progress_reporter("embedding", "images") as progress:
        result = evaluate_unsupervised(train, test, encoder, options, progress=progress)
    if not is_main:
        return
    put_json(json_file, result.content())
    protocol, (low, high) = result.protocol, result.details["intervals"]["acc"]
    if json_file != STDOUT:
        print_table(
            f"{result.encoder['name']}: {protocol['clusters']:,} clusters of {protocol['train_images']:,} training "
            f"images; {protocol['test_images']:,} test images, {protocol['classes']:,} classes",
            ["unsupervised", *(f"{name.upper()} %" for name in result.metrics), "95 % interval of ACC"],
            [["k-means", *(f"{value:.2f}" for value in result.metrics.values()), f"{low:.2f} to {high:.2f}"]],
        )
    say_dropped(protocol)
    say_written("JSON", json_file)
