"""CIFAR-10 and 100, iNaturalist 2018 and 2019, Flowers-102 and Stanford Cars as their authors give them out.

Nothing is downloaded, and no code in files is run.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from jaxtyping import Int64, UInt8

from sop_faiss.data.images.listing import open_files
from sop_faiss.data.images.source import ImageSource
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.paths import path_state

Sets = tuple[ImageSource, ImageSource]
"""To train on, and to test on."""
_SIDE = 32
_PIXELS = 3 * _SIDE**2


@dataclass(frozen=True)
class _Arrays:
    """Decoded images of one size as an `ImageSource`: read as PNG, which loses nothing."""

    description: str
    root: Path
    keys: list[str]
    labels: Int64[np.ndarray, " n"]
    class_names: list[str]
    pixels: UInt8[np.ndarray, "n h w 3"]
    files: list[str]

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, position: int) -> bytes:
        """See `ImageSource.read`."""
        return bytes(cv2.imencode(".png", self.pixels[position][:, :, ::-1])[1])

    def source_of(self, position: int) -> str:
        """See `ImageSource.source_of`."""
        return self.files[position]

    def member_of(self, position: int) -> str:
        """See `ImageSource.member_of`."""
        return self.keys[position]

    def offset_of(self, position: int) -> int:
        """See `ImageSource.offset_of`."""
        return 0


class _ArrayUnpickler(pickle.Unpickler):
    """Loads dicts, lists, text, numbers and NumPy arrays, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what an array needs; called by pickle."""
        if (module, name) == ("_codecs", "encode"):
            return lambda text, encoding: text.encode("latin1")
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np._core.multiarray._reconstruct  # type: ignore[attr-defined]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def find_set(data: Path) -> str:
    """Return which set a directory has.

    Raises:
        DataError: it has none, or several.
    """
    found = [name for name, (files, _) in _LAYOUTS.items() if _place(data, files) is not None]
    if len(found) != 1:
        what = f"has several ({', '.join(found)}): name one by `name`" if found else "has none of the known sets"
        state = what if data.is_dir() else path_state(data)
        looked = "; ".join(f"{name}: {' or '.join(files)}" for name, (files, _) in _LAYOUTS.items())
        raise DataError(f"`data={data}` {state}; wanted one of {looked}")
    return found[0]


def open_set(data: Path, name: str) -> Sets:
    """Open a set's training and test images.

    Args:
        data: the directory that holds it, or the one above.
        name: one of the sets.

    Raises:
        ConfigError: there is no such set, or SciPy is missing.
        DataError: a file is missing, damaged, or would run code.
    """
    if name not in _LAYOUTS:
        raise ConfigError(f"`name={name}`: wanted {', '.join(_LAYOUTS)}")
    files, read = _LAYOUTS[name]
    root = _place(data, files)
    if root is None:
        state = f"is not {name}" if data.is_dir() else path_state(data)
        raise DataError(f"`data={data}` {state}: wanted {' or '.join(files)} in it")
    try:
        return read(root)
    except OSError as error:
        raise DataError(f"{error.filename or root} of {name} cannot be read: {error.strerror or error}") from None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{root} is not {name} as its authors give it out, or damaged ({reason})") from None


def _place(data: Path, files: tuple[str, ...]) -> Path | None:
    """Return where one of the files is: in the directory, or in a folder of it."""
    places = [data, *(sorted(each for each in data.iterdir() if each.is_dir()) if data.is_dir() else [])]
    return next((place for place in places for file in files if (place / file).is_file()), None)


def _cifar(root: Path, parts: tuple[list[str], list[str]], names: tuple[str, str], label: str) -> Sets:
    """Read CIFAR's batches: pickled, or, where a file ends in .bin, records of labels and planes."""
    suffix = ".bin" if (root / f"{parts[0][0]}.bin").is_file() else ""
    class_names = _class_names(root, suffix, *names)
    made = []
    for split, files in zip(("train", "test"), parts, strict=True):
        read = [_records(root / f"{file}.bin", label) if suffix else _unpickled(root / file, label) for file in files]
        labels = np.concatenate([each[0] for each in read])
        if not (labels.min() >= 0 and labels.max() < len(class_names)):
            raise ValueError(f"labels of {labels.min()} to {labels.max()} for {len(class_names)} classes")
        pixels = np.concatenate([each[1] for each in read]).reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)
        origin = [file + suffix for file, each in zip(files, read, strict=True) for _ in each[0]]
        keys = [f"{split}_{number:05d}" for number in range(len(labels))]
        made.append(_Arrays(f"{root} ({split})", root.absolute(), keys, labels, class_names, pixels, origin))
    return made[0], made[1]


def _class_names(root: Path, suffix: str, of_pickle: str, of_binary: str) -> list[str]:
    if suffix:
        return (root / of_binary).read_text(encoding="utf-8").split()
    file, key = of_pickle.split(":")
    return [str(each) for each in _load(root / file)[key]]


def _records(file: Path, label: str) -> tuple[Int64[np.ndarray, " n"], UInt8[np.ndarray, "n p"]]:
    head = 2 if label == "fine_labels" else 1  # of CIFAR-100 the coarse label comes first
    values = np.fromfile(file, dtype=np.uint8)
    if not len(values) or len(values) % (head + _PIXELS):
        raise ValueError(f"{file.name} has {len(values)} bytes, no multiple of {head + _PIXELS}")
    rows = values.reshape(-1, head + _PIXELS)
    return rows[:, head - 1].astype(np.int64), rows[:, head:]


def _unpickled(file: Path, label: str) -> tuple[Int64[np.ndarray, " n"], UInt8[np.ndarray, "n p"]]:
    content = _load(file)
    numbers, pixels = np.array(content[label]), np.asarray(content["data"])
    labels = numbers.astype(np.int64)
    if not np.array_equal(labels, numbers):
        raise ValueError(f"{file.name} has labels that are not whole numbers")
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), _PIXELS) or not len(labels):
        raise ValueError(f"{file.name} has {len(labels)} labels and data of shape {pixels.shape}")
    return labels, pixels


def _load(file: Path) -> Any:
    encoded = file.read_bytes()
    try:
        return _ArrayUnpickler(io.BytesIO(encoded), encoding="latin1").load()
    except Exception as error:  # a damaged pickle can raise nearly any built-in exception
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise DataError(f"{file} is damaged, or would run code, and is not loaded ({reason})") from None


def _inat(root: Path, year: int) -> Sets:
    """Read the competition's JSON: images by `file_name`, one annotation for each."""
    made, numbers = [], {}
    for split in ("train", "val"):
        content = json.loads((root / f"{split}{year}.json").read_text(encoding="utf-8"))
        category_of = {each["image_id"]: each["category_id"] for each in content["annotations"]}
        members = [str(each["file_name"]) for each in content["images"]]
        categories = [int(category_of[each["id"]]) for each in content["images"]]
        if split == "train":
            numbers = {category: number for number, category in enumerate(sorted(set(categories)))}
            names = {int(each["id"]): str(each.get("name", each["id"])) for each in content.get("categories", [])}
        labels = [numbers[category] for category in categories]
        class_names = [f"{category} {names.get(category, '')}".strip() for category in numbers]
        made.append(_files(root, split, members, labels, class_names))
    return made[0], made[1]


def _files(root: Path, split: str, members: list[str], labels: list[int], class_names: list[str]) -> ImageSource:
    outside = next((each for each in members if each.startswith("/") or ".." in Path(each).parts), None)
    if outside is not None or not members:
        raise ValueError(f"{outside!r} is outside of the set" if outside else f"no {split} images")
    return open_files(f"{root} ({split})", root.absolute(), members, np.array(labels, dtype=np.int64), class_names)


def _matlab(file: Path) -> dict[str, Any]:
    try:
        from scipy.io import loadmat
    except ImportError:
        raise ConfigError(f"{file} needs SciPy: pip install 'sop-faiss[eval]'") from None
    encoded = io.BytesIO(file.read_bytes())  # of a missing file SciPy does not say the name
    try:
        content: dict[str, Any] = loadmat(encoded, squeeze_me=True)
    except Exception as error:  # of a damaged file nearly any
        raise DataError(f"{file} is not a MATLAB file, or damaged ({type(error).__name__})") from None
    return content


def _flowers(root: Path) -> Sets:
    """Train on the official training and validation images, as DINO and iBOT do."""
    labels = np.atleast_1d(_matlab(root / "imagelabels.mat")["labels"]).astype(np.int64) - 1
    split = {name: np.atleast_1d(each) for name, each in _matlab(root / "setid.mat").items() if name.endswith("id")}
    class_names = [f"{number + 1:03d}" for number in range(int(labels.max()) + 1)]
    made = []
    for name, ids in (("train", np.concatenate([split["trnid"], split["valid"]])), ("test", split["tstid"])):
        if ids.min() < 1:
            raise ValueError(f"image {ids.min()} in setid.mat")
        members = [f"jpg/image_{number:05d}.jpg" for number in ids]
        made.append(_files(root, name, members, labels[ids - 1].tolist(), class_names))
    return made[0], made[1]


def _cars(root: Path) -> Sets:
    """Read `cars_annos.mat`, or the devkit's two files and the labels of the test images."""
    if (root / "cars_annos.mat").is_file():
        content = _matlab(root / "cars_annos.mat")
        rows, class_names = content["annotations"], [str(each) for each in content["class_names"]]
        named = [(str(row["relative_im_path"]), int(row["class"]) - 1, bool(row["test"])) for row in rows]
    else:
        class_names = [str(each) for each in _matlab(root / "devkit" / "cars_meta.mat")["class_names"]]
        named = []
        for file, folder, test in (
            ("devkit/cars_train_annos.mat", "cars_train", False),
            ("cars_test_annos_withlabels.mat", "cars_test", True),
        ):
            place = root / file if (root / file).exists() else root / "devkit" / Path(file).name
            rows = np.atleast_1d(_matlab(place)["annotations"])
            named += [(f"{folder}/{row['fname']}", int(row["class"]) - 1, test) for row in rows]
    made = []
    for split in (False, True):
        own = [(member, label) for member, label, test in named if test is split]
        made.append(_files(root, "test" if split else "train", [m for m, _ in own], [n for _, n in own], class_names))
    return made[0], made[1]


def _of_cifar10(root: Path) -> Sets:
    parts = [f"data_batch_{number}" for number in range(1, 6)], ["test_batch"]
    return _cifar(root, parts, ("batches.meta:label_names", "batches.meta.txt"), "labels")


def _of_cifar100(root: Path) -> Sets:
    return _cifar(root, (["train"], ["test"]), ("meta:fine_label_names", "fine_label_names.txt"), "fine_labels")


_LAYOUTS: dict[str, tuple[tuple[str, ...], Callable[[Path], Sets]]] = {
    "cifar10": (("data_batch_1", "data_batch_1.bin"), _of_cifar10),
    "cifar100": (("meta", "fine_label_names.txt"), _of_cifar100),
    "inat18": (("train2018.json",), lambda root: _inat(root, 2018)),
    "inat19": (("train2019.json",), lambda root: _inat(root, 2019)),
    "flowers": (("setid.mat",), _flowers),
    "cars": (("cars_annos.mat", "devkit/cars_meta.mat"), _cars),
}
"""By set: a file by which it is recognized, and its reader."""
