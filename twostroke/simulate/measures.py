"""Measures: what is noted of each request and of each token while a simulation runs."""

from __future__ import annotations

from array import array

import numpy as np

NEVER = np.nan


class Measures:
    """Times of requests by their number, and the gaps between tokens.

    Attributes:
        arrived, first, finished: seconds, `NEVER` where it did not happen, one per request.
        outputs: tokens that each gave.
        prompt_tokens: of all requests that were taken.
        refused: requests that were not. refusal: why the first of them was not; None if all were taken.
        gaps, gap_counts: from one token of a sample to its next, seconds; each as often as its count says.
    """

    def __init__(self) -> None:
        self.arrived, self.first, self.finished = array("d"), array("d"), array("d")
        self.outputs = array("q")
        self.prompt_tokens = self.refused = 0
        self.refusal: str | None = None
        self.gaps, self.gap_counts = array("d"), array("q")

    def arrive(self, time: float, prompt_tokens: int) -> int:
        """A request is taken; return its number."""
        self.arrived.append(time)
        self.first.append(NEVER)
        self.finished.append(NEVER)
        self.outputs.append(0)
        self.prompt_tokens += prompt_tokens
        return len(self.arrived) - 1

    def refuse(self, reason: str) -> None:
        """A request is not taken."""
        self.refused += 1
        self.refusal = self.refusal or reason

    def gap(self, seconds: float, count: int) -> None:
        """So many samples had to wait so long for their next token."""
        self.gaps.append(seconds)
        self.gap_counts.append(count)

    def times_to_first_token(self) -> np.ndarray:
        """Of every request, seconds from its arrival."""
        return np.array(self.first) - np.array(self.arrived)

    def gap_percentiles(self, *shares: float) -> list[float]:
        """Gaps that so many percent of all do not exceed; `NEVER` if there are none."""
        if not self.gaps:
            return [NEVER] * len(shares)
        gaps, counts = np.array(self.gaps), np.array(self.gap_counts)
        order = np.argsort(gaps, kind="stable")
        reached = np.cumsum(counts[order])
        places = np.searchsorted(reached, [share / 100 * reached[-1] for share in shares])
        return gaps[order][np.minimum(places, len(order) - 1)].tolist()
