"""Small data sets in the layouts of published ones: a few images of a few classes, that look alike within a class."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.images import encode, make_image


class Painter:
    """Writes images below a folder; those of one class look alike, but no two are the same."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._rng = np.random.default_rng(0)

    def image(self, name: str, label: int) -> str:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        picture = make_image(self._rng, 20, label)
        file.write_bytes(encode(picture, "PNG" if name.endswith(".png") else "JPEG"))
        return name

    def text(self, name: str, *lines: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join([*lines, ""]))

    def json(self, name: str, content: object) -> None:
        self.text(name, json.dumps(content))


def cub(paint: Painter) -> None:
    """Four classes of three; the last two are tested."""
    names = [f"{label:03d}.Bird/Bird {label} {number}.jpg" for label in range(1, 5) for number in range(3)]
    for name in names:
        paint.image(f"images/{name}", int(name[:3]))
    paint.text("images.txt", *(f"{place} {name}" for place, name in enumerate(names, start=1)))
    paint.text("image_class_labels.txt", *(f"{place} {int(name[:3])}" for place, name in enumerate(names, start=1)))


def sop(paint: Painter) -> None:
    rows = [f"{n} {9000 + n // 2} 1 {paint.image(f'chair_final/{n // 2}_{n % 2}.JPG', n // 2)}" for n in range(6)]
    paint.text("Ebay_test.txt", "image_id class_id super_class_id path", *rows)


def inshop(paint: Painter) -> None:
    rows = []
    for number in range(9):
        name = f"img/WOMEN/Tees/id_{number // 3}/0{number % 3}_1_front.jpg"
        paint.image(f"Img/{name}", number // 3)
        rows.append(f"{name}   id_{number // 3:08d}  {('query', 'gallery', 'gallery')[number % 3]}")
    rows.append("img/WOMEN/Tees/id_9/01_1_front.jpg id_00000009 train")  # not read
    paint.text("Eval/list_eval_partition.txt", "10", "image_name item_id evaluation_status", *rows)


def reid(paint: Painter) -> None:
    """Two persons, each by two cameras; a detector's errors (-1), a distractor (0000), and a person seen by one."""
    for person in (2, 7):
        paint.image(f"query/{person:04d}_c1s1_000001_00.jpg", person)
        for camera in (1, 1, 3):
            number = len(list((paint.root / "bounding_box_test").glob("*")))
            paint.image(f"bounding_box_test/{person:04d}_c{camera}s1_{number:06d}_01.jpg", person)
    paint.image("query/0011_c2s1_000001_00.jpg", 11)
    paint.image("bounding_box_test/0011_c2s1_000099_01.jpg", 11)
    paint.image("bounding_box_test/-1_c1s1_000050_01.jpg", 2)
    paint.image("bounding_box_test/0000_c2s1_000060_01.jpg", 9)


def place(paint: Painter) -> None:
    """Three images 20 m apart on a line; a query between the first two, one at the end of the radius, one far away."""
    for label, east in enumerate((0, 20, 40)):
        paint.image(f"images/test/database/@{east:.2f}@0.00@17@T@@@@{label}@@@@@@.jpg", label)
    for label, east in ((0, 10.0), (2, 65.0), (3, 500.0)):
        paint.image(f"images/test/queries/@{east:.2f}@0.00@17@T@@@@q{label}@@@@@@.jpg", label)


def gldv2(paint: Painter) -> None:
    names = [f"{label}{number}c{'0' * 13}" for label in "ab" for number in range(3)]
    for name in names:
        paint.image(f"index/{name[0]}/{name[1]}/{name[2]}/{name}.jpg", ord(name[0]))
    queries = [f"f{label}{'1' * 14}" for label in "abc"]
    for name in queries[:2]:
        paint.image(f"test/{name[0]}/{name[1]}/{name[2]}/{name}.jpg", ord(name[1]))
    paint.text("index.csv", "id", *names)
    paint.text(
        "retrieval_solution_v2.1.csv",
        "id,images,Usage",
        f"{queries[0]},{' '.join(names[:3])},Public",
        f"{queries[1]},{' '.join(names[3:])},Private",
        f"{queries[2]},None,Ignored",
    )


def ilias(paint: Painter) -> None:
    """Two objects; the first has a positive in the least and one in the most of scale and clutter."""
    rows = []
    for number, name in enumerate(("bold_bimp_000", "zippy_toy_001")):
        paint.image(f"ilias_core/{name}/query/Q{number:03d}_00.jpg", number)
        paint.text(f"ilias_core/{name}/query/Q{number:03d}_00_bbox.txt", "1 2 10 10")
        for place, (scale, clutter) in enumerate(((0.01, 3), (0.9, 60), (0.1, 18))):
            file = paint.image(f"ilias_core/{name}/pos/P{number:03d}_{place:02d}.jpg", number)
            rows.append(f"{file.removeprefix('ilias_core/')},{scale},{clutter}")
    paint.text("image_ids/positive_ids.txt", *rows)


def met(paint: Painter) -> None:
    """Two exhibits; validation and test queries of each, and test and validation queries of none."""
    database = [
        {"id": 100 + label, "path": paint.image(f"images/MET/{100 + label}/{n}.jpg", label).removeprefix("images/")}
        for label in (0, 1)
        for n in range(2)
    ]
    paint.json("ground_truth/MET_database.json", database)
    for part in ("val", "test"):
        entries = []
        for label in (0, 1, 5):
            name = paint.image(f"images/{part}_met/{label}.jpg", label).removeprefix("images/")
            entries.append({"path": name} | ({"MET_id": 100 + label} if label < 5 else {}))
        paint.json(f"ground_truth/{part}set.json", entries)


def uned(paint: Painter) -> None:
    """Two domains with the same class numbers; the second has an index of its own."""

    def entries(kind: str, labels: list[int], shown: int = 0) -> list[dict[str, object]]:
        names = [paint.image(f"images/{kind}{n}.jpg", shown + label) for n, label in enumerate(labels)]
        return [{"path": name[len("images/") :], "class_id": own} for name, own in zip(names, labels, strict=True)]

    paint.json("info_files/cars/test.json", entries("cars/", [0, 0, 1, 1]))
    paint.json("info_files/met/index.json", entries("met/index", [0, 1], 5))
    asked = entries("met/test", [0, 1], 5)
    paint.json("info_files/met/test.json", [entry | {"class_id": [entry["class_id"]]} for entry in asked])


def copydays(paint: Painter) -> None:
    for scene in range(3):
        paint.image(f"original/20{scene:02d}00.jpg", scene)
        paint.image(f"strong/20{scene:02d}01.jpg", scene)
        paint.image(f"jpegqual/3/20{scene:02d}00.jpg", scene)
    paint.image("strong/200002.jpg", 0)


def amstertime(paint: Painter) -> None:
    for number in range(3):
        paint.image(f"new/{number:04d}.png", number)
        paint.image(f"old/{number:04d}.jpg", number)


WRITERS: dict[str, Callable[[Painter], None]] = {
    writer.__name__: writer for writer in (cub, sop, inshop, reid, place, gldv2, ilias, met, uned, copydays, amstertime)
}


def write_published_set(root: Path, protocol: str) -> Path:
    """Write the small set of a protocol; return its folder."""
    WRITERS[protocol](Painter(root))
    return root
