"""Prefixes: which of a sample's first blocks are taken from the cache, and which of a row's are put into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..cache.block_pool import BlockPool
from ..plan import Flag
from ..request import Sample
from .rows import RowTable

_TOKEN = int(Flag.TOKEN)


class Start(NamedTuple):
    """Where a sample that is admitted begins: what it need not compute.

    Attributes:
        positions: that it has; those in `blocks`, and in `copied`.
        blocks: full blocks that it shares. chain: their digests.
        source: the row whose blocks these are; None if the prefix cache knows them.
        copied: the block that it gets a copy of, which holds the positions behind `blocks`.
        returning: digests of the blocks behind `blocks` that come back from the host.
    """

    positions: int
    blocks: list[int]
    chain: Sequence[bytes]
    source: int | None = None
    copied: int | None = None
    returning: Sequence[bytes] = ()


class Prefixes:
    """Between the rows and the prefix cache.

    A row's full blocks are published twice in its life, each time as far as they are *vouched for*: the steps that
    computed them are committed, so their tokens are known, and a token was sampled after them from finite logits,
    which depend on all of them (with sliding windows only, on those within reach).

        commit of the step that gives the first token     the blocks of the prompt
        the row leaves: it ends, or is preempted          what it has decoded, too

    So a steady step has nothing to publish. A prompt's chunks are not vouched for before the last one is, and a row
    that ends with an error publishes nothing of what the step with the bad logits computed.

    Nothing is looked up before its sample is admitted: what was there earlier may be gone by then.

    Attributes:
        hit_tokens: tokens that admissions found in the cache, since the start. host_hit_tokens: those of them that came
            back from the host.
    """

    def __init__(self, rows: RowTable, pool: BlockPool, *, enabled: bool) -> None:
        self.hit_tokens = self.host_hit_tokens = 0
        self._rows = rows
        self._cache = pool.cache
        self._tier = pool.tier if enabled else None
        self._enabled = enabled

    def find(self, sample: Sample) -> Start:
        """Where a waiting sample begins with what the cache knows; at least its last token is left out.

        So are positions whose next token is to be scored.
        """
        size = self._rows.block_size
        blocks = self._cache.find(sample.chain, sample.tokens) if self._enabled else []
        end = self._find_on_host(sample, len(blocks))
        if sample.scored < sample.prompt_len - 1:
            end = min(end, sample.scored // size)
            blocks = blocks[:end]
        here = len(blocks)
        return Start(end * size, blocks, sample.chain[:here], returning=sample.chain[here:end])

    def _find_on_host(self, sample: Sample, index: int) -> int:
        """The number of first blocks that are known if `index` are on the device, and those behind may be on the host.

        If to bring them back pays.
        """
        tier, end = self._tier, index
        if tier is None:
            return index
        while self._cache.extend(sample.chain, sample.tokens, end) and tier.has(sample.chain[end]):
            end += 1
        return end if end > index and tier.costs.pays(1) else index

    def begin(self, row: int, sample: Sample, start: Start) -> None:
        """Let `row`, just admitted, begin at `start`."""
        if start.source is not None:
            self._rows.begin_at(row, start.positions, publishes=bool(self._rows.publishes[start.source]))
            sample.chain[:] = start.chain
        elif self._enabled:
            self._rows.begin_at(row, start.positions, publishes=True)
            self.hit_tokens += start.positions
            self.host_hit_tokens += len(start.returning) * self._rows.block_size
            if sample.timings.admitted is None:
                sample.cached_tokens = start.positions

    def publish_prompts(self, rows: np.ndarray, flags: np.ndarray) -> None:
        """Publish the prompts of `rows`, intp [S], which have sampled their first token."""
        for row, flag in zip(rows.tolist(), flags.tolist(), strict=True):
            if flag & _TOKEN:
                self.publish(row, bad=0)

    def publish(self, row: int, bad: int) -> list[bytes]:
        """Publish the vouched blocks of `row`, the last `bad` of its confirmed positions left out; return their chain.

        A row that must not publish has an empty chain.
        """
        rows = self._rows
        if not rows.publishes[row]:
            return []
        good = int(rows.confirmed[row]) - bad
        vouched = good if good >= rows.target[row] else int(rows.shared[row])
        count = vouched // rows.block_size
        chain: list[bytes] = rows.samples[row].chain
        self._cache.publish(chain, rows.tokens[row], rows.blocks[0, row, :count].tolist())
        return chain[:count]

    def stop(self) -> None:
        """Let no row that runs now publish anything more."""
        self._rows.publishes[:] = False
