"""A figure of the views and masks that a run would see, as `sop-data preview` draws it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sop_faiss.config import Config
from sop_faiss.data.batch import BadSample, Batch
from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.stream import Batches
from sop_faiss.data.views.crops import CropBox
from sop_faiss.errors import ConfigError
from sop_faiss.output_checks import require_writable
from sop_faiss.report.views_figure import ViewedImage, plot_views
from sop_faiss.verbs.training.training_images import mask_unit, open_indexed_images

_LAST_EPOCH = 1_000_000  # of the longest run


@dataclass(frozen=True)
class Preview:
    """The content of the figure."""

    keys: list[str]
    views: int
    """Number of views of each image."""
    bad: list[BadSample]
    """Bad images; others took their places, as in training."""


def draw_preview(config: Config, out: Path, *, images: int = 4, epoch: int = 0) -> Preview:
    """Draw the first images of an epoch: source, crop boxes, every view, and the masks on the global views.

    The images come from `Batches`, as in training: the same images in the same order, with the same views and masks,
    pixel for pixel; colors are changed on the CPU, from which a device differs by half a level of 255.

    Args:
        config: of the run; `data.train` names the images.
        images: number of images; all if there are fewer.
        epoch: of the views, from 0.

    Raises:
        ConfigError: a setting is impossible.
        DataError: the images cannot be opened, or none can be read.
        SopError: `out` cannot be written.
    """
    if images < 1 or not 0 <= epoch <= _LAST_EPOCH:
        raise ConfigError(
            f"images = {images}, epoch = {epoch}: wanted 1 or more images, of an epoch from 0 to {_LAST_EPOCH:,}"
        )
    require_writable(out)
    source, trained = open_indexed_images(config, "a preview")
    count = min(images, len(trained))
    few = replace(
        config, train=replace(config.train, batch_size=count, accumulate=1), views=replace(config.views, color="cpu")
    )
    batches = Batches(source, trained, few, mask_unit(config))
    batch = batches.make(epoch * batches.steps_per_epoch)
    viewed = [_viewed_image(batches, batch, number, epoch) for number in range(count)]
    plot_views(viewed, out, f"What the model sees of {source.description} (epoch {epoch}, seed {config.train.seed})")
    return Preview([image.key for image in viewed], len(batch.global_views) + len(batch.local_views), batch.bad)


def _viewed_image(batches: Batches, batch: Batch, number: int, epoch: int) -> ViewedImage:
    image_id = int(batch.image_ids[number])
    data = batches.config.data
    image = decode_image(batches.source.read(image_id), data.max_image_pixels, data.top_value)
    return ViewedImage(
        key=batches.source.keys[image_id],
        image=image,
        global_views=batch.global_views[:, number].numpy(),
        local_views=batch.local_views[:, number].numpy(),
        masks=batch.masks[:, number].numpy(),
        boxes=_boxes(batches, image_id, image.shape[0], image.shape[1], epoch),
    )


def _boxes(batches: Batches, image_id: int, height: int, width: int, epoch: int) -> list[CropBox]:
    """Return the crop of each view, global ones first.

    None if the image is turned or sheared before it is cropped, or if other images of its group give some of them.
    """
    views = batches.config.views
    if views.max_rotation_degrees or views.max_shear_degrees or batches.config.data.groups != "none":
        return []
    drawn = batches.multicrop.draw(image_id, epoch, height, width)
    return [one.view.box for one in drawn]
