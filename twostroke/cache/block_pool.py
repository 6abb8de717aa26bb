"""The pool of free cache blocks."""

from __future__ import annotations

import numpy as np

from ..plan import DUMMY_BLOCK


class BlockPool:
    """Counts the blocks of every cache group, and hands them out.

    Each group has `num_blocks` blocks of its own: its layers have their own memory, so the numbers of different groups
    do not clash. A sample takes one block of every group per index of its table, so one count holds for all groups.

    A *reservation* is a promise to take blocks later: it lowers `available`, not `free`.

        free = available + reserved
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        """`num_blocks` counts the dummy block, which is never handed out."""
        self.total = num_blocks - 1
        self.free = self.total
        self.reserved = 0
        # The stack's top is its end: low numbers come first, and what was given back last is taken first.
        stack = np.arange(num_blocks - 1, DUMMY_BLOCK, -1, dtype=np.int32)
        self._stack = np.tile(stack, (num_groups, 1))

    @property
    def available(self) -> int:
        """Blocks of each group that nobody has and nobody was promised."""
        return self.free - self.reserved

    def reserve(self, count: int) -> None:
        """Promise `count` of the available blocks."""
        if count > self.available:
            raise RuntimeError(f"{count} blocks to reserve, {self.available} available")
        self.reserved += count

    def unreserve(self, count: int) -> None:
        """Take back a promise of `count` blocks."""
        if count > self.reserved:
            raise RuntimeError(f"{count} blocks to unreserve, {self.reserved} reserved")
        self.reserved -= count

    def take(self, count: int) -> np.ndarray:
        """Hand out `count` available blocks of each group, int32 [G, count], a copy."""
        if count > self.available:
            raise RuntimeError(f"{count} blocks to take, {self.available} available")
        self.free -= count
        return self._stack[:, self.free : self.free + count].copy()

    def take_reserved(self, count: int) -> np.ndarray:
        """Hand out `count` blocks that were reserved, int32 [G, count]."""
        self.unreserve(count)
        return self.take(count)

    def give(self, blocks: np.ndarray) -> None:
        """Take back `blocks`, int32 [G, n]."""
        count = blocks.shape[1]
        if self.free + count > self.total:
            raise RuntimeError(f"{count} blocks given back, but only {self.total - self.free} are out")
        self._stack[:, self.free : self.free + count] = blocks
        self.free += count

    def free_blocks(self) -> np.ndarray:
        """The free blocks of each group, int32 [G, free], a copy."""
        return self._stack[:, : self.free].copy()
