"""Make the set of groceries that the README trains and scores on, of a checkout of the Grocery Store Dataset.

    git clone https://github.com/marcusklasson/GroceryStoreDataset
    python benchmarks/make_groceries.py GroceryStoreDataset/ retrieval_grocery/

The photos of Klasson et al. 2019 ("A Hierarchical Grocery Store Image Dataset with Visual and Semantic Labels"), not
changed: in `query/` up to 8 test photos of each of 31 packaged products; in `database/` all training photos of these
products, and up to 8 of each of 50 kinds of produce, which are right for no query; `gnd.json` for `sop-retrieve`. Which
photos were drawn is in `groceries.json`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from sop_faiss.errors import DataError
from sop_faiss.files import atomic_directory, read_json, write_json

DRAWN = Path(__file__).with_name("groceries.json")
"""`queries` and `produce`: by class, the numbers of its photos in the parts `test` and `train`; `gallery`: how many."""


def main() -> None:
    """Write the set."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="of github.com/marcusklasson/GroceryStoreDataset")
    parser.add_argument("out", type=Path, help="a new directory")
    arguments = parser.parse_args()
    queries, gallery = drawn_photos(arguments.checkout / "dataset")
    with atomic_directory(arguments.out) as directory:
        for folder, photos in (("query", queries), ("database", gallery)):
            (directory / folder).mkdir()
            for photo in photos:
                shutil.copyfile(photo, directory / folder / photo.name)
        relevant = [
            {"ok": [row for row, photo in enumerate(gallery) if class_of(photo) == class_of(query)], "junk": []}
            for query in queries
        ]
        names = {"imlist": [photo.name for photo in gallery], "qimlist": [photo.name for photo in queries]}
        write_json(directory / "gnd.json", {**names, "gnd": relevant})
    print(f"{len(queries):,} queries, {len(gallery):,} photos to search: {arguments.out}")


def drawn_photos(dataset: Path) -> tuple[list[Path], list[Path]]:
    """Return the photos of the queries and of the gallery.

    Raises:
        DataError: the dataset lacks one of them.
    """
    drawn = read_json(DRAWN)
    train = photos_by_name(dataset / "train")
    wanted = [f"{name}_{number:03d}.jpg" for name, numbers in drawn["produce"].items() for number in numbers]
    wanted += [name for name, photo in train.items() if class_of(photo) in drawn["queries"]]
    test = photos_by_name(dataset / "test")
    asked = [f"{name}_{number:03d}.jpg" for name, numbers in drawn["queries"].items() for number in numbers]
    lacking = sorted({*wanted} - train.keys() | {*asked} - test.keys())
    if lacking or len(wanted) != drawn["gallery"]:
        what = f"such as {lacking[0]}" if lacking else f"{len(wanted):,} of {drawn['gallery']:,} are there"
        raise DataError(
            f"{dataset} lacks photos ({what}): name a complete checkout of github.com/marcusklasson/GroceryStoreDataset"
        )
    return [test[name] for name in sorted(asked)], [train[name] for name in sorted(wanted)]


def photos_by_name(folder: Path) -> dict[str, Path]:
    """Find the photos of a part; each name stands in one folder."""
    return {photo.name: photo for photo in folder.rglob("*.jpg")}


def class_of(photo: Path) -> str:
    """Return the product or kind of produce that a photo is named after."""
    return photo.stem.rpartition("_")[0]


if __name__ == "__main__":
    import report as report  # mistakes are one line

    main()
