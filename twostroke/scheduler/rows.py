"""The row table: what the CPU knows of the samples that have a row, as arrays with one element per row."""

from __future__ import annotations

import time

import numpy as np

from ..cache.block_pool import BlockRun
from ..cache.host_tier import NO_TRANSFER
from ..cache.prefix_cache import keys_of
from ..cache_groups import CacheGroups
from ..logprob_record import NO_RECORDS
from ..plan import NO_LEDGER, Flag, Plan, StepOutput
from ..request import Sample, SampleState
from .features import FeatureCounts

NO_TOKENS = np.empty(0, np.int32)
NO_TOKENS.flags.writeable = False

_TOKEN = int(Flag.TOKEN)

_ONE = np.ones(1, np.int64)  # numpy takes less time for an array than to make one of a Python number


class RowTable:
    """One element per row, so that a step works on all rows with a few numpy calls.

    A row is free, or it is

        running   order >= 0, alive         its sample takes part in steps
        draining  order = -1, alive         its sample was preempted; steps in flight still bring it tokens
        dead      order = -1, not alive     its sample ended; steps in flight may still use the row

    Of a row with `launched` and `confirmed` positions:

        0 <= confirmed <= launched <= limit
        known tokens = max(target, confirmed + 1)

    `target` is the number of tokens known at admission: until `launched` reaches it, the row prefills. The step that
    computes position p gives the token with index p + 1, so the sample's last step computes position limit - 1.

    NOTE: a step writes to `tokens` and `blocks` with one flat index and contiguous values. With two indices, or strided
    values, numpy lets go of the interpreter's lock, and to get it back from a busy thread can take milliseconds.
    """

    def __init__(self, num_rows: int, max_model_len: int, groups: CacheGroups, num_ledgers: int) -> None:
        self.block_size = groups.block_size
        self.num_groups = len(groups.windows)
        reaches = groups.reaches()
        self.sliding = np.array([group for group, reach in enumerate(reaches) if reach is not None], np.int64)
        """Groups with a window."""
        self.num_full_groups = self.num_groups - len(self.sliding)
        self._reach = np.array([reaches[group] for group in self.sliding], np.int64)
        """Of each of them, how many blocks before its own a position may look into."""
        self._behind = self._reach[:, None] + 1
        """How far before the block that comes stands the one that slides out, int64 [S, 1]."""
        self._farthest = np.array([self._behind.max(initial=0) * self.block_size])
        """So many positions behind a prompt, what slides out at an edge of its row is output, in all of them."""
        self._spans = groups.spans()
        self.running = 0
        self.features = FeatureCounts()
        """What the running rows ask for."""
        # NOTE: np.empty, since the pages of rows and positions that are never used then cost no memory.
        self.tokens = np.empty((num_rows, max_model_len), np.int32)
        self._flat_tokens = self.tokens.reshape(-1)
        self.blocks = np.empty((self.num_groups, num_rows, -(-max_model_len // self.block_size)), np.int32)
        self._flat_blocks = self.blocks.reshape(-1)
        self._groups = np.arange(self.num_groups)[:, None]
        self._full_first = self._groups[[*np.flatnonzero([reach is None for reach in reaches]), *self.sliding]]
        """The groups in another order, int64 [G, 1]: those without a window, then those with one."""
        self._tables = self._full_first * num_rows
        """Of each group, in that order, the number of its first row's table, int64 [G, 1]; see `slide`."""
        self._sliding_tables = self._tables[self.num_full_groups :]
        self.first = np.zeros((self.num_groups, num_rows), np.int64)
        """Index of the first block of each group that the row has; those before it have slid out of the window."""
        self._flat_first = self.first.reshape(-1)
        self.held = np.zeros(num_rows, np.int64)
        """Index behind the last block that the row has, in all groups."""
        self.reserved = np.zeros(num_rows, np.int64)
        """Blocks that it was promised for the rest of its prefill."""
        self.launched = np.zeros(num_rows, np.int64)
        self.confirmed = np.zeros(num_rows, np.int64)
        self.target = np.zeros(num_rows, np.int64)
        self.limit = np.zeros(num_rows, np.int64)
        self.event_at = np.zeros(num_rows, np.int64)
        """The `launched` at which a decoding row reaches its limit or the edge of its last block."""
        self.shared = np.zeros(num_rows, np.int64)
        """Positions that the row found computed."""
        self.published = np.zeros(num_rows, np.int64)
        """So many of its first blocks are published, as far as the row has them."""
        self.arrival = np.full(num_rows, NO_TRANSFER, np.int64)
        """The transfer that brings blocks which the row found, and without which it cannot run."""
        self.publishes = np.zeros(num_rows, bool)
        """The row's blocks may be found by others."""
        self.order = np.full(num_rows, -1, np.int64)
        self.rank = np.zeros(num_rows)
        self.alive = np.zeros(num_rows, bool)
        self.streaming = np.zeros(num_rows, bool)
        self.samples = np.full(num_rows, None, object)
        self.free = list(range(num_rows - 1, -1, -1))
        self.ledger = np.full(num_rows, NO_LEDGER, np.int32)
        self.free_ledgers = list(range(num_ledgers - 1, -1, -1))

    def blocks_of(self, positions: int) -> int:
        """Blocks that so many positions need."""
        return -(-positions // self.block_size)

    def admit(self, sample: Sample, reserved: int, streaming: bool) -> int:
        """Give `sample` a free row, and return its number."""
        row = self.free.pop()
        target = len(sample.tokens)
        self.tokens[row, :target] = sample.tokens
        self.launched[row] = self.confirmed[row] = self.held[row] = 0
        self.shared[row] = self.published[row] = 0
        self.first[:, row] = 0
        self.arrival[row] = NO_TRANSFER
        self.target[row], self.reserved[row] = target, reserved
        self.limit[row] = sample.prompt_len + sample.request.max_tokens - 1
        self.order[row], self.rank[row], self.samples[row] = sample.order, sample.rank, sample
        self.alive[row], self.streaming[row] = True, streaming
        self.running += 1
        if sample.request.terms.needs_ledger:
            self.ledger[row] = self.free_ledgers.pop()
        self.features.add(sample.request.terms.features)
        sample.state = SampleState.RUNNING
        return row

    @property
    def ending(self) -> np.ndarray:
        """Which rows wait for their last token, bool [rows]."""
        return (self.launched == self.limit) & (self.order >= 0)

    def ranked(self, rows: np.ndarray) -> np.ndarray:
        """`rows`, intp [K], sorted by rank, and those of one rank by arrival."""
        return rows[np.lexsort((self.order[rows], self.rank[rows]))]

    def coming_ledgers(self) -> int:
        """Ledgers that are free, or will be once steps in flight are committed."""
        leaving = (self.order < 0) | self.ending
        return len(self.free_ledgers) + int(np.count_nonzero(leaving & (self.ledger != NO_LEDGER)))

    def begin_at(self, row: int, length: int, *, publishes: bool) -> None:
        """The row finds its first `length` positions computed; `publishes`: its blocks may be found by others."""
        self.launched[row] = self.confirmed[row] = self.shared[row] = length
        self.published[row] = length // self.block_size if publishes else 0
        self.publishes[row] = publishes

    def suspend(self, row: int) -> None:
        """The row takes part in no further step."""
        if self.order[row] >= 0:
            self.running -= 1
            self.features.remove(self.samples[row].request.terms.features)
        self.order[row], self.publishes[row] = -1, False

    def end(self, row: int) -> None:
        """Suspend the row, and let nobody see what steps in flight still give it."""
        self.suspend(row)
        self.alive[row] = self.streaming[row] = False
        self.samples[row] = None

    def free_row(self, row: int) -> None:
        """Return an ended row to the pool of rows, and its ledger to that of ledgers."""
        if self.ledger[row] != NO_LEDGER:
            self.free_ledgers.append(int(self.ledger[row]))
            self.ledger[row] = NO_LEDGER
        self.free.append(row)

    def roll(self, rows: np.ndarray) -> np.ndarray | None:
        """Take from `rows`, intp [K], all at the edge of their last block, the one block that slides out in each group.

        Returns:
            The blocks of the groups with a window, int32 [S * K], those of the first one first: whatever they hold,
            nobody shares it, nor may find it. None if a row slides off anything else, or nothing; see `slide` then.
        """
        if np.count_nonzero(self.launched[rows] - self._farthest < self.target[rows]):
            return None
        tables = (self._sliding_tables + rows).reshape(-1)
        leaving = (self.held[rows] - self._behind).reshape(-1)
        if np.count_nonzero(self._flat_first[tables] != leaving):
            return None
        self._flat_first[tables] = leaving + _ONE
        return self.blocks_at(tables, leaving)

    def add_blocks(self, rows: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Append one block of each group to each of `rows`.

        Args:
            rows: intp [K], each at most once.
            blocks: int32 [G * K], those for groups without a window first, then those for the others, group by group.

        Returns:
            The block deltas, int32 [G * K, 4]: group, row, index, block.
        """
        index = self.held[rows]
        self._flat_blocks[((self._tables + rows) * self.blocks.shape[2] + index).reshape(-1)] = blocks
        self.held[rows] = index + 1
        self.event_at[rows] = np.minimum((index + 1) * self.block_size, self.limit[rows])
        return _block_deltas(self._full_first, rows, index, blocks.reshape(self.num_groups, -1))

    def extend_blocks(self, row: int, blocks: np.ndarray) -> np.ndarray:
        """Append to `row` as many blocks of each group, int32 [G * n], those of the first group first.

        Returns the block deltas.
        """
        blocks = blocks.reshape(self.num_groups, -1)
        held, count = int(self.held[row]), blocks.shape[1]
        self.blocks[:, row, held : held + count] = blocks
        self._hold(row, held + count)
        return _block_deltas(self._groups, row, np.arange(held, held + count), blocks)

    def share_blocks(self, row: int, count: int, runs: list[BlockRun]) -> np.ndarray:
        """Let `row` begin with `count` blocks, of which it has the last ones: `runs` of each group.

        Returns the block deltas.
        """
        deltas = []
        for group, (blocks, _) in enumerate(runs):
            first = self.first[group, row] = count - len(blocks)
            self.blocks[group, row, first:count] = blocks
            deltas.append(_block_deltas(group, row, np.arange(first, count), blocks))
        self._hold(row, count)
        return np.concatenate(deltas)

    def _hold(self, row: int, count: int) -> None:
        self.held[row] = count
        self.event_at[row] = min(count * self.block_size, int(self.limit[row]))

    def firsts(self, count: int) -> list[int]:
        """Of each group, the first of `count` blocks that the position behind them may look into."""
        firsts = np.zeros(self.num_groups, np.int64)
        firsts[self.sliding] = np.maximum(count - self._reach, 0)
        return firsts.tolist()

    def slide(self, rows: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take from `rows`, intp [K], the blocks that `positions`, int64 [K], and those behind them do not look into.

        Returns:
            Of each of these blocks the table in which it stands, group * rows + row, and its index there: int64 [N].
        """
        tables = (self._sliding_tables + rows).reshape(-1)
        first = self._flat_first[tables]
        count = np.maximum((positions // self.block_size - self._reach[:, None]).reshape(-1) - first, 0)
        ends = count.cumsum()
        total = int(ends[-1]) if len(ends) else 0
        if not total:
            return tables[:0], first[:0]
        self._flat_first[tables] = first + count
        numbers = np.ones(total, np.int64).cumsum() - _ONE  # NOTE: np.arange would let go of the interpreter's lock.
        return tables.repeat(count), (first - ends + count).repeat(count) + numbers

    def blocks_at(self, tables: np.ndarray, index: np.ndarray) -> np.ndarray:
        """The blocks at so many places; the arguments as `slide` returns them. int32 [N]."""
        return self._flat_blocks[tables * self.blocks.shape[2] + index]

    def missing(self, row: int, end: int) -> int:
        """The most blocks more that a prefilling row will have at once, on its way to `end` blocks.

        What it shares does not count: it may not be free when it slides out of the window.
        """
        held, shared = int(self.held[row]), int(self.shared[row]) // self.block_size
        own = [held - max(int(first), shared) for first in self.first[:, row]]
        return sum(max(0, min(end - held, span - has)) for span, has in zip(self._spans, own, strict=True))

    def confirm(self, plan: Plan) -> np.ndarray:
        """Confirm the positions of `plan`; returns the rows that sampled, intp [S], in the order of the output."""
        lane_rows = plan.lane_rows.astype(np.intp)
        self.confirmed[lane_rows] += 1
        if not len(plan.chunks):
            return lane_rows
        self.confirmed[plan.chunks[:, 0]] += plan.chunks[:, 2]
        return np.concatenate([lane_rows, plan.sampling_chunks()[:, 0]])

    def write_tokens(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Write to each of `rows`, intp [S], the token after its confirmed positions."""
        self._flat_tokens[rows * self.tokens.shape[1] + self.confirmed[rows]] = tokens

    def streamed(self, rows: np.ndarray, output: StepOutput) -> tuple[list[Sample], np.ndarray, np.ndarray]:
        """Of the tokens of `rows`, intp [S], those that are handed over as they come: samples, tokens, records."""
        mask = self.streaming[rows]
        if not np.count_nonzero(mask):
            return [], NO_TOKENS, NO_RECORDS
        mask &= output.flags & _TOKEN != 0
        records = output.records[mask] if len(output.records) else NO_RECORDS
        return self.samples[rows[mask]].tolist(), output.tokens[mask], records

    def scored(self, plan: Plan, output: StepOutput) -> tuple[list[Sample], np.ndarray]:
        """The scored prompt positions of samples that have not ended: for each its sample and its record."""
        rows = plan.scores[:, 0]
        mask = self.alive[rows]
        return self.samples[rows[mask]].tolist(), output.scores[mask]

    def stamp_first_tokens(self, rows: np.ndarray) -> None:
        """Note the moment for those of `rows` whose samples had no token so far."""
        now = time.perf_counter()
        for sample in self.samples[rows].tolist():
            if sample is not None and sample.timings.first_token is None:
                sample.timings.first_token = now

    def own_blocks(self, row: int) -> np.ndarray:
        """All blocks that `row` has, int32 [N]."""
        held, firsts = self.held[row], self.first[:, row]
        return np.concatenate([table[row, first:held] for table, first in zip(self.blocks, firsts, strict=True)])

    def count_blocks(self, rows: np.ndarray) -> int:
        """How many blocks `rows`, bool [rows], have."""
        return self.num_groups * int(self.held[rows].sum()) - int(self.first[:, rows].sum())

    def pop_blocks(self, row: int, chain: list[bytes]) -> list[BlockRun]:
        """Take all blocks from `row` and return those of each group; the first of them are published: `chain`."""
        runs = []
        for group in range(self.num_groups):
            first = int(self.first[group, row])
            blocks = self.blocks[group, row, first : self.held[row]].copy()
            runs.append(BlockRun(blocks, keys_of(chain[first:], group)))
        self.first[:, row] = self.held[row] = self.published[row] = 0
        return runs

    def known_tokens(self, row: int) -> np.ndarray:
        """Prompt and confirmed output tokens of `row`, int32, a read-only copy."""
        return self.first_tokens(row, self.known(row))

    def known(self, row: int) -> int:
        """How many tokens of `row` are known."""
        return max(int(self.target[row]), int(self.confirmed[row]) + 1)

    def first_tokens(self, row: int, count: int) -> np.ndarray:
        """The first `count` tokens of `row`, int32, a read-only copy."""
        tokens = self.tokens[row, :count].copy()
        tokens.flags.writeable = False
        return tokens


def _block_deltas(group: np.ndarray | int, rows: np.ndarray | int, index: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    deltas = np.empty((*blocks.shape, 4), np.int32)
    deltas[..., 0] = group
    deltas[..., 1] = rows
    deltas[..., 2] = index
    deltas[..., 3] = blocks
    return deltas.reshape(-1, 4)
