"""Recall@1 between two views of images, and other numbers of these views, as a task; it needs no labels."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from sop_faiss.bootstrap import Score
from sop_faiss.data.views.view_pairs import ViewPairs
from sop_faiss.evaluate.label_free import LABEL_FREE, label_free_numbers
from sop_faiss.evaluate.task import percents
from sop_faiss.evaluate.view_recall import views_found
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.progress import ProgressCallback


@dataclass(frozen=True)
class ViewRecallTask:
    """Find the other view of each image among the views of all images."""

    pairs: ViewPairs
    """Two views of each image, always the same ones."""
    batch_size: int = 64
    """Views per forward pass, both of an image in one; at least two."""
    label_free: bool = False
    """Whether the other numbers without labels are measured on the same views, too."""

    @property
    def names(self) -> tuple[str, ...]:
        """`view_recall_at_1`, and those of `LABEL_FREE` if they are wanted."""
        return ("view_recall_at_1", *(LABEL_FREE if self.label_free else ()))

    def measure(self, encoder: Encoder) -> dict[str, float]:
        """Return the share of views whose nearest one is of the same image; see `EvaluationTask`."""
        return percents(self.measure_each(encoder))

    def measure_each(self, encoder: Encoder, progress: ProgressCallback | None = None) -> dict[str, Score]:
        """Return the same, with 100, 50 or 0 for each image: whether both of its views are found, one, or none."""
        as_they_are = replace(encoder.preprocess, resize=encoder.preprocess.crop)  # views have their size already
        features, waiting, read = [], iter(self.pairs), 0
        while part := list(itertools.islice(waiting, max(1, self.batch_size // 2))):
            views = [pair[number] for number in (0, 1) for pair in part]
            embedded = encoder.encode(views, preprocess=as_they_are, batch_size=len(views))
            features.append(embedded.reshape(2, len(part), -1))
            read += len(part)
            if progress is not None:
                progress(read, len(self.pairs))
        first, second = np.concatenate([np.empty((2, 0, encoder.feature_dim), np.float32), *features], axis=1)
        found = views_found(first, second)
        recall = Score(100.0 * float(np.mean(found)), 100.0 * found.mean(axis=0))
        return {"view_recall_at_1": recall, **(label_free_numbers(first, second) if self.label_free else {})}
