"""The data stream against iBOT's loader, PIL and webdataset.

    python benchmarks/bench_data.py [--quick] [--json FILE] [--record] [--photos DIR] [--ibot CHECKOUT]

2 x 224 + 10 x 96 views with iBOT's augmentations of 500 x 375 JPEGs (see `photos.py`). A loader is timed from its
creation to its last batch, including the start and end of its processes: the first batches alone would favor loaders
that prefetch. A run has 1,024 photos, so that starting and ending two processes is a small part of it. iBOT's loader
reads the files, ours reads shards packed from them; both use two worker processes, and the process that takes the
batches does nothing else. Masks and reads are timed on one core, as processor time.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from ibot import peer_dataset, peer_loader
from photos import write_photos
from PIL import Image, ImageFilter
from report import Row, finish, interleaved_medians, meets
from torchvision.transforms import functional as F

from sop_faiss.config import Config, DataConfig, TrainConfig, ViewsConfig
from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.source import open_source
from sop_faiss.data.pack import pack
from sop_faiss.data.shards.shard_source import ShardSource
from sop_faiss.data.stream import Batches, batch_loader
from sop_faiss.data.views.color import UNCHANGED, Colors, augment_colors
from sop_faiss.data.views.crops import View, draw_view, view_generator, write_view
from sop_faiss.data.views.device_color import augment_colors_on_device
from sop_faiss.data.views.masks import draw_mask

PHOTOS, BATCH, WORKERS, PATCH = 1024, 64, 2, 16
IMAGENETTE = Path(__file__).resolve().parents[2] / "shared" / "data" / "imagenette224_train"
LOADERS = {"cpu": ("all augmentation on the CPU", ">= 4.5"), "device": ("color left to the device", ">= 8")}
CROPS, JITTER, BLUR, MASKS, READS = "<= 0.05", "<= 1.0", "<= 0.6", "<= 0.15", ">= 20000"
MISSING = {"missing": "the peer: name a checkout of github.com/bytedance/ibot with --ibot"}


def our_run(shards: Path, color: str) -> Callable[[], None]:
    config = Config(
        data=DataConfig(workers=WORKERS), views=ViewsConfig(color=color), train=TrainConfig(batch_size=BATCH)
    )
    source = open_source(shards)

    def run() -> None:
        batches = Batches(source, np.arange(len(source)), config, PATCH)
        take(batch_loader(batches, range(batches.steps_per_epoch), pin_memory=False))

    return run


def take(batches: Iterable[Any]) -> None:
    for batch in batches:
        del batch


def loader_rows(photos: Path, shards: Path, ibot: Path | None, repeats: int) -> list[Row]:
    runs = {color: our_run(shards, color) for color in LOADERS}
    if ibot is not None:
        dataset = peer_dataset(ibot, photos)
        runs["ibot"] = lambda: take(peer_loader(dataset, BATCH, WORKERS))
    seconds = interleaved_medians(runs, repeats, warm_up=False)
    images = len(open_source(shards)) // BATCH * BATCH
    rows = []
    for color, (what, target) in LOADERS.items():
        ratio = seconds["ibot"] / seconds[color] if ibot is not None else None
        detail: dict[str, Any] = {"images_per_second": images / seconds[color]}
        detail |= {"ibot_images_per_second": images / seconds["ibot"]} if ibot is not None else MISSING
        detail |= {"images": images, "rounds": repeats}
        rows.append(Row(f"loader, {what}, times faster", "iBOT's loader", ratio, target, meets(ratio, target), detail))
    return rows


def drawn_views(photos: Path, count: int) -> list[tuple[np.ndarray, View, np.ndarray]]:
    """Return the image, the drawn view and the view made without its colors, for each view of some photos."""
    source, config, made = open_source(photos), ViewsConfig(), []
    for position in range(min(count, len(source))):
        image = decode_image(source.read(position))
        height, width, _ = image.shape
        for index in range(config.count):
            view = draw_view(height, width, index, config, view_generator(0, 0, position, index))
            side = config.global_size if index < config.global_count else config.local_size
            out = np.empty((side, side, 3), np.uint8)
            write_view(image, view, out, colored=False)
            made.append((image, view, out))
    return made


def difference(ours: np.ndarray, theirs: Image.Image) -> float:
    return float(np.abs(ours.astype(np.float32) - np.asarray(theirs)).mean())


def pillow_crop(image: np.ndarray, view: View, side: int) -> Image.Image:
    top, left, height, width = view.box
    corners = (left, top, left + width, top + height)
    crop = Image.fromarray(image).crop(corners).resize((side, side), Image.Resampling.BICUBIC)
    return F.hflip(crop) if view.flipped else crop


def pillow_jitter(crop: Image.Image, colors: Colors) -> Image.Image:
    adjust = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
    for which in colors[4:8]:
        crop = adjust[int(which)](crop, colors[int(which)])
    return crop


def colored(crop: np.ndarray, colors: Colors) -> np.ndarray:
    out = crop.copy()
    augment_colors(out, colors)
    return out


def colored_on_device(crop: np.ndarray, colors: Colors) -> np.ndarray:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pixels = torch.from_numpy(crop).to(device).float().unsqueeze(0)
    return augment_colors_on_device(pixels, torch.tensor([colors], dtype=torch.float32))[0].cpu().numpy()


def pixel_rows(photos: Path, count: int) -> list[Row]:
    crops, jitters, blurs = [], [], []
    for image, view, crop in drawn_views(photos, count):
        crops.append(difference(crop, pillow_crop(image, view, len(crop))))
        pillow, colors = Image.fromarray(crop), view.colors
        if colors[:4] != UNCHANGED[:4]:
            jitter = UNCHANGED._replace(**dict(zip(Colors._fields[:8], colors[:8], strict=True)))
            theirs = pillow_jitter(pillow, jitter)
            jitters.append([difference(make(crop, jitter), theirs) for make in (colored, colored_on_device)])
        if colors.blur_sigma:
            blur = UNCHANGED._replace(blur_sigma=colors.blur_sigma)
            theirs = pillow.filter(ImageFilter.GaussianBlur(colors.blur_sigma))
            blurs.append([difference(make(crop, blur), theirs) for make in (colored, colored_on_device)])
    mean = statistics.fmean(crops)
    rows = [
        Row("crop pixels, levels of 255", "PIL, same boxes", mean, CROPS, meets(mean, CROPS), {"views": len(crops)})
    ]
    for what, pairs, against, target in (
        ("jitter", jitters, "torchvision on PIL, same factors", JITTER),
        ("blur", blurs, "PIL, same sigma", BLUR),
    ):
        on_cpu, on_device = np.mean(pairs, axis=0).tolist()
        detail = {"on_device": on_device, "views": len(pairs)}
        rows.append(Row(f"{what} pixels, levels of 255", against, on_cpu, target, meets(on_cpu, target), detail))
    return rows


def mask_row(ibot: Path | None, photos: Path, repeats: int) -> Row:
    config, grid, images = Config().masks, ViewsConfig().global_size // PATCH, 500
    generators = [view_generator(0, 0, number, 0) for number in range(2 * images)]

    def ours() -> None:
        for generator in generators:
            draw_mask(grid, grid, config, generator)

    runs: dict[str, Callable[[], object]] = {"ours": ours}
    if ibot is not None:
        dataset = peer_dataset(ibot, photos)
        blank = torch.empty(3, 224, 224)
        dataset.loader = lambda path: path
        dataset.transform = lambda image: [blank, blank]
        runs["ibot"] = lambda: [dataset[number % len(dataset)] for number in range(images)]
    seconds = interleaved_medians(runs, repeats, clock=time.process_time)
    milliseconds = 1000 * seconds["ours"] / images
    detail = {"ibot_milliseconds": 1000 * seconds["ibot"] / images} if ibot is not None else MISSING
    what = "masks of two views, milliseconds per image"
    return Row(what, "iBOT's", milliseconds, MASKS, meets(milliseconds, MASKS), detail)


def read_row(shards: Path, repeats: int) -> Row:
    import webdataset

    source = open_source(shards)
    assert isinstance(source, ShardSource)
    order = np.random.default_rng(0).permutation(len(source)).tolist()
    paths = sorted(str(path) for path in shards.glob("*.tar"))

    def in_random_order() -> None:
        for position in order:
            source.read(position)

    def sequentially() -> None:
        take(webdataset.WebDataset(paths, shardshuffle=False))

    functions = {"ours": in_random_order, "webdataset": sequentially}
    seconds = interleaved_medians(functions, repeats, clock=time.process_time)
    rate = len(source) / seconds["ours"]
    detail = {
        "webdataset_sequential_per_second": len(source) / seconds["webdataset"],
        "kilobytes_per_member": sum(source.sizes.tolist()) / len(source) / 1000,
        "members": len(source),
    }
    what = "members read in random order, per second on one core"
    return Row(what, "webdataset sequential", rate, READS, meets(rate, READS), detail)


@click.command()
@click.option("--quick", is_flag=True, help="One round of the loaders, the other figures on fewer photos.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the rows here, too.")
@click.option("--record", is_flag=True, help="Append the table to benchmarks/RESULTS.md.")
@click.option(
    "--photos", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Class folders of photos."
)
@click.option("--ibot", type=click.Path(path_type=Path, exists=True, file_okay=False), help="A checkout of iBOT.")
def main(quick: bool, json_file: Path | None, record: bool, photos: Path | None, ibot: Path | None) -> None:
    """Measure loaders, pixels, masks and reads on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        made_from = "the user's"
        if photos is None:
            photos = Path(folder) / "photos"
            made_from = write_photos(PHOTOS, IMAGENETTE, photos)
        count = len(open_source(photos))
        if count < BATCH:
            raise SystemExit(f"--photos {photos} holds {count} images: wanted {BATCH} or more")
        shards = Path(folder) / "shards"
        pack(photos, shards)
        parts: dict[str, Callable[[], list[Row]]] = {
            "loaders": lambda: loader_rows(photos, shards, ibot, 1 if quick else 5),
            "pixels": lambda: pixel_rows(photos, 16 if quick else 64),
            "masks": lambda: [mask_row(ibot, photos, 3 if quick else 9)],
            "reads": lambda: [read_row(shards, 3 if quick else 9)],
        }
        rows = []
        for name, part in parts.items():
            started = time.perf_counter()
            rows += [replace(row, detail=row.detail | {"photos": made_from}) for row in part()]
            print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        finish("data", rows, json_file=json_file, record=record)


if __name__ == "__main__":
    main()
