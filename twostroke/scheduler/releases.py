"""Rows and blocks that a step in flight may still use."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ..cache.block_pool import BlockRun


class Release(NamedTuple):
    """A row, and the blocks that it had in each group, to be returned once `step` is committed."""

    step: int
    row: int
    runs: list[BlockRun]

    @property
    def num_blocks(self) -> int:
        return sum(len(run.blocks) for run in self.runs)


class Releases:
    """What finished and cancelled samples had, in the order of the steps that must be committed first.

    A step that was launched before a sample ended still reads its row and may write its blocks:

        step      N launched   N+1 launched        N committed             N+1 committed
        sample    runs in N    runs in N+1 too     ends; tagged with N+1   row and blocks go back
    """

    def __init__(self) -> None:
        self.blocks = 0
        """Blocks that are pending."""
        self._queue: deque[Release] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, release: Release) -> None:
        """Queue `release`; its step is not smaller than any queued before."""
        self._queue.append(release)
        self.blocks += release.num_blocks

    def pop(self, step: int) -> Release | None:
        """Remove and return the oldest release whose step is at most `step`, or None."""
        if not self._queue or self._queue[0].step > step:
            return None
        release = self._queue.popleft()
        self.blocks -= release.num_blocks
        return release

    def forget_keys(self) -> None:
        """Let what is queued be of no use to anybody once it is returned."""
        for release in self._queue:
            for run in release.runs:
                run.keys.clear()

    def pending(self) -> list[Release]:
        """All that is queued, oldest first."""
        return list(self._queue)
