"""The host tier: which blocks lie in host memory, and which copies to and from there a plan carries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from ..plan import NO_COPIES
from .copy_costs import CopyCosts
from .host_slots import HostSlots
from .prefix_cache import PrefixCache

NO_TRANSFER = -1
"""Older than any transfer."""


class Link(Protocol):
    """Who makes the copies."""

    def poll(self) -> Iterable[tuple[int, int, float, int, float]]:
        """The transfers that were done since the last call, oldest first; never waits.

        Of each the step whose plan carried it, the blocks that it saved, the seconds that took, and both of loads.
        """


class HostTier:
    """The second tier of the prefix cache: known blocks go to *host slots* before they are evicted from the device.

        device   in use --> idle --> ready --> blank          ready: the next to be evicted, and saved by then
                                       | save                 (`PrefixCache.make_ready`)
        host                           v
                                     slot ---- load ----> a block of the row that is admitted

    A preempted sample is no special case: what it has computed is known, becomes idle, is saved before anybody else
    writes there, and found again when the sample is admitted. The copies of a plan are one *transfer*, which has the
    number of its step. All transfers run in this order on one stream of their own, so host slots need no care: a slot
    is written again behind whoever reads it. Of a transfer, saves come first.

    Blocks do need care, since steps use them on another stream. A step is held back, on the device, until a transfer
    is done that

        saves what is in a block which the step's rows were given to write       (`newest`)
        loads what the step's rows read                                          (`arrival`)

    and a transfer with loads waits for the steps launched before. A row whose blocks are on their way sits steps out as
    long as there is anything else to run, so the wait is seldom one. The host never waits.

    Of full slots the one used last longest ago is overwritten, but not what preempted samples await: who took their
    place is evicted for them in turn, and would push it out. A chain is saved from its end to its beginning, so no
    block goes before those that follow it.

    Args:
        num_slots: blocks that the host has room for. num_blocks: those of the device.
        ahead: free blocks of the device that should be blank or ready when a step is planned.
        costs: whether copies pay.
        link: who makes them.

    Attributes:
        offloaded, returned: blocks saved and loaded, since the start.
        slots: what lies on the host; who was preempted keeps its blocks there.
    """

    def __init__(self, num_slots: int, num_blocks: int, ahead: int, costs: CopyCosts, link: Link) -> None:
        self.num_slots = num_slots
        self.costs = costs
        self.slots = HostSlots(num_slots)
        self.offloaded = self.returned = 0
        self._ahead = ahead
        self._link = link
        self._touched = np.full(num_blocks, NO_TRANSFER, np.int64)
        self._loaded = np.full(num_blocks, NO_TRANSFER, np.int64)
        self._done = self._step = NO_TRANSFER
        self._fixed: set[int] = set()  # slots that the plan under construction reads or writes
        self._saves: list[tuple[int, int]] = []
        self._loads: list[tuple[int, int]] = []

    @property
    def used(self) -> int:
        """Slots that hold something."""
        return len(self.slots)

    def begin(self, step: int) -> None:
        """Begin the plan of `step`."""
        for done, saved, saving, loaded, loading in self._link.poll():
            self._done = done
            if saved:
                self.costs.observe_saves(saved, saving)
            if loaded:
                self.costs.observe_loads(loaded, loading)
        self._step = step

    def has(self, digest: bytes) -> bool:
        """Whether the host has the block of that content."""
        return digest in self.slots

    def newest(self, blocks: np.ndarray) -> int:
        """The newest transfer in flight that touches one of `blocks`, int32 [n]: who writes to them waits for it."""
        return self._pending(self._touched[blocks])

    def arrival(self, blocks: np.ndarray) -> int:
        """The newest transfer in flight that loads one of `blocks`, int32 [n]: who reads them waits for it."""
        return self._pending(self._loaded[blocks])

    def is_done(self, transfer: int) -> bool:
        return transfer <= self._done

    def _pending(self, transfers: np.ndarray) -> int:
        newest = int(transfers.max(initial=NO_TRANSFER))
        return NO_TRANSFER if self.is_done(newest) else newest

    def fix(self, chain: Sequence[bytes]) -> None:
        """Keep what the host has of `chain` until the plan is made."""
        for digest in reversed(chain):
            self.slots.touch(digest)
            self._fixed.add(self.slots[digest])

    def load(self, chain: Sequence[bytes], blocks: np.ndarray) -> None:
        """Bring back `chain`, which is fixed, to `blocks`, int32 [n]."""
        self._loads += [(self.slots[digest], block) for digest, block in zip(chain, blocks.tolist(), strict=True)]
        self._touched[blocks] = self._loaded[blocks] = self._step
        self.returned += len(chain)

    def rescue(self, evicted: Sequence[tuple[bytes, int]]) -> None:
        """Save those of the evicted blocks, digests and numbers, that nobody has saved yet, if that pays.

        If it is but tried, those evicted last are saved: what comes before them in their chain is still known.
        """
        lost = [(digest, block) for digest, block in evicted if digest not in self.slots]
        if lost:
            for digest, block in lost[len(lost) - self.costs.worthwhile(len(lost), 2) :]:
                self._save(digest, block)

    def save_ahead(self, cache: PrefixCache, blank: int) -> None:
        """Save the idle blocks of `cache` that are evicted next, so many as can be copied beside the step."""
        missing = self._ahead - blank - cache.ready
        if missing <= 0 or cache.ready == cache.idle:
            return
        wanted = min(missing, self.costs.copies_per_step)
        for digest, block in cache.make_ready(self.costs.worthwhile(wanted, 2)):
            if digest in self.slots:
                self.slots.touch(digest)
            else:
                self._save(digest, block)

    def _save(self, digest: bytes, block: int) -> None:
        """Save a block, unless all slots are awaited, or in use by this very plan."""
        slot = self.slots.add(digest, self._fixed)
        if slot is None:
            return
        self._fixed.add(slot)
        self._saves.append((block, slot))
        self._touched[block] = self._step
        self.offloaded += 1

    def pop_transfer(self) -> tuple[np.ndarray, np.ndarray]:
        """The plan's saves, int32 [K, 2]: block, slot; and its loads, int32 [K, 2]: slot, block."""
        self._fixed.clear()
        saves, self._saves = _pairs(self._saves), []
        loads, self._loads = _pairs(self._loads), []
        return saves, loads

    def forget(self) -> None:
        """Forget what the host has; transfers in flight end as they are."""
        self.slots.clear()


def _pairs(pairs: list[tuple[int, int]]) -> np.ndarray:
    if not pairs:
        return NO_COPIES
    array = np.array(pairs, np.int32)
    array.flags.writeable = False
    return array
