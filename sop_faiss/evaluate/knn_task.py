"""Weighted k-NN classification as a task; the protocol is in `knn`."""

from __future__ import annotations

from dataclasses import dataclass

from sop_faiss.bootstrap import Score
from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.knn import KnnScores, knn_scores
from sop_faiss.evaluate.knn_choices import KS, TEMPERATURE, check_choices
from sop_faiss.evaluate.sets.labeled_sets import LabeledFeatures, LabeledSets
from sop_faiss.evaluate.task import percents
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.progress import ProgressCallback


@dataclass(frozen=True)
class KnnTask:
    """Classify test images by their nearest training images.

    Raises:
        ConfigError: a number of neighbors or the temperature is impossible.
    """

    sets: LabeledSets
    """The training images, which vote, and the test images."""
    ks: tuple[int, ...] = KS
    """Numbers of neighbors, none above the number of training images."""
    temperature: float = TEMPERATURE
    """Of the votes: weight exp(similarity / temperature)."""

    def __post_init__(self) -> None:
        check_choices(self.ks, self.temperature)
        self.require_voters(self.sets.train_count)

    @property
    def names(self) -> tuple[str, ...]:
        """`knn_top1_k20` and so on."""
        return tuple(f"knn_top1_k{k}" for k in self.ks)

    def measure(self, encoder: Encoder) -> dict[str, float]:
        """Return the share of right classes for each k; see `EvaluationTask`."""
        return percents(self.measure_each(encoder))

    def measure_each(self, encoder: Encoder, progress: ProgressCallback | None = None) -> dict[str, Score]:
        """Return the same, with 100 for each test image whose class is right and 0 for the others."""
        features = self.sets.features(encoder, progress)
        found = self.classify(features)
        return {
            name: Score(found.metrics[f"top1_k{k}"], 100.0 * (found.predicted[k] == features.test_labels))
            for name, k in zip(self.names, self.ks, strict=True)
        }

    def classify(self, features: LabeledFeatures) -> KnnScores:
        """Classify the test images, by features of any origin."""
        return knn_scores(
            features.train_features,
            features.train_labels,
            features.test_features,
            features.test_labels,
            self.ks,
            self.temperature,
        )

    def require_voters(self, count: int) -> None:
        """Check that there are as many training images as neighbors.

        Raises:
            ConfigError: there are fewer.
        """
        largest = max(self.ks)
        if largest > count:
            asked = f"`ks={largest}`" if self.ks != KS else f"the default numbers of neighbors go up to {largest}"
            raise ConfigError(
                f"{asked}, but {count} training images vote: wanted k <= {count}, such as `ks={min(20, count)}`"
            )
