"""Tiny sets in the layouts of their authors."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
from scipy.io import savemat

from tests.images import encode

COLORS = ((200, 60, 40), (40, 160, 60), (60, 70, 200))


def pixels(count: int, seed: int, side: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Noisy images (n, 3, side, side) of one color for each of three classes, and their classes."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    made = np.array(COLORS)[labels][:, :, None, None] + rng.normal(0, 20, (count, 3, side, side))
    return np.clip(made, 0, 255).astype(np.uint8), labels


def write_cifar(root: Path, *, hundred: bool = False, binary: bool = False, count: int = 6) -> Path:
    """Write `count` images in each file."""
    root.mkdir(parents=True)
    files = ["train", "test"] if hundred else [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    names = ["red", "green", "blue"]
    for seed, name in enumerate(files):
        images, labels = pixels(count, seed)
        rows = images.reshape(count, -1)
        if binary:
            coarse = [np.zeros((count, 1), np.uint8)] if hundred else []
            np.concatenate([*coarse, labels[:, None].astype(np.uint8), rows], axis=1).tofile(root / f"{name}.bin")
        else:
            key = "fine_labels" if hundred else "labels"
            content = {"batch_label": name, key: labels.tolist(), "data": rows}
            (root / name).write_bytes(pickle.dumps(content, protocol=2))
    if binary:
        (root / ("fine_label_names.txt" if hundred else "batches.meta.txt")).write_text("\n".join(names) + "\n\n")
    else:
        key = "fine_label_names" if hundred else "label_names"
        (root / ("meta" if hundred else "batches.meta")).write_bytes(pickle.dumps({key: names}, protocol=2))
    return root


def write_files(root: Path, members: list[str], seed: int) -> list[int]:
    """Write an image for each name, and return their classes."""
    images, labels = pixels(len(members), seed, 40)
    for member, image in zip(members, images, strict=True):
        (root / member).parent.mkdir(parents=True, exist_ok=True)
        (root / member).write_bytes(encode(image.transpose(1, 2, 0)))
    return [int(label) for label in labels]


def write_inat(root: Path, year: int) -> Path:
    """Write iNaturalist's JSON, in which the categories have gaps."""
    for seed, (split, count) in enumerate((("train", 9), ("val", 3))):
        members = [f"train_val{year}/Plantae/{number % 3}/{split}{number}.jpg" for number in range(count)]
        categories = [10 + 5 * label for label in write_files(root, members, seed)]
        images = [{"id": 7 * number + seed, "file_name": member} for number, member in enumerate(members)]
        annotations = [
            {"id": number, "image_id": 7 * number + seed, "category_id": category}
            for number, category in enumerate(categories)
        ]
        content = {"images": images, "annotations": annotations[::-1], "categories": [{"id": 10, "name": "a plant"}]}
        (root / f"{split}{year}.json").write_text(json.dumps(content))
    return root


def write_flowers(root: Path) -> Path:
    """Write images 1 to 9: 7 to train on, in two parts, and 2 to test on."""
    labels = write_files(root, [f"jpg/image_{number:05d}.jpg" for number in range(1, 10)], 0)
    savemat(root / "imagelabels.mat", {"labels": np.array([labels]) + 1})
    savemat(root / "setid.mat", {"trnid": [[1, 2, 9]], "valid": [[3, 4, 5, 6]], "tstid": [[7, 8]]})
    return root


def write_cars(root: Path, *, devkit: bool) -> Path:
    """Write the single file with all annotations, or the devkit's files."""
    names = np.array(["a car", "b car", "c car"], dtype=object)
    if devkit:
        (root / "devkit").mkdir(parents=True)
        savemat(root / "devkit" / "cars_meta.mat", {"class_names": names})
        for seed, (split, file) in enumerate(
            (("train", "devkit/cars_train_annos.mat"), ("test", "cars_test_annos_withlabels.mat"))
        ):
            members = [f"{number:05d}.jpg" for number in range(1, 5)]
            labels = write_files(root / f"cars_{split}", members, seed)
            fields = [("fname", object), ("class", object)]
            rows = np.array([(m, n + 1) for m, n in zip(members, labels, strict=True)], dtype=fields)
            savemat(root / file, {"annotations": rows})
        return root
    members = [f"car_ims/{number:06d}.jpg" for number in range(1, 9)]
    labels = write_files(root, members, 0)
    fields = [("relative_im_path", object), ("class", object), ("test", object)]
    rows = [(m, n + 1, int(number >= 4)) for number, (m, n) in enumerate(zip(members, labels, strict=True))]
    savemat(root / "cars_annos.mat", {"annotations": np.array(rows, dtype=fields), "class_names": names})
    return root
