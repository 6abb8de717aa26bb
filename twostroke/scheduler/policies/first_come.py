"""First come, first served."""

from __future__ import annotations

from ...request import Sample


class FirstCome:
    """All rank alike, so the order is that of arrival; nobody ever waits for anybody who came later."""

    takes_rows = False

    def rank(self, sample: Sample) -> float:
        return 0.0
