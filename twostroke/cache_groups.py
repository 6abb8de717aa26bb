"""The cache groups of a model, and how many blocks a sample needs of them."""

from __future__ import annotations

import sys
from bisect import bisect_right
from typing import NamedTuple


class CacheGroups(NamedTuple):
    """Groups of layers with block tables of their own. Those of a group have one window.

    A row whose next position lies in block `i` of its sequence keeps, in a group with a window, block `i` and the
    `reach` blocks before it: what that position sees, and what the first position of block `i` sees. So a row that
    stopped anywhere in block `i` still has all that a hit of its first `i` blocks needs.

    Attributes:
        windows: of each group: a query sees its own position and the window - 1 before it; 0 sees all.
        block_size: positions of a block.
        max_chunk_tokens: most tokens of a prompt chunk.
    """

    windows: tuple[int, ...]
    block_size: int
    max_chunk_tokens: int

    def reaches(self) -> list[int | None]:
        """Of each group, how many blocks before its own a position may look into; None is any number."""
        return [-(-(window - 1) // self.block_size) if window else None for window in self.windows]

    def spans(self) -> list[int]:
        """Of each group, the most blocks that a row has at once: those of a chunk, and those within reach of it."""
        chunk = 1 + -(-(self.max_chunk_tokens - 1) // self.block_size)
        return [sys.maxsize if reach is None else reach + chunk for reach in self.reaches()]

    def blocks(self, positions: int) -> int:
        """The most blocks that a sample has at once on its way to so many positions, in all groups."""
        end = -(-positions // self.block_size)
        return sum(min(end, span) for span in self.spans())

    def positions(self, blocks: int) -> int:
        """The most positions of a sample that never has more than `blocks`."""
        if sum(spans := self.spans()) <= blocks:
            return sys.maxsize
        ends = range(1, blocks + 1)
        return bisect_right(ends, blocks, key=lambda end: sum(min(end, span) for span in spans)) * self.block_size
