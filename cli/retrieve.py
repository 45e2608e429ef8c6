"""sop-retrieve: image retrieval on revisited Oxford/Paris, or on a data set of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sop_faiss.cli.common import CONTEXT_SETTINGS, one_line, page_footer, run_command, say_written
from sop_faiss.cli.encoder_options import EncoderCommand, batch_size_option, workers_option
from sop_faiss.cli.idle_options import refuse_idle, refuse_without
from sop_faiss.cli.json_output import json_option, put_json
from sop_faiss.cli.optional_encoder import optional_encoder_options
from sop_faiss.cli.path_options import NamedPath, force_option, refuse_empty
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.ranks import ranks_of_torchrun
from sop_faiss.cli.rerank_options import rerank_options, token_options, token_settings
from sop_faiss.cli.tables import print_baselines, print_table
from sop_faiss.files import write_file
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs.output_paths import STDOUT, check_outputs, encoder_files, ground_truth_files, source_files

if TYPE_CHECKING:
    from sop_faiss.bootstrap import Interval
    from sop_faiss.index.rerank.settings import Rerank
    from sop_faiss.verbs.scoring.retrieve import RetrievalResult

_PATH = NamedPath()


@click.command(cls=EncoderCommand, context_settings=CONTEXT_SETTINGS, no_args_is_help=True)
@click.version_option(package_name="sop-faiss")
@optional_encoder_options
@click.argument("files", nargs=-1, type=_PATH, metavar="[--compare A.json B.json ...]")
@click.option(
    "--dataset",
    metavar="NAME|DIR|CSV",
    callback=refuse_empty,
    help="roxford5k, rparis6k, a directory with gnd.json (or gnd_*.pkl) and images in jpg/, or in query/ and "
    "database/, or next to it; class folders; or a .csv of image,group or query,image.",
)
@click.option("--data-root", type=_PATH, metavar="DIR", help="The directory that holds the data set.  [default: here]")
@click.option(
    "--protocol",
    metavar="NAME",
    help="revisitop: queries cropped to their boxes, easy/medium/hard. dino: whole queries, medium/hard. plain: sets "
    "with ok/junk. cub, sop, inshop, reid, place, gldv2, ilias, met, uned, copydays, amstertime: published sets in the "
    "folders they come in.  [default: what suits the ground truth]",
)
@click.option(
    "--radius",
    type=float,
    default=25.0,
    show_default=True,
    metavar="METERS",
    help="Of --protocol place: how far from a query an image may be.",
)
@click.option("--gnd", type=_PATH, metavar="FILE", help="Another ground truth (.json or .pkl) than the data set's own.")
@click.option(
    "--square", is_flag=True, help="Crop images to a centered square of --size, instead of whole, longer side --size."
)
@click.option(
    "--distractors",
    metavar="STORE|SRC",
    callback=refuse_empty,
    help="Images that show none of the queries (the benchmark's +R1M): a feature store of sop-embed --whole, or "
    "images. They are streamed, never held.",
)
@click.option(
    "--qe",
    "query_neighbors",
    type=int,
    default=0,
    metavar="N",
    help="Query expansion (alpha-QE): add the N nearest to each query.",
)
@click.option(
    "--qe-alpha", "query_alpha", type=float, default=3.0, show_default=True, help="Of --qe: weights similarity^alpha."
)
@click.option(
    "--dba",
    "database_neighbors",
    type=int,
    default=0,
    metavar="N",
    help="Database augmentation: add the N nearest gallery images to each gallery image.",
)
@click.option(
    "--dba-alpha",
    "database_alpha",
    type=float,
    default=3.0,
    show_default=True,
    help="Of --dba: weights similarity^alpha.",
)
@rerank_options
@token_options
@click.option(
    "--baselines",
    is_flag=True,
    help="Score raw pixels, a dictionary of image patches, and the same network with random weights, too.",
)
@batch_size_option
@workers_option
@json_option
@click.option("--html", "html_file", type=_PATH, metavar="FILE", help="Write a page of queries from best to worst.")
@click.option("--per-query", "csv_file", type=_PATH, metavar="FILE.csv", help="Write a table with one line per query.")
@click.option(
    "--top", type=int, default=10, show_default=True, help="Found images per query in --html and --per-query."
)
@click.option(
    "--make-gnd", type=_PATH, metavar="FILE.json", help="Write what --dataset means as a new ground truth, no more."
)
@click.option("--compare", is_flag=True, help="Compare files that --json wrote with the first of them.")
@click.option("--plot", type=_PATH, metavar="FILE.png", help="With --compare: draw it.")
@force_option
@run_command
def main(
    encoder: EncoderSpec | None,
    files: tuple[Path, ...],
    dataset: str | None,
    data_root: Path | None,
    protocol: str | None,
    radius: float,
    gnd: Path | None,
    square: bool,
    distractors: str | None,
    query_neighbors: int,
    query_alpha: float,
    database_neighbors: int,
    database_alpha: float,
    rerank: Rerank | None,
    token_size: int | None,
    token_count: int | None,
    token_codes: str | None,
    baselines: bool,
    batch_size: int,
    workers: int | None,
    json_file: Path | None,
    html_file: Path | None,
    csv_file: Path | None,
    top: int,
    make_gnd: Path | None,
    compare: bool,
    plot: Path | None,
    force: bool,
) -> None:
    """Find the images that show the same as a query, and score the rankings: mAP and mP@k.

    Exact average precision by the revisited protocol (trapezoids); plain sets get Recall@k (R@k), R-precision, mAP@R,
    nDCG and the standard, non-interpolated mAP (mAP_standard), too.
    Nothing is downloaded.

    A data set of your own is a folder with class folders (images of one class are relevant to each other), a .csv
    with the columns image,group or query,image, or a folder with the images in query/ and database/ (or all in jpg/)
    and a gnd.json such as this one, which --make-gnd helps to write. Its gnd[i] says of qimlist[i] which images of
    imlist, counted from 0, show the same (ok), and which count neither way (junk):

    \b
      {
       "qimlist": ["shoe_in_street.jpg", "mug_on_desk.jpg"],
       "imlist": ["mug_1.jpg", "shoe_1.jpg", "shoe_2.jpg", "mug_2.jpg"],
       "gnd": [{"ok": [1, 2], "junk": []}, {"ok": [0], "junk": [3]}]
      }

    \b
    Examples:
      sop-data demo digits/ && \\
          sop-retrieve --model config:digits_demo --random-weights 0 --dataset digits/retrieval
      sop-retrieve --model runs/photos --dataset my_products --html found.html
      sop-retrieve --model dino:dino_vitb16.pth --arch vit_base_patch16_224 --size 512 \\
          --dataset roxford5k --data-root datasets --json roxford5k.json
      sop-retrieve --model runs/photos --dataset Market-1501-v15.09.15 --protocol reid
      sop-retrieve --dataset my_products --make-gnd my_products/gnd.json
      sop-retrieve --compare before.json after.json --plot gain.png
    """
    if compare:
        refuse_idle("--compare", ["compare", "files", "plot", "force"])
        _compare(files, plot, force)
        return
    if files or plot is not None:
        raise click.UsageError(f"{files[0] if files else '--plot'}: only with --compare")
    if dataset is None:
        raise click.UsageError("Missing option '--dataset'.")
    if make_gnd is not None:
        refuse_idle("--make-gnd", ["make_gnd", "dataset", "data_root", "force"])
        _make_gnd(dataset, data_root, make_gnd, force)
        return
    if encoder is None:
        raise click.UsageError("Missing option '--model'.")
    refuse_without("query_alpha", "--qe N", query_neighbors != 0)
    refuse_without("database_alpha", "--dba N", database_neighbors != 0)
    refuse_without("radius", "--protocol place", protocol == "place")
    from sop_faiss.evaluate.expansion import Expansion
    from sop_faiss.features.extract import ExtractionOptions
    from sop_faiss.index.rerank.settings import TokenSettings
    from sop_faiss.progress import silent_stage
    from sop_faiss.verbs.scoring.retrieve import RetrieveOptions, evaluate_retrieval

    read = [*ground_truth_files(dataset, data_root, gnd), *encoder_files(encoder), *source_files(distractors)]
    outputs = {"--json": json_file, "--html": html_file, "--per-query": csv_file}
    check_outputs(outputs, read, to_stdout=["--json"], force=force)
    extraction = ExtractionOptions(batch_size, workers)
    expansion = Expansion(query_neighbors, query_alpha, database_neighbors, database_alpha)
    used = rerank is not None and rerank.method == "local"
    tokens = token_settings(token_size, token_count, token_codes, used=used, needed="--rerank local")
    options = RetrieveOptions(
        *(square, top, extraction, distractors, expansion, baselines, radius, rerank), TokenSettings(**tokens)
    )
    with ranks_of_torchrun() as is_main:
        stage = progress_reporter if is_main else silent_stage
        result = evaluate_retrieval(
            encoder, dataset, data_root, protocol=protocol, gnd=gnd, options=options, stage=stage
        )
    if is_main:
        _report(result, dataset, json_file, csv_file, html_file)


def _report(
    result: RetrievalResult, dataset: str, json_file: Path | None, csv_file: Path | None, html_file: Path | None
) -> None:
    """Write the wanted files, and print the result unless it is on stdout as JSON."""
    from sop_faiss.verbs.scoring.retrieve_output import write_per_query, write_retrieval_page

    put_json(json_file, result.content())
    if csv_file is not None:
        write_per_query(csv_file, result)
    if html_file is not None:
        with progress_reporter("drawing", "images") as progress:
            write_retrieval_page(html_file, result, footer=page_footer("sop-retrieve"), progress=progress)
    if json_file != STDOUT:
        _print(result, dataset)
    for what, file in (("JSON", json_file), ("CSV", csv_file), ("page", html_file)):
        say_written(what, file)


def _print(result: RetrievalResult, dataset: str) -> None:
    from sop_faiss.verbs.scoring.retrieve_output import metrics_table, published_table

    extra = result.protocol["distractors"]
    among = "" if extra is None else f" and {extra['count']:,} distractors"
    title = (
        f"{result.encoder['name']}: {len(result.queries):,} queries in {len(result.data.gallery):,} images of "
        f"{dataset}{among}, protocol {result.rules.name}, percent"
    )
    print_table(title, *metrics_table(result))
    metrics, headline = result.scores.metrics, result.rules.headline.name
    wanted = [*(difficulty.metric(headline) for difficulty in result.rules.difficulties), "R@1"]
    print_baselines(result.baselines, metrics, {name: name for name in wanted if name in metrics}, "percent")
    published = published_table(result)
    if published is not None:
        print_table(f"{published.title}, percent", published.columns, published.rows)
        click.echo(f"Not as published: {'; '.join(published.differences) or 'nothing that is known'}.")


def _make_gnd(dataset: str, data_root: Path | None, out: Path, force: bool) -> None:
    from sop_faiss.verbs.scoring.make_gnd import write_ground_truth

    made = write_ground_truth(dataset, data_root, out, force=force)
    click.echo(
        f"{made.queries:,} queries in {made.gallery:,} images; relevant to a query: {made.relevant_min:,} to "
        f"{made.relevant_max:,}, median {made.relevant_median:g}"
    )
    if made.alone:
        click.echo(f"{made.alone:,} images are alone in their group, and no queries", err=True)
    if made.without_relevant:
        click.echo(f"{made.without_relevant:,} queries have nothing relevant, and will not be counted", err=True)
    say_written("ground truth", out)


def _compare(files: tuple[Path, ...], plot: Path | None, force: bool) -> None:
    from sop_faiss.evaluate.compare import compare_results

    check_outputs({"--plot": plot}, files, figures=["--plot"], force=force)
    comparison = compare_results(files)
    for setup in comparison.setups:
        rows = [[comparison.names[0], *_interval(setup.scores[0]), "", "", "", ""]]
        for name, score, paired in zip(comparison.names[1:], setup.scores[1:], setup.differences, strict=True):
            difference = paired.difference
            between = f"{difference.low:+.2f}..{difference.high:+.2f}"
            counts = f"{paired.better}/{paired.worse}"
            rows.append([name, *_interval(score), f"{difference.mean:+.2f}", between, f"{paired.p_value:.4f}", counts])
        columns = ["", setup.metric, "95 %", "difference", "95 %", "p", "better/worse"]
        print_table(f"{setup.metric}, {setup.queries} queries, percent; paired bootstrap", columns, rows)
    for note in comparison.notes:
        click.echo(one_line(note))
    if plot is not None:
        from sop_faiss.report.comparison_figure import draw_comparison

        write_file(plot, draw_comparison(comparison))
    say_written("plot", plot)


def _interval(score: Interval) -> tuple[str, str]:
    return f"{score.mean:.2f}", f"{score.low:.2f}..{score.high:.2f}"


if __name__ == "__main__":
    main()
