"""Prefixes: which of a sample's first blocks are taken from the cache, and which of a row's are put into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..cache.block_pool import BlockPool, BlockRun
from ..cache.prefix_cache import Elsewhere, keys_of, nowhere
from ..plan import DUMMY_BLOCK, Flag
from ..request import Sample
from .rows import RowTable

_TOKEN = int(Flag.TOKEN)


class Start(NamedTuple):
    """Where a sample that is admitted begins: what it need not compute.

    Attributes:
        positions: that it has; those in full blocks, and in `copied`.
        runs: of each group, the full blocks that it shares: in one with a window only those within reach.
        chain: the digests of all full blocks.
        source: the row whose blocks these are; None if the prefix cache knows them.
        copied: of each group the block that it gets a copy of, which holds the positions behind the full ones; or none.
        returning: positions that it would not have without what comes back from the host.
    """

    positions: int
    runs: list[BlockRun]
    chain: Sequence[bytes]
    source: int | None = None
    copied: Sequence[int] = ()
    returning: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that it shares, or gets from the host, in all groups."""
        return sum(len(run.blocks) for run in self.runs)

    @property
    def num_returning(self) -> int:
        """Those of them that it gets from the host."""
        return sum(int(np.count_nonzero(run.blocks == DUMMY_BLOCK)) for run in self.runs) if self.returning else 0


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
        if not self._enabled:
            return self.nothing()
        size = self._rows.block_size
        most = (len(sample.tokens) - 1) // size
        if sample.scored < sample.prompt_len - 1:
            most = min(most, sample.scored // size)
        here = self._look(sample, most) if most else 0
        count = self._find_on_host(sample, most, here) if most else 0
        if not count:
            return self.nothing()
        chain = sample.chain[:count]
        keys = [keys_of(chain[first:], group) for group, first in enumerate(self._rows.firsts(count))]
        runs = [BlockRun(self._cache.blocks(each), each) for each in keys]
        return Start(count * size, runs, chain, returning=(count - here) * size)

    def _find_on_host(self, sample: Sample, most: int, here: int) -> int:
        """How many first blocks, `here` on the device, are known on device or host, as far as to bring back pays."""
        if self._tier is None or here == most:
            return here
        known = self._look(sample, most, self._tier.has)
        if known == here:
            return here
        few = self._tier.costs.worthwhile(known - here, 1)
        return known if few == known - here else self._look(sample, here + few, self._tier.has)

    def _look(self, sample: Sample, most: int, elsewhere: Elsewhere = nowhere) -> int:
        namespace = sample.request.terms.namespace
        return self._cache.find(sample.chain, sample.tokens, most, elsewhere, namespace=namespace)

    def nothing(self) -> Start:
        """Where a sample begins that computes everything."""
        return Start(0, [], [])

    def begin(self, row: int, sample: Sample, start: Start) -> None:
        """Let `row`, just admitted, begin at `start`."""
        if start.source is not None:
            self._rows.begin_at(row, start.positions, publishes=bool(self._rows.publishes[start.source]))
            sample.chain[:] = start.chain
        elif self._enabled:
            self._rows.begin_at(row, start.positions, publishes=True)
            self.hit_tokens += start.positions
            self.host_hit_tokens += start.returning
            if sample.timings.admitted is None:
                sample.cached_tokens = start.positions

    def publish_prompts(self, rows: np.ndarray, flags: np.ndarray) -> None:
        """Publish the prompts of `rows`, intp [S], which have sampled their first token."""
        for row, flag in zip(rows.tolist(), flags.tolist(), strict=True):
            if flag & _TOKEN:
                self.publish(row, bad=0)

    def publish(self, row: int, bad: int) -> list[bytes]:
        """Publish the vouched blocks of `row`, the last `bad` of its confirmed positions left out.

        Returns:
            The chain of what is published, now or before; a row that must not publish adds nothing to it.
        """
        rows = self._rows
        if rows.publishes[row]:
            good = int(rows.confirmed[row]) - bad
            vouched = good if good >= rows.target[row] else int(rows.shared[row])
            if vouched // rows.block_size > rows.published[row]:
                self._publish_blocks(row, vouched // rows.block_size)
        count = int(rows.published[row])
        return list(rows.samples[row].chain[:count]) if count else []

    def _publish_blocks(self, row: int, count: int) -> None:
        """Publish the first `count` blocks of `row`, as far as it has them."""
        rows, sample = self._rows, self._rows.samples[row]
        chain: list[bytes] = sample.chain
        self._cache.extend(chain, rows.tokens[row], count, namespace=sample.request.terms.namespace)
        for group, first in enumerate(rows.first[:, row].tolist()):
            keys = keys_of(chain[first:count], group)
            self._cache.publish(keys, rows.blocks[group, row, first : first + len(keys)].tolist())
        rows.published[row] = count

    def stop(self) -> None:
        """Let no row that runs now publish anything more."""
        self._rows.publishes[:] = False
        self._rows.published[:] = 0
