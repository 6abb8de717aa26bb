"""The more urgent first."""

from __future__ import annotations

from ...request import Sample


class Priority:
    """A level of priority is worth `patience` seconds: a sample ranks as if it had come so much earlier.

    A sample of priority p that has waited, or run, for patience * (q - p) seconds goes before those of priority q that
    come from then on, and keeps its row against them; so it is overtaken only by what comes within that time.
    """

    takes_rows = True

    def __init__(self, patience: float) -> None:
        self._patience = patience

    def rank(self, sample: Sample) -> float:
        return sample.timings.submitted - self._patience * sample.request.params.priority
