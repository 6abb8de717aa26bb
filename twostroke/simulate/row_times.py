"""Who sits in which row, and when the row's last token came."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..request import Sample
from .measures import NEVER, Measures


@dataclass(eq=False)
class Trip:
    """A request on its way.

    Attributes:
        number: of its measures.
        end: positions that are computed when it ends.
        row: that it had last. last: when its last token came, while it is not current in that row.
    """

    number: int
    end: int
    row: int = -1
    last: float = NEVER


class RowTimes:
    """The times of tokens by row, so that a step notes them for all rows at once.

    Attributes:
        end: of each row, positions that are computed when its sample ends, int [rows].
        last: of each row, when its sample's last token came, float [rows].
    """

    def __init__(self, num_rows: int, measures: Measures) -> None:
        self.end = np.zeros(num_rows, np.int64)
        self.last = np.full(num_rows, NEVER)
        self._measures = measures
        self._trips: list[Trip | None] = [None] * num_rows
        self._trip_of: dict[Sample, Trip] = {}
        self._committed = NEVER

    @property
    def on_the_way(self) -> int:
        """Requests that have come and have not ended."""
        return len(self._trip_of)

    def submit(self, sample: Sample, trip: Trip) -> None:
        self._trip_of[sample] = trip

    def join(self, row: int, sample: Sample) -> None:
        """`sample` gets `row`, for the first time or again."""
        trip, before = self._trip_of[sample], self._trips[row]
        if before is not None:
            before.last = float(self.last[row])
        if trip.row >= 0 and self._trips[trip.row] is trip:
            trip.last = float(self.last[trip.row])
            self._trips[trip.row] = None
        self._trips[row], trip.row = trip, row
        self.end[row], self.last[row] = trip.end, trip.last

    def tokens(self, rows: np.ndarray, now: float) -> None:
        """Each of `rows`, int [S], got a token."""
        since = self.last[rows]
        common = int(np.count_nonzero(since == self._committed))
        if common:
            self._measures.gap(now - self._committed, common)
        if common < len(rows):
            for place in np.flatnonzero(since != self._committed).tolist():
                self._single(int(rows[place]), float(since[place]), now)
        self.committed(rows, now)

    def committed(self, rows: np.ndarray, now: float) -> None:
        """Each of `rows`, int [S], got its last token now, by the newest commit."""
        self.last[rows] = self._committed = now

    def _single(self, row: int, since: float, now: float) -> None:
        if since == since:
            self._measures.gap(now - since, 1)
        else:
            trip = self._trips[row]
            assert trip is not None
            self._measures.first[trip.number] = now

    def finish(self, sample: Sample, now: float) -> None:
        trip = self._trip_of.pop(sample)
        self._measures.finished[trip.number] = now
        self._measures.outputs[trip.number] = len(sample.output)
