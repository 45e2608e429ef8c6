"""sop-index info: what an index is, every byte verified, with those of its tokens and parts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from sop_faiss.cli.common import one_line, run_command, say_written
from sop_faiss.cli.index_output import counted
from sop_faiss.cli.json_output import put_json
from sop_faiss.cli.path_options import NamedPath, force_option
from sop_faiss.paths import plain_path
from sop_faiss.verbs.output_paths import STDOUT, check_outputs

_FILE = NamedPath(allow_dash=True)
_FOLDER = NamedPath()


@click.command("info", short_help="Verify an index and say what it is.")
@click.argument("index", type=_FOLDER)
@click.option(
    "--json",
    "json_file",
    type=_FILE,
    is_flag=False,
    flag_value="-",
    metavar="[FILE]",
    help="As JSON, on stdout if no FILE.",
)
@click.option("--left-out", "names_left_out", is_flag=True, help="Also name the images that are left out, and why.")
@force_option
@run_command
def info_command(index: Path, json_file: Path | None, names_left_out: bool, force: bool) -> None:
    """Verify every byte of an index, with its tokens and parts, and say what it is.

    INDEX is the directory that sop-index build wrote.

    \b
    Examples:
      sop-index info photos.index
      sop-index info photos.index --left-out
    """
    from sop_faiss.index.beside import verify_beside
    from sop_faiss.index.left_out import REMOVED
    from sop_faiss.index.store import read_left_out, read_verified

    check_outputs({"--json": json_file}, [index], to_stdout=("--json",), force=force)
    manifest, ids = read_verified(index)
    labeled = 0 if ids.labels is None else int((ids.labels >= 0).sum())
    size = sum(int(file["bytes"]) for file in manifest.files.values())
    facts: dict[str, Any] = {
        "command": "sop-index info",
        "factory": manifest.factory,
        "search": manifest.search,
        "metric": manifest.metric,
        "count": manifest.count,
        "dimension": manifest.dimension,
        "bytes": size,
        "encoder": manifest.encoder,
        "encoder_spec": manifest.encoder_spec,
        "preprocess": manifest.preprocess,
        "pooling": manifest.pooling,
        "beside": verify_beside(index),
        "labeled": labeled,
        "class_names": manifest.class_names,
        "dropped": manifest.dropped,
        "left_out": [asdict(each) for each in read_left_out(index, manifest)],
        "folder": manifest.folder,
        "root": manifest.root,
        "root_exists": Path(manifest.root).is_dir(),
        "verified": True,
    }
    put_json(json_file, facts)
    if json_file != STDOUT:
        removed = sum(each["reason"] == REMOVED for each in facts["left_out"])
        click.echo(_info_text(index, facts, removed))
        for each in facts["left_out"] if names_left_out else ():
            shard = f"{each['source']}: " if each["source"] else ""
            click.echo(one_line(f"{shard}{each['member']}: {each['error']}"))
        say_written("JSON", json_file)


def _info_text(index: Path, facts: dict[str, Any], removed: int) -> str:
    from sop_faiss.index.encoder_doubts import training_doubt

    encoder, names = facts["encoder"], facts["class_names"]
    moved = "" if facts["root_exists"] else " (not there: give --images-root when you search)"
    beside = [f"{name} {size / 1e6:,.1f} MB" for name, size in facts["beside"].items()]
    doubt = training_doubt(facts["search"].get("scores"))
    lines = {
        "index": f"{index}, {facts['bytes'] / 1e6:,.1f} MB, every byte verified",
        "vectors": f"{facts['count']:,} of dimension {facts['dimension']}, {facts['factory']}, {facts['metric']}",
        "search": _search_text(facts["search"], facts["factory"]),
        "encoder": f"{encoder['name']}, fingerprint {encoder['fingerprint'][:12]}, pooling {facts['pooling']}",
        "opened by": _spec_text(facts["encoder_spec"]),
        "preprocess": ", ".join(f"{name} {value}" for name, value in facts["preprocess"].items()),
        "alike": _alike_text(facts["search"].get("mean_cosine")),
        **({} if doubt is None else {"training": doubt}),
        "beside": f"{', '.join(beside)}, every byte verified" if beside else "no tokens, no parts",
        "labels": f"{facts['labeled']:,} of {facts['count']:,}" + (f", {len(names):,} class names" if names else ""),
        "images": f"{plain_path(facts['root'])}{moved}",
        "left out": ", ".join(
            filter(None, [counted(facts["dropped"]), f"removed by you {removed:,}" if removed else ""])
        )
        or "none",
    }
    return "\n".join(f"{name:<11}{one_line(value)}" for name, value in lines.items())


def _spec_text(spec: dict[str, Any] | None) -> str:
    """Say how the encoder is opened."""
    if spec is None:
        return "not known: give --model where images are encoded"
    said_elsewhere = ("relative", "pooling", "size", "mean", "std", "scales", "mirrored", "top_value")
    return ", ".join(f"{name} {value}" for name, value in spec.items() if name not in said_elsewhere)


def _alike_text(cosine: float | None) -> str:
    return "not measured" if cosine is None else f"random pairs have a mean cosine of {cosine:.3f}"


def _search_text(search: dict[str, Any], factory: str) -> str:
    """Say how far a search looks, how much it finds, why this kind of index, and what has changed since."""
    setting = "nprobe" if "IVF" in factory or "IMI" in factory else "efSearch"
    parts = [] if search["effort"] is None else [f"{setting} {search['effort']}"]
    if search["recall"] is not None:
        found = f"recall@{search['k']} {search['recall']:.3f} on {search['queries']:,} images held out"
        parts.append(f"{found} (wanted {search['target']:g})")
    if "milliseconds" in search:
        parts.append(f"{search['milliseconds']:g} ms a query on one core")
    parts.append(search["why"])
    parts += [f"{search[what]:,} {what} since" for what in ("added", "removed") if search.get(what)]
    return "; ".join(parts)
