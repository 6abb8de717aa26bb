"""Features: what requests ask for beyond the common case."""

from __future__ import annotations

from ..plan import NO_FEATURES, Feature


class FeatureCounts:
    """How many rows ask for each feature, counted when rows come and go, so that a step costs nothing.

    Attributes:
        union: what at least one row asks for.
    """

    def __init__(self) -> None:
        self.union = NO_FEATURES
        self._counts = dict.fromkeys(Feature, 0)

    def add(self, features: Feature) -> None:
        """Count a row that comes."""
        for feature in features:
            self._counts[feature] += 1
        self.union |= features

    def remove(self, features: Feature) -> None:
        """Count a row that goes."""
        for feature in features:
            self._counts[feature] -= 1
            if not self._counts[feature]:
                self.union &= ~feature
