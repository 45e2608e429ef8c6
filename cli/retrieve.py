"""sop-retrieve: image retrieval on revisited Oxford/Paris, or on a data set of one's own."""

from __future__ import annotations

from pathlib import Path

import click

from sop_faiss.cli.common import CONTEXT_SETTINGS, page_footer, progress_reporter, run_command, say_written
from sop_faiss.cli.encoder_options import encoder_options
from sop_faiss.cli.tables import print_table
from sop_faiss.model.spec import EncoderSpec
from sop_faiss.pipeline.outputs import check_outputs, encoder_files, ground_truth_files

_PATH = click.Path(path_type=Path)


@click.command(context_settings=CONTEXT_SETTINGS, no_args_is_help=True)
@click.version_option(package_name="sop-faiss")
@encoder_options
@click.option(
    "--dataset",
    required=True,
    metavar="NAME|DIR",
    help="roxford5k, rparis6k, or a directory with gnd.json (or gnd_*.pkl) and pictures in jpg/, or in query/ and "
    "database/.",
)
@click.option("--data-root", type=_PATH, metavar="DIR", help="The directory that holds the data set.  [default: here]")
@click.option(
    "--protocol",
    metavar="NAME",
    help="revisitop: queries cropped to their boxes, easy/medium/hard. dino: whole queries, medium/hard. plain: sets "
    "with ok/junk.  [default: what suits the ground truth]",
)
@click.option("--gnd", type=_PATH, metavar="FILE", help="Another ground truth than the data set's own.")
@click.option(
    "--square", is_flag=True, help="Crop pictures to a centred square of --size, instead of whole, longer side --size."
)
@click.option("--batch-size", type=int, default=64, show_default=True, help="Pictures per forward pass.")
@click.option("--workers", type=int, help="Threads that decode.  [default: one per CPU, at most 8]")
@click.option("--json", "json_file", type=_PATH, metavar="FILE", help="Also write the result.")
@click.option("--html", "html_file", type=_PATH, metavar="FILE", help="Write a page of the best and worst queries.")
@click.option("--per-query", "csv_file", type=_PATH, metavar="FILE.csv", help="Write one line per query.")
@click.option("--top", type=int, default=10, show_default=True, help="Found pictures shown per query in these files.")
@run_command
def main(
    encoder: EncoderSpec,
    dataset: str,
    data_root: Path | None,
    protocol: str | None,
    gnd: Path | None,
    square: bool,
    batch_size: int,
    workers: int | None,
    json_file: Path | None,
    html_file: Path | None,
    csv_file: Path | None,
    top: int,
) -> None:
    """Find the pictures that show the same as a query, and score the rankings: mAP and mP@k (R@1 for plain sets).

    Exact average precision by the revisited protocol. Nothing is downloaded.

    A data set of your own is a folder with the pictures in query/ and database/ (or all in jpg/) and a gnd.json such as
    this one. Its gnd[i] says of qimlist[i] which pictures of imlist, counted from 0, show the same (ok), and which
    count neither way (junk):

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
    """
    from sop_faiss.pipeline.retrieve import RetrieveOptions, evaluate_retrieval
    from sop_faiss.pipeline.retrieve_output import metrics_table, write_per_query, write_retrieval_page

    read = [*ground_truth_files(dataset, data_root, gnd), *encoder_files(encoder)]
    check_outputs({"--json": json_file, "--html": html_file, "--per-query": csv_file}, read)
    options = RetrieveOptions(square, top, batch_size, workers)
    with progress_reporter("embedding", "pictures") as progress:
        result = evaluate_retrieval(
            encoder, dataset, data_root, protocol=protocol, gnd=gnd, options=options, progress=progress
        )
    if json_file is not None:
        result.write(json_file)
    if csv_file is not None:
        write_per_query(csv_file, result)
    if html_file is not None:
        with progress_reporter("drawing", "pictures") as progress:
            write_retrieval_page(html_file, result, footer=page_footer("sop-retrieve"), progress=progress)
    title = (
        f"{result.encoder['name']}: {len(result.queries):,} queries in {len(result.data.gallery):,} pictures of "
        f"{dataset}, protocol {result.rules.name}, percent"
    )
    print_table(title, *metrics_table(result))
    for what, file in (("JSON", json_file), ("CSV", csv_file), ("page", html_file)):
        say_written(what, file)


if __name__ == "__main__":
    main()
