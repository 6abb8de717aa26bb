"""The pool of cache blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..plan import DUMMY_BLOCK
from .host_tier import HostTier
from .prefix_cache import PrefixCache


class BlockPool:
    """Counts the blocks of every cache group, and hands them out.

    Each group has `num_blocks` blocks of its own: its layers have their own memory, so the numbers of different groups
    do not clash. The groups run in lockstep: a sample takes one block of every group per index of its table, the same
    number in all of them, so one count and one digest hold for all groups.

        blank   nobody has it, and it holds nothing
        idle    nobody has it, but the prefix cache knows what it holds; handed out when no blank one is left
        in use  by one row, or by several that begin with the same tokens

    A *reservation* is a promise to take blocks later: it lowers `available`, not `free`.

        free = blank + idle = available + reserved
    """

    def __init__(self, num_blocks: int, block_size: int, num_groups: int = 1, tier: HostTier | None = None) -> None:
        """`num_blocks` counts the dummy block, which is never handed out. `tier` keeps what is evicted."""
        self.tier = tier
        self.total = num_blocks - 1
        self.free = self.total
        self.reserved = 0
        self.cache = PrefixCache(block_size)
        self.sharers = np.zeros(num_blocks, np.int32)
        """Of each block in use, the rows and pending releases that have it, besides the first."""
        # The stack's top is its end: low numbers come first, and what was given back last is taken first.
        self._stack = np.tile(np.arange(num_blocks - 1, DUMMY_BLOCK, -1, dtype=np.int32), (num_groups, 1))
        self._blank = self.total

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
        """Hand out `count` available blocks of each group, int32 [G, count], a copy; what they held is forgotten.

        NOTE: steps in flight may still read a block that was idle, or that a preemption gave back in this very plan.
        They are on the compute stream, and so is the step that writes it next.
        """
        if count > self.available:
            raise RuntimeError(f"{count} blocks to take, {self.available} available")
        if count > self._blank:
            evicted = self.cache.evict(count - self._blank)
            if self.tier is not None:
                self.tier.rescue(evicted)
            self._push([block for _, block in evicted])
        self._blank -= count
        self.free -= count
        return self._stack[:, self._blank : self._blank + count].copy()

    def take_reserved(self, count: int) -> np.ndarray:
        """Hand out `count` blocks that were reserved, int32 [G, count]."""
        self.unreserve(count)
        return self.take(count)

    def share(self, chain: Sequence[bytes], blocks: Sequence[int]) -> np.ndarray:
        """Hand out `blocks`, known to hold `chain`, to one more row that only reads them; int32 [G, n]."""
        was_idle = self.cache.use(chain)
        self.free -= was_idle.count(True)
        shared = [block for block, idle in zip(blocks, was_idle, strict=True) if not idle]
        self.sharers[shared] += 1
        return np.array([blocks] * len(self._stack), np.int32)

    def share_used(self, blocks: Sequence[int]) -> np.ndarray:
        """Hand out `blocks` of a running row to one more row that only reads them; int32 [G, n]."""
        self.sharers[blocks] += 1
        return np.array([blocks] * len(self._stack), np.int32)

    def give(self, blocks: np.ndarray, chain: Sequence[bytes] = ()) -> None:
        """Take back a row's blocks, int32 [G, n], of which the first hold the published `chain`."""
        own, published = blocks[0], len(chain)
        unused = self.sharers[own] == 0
        count = int(np.count_nonzero(unused))
        if self.free + count > self.total:
            raise RuntimeError(f"{count} blocks given back, but only {self.total - self.free} are out")
        self.sharers[own[~unused]] -= 1
        self.free += count
        if published:
            self._push(self.cache.retire(chain, own[:published].tolist(), unused[:published].tolist()))
        self._push(own[published:][unused[published:]])

    def save_ahead(self) -> None:
        """Let the host tier have what is evicted next."""
        if self.tier is not None:
            self.tier.save_ahead(self.cache, self._blank)

    def count_unshared(self, blocks: np.ndarray) -> int:
        """How many of `blocks`, int32 [n], all of one row, nobody else has."""
        return int(np.count_nonzero(self.sharers[blocks] == 0))

    def forget(self) -> None:
        """Forget what every block holds, on the host, too; those in use stay with their rows."""
        self._push(self.cache.clear())
        if self.tier is not None:
            self.tier.forget()

    def _push(self, blocks: Sequence[int] | np.ndarray) -> None:
        self._stack[:, self._blank : self._blank + len(blocks)] = blocks
        self._blank += len(blocks)

    def free_blocks(self) -> np.ndarray:
        """The free blocks of each group, blank and idle, int32 [G, free], a copy."""
        idle = np.array([self.cache.idle_blocks()] * len(self._stack), np.int32)
        return np.concatenate([self._stack[:, : self._blank], idle], axis=1)
