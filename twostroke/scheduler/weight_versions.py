"""The versions of the weights: which of them gave which tokens."""

from __future__ import annotations

from ..request import Sample
from .batch import Batch
from .queue import Queue


class WeightVersions:
    """Counts versions, and notes of every sample that has begun how many of its tokens each of them gave.

    Attributes:
        current: version of the weights that steps planned from now on run with.
    """

    def __init__(self, batch: Batch, waiting: Queue) -> None:
        self.current = 0
        self._batch = batch
        self._waiting = waiting

    def advance(self) -> None:
        """There are new weights; tokens that are in flight are of those before them."""
        rows = self._batch.rows
        for sample, row in self._batch.row_of.items():
            launched, target = int(rows.launched[row]), int(rows.target[row])
            sample.mark_version(self.current, target if launched < target else launched + 1)
        for sample in self._waiting:
            if sample not in self._batch.row_of:
                self.mark_end(sample)
        self.current += 1

    def mark_end(self, sample: Sample) -> None:
        """All tokens that `sample` has are of this version or older ones."""
        sample.mark_version(self.current, len(sample.tokens))
