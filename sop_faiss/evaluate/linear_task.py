"""A linear probe as a task; the protocol is in `linear`."""

from __future__ import annotations

from dataclasses import dataclass, field

from sop_faiss.evaluate.classifier import ChosenScores
from sop_faiss.evaluate.linear import linear_probe
from sop_faiss.evaluate.linear_choices import LinearChoices
from sop_faiss.evaluate.sets.labeled_sets import LabeledFeatures, LabeledSets
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.progress import ProgressCallback


@dataclass(frozen=True)
class LinearTask:
    """Train a linear classifier on frozen features, and test it.

    Raises:
        ConfigError: a choice is impossible.
    """

    sets: LabeledSets
    """The training and the test images."""
    choices: LinearChoices = field(default_factory=LinearChoices)
    """Learning rates, epochs and the like."""

    def __post_init__(self) -> None:
        self.choices.check()

    @property
    def names(self) -> tuple[str, ...]:
        """`linear_top1`."""
        return ("linear_top1",)

    def measure(self, encoder: Encoder) -> dict[str, float]:
        """Return the share of right classes; see `EvaluationTask`."""
        return {"linear_top1": self.probe(self.sets.features(encoder), encoder).metrics["top1"]}

    def probe(
        self, features: LabeledFeatures, encoder: Encoder | None, progress: ProgressCallback | None = None
    ) -> ChosenScores:
        """Train and test, by features of any origin.

        Args:
            features: of both sets.
            encoder: the classifier is trained on its device; None: on the CPU.
            progress: called with the epochs trained.

        Raises:
            SopError: as of `linear_probe`.
        """
        return linear_probe(
            features.train_features,
            features.train_labels,
            features.test_features,
            features.test_labels,
            self.choices,
            device="cpu" if encoder is None else str(next(encoder.parameters()).device),
            progress=progress,
        )
