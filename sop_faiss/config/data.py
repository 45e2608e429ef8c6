"""The sections of a configuration about images: where they are, their views, and their masks."""

from __future__ import annotations

from dataclasses import dataclass

from sop_faiss.config.checks import (
    require,
    require_between,
    require_finite,
    require_one_of,
    require_range,
    require_share,
)


@dataclass(frozen=True)
class DataConfig:
    """Where the training images are and how they are read."""

    train: str = ""
    """SRC of the training images: shard pattern, folder, list, or the address of shards (https, s3, gs, ...)."""
    access: str = "auto"
    """How shards are read. `auto`: local shards in place, those at addresses through the cache. `cached`: local shards
    through the cache too (for slow network drives). The index of a shard is next to it, as NAME.tar.index; if that
    cannot be written, `auto` indexes the shard in memory at each start. `sequential`: each shard from front to back,
    without a cache, for data that fit in none. Then the order is shuffled only within `shuffle_buffer` and by shards,
    an epoch is `samples_per_epoch` images whether or not each was seen once, two workers may read the same image, and a
    resumed run starts again with freshly shuffled shards: its steps are not those of a run that never stopped."""
    cache_dir: str = ""
    """Folder of fetched shards; several runs may share it (empty: sop_faiss/shards in the user's cache folder)."""
    cache_bytes: int = 100_000_000_000
    """The largest size of that folder. All shards of a run must fit, and are fetched in the order in which they are
    needed, during training; those of other runs are removed, the longest unused first."""
    shuffle_buffer: int = 1000
    """Encoded images that wait in each worker to be drawn at random (`sequential`)."""
    samples_per_epoch: int = 0
    """Images per epoch, which are not counted (`sequential`); else 0."""
    groups: str = "none"
    """`labels`: images with the same label (a folder, a `.cls` member, a list's column) show the same thing, and are
    views of each other: every second view of an image is one of another image of its group, another draw in each
    epoch. Classes are not groups for retrieval of single things. `none`: all views of an image are its own."""
    workers: int = 2
    """Processes that decode and augment, per rank; 0: the training process does it."""
    threads: int = 0
    """Threads in each of these processes, which share the images of a batch; 0: so many that each has a processor, 4 at
    most. Beyond about 6, more `workers` help more. The images do not depend on either."""
    holdout_share: float = 0.0
    """Fraction of the images left out of training (a seeded draw); `evaluate` may score on them."""
    max_bad_fraction: float = 0.01
    """Stop if more than this fraction of the attempts to read an image failed; another replaces each bad image."""
    max_image_pixels: int = 64_000_000
    """Larger images are refused before they are decoded."""
    top_value: float = 0.0
    """White in grayscale images of 16 bits or of floats, such as 4095 where a camera or scanner fills 12 of the 16; 0:
    what a TIFF states, else what its type holds (65535, which leaves 12 bits almost black). An encoder of the run reads
    images in the same way. `sop-data check` reports what the images contain."""
    scaled_decoding: bool = False
    """Decode a JPEG at 1/2, 1/4 or 1/8 where every crop of it still has at least the pixels of its view. Faster on
    large photos; the views differ slightly (by some levels of 255 on fine detail), so it is off unless asked for."""
    decoded_cache_bytes: int = 0
    """Keep decoded images in memory, up to this many bytes per worker (0: none). For small images."""

    def __post_init__(self) -> None:
        require_finite("data", self)
        require_one_of("data.access", self.access, ("auto", "cached", "sequential"))
        for name in ("cache_bytes", "shuffle_buffer"):
            require(getattr(self, name) >= 1, f"data.{name} = {getattr(self, name)}: wanted 1 or more")
        sequential = self.access == "sequential"
        require(
            self.samples_per_epoch >= 1 if sequential else self.samples_per_epoch == 0,
            f"data.samples_per_epoch = {self.samples_per_epoch} with data.access = {self.access}: wanted "
            + ("the images per epoch, which are not counted" if sequential else "0, since the index counts them"),
        )
        require(
            not (sequential and self.decoded_cache_bytes),
            f"data.decoded_cache_bytes = {self.decoded_cache_bytes} with data.access = sequential: a stream is "
            "not cached; set it to 0",
        )
        require(
            not sequential or self.holdout_share == 0,
            f"data.holdout_share = {self.holdout_share} with data.access = sequential: nothing can be held out of a "
            "stream; set it to 0, and name evaluate.train and evaluate.test",
        )
        require_one_of("data.groups", self.groups, ("none", "labels"))
        require(
            not sequential or self.groups == "none",
            f"data.groups = {self.groups} with data.access = sequential: other images of a group cannot be read; set "
            "data.groups=none",
        )
        require_between("data.workers", self.workers, 0, 1024)
        require_between("data.threads", self.threads, 0, 1024)
        require(
            not (self.scaled_decoding and self.decoded_cache_bytes),
            "data.scaled_decoding and data.decoded_cache_bytes are both set: a cached image serves later crops "
            "too, so it is decoded in full size; set one of them",
        )
        require(0.0 <= self.holdout_share < 1.0, f"data.holdout_share = {self.holdout_share}: wanted 0 <= share < 1")
        require_share("data.max_bad_fraction", self.max_bad_fraction)
        require(self.max_image_pixels > 0, f"data.max_image_pixels = {self.max_image_pixels}: wanted more than 0")
        require(self.top_value >= 0, f"data.top_value = {self.top_value:g}: wanted the value of white, or 0")
        require(
            self.decoded_cache_bytes >= 0,
            f"data.decoded_cache_bytes = {self.decoded_cache_bytes}: wanted 0 or more",
        )


@dataclass(frozen=True)
class ViewsConfig:
    """The multi-crop views of an image (docs/method.md, 1; iBOT's augmentations)."""

    global_count: int = 2
    """Large crops per image, which the teacher sees, too."""
    global_size: int = 224
    """Side in pixels."""
    global_scale: tuple[float, float] = (0.25, 1.0)
    """Area of the crop as a fraction of the image."""
    local_count: int = 10
    """Small crops per image, which only the student sees; 0: none."""
    local_size: int = 96
    """Side in pixels."""
    local_scale: tuple[float, float] = (0.05, 0.25)
    """Area of the crop as a fraction of the image."""
    aspect: tuple[float, float] = (0.75, 4.0 / 3.0)
    """Width over height of a crop box."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    max_rotation_degrees: float = 0.0
    """Rotate by an angle uniform in +- this before the crop (0 in the paper; the digits use it)."""
    max_shear_degrees: float = 0.0
    """Shear by an angle uniform in +- this, with the rotation."""
    jitter: float = 0.8
    """Probability of color jitter."""
    brightness: float = 0.4
    """Of color jitter: a factor uniform in 1 +- this."""
    contrast: float = 0.4
    """Of color jitter: a factor uniform in 1 +- this."""
    saturation: float = 0.2
    """Of color jitter: a factor uniform in 1 +- this."""
    hue: float = 0.1
    """Of color jitter: a shift uniform in +- this, in turns of the color circle."""
    gray: float = 0.2
    """Probability of dropping color."""
    blur_global1: float = 1.0
    """Probability of Gaussian blur on the first global view."""
    blur_global2: float = 0.1
    """Probability of Gaussian blur on every further global view."""
    blur_local: float = 0.5
    """Probability of Gaussian blur on a local view."""
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """Standard deviation in pixels, uniform."""
    solarize_global2: float = 0.2
    """Probability of solarization on every global view but the first."""
    color: str = "auto"
    """Where jitter, gray, blur and solarization are computed: `cpu` (uint8, in the workers), `device` (in batches, from
    the same draws; the pixels differ by about half a level of 255), or `auto`: on a CUDA device, else on the CPU."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Of red, green and blue in 0 to 1, subtracted from each pixel; the default is ImageNet's."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """Standard deviation of red, green and blue, which each pixel is divided by; the default is ImageNet's."""

    def __post_init__(self) -> None:
        require_finite("views", self)
        require_between("views.global_count", self.global_count, 1, 1000)
        require_between("views.local_count", self.local_count, 0, 1000)
        require(
            self.global_count >= 2 or self.local_count >= 1,
            "views.global_count = 1 and views.local_count = 0: wanted at least two views of an image to compare",
        )
        for name in ("global_size", "local_size"):
            require(8 <= getattr(self, name) <= 4096, f"views.{name} = {getattr(self, name)}: wanted 8 to 4096 pixels")
        for name in ("global_scale", "local_scale"):
            require_range(f"views.{name}", getattr(self, name), 1e-4, 1.0)
        require_range("views.aspect", self.aspect, 0.1, 10.0)
        require_range("views.blur_sigma", self.blur_sigma, 0.01, 100.0)
        for name in ("flip", "jitter", "gray", "blur_global1", "blur_global2", "blur_local", "solarize_global2"):
            require_share(f"views.{name}", getattr(self, name))
        for name in ("brightness", "contrast", "saturation"):
            require(0.0 <= getattr(self, name) <= 1.0, f"views.{name} = {getattr(self, name)}: wanted 0 to 1")
        require(0.0 <= self.hue <= 0.5, f"views.hue = {self.hue}: wanted 0 to 0.5")
        for name in ("max_rotation_degrees", "max_shear_degrees"):
            require(0.0 <= getattr(self, name) <= 80.0, f"views.{name} = {getattr(self, name)}: wanted 0 to 80")
        require_one_of("views.color", self.color, ("cpu", "device", "auto"))
        require(min(self.std) > 0, f"views.std = {self.std}: wanted positive numbers")
        for name in ("mean", "std"):
            value = getattr(self, name)
            require(
                0 <= min(value) <= max(value) <= 1, f"views.{name} = {value}: wanted values of 0 to 1, not 0 to 255"
            )

    @property
    def count(self) -> int:
        """Views per image, V."""
        return self.global_count + self.local_count


@dataclass(frozen=True)
class MasksConfig:
    """Which patches of the student's global views are hidden (docs/method.md, 1)."""

    kind: str = "block"
    """`block` (BEiT), `random`, or `none`."""
    probability: float = 0.5
    """Probability that a view is masked at all (`block`, and `random` without `random_ratio`)."""
    ratio: tuple[float, float] = (0.1, 0.5)
    """Fraction of patches hidden, uniform in this range (in the same cases)."""
    random_ratio: float | None = 0.7
    """Fraction of patches hidden in every view (`random`). null: drawn for each view from `probability` and `ratio`, as
    iBOT's `rand` does with the recipe's ratios."""
    start_epoch: int = 0
    """Nothing is hidden before this epoch, so that the patch loss starts with it: iBOT's pred_start_epoch, 50 for Swin.
    The patch memory is filled from the start. Departs: iBOT's patch temperature starts to rise at this epoch; here, as
    in the released code, it follows the schedule of [CLS]."""
    aspect: tuple[float, float] = (0.3, 1.0 / 0.3)
    """Height over width of a block."""
    drop: float = 0.0
    """Fraction of the patches of each of the student's global views that are left out before the first block, others in
    each view, instead of being replaced by the mask token: a step takes less time and memory (0: none). Rounded down to
    whole patches. For ViTs without rotary positions, with `kind: none` and no patch loss."""
    pixels: bool = False
    """For convolutional backbones, which have no tokens to hide: replace the pixels of hidden squares by a learned
    color, which starts as the mean. Without it they train with `kind: none` and no patch loss."""

    def __post_init__(self) -> None:
        require_finite("masks", self)
        require_one_of("masks.kind", self.kind, ("block", "random", "none"))
        require_share("masks.probability", self.probability)
        require_range("masks.ratio", self.ratio, 0.0, 1.0)
        if self.random_ratio is not None:
            require_share("masks.random_ratio", self.random_ratio)
        require_between("masks.start_epoch", self.start_epoch, 0, 1_000_000)
        require_range("masks.aspect", self.aspect, 0.05, 20.0)
        require(0 <= self.drop < 1, f"masks.drop = {self.drop}: wanted 0 or more, less than 1")
        require(
            self.drop == 0 or self.kind == "none",
            f"masks.drop = {self.drop:g} with masks.kind = {self.kind}: dropped patches take the place of masked ones; "
            "set masks.kind=none",
        )

    @property
    def hides(self) -> bool:
        """Return whether some patches are masked or dropped."""
        return self.kind != "none" or self.drop > 0
