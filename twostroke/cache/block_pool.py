"""The pool of cache blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import counted
from ..plan import DUMMY_BLOCK
from .host_tier import HostTier
from .prefix_cache import PrefixCache


class BlockRun(NamedTuple):
    """Blocks of a row that follow each other in the table of one cache group.

    Attributes:
        blocks: int32 [n]; the dummy block where one is known on the host alone.
        keys: what the first of them are known by; see `PrefixCache`.
    """

    blocks: np.ndarray
    keys: list[bytes]


class BlockPool:
    """Counts the blocks of the cache, and hands them out.

    All cache groups take from one pool: a block is of the group whose table it stands in, until it is given back.

        blank   nobody has it, and it holds nothing
        idle    nobody has it, but the prefix cache knows what it holds; handed out when no blank one is left
        in use  by one row, or by several that begin with the same tokens

    A *reservation* is a promise to take blocks later: it lowers `available`, not `free`.

        free = blank + idle = available + reserved
    """

    def __init__(
        self, num_blocks: int, block_size: int, reaches: Sequence[int | None] = (None,), tier: HostTier | None = None
    ) -> None:
        """`num_blocks` counts the dummy block, which is never handed out; `tier` keeps what is evicted.

        `reaches`: see `CacheGroups.reaches`.
        """
        self.tier = tier
        self.total = num_blocks - 1
        self.free = self.total
        self.reserved = 0
        self.cache = PrefixCache(block_size, reaches)
        self.sharers = np.zeros(num_blocks, np.int32)
        """Of each block in use, the rows and pending releases that have it, besides the first."""
        # The stack's top is its end: low numbers come first, and what was given back last is taken first.
        self._stack = np.arange(num_blocks - 1, DUMMY_BLOCK, -1, dtype=np.int32)
        self._blank = self.total

    @property
    def available(self) -> int:
        """Blocks that nobody has and nobody was promised."""
        return self.free - self.reserved

    def reserve(self, count: int) -> None:
        """Promise `count` of the available blocks."""
        if count > self.available:
            raise RuntimeError(f"{counted(count, 'block')} to reserve, {self.available} available")
        self.reserved += count

    def unreserve(self, count: int) -> None:
        """Take back a promise of `count` blocks."""
        if count > self.reserved:
            raise RuntimeError(f"{counted(count, 'block')} to unreserve, {self.reserved} reserved")
        self.reserved -= count

    def take(self, count: int) -> np.ndarray:
        """Hand out `count` available blocks, int32 [count], a copy; what they held is forgotten.

        NOTE: steps in flight may still read a block that was idle, or that was given back in this very plan since it
        slid out of a window, or its sample was preempted.
        They are on the compute stream, and so is the step that writes it next.
        """
        if count > self.available:
            raise RuntimeError(f"{counted(count, 'block')} to take, {self.available} available")
        if count > self._blank:
            evicted = self.cache.evict(count - self._blank)
            if self.tier is not None:
                self.tier.rescue(evicted)
            self._push([block for _, block in evicted])
        self._blank -= count
        self.free -= count
        return self._stack[self._blank : self._blank + count].copy()

    def take_reserved(self, count: int) -> np.ndarray:
        """Hand out `count` blocks that were reserved, int32 [count]."""
        self.unreserve(count)
        return self.take(count)

    def share(self, run: BlockRun) -> None:
        """Hand out what is known on the device of `run` to one more row that only reads it."""
        here = run.blocks != DUMMY_BLOCK
        was_idle = np.array(self.cache.use([key for key, found in zip(run.keys, here, strict=True) if found]), bool)
        self.free -= int(np.count_nonzero(was_idle))
        self.sharers[run.blocks[here][~was_idle]] += 1

    def share_used(self, blocks: np.ndarray) -> None:
        """Hand out `blocks` of a running row, int32 [n], to one more row that only reads them."""
        self.sharers[blocks] += 1

    def give(self, blocks: np.ndarray, keys: Sequence[bytes] = ()) -> None:
        """Take back blocks of a row, int32 [n], of which the first are published under `keys`."""
        published = len(keys)
        unused = self.sharers[blocks] == 0
        count = int(np.count_nonzero(unused))
        self._count_in(count)
        self.sharers[blocks[~unused]] -= 1
        if published:
            self._push(self.cache.retire(keys, blocks[:published].tolist(), unused[:published].tolist()))
        self._push(blocks[published:][unused[published:]])

    def give_runs(self, runs: Sequence[BlockRun]) -> None:
        """Take back the blocks of many rows; as `give` of one run after the other.

        NOTE: most often nobody shares any of them, and then numpy is asked about all of them together.
        """
        every = np.concatenate([run.blocks for run in runs])
        if np.count_nonzero(self.sharers[every]):
            for run in runs:
                self.give(*run)
            return
        self._count_in(len(every))
        spare: list[int] = []
        for blocks, keys in runs:
            numbers = blocks.tolist()
            if published := len(keys):
                spare += self.cache.retire(keys, numbers[:published], [True] * published)
            spare += numbers[published:]
        self._push(spare)

    def _count_in(self, count: int) -> None:
        """Count blocks that are given back."""
        if self.free + count > self.total:
            raise RuntimeError(f"{count} blocks given back, but only {self.total - self.free} are out")
        self.free += count

    def give_blank(self, blocks: np.ndarray) -> None:
        """Take back blocks, int32 [n], which nobody shares and nobody may find."""
        self.free += len(blocks)
        self._push(blocks)

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
        self._stack[self._blank : self._blank + len(blocks)] = blocks
        self._blank += len(blocks)

    def free_blocks(self) -> np.ndarray:
        """The free blocks, blank and idle, int32 [free], a copy."""
        return np.concatenate([self._stack[: self._blank], np.array(self.cache.idle_blocks(), np.int32)])
