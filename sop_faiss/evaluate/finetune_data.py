"""Batches of labeled images for fine-tuning, augmented: each a pure function of the seed, the epoch and its place."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import RandAugment
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms

from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.source import ImageSource
from sop_faiss.distributed import announced_world_size, derive_seed
from sop_faiss.errors import ConfigError, DataError, WorkerDiedError
from sop_faiss.evaluate.finetune_choices import FinetuneChoices
from sop_faiss.model.encoders.preprocess import Preprocess

__all__ = [
    "Augmentation",
    "check_readable",
    "load_batches",
    "plan_batches",
    "plan_epoch",
    "plan_in_order",
    "require_one_process",
    "seeded",
]

_SHIFTED_SIDE = 32
"""Up to this side in pixels BEiT's script shifts images and takes no random crops."""
_SHIFT = 4
_MOST_POSTERIZED = 9.99
"""Of a magnitude of 10: there timm would keep no bit, a black image, which Pillow 13 refuses; this keeps one."""

_CHECKED_AT_ONCE = 64

Plan = Sequence[Int64[np.ndarray, " _"]]
"""The images of each batch."""


@contextlib.contextmanager
def seeded(*key: int | str) -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch from a key, for the work inside; then put them back.

    timm draws from all three.
    """
    seed = derive_seed(*key)
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


class Augmentation:
    """Make the network's input of a training image; called with its pixels and what its random draws depend on."""

    def __init__(self, preprocess: Preprocess, choices: FinetuneChoices) -> None:
        side = preprocess.crop
        self.preprocess = preprocess
        chain: Any = create_transform(
            side,
            is_training=True,
            scale=(choices.min_crop, 1.0),
            hflip=choices.flip,
            color_jitter=None,  # RandAugment takes its place in the recipe
            auto_augment=f"rand-m{choices.randaugment}-mstd0.5-inc1" if choices.randaugment else None,
            interpolation="bicubic",
            mean=preprocess.mean,
            std=preprocess.std,
            re_prob=choices.erasing,
            re_mode="pixel",
            re_count=1,
        )
        for augment in (each for each in chain.transforms if isinstance(each, RandAugment)):
            for operation in augment.ops:
                if operation.name.startswith("Posterize"):
                    operation.magnitude_max = _MOST_POSTERIZED
        self.crops = choices.min_crop < 1 and side > _SHIFTED_SIDE
        if not self.crops:
            chain.transforms[0] = transforms.RandomCrop(side, padding=_SHIFT if choices.min_crop < 1 else 0)
        self.chain = chain

    def __call__(self, pixels: UInt8[np.ndarray, "h w 3"], *key: int | str) -> Float32[Tensor, "3 rows columns"]:
        """Augment one image."""
        with seeded(*key):
            made: Tensor = self.chain(Image.fromarray(pixels if self.crops else self.preprocess.apply(pixels)))
        return made


def plan_epoch(rows: Int64[np.ndarray, " n"], choices: FinetuneChoices, *key: int | str) -> Plan:
    """Shuffle an epoch's images into batches as `plan_batches` does, without an odd one where batches are mixed."""
    size = choices.batch_size
    if len(rows) < size:
        size = len(rows) - (len(rows) % 2 if choices.mixes else 0)
    return plan_batches(rows, size, *key)


def plan_batches(rows: Int64[np.ndarray, " n"], batch_size: int, *key: int | str) -> Plan:
    """Shuffle images into full batches; what is left over is not used, as in the recipe.

    Fewer images than a batch are one batch.
    """
    order = np.random.default_rng(derive_seed(*key)).permutation(rows)
    size = min(batch_size, len(order))
    return [order[start : start + size] for start in range(0, len(order) - size + 1, size)]


def plan_in_order(count: int, batch_size: int) -> Plan:
    """Return all images, in batches."""
    return [np.arange(start, min(count, start + batch_size)) for start in range(0, count, batch_size)]


def check_readable(images: ImageSource, *, top_value: float, workers: int) -> None:
    """Decode all images: one that cannot be used is found before hours of training, not after them.

    Args:
        images: to be tested on later.
        top_value: as of `load_batches`.
        workers: as of `load_batches`.

    Raises:
        DataError: an image cannot be used; it is named.
        WorkerDiedError: a process died.
    """
    plan, nothing = plan_in_order(len(images), _CHECKED_AT_ONCE), torch.zeros(3, 0, 0)
    for _ in load_batches(images, plan, lambda pixels, row: nothing, top_value=top_value, workers=workers):
        pass


@dataclass(frozen=True)
class _Batches:
    """A batch, or why it cannot be made, by its number: exceptions of workers come with their traceback."""

    images: ImageSource
    plan: Plan
    make: Callable[[UInt8[np.ndarray, "h w 3"], int], Any]
    top_value: float
    join: Callable[[list[Any]], Any]

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, number: int) -> Any:
        made = []
        for row in self.plan[number].tolist():
            try:
                made.append(self.make(decode_image(self.images.read(row), top_value=self.top_value), row))
            except DataError as error:
                return f"image {self.images.keys[row]} of {self.images.description} cannot be used ({error})"
        return self.join(made)


def load_batches(
    images: ImageSource,
    plan: Plan,
    make: Callable[[UInt8[np.ndarray, "h w 3"], int], Any],
    *,
    top_value: float,
    workers: int,
    join: Callable[[list[Any]], Any] = torch.stack,
) -> Iterator[tuple[Any, Int64[np.ndarray, " _"]]]:
    """Yield batches and their rows in the order of the plan.

    Args:
        images: where the rows are.
        plan: the rows of each batch.
        make: of the pixels and row of an image, the network's input, perhaps with further channels.
        top_value: of the decoder.
        workers: processes that decode and augment; 0: this one. The batches do not depend on it.
        join: of what is made of the images of a batch, the batch.

    Raises:
        DataError: an image cannot be used; it is named.
        WorkerDiedError: a process died.
    """
    loader: Any = DataLoader(
        _Batches(images, plan, make, top_value, join),  # type: ignore[arg-type]
        batch_size=None,
        num_workers=min(workers, len(plan)),
        generator=torch.Generator(),  # so that the caller's stays as it is
    )
    batches = iter(loader)
    for rows in plan:
        try:
            made = next(batches)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise WorkerDiedError(f"a process that prepares images died: {str(error).splitlines()[0]}") from None
        if isinstance(made, str):
            raise DataError(f"{made}: remove it, or look with sop-data check")
        yield made, rows


def require_one_process(what: str, workers: int) -> None:
    """Raise ConfigError if a training that runs in one process was started in several, or with impossible workers."""
    if not 0 <= workers <= 1024:
        raise ConfigError(f"`workers={workers}`: wanted 0 to 1,024")
    if announced_world_size() > 1:
        raise ConfigError(f"{what} runs in one process: start it without torchrun")
