"""Labeled images, or features, of a training and a test set, for classifiers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.images.subset import Subset
from sop_faiss.errors import DataError
from sop_faiss.evaluate.sets.feature_sets import FeatureSet, fill_stores, open_feature_set, require_encoder_or_stores
from sop_faiss.evaluate.sets.labeled_part import LabeledPart
from sop_faiss.features.extract import ExtractionOptions
from sop_faiss.features.store import FeatureStore
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.paths import real_path
from sop_faiss.progress import ProgressCallback


@dataclass(frozen=True)
class LabeledFeatures:
    """Features of a training set, or of the chosen part of it, and of a test set, by one encoder.

    Attributes:
        train_features: unit rows of the chosen training images.
        train_labels: class number of each.
        test_features: unit rows.
        test_labels: in the training set's numbers.
        class_names: name of each number; None where only numbers are known.
        choices: what of the protocol is known here, as JSON values.
        encoder: name and fingerprint.
        train_images: what the training rows are of; None where only features are known.
        test_images: of the test rows.
    """

    train_features: Float32[np.ndarray, "n d"]
    train_labels: Int64[np.ndarray, " n"]
    test_features: Float32[np.ndarray, "q d"]
    test_labels: Int64[np.ndarray, " q"]
    class_names: list[str] | None = None
    choices: dict[str, Any] = field(default_factory=dict)
    encoder: dict[str, str] = field(default_factory=dict)
    train_images: ImageSource | None = None
    test_images: ImageSource | None = None


@dataclass(frozen=True)
class LabeledImages:
    """Images of a training set, or of the chosen part of it, and of a test set; fields as of `LabeledFeatures`."""

    train_images: ImageSource
    train_labels: Int64[np.ndarray, " n"]
    test_images: ImageSource
    test_labels: Int64[np.ndarray, " q"]
    class_names: list[str] | None
    choices: dict[str, Any]


@dataclass(frozen=True)
class LabeledSets:
    """A training set, of which a part may be used, and a test set.

    Raises:
        ConfigError: the part is impossible.
        DataError: an image has no label, or the labels are of two label sets.
    """

    train: FeatureSet
    test: FeatureSet
    what: str
    """The classifier that needs the labels, for messages."""
    part: LabeledPart = field(default_factory=LabeledPart)
    """Which training images may be used."""
    extraction: ExtractionOptions = field(default_factory=ExtractionOptions)
    """How features of images are extracted."""

    def __post_init__(self) -> None:
        self.part.check()
        for each in (self.train, self.test):
            _require_labels(each, self.what)
        _in_training_numbers(self.train, self.test, self.what)

    @property
    def train_count(self) -> int:
        """The training images, before a part of them is chosen."""
        return len(_require_labels(self.train, self.what))

    @property
    def test_labels(self) -> Int64[np.ndarray, " q"]:
        """The class of each test image, in the training set's numbers."""
        return _in_training_numbers(self.train, self.test, self.what)[0]

    def features(self, encoder: Encoder | None, progress: ProgressCallback | None = None) -> LabeledFeatures:
        """Choose the part, extract what of it is not extracted yet, and put the labels into one numbering.

        Args:
            encoder: which encoder; None where both sets are feature stores.

        Raises:
            DataError: the part names images that are not there.
            FeatureError: a store was made by another encoder, preprocessing or pooling.
            SopError: as of `extract_features`.
        """
        train, test, rows, of_all = self.train, self.test, self._rows(), self.train_count
        if encoder is not None:
            if train.store is None:  # the other training images are never decoded
                train = replace(train, source=Subset(require_images(train, self.what), rows))
            extraction = self.extraction
            train, test = fill_stores([train, test], encoder, extraction=extraction, progress=progress)
        if self.train.store is None:
            of_all -= len(rows) - len(_store(train))  # without those that cannot be used
            rows = np.arange(len(_store(train)))
        return _chosen(train, test, rows, of_all, self.part, self.what)

    def _rows(self) -> Int64[np.ndarray, " n"]:
        """Return which training images, or features, are chosen."""
        labels, store, images = _require_labels(self.train, self.what), self.train.store, self.train.source
        if store is not None:
            return self.part.rows(labels, store.keys, store.members)
        assert images is not None  # a set has one of the two
        return self.part.rows(labels, images.keys, [images.member_of(place) for place in range(len(images))])

    def images(self) -> LabeledImages:
        """Choose the part, and put the labels into one numbering; nothing is decoded.

        Raises:
            DataError: a set is a feature store, or the part names images that are not there.
        """
        train, test = require_images(self.train, self.what), require_images(self.test, self.what)
        labels = _require_labels(self.train, self.what)
        test_labels, compared_by, names = _in_training_numbers(self.train, self.test, self.what)
        rows = self._rows()
        train_labels = labels[rows]
        choices = {
            "train": self.train.name,
            "test": self.test.name,
            **_counts(train_labels, test_labels, self.part, len(train), compared_by),
        }
        return LabeledImages(Subset(train, rows), train_labels, test, test_labels, names, choices)


def open_labeled_images(train: str, test: str, what: str, part: LabeledPart) -> LabeledImages:
    """Open two sets of labeled images; arguments and errors as of `open_labeled_sets` and `LabeledSets.images`."""
    require_two(train, test)
    sets = open_feature_set(train), open_feature_set(test)
    for each in sets:
        require_images(each, what)
    return LabeledSets(*sets, what, part).images()


def open_labeled_sets(
    train: str,
    test: str,
    encoder: EncoderSpec | None,
    what: str,
    part: LabeledPart,
    extraction: ExtractionOptions,
) -> LabeledSets:
    """Open both sets.

    Args:
        train: SRC of labeled images, or the directory of a feature store.
        test: as `train`.
        encoder: which encoder; None where both are feature stores.
        what: the classifier that needs the labels, for messages.
        part: which training images may be used.
        extraction: how features of images are extracted; the ranks share the images.

    Raises:
        ConfigError: the encoder is missing or idle, or the part is impossible.
        DataError: a source is unusable or lacks labels, both are the same, or their labels are of two label sets.
        FeatureError: a store is damaged, or the two were made by different encoders, preprocessings or poolings.
    """
    require_two(train, test)
    of_ranks = replace(extraction, across_ranks=True)
    sets = LabeledSets(open_feature_set(train), open_feature_set(test), what, part, of_ranks)
    require_encoder_or_stores([sets.train, sets.test], encoder)
    return sets


def require_two(train: str, test: str) -> None:
    """Raise DataError if both are the same source."""
    if real_path(train) == real_path(test):
        raise DataError(f"training and test set are both {train}: every image would find itself, name two")


def require_images(feature_set: FeatureSet, what: str) -> ImageSource:
    """Return the images of a set; raise DataError if it is a feature store. `what` needs them, for the message."""
    if feature_set.source is None:
        raise DataError(f"{feature_set.name} is a feature store, but {what} needs the images: name these")
    return feature_set.source


def _counts(
    train_labels: Int64[np.ndarray, " n"],
    test_labels: Int64[np.ndarray, " q"],
    part: LabeledPart,
    of_all: int,
    compared_by: str,
) -> dict[str, Any]:
    per_class = np.unique(train_labels, return_counts=True)[1]
    return {
        "train_images": len(train_labels),
        "train_images_of_all": of_all,
        "train_images_per_class": [int(per_class.min()), int(per_class.max())],
        "train_part": part.to_dict(),
        "test_images": len(test_labels),
        "classes": len(per_class),
        "labels_compared_by": compared_by,
        "test_images_of_unseen_classes": int((~np.isin(test_labels, train_labels)).sum()),
    }


def _chosen(
    train: FeatureSet,
    test: FeatureSet,
    rows: Int64[np.ndarray, " n"],
    of_all: int,
    part: LabeledPart,
    what: str,
) -> LabeledFeatures:
    """Return rows of the training set's store, which are a part of so many images, and the test set's store."""
    train_store, test_store = _store(train), _store(test)
    all_labels = _require_labels(train, what)
    test_labels, compared_by, names = _in_training_numbers(train, test, what)
    train_labels = all_labels[rows]
    choices = {
        "train": train.name,
        "test": test.name,
        **_counts(train_labels, test_labels, part, of_all, compared_by),
        "train_dropped": _dropped(train_store),
        "test_dropped": _dropped(test_store),
        "preprocess": train_store.manifest["preprocess"],
        "pooling": train_store.manifest["pooling"],
    }
    made_by = train_store.manifest["encoder"]
    encoder = {"name": str(made_by.get("name")), "fingerprint": str(made_by["fingerprint"])}
    features = train_store.features if len(rows) == len(train_store) else train_store.features[rows]
    images = _images(train, rows), _images(test, np.arange(len(test_store)))
    return LabeledFeatures(features, train_labels, test_store.features, test_labels, names, choices, encoder, *images)


def _images(feature_set: FeatureSet, rows: Int64[np.ndarray, " n"]) -> ImageSource | None:
    """Return the images that rows of a set's features are of."""
    if feature_set.source is None:
        return None
    store, keys = _store(feature_set), feature_set.source.keys
    if len(store) < len(keys):  # without those that could not be used
        place = {key: position for position, key in enumerate(keys)}
        rows = np.array([place[store.keys[row]] for row in rows], dtype=np.int64)
    return Subset(feature_set.source, rows)


def _require_labels(feature_set: FeatureSet, what: str) -> Int64[np.ndarray, " n"]:
    labels = feature_set.labels
    without = 0 if labels is None else int((labels < 0).sum())
    if labels is None or without:
        got = "none has one" if labels is None else f"{without} of {len(labels)} have none"
        raise DataError(
            f"{feature_set.name}: {what} needs a label for every image, but {got}; wanted class sub-folders, .cls "
            "members, or a label column"
        )
    return labels


def _in_training_numbers(
    train: FeatureSet, test: FeatureSet, what: str
) -> tuple[Int64[np.ndarray, " n"], str, list[str] | None]:
    """Translate test labels into the numbers of the training set.

    Folders number their classes by sorted name, so a class that one side lacks shifts all others. A class that the
    training set does not have gets a number of its own there. Labels that have nothing in common are an error: they
    are of two label sets, and every prediction would be wrong.

    Args:
        train: the training set.
        test: the test set.
        what: the classifier that needs the labels, for messages.

    Returns:
        The test labels, what tied them (`name` or `number`), and the names of the numbers.

    Raises:
        DataError: an image has no label, or the labels are of two label sets: nothing in common, or names on one
            side and numbers on the other.
    """
    labels, train_labels = _require_labels(test, what), _require_labels(train, what)
    names, test_names = train.class_names, test.class_names
    for side, own, known in ((train, train_labels, names), (test, labels, test_names)):
        if known is not None and own.max() >= len(known):
            raise DataError(f"{side.name} has a label {own.max()}, but names only {len(known)} classes")
    if names is not None and test_names is not None:
        numbers = {name: number for number, name in enumerate(names)}
        translated = [numbers.setdefault(name, len(numbers)) for name in test_names]
        _require_common(train, test, {names[label] for label in np.unique(train_labels)}, set(test_names))
        return np.array(translated, dtype=np.int64)[labels], "name", list(numbers)
    for named, other, known in ((train, test, names), (test, train, test_names)):
        if known is not None:
            raise DataError(
                f"labels of {named.name} are names (such as {known[0]}), those of {other.name} numbers without names: "
                "they cannot be compared; give both names (class folders; classes.txt next to shards), or both numbers"
            )
    train_numbers, test_numbers = ({str(label) for label in np.unique(own)} for own in (train_labels, labels))
    _require_common(train, test, train_numbers, test_numbers)
    return labels, "number", None


def _require_common(train: FeatureSet, test: FeatureSet, of_train: set[str], of_test: set[str]) -> None:
    if not of_train & of_test:
        raise DataError(
            f"labels of {train.name} and {test.name} are of two label sets: they have no class in common "
            f"(such as {min(of_train)} and {min(of_test)}); name sets of the same classes"
        )


def _store(feature_set: FeatureSet) -> FeatureStore:
    assert feature_set.store is not None  # `require_encoder_or_stores` and `fill_stores` saw to it
    return feature_set.store


def _dropped(store: FeatureStore) -> int:
    """How many images extraction could not use."""
    dropped = store.manifest.get("dropped")
    return int(dropped.get("count", 0)) if isinstance(dropped, dict) else 0
