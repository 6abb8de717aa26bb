"""Rows and blocks that a step in flight may still use."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np


class Release(NamedTuple):
    """A row, and the blocks int32 [G, n] that it had, to be returned once `step` is committed.

    The first of the blocks hold the published `chain`.
    """

    step: int
    row: int
    blocks: np.ndarray
    chain: list[bytes]


class Releases:
    """What finished and cancelled samples had, in the order of the steps that must be committed first.

    A step that was launched before a sample ended still reads its row and may write its blocks:

        step      N launched   N+1 launched        N committed             N+1 committed
        sample    runs in N    runs in N+1 too     ends; tagged with N+1   row and blocks go back
    """

    def __init__(self) -> None:
        self.blocks = 0
        """Blocks of each group that are pending."""
        self._queue: deque[Release] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, release: Release) -> None:
        """Queue `release`; its step is not smaller than any queued before."""
        self._queue.append(release)
        self.blocks += release.blocks.shape[1]

    def pop(self, step: int) -> Release | None:
        """Remove and return the oldest release whose step is at most `step`, or None."""
        if not self._queue or self._queue[0].step > step:
            return None
        release = self._queue.popleft()
        self.blocks -= release.blocks.shape[1]
        return release

    def forget_chains(self) -> None:
        """Let what is queued be of no use to anybody once it is returned."""
        for release in self._queue:
            release.chain.clear()

    def pending(self) -> list[Release]:
        """All that is queued, oldest first."""
        return list(self._queue)
