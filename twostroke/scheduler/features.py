"""Features: what requests ask for beyond the common case."""

from __future__ import annotations

from ..plan import NO_FEATURES, Feature


class FeatureCounts:
    """How many rows ask for each feature, counted when rows come and go, so that a step costs nothing.

    NOTE: nearly all rows ask for none, and operations on flags are slow, so for these there are none.

    Attributes:
        union: what at least one row asks for.
    """

    def __init__(self) -> None:
        self.union = NO_FEATURES
        self._counts = dict.fromkeys(Feature, 0)

    def add(self, features: Feature) -> None:
        """Count a row that comes."""
        for feature in features or ():
            self._counts[feature] += 1
            self.union |= feature

    def remove(self, features: Feature) -> None:
        """Count a row that goes."""
        for feature in features or ():
            self._counts[feature] -= 1
            if not self._counts[feature]:
                self.union &= ~feature
