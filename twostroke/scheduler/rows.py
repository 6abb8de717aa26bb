"""The row table: what the CPU knows of the samples that have a row, as arrays with one element per row."""

from __future__ import annotations

import time

import numpy as np

from ..cache.host_tier import NO_TRANSFER
from ..logprob_record import NO_RECORDS
from ..plan import NO_LEDGER, Flag, Plan, StepOutput
from ..request import Sample, SampleState
from .features import FeatureCounts

NO_TOKENS = np.empty(0, np.int32)
NO_TOKENS.flags.writeable = False

_TOKEN = int(Flag.TOKEN)


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

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, num_groups: int, num_ledgers: int) -> None:
        self.block_size = block_size
        self.running = 0
        self.features = FeatureCounts()
        """What the running rows ask for."""
        # NOTE: np.empty, since the pages of rows and positions that are never used then cost no memory.
        self.tokens = np.empty((num_rows, max_model_len), np.int32)
        self._flat_tokens = self.tokens.reshape(-1)
        self.blocks = np.empty((num_groups, num_rows, -(-max_model_len // block_size)), np.int32)
        self._flat_blocks = self.blocks.reshape(num_groups, -1)
        self.held = np.zeros(num_rows, np.int64)
        """Blocks of each group that the row has."""
        self.reserved = np.zeros(num_rows, np.int64)
        """Blocks of each group that it was promised for the rest of its prefill."""
        self.launched = np.zeros(num_rows, np.int64)
        self.confirmed = np.zeros(num_rows, np.int64)
        self.target = np.zeros(num_rows, np.int64)
        self.limit = np.zeros(num_rows, np.int64)
        self.event_at = np.zeros(num_rows, np.int64)
        """The `launched` at which a decoding row reaches its limit or the edge of its last block."""
        self.shared = np.zeros(num_rows, np.int64)
        """Positions that the row found computed."""
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

    def add_blocks(self, rows: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Append one block of each group to each of `rows`.

        Args:
            rows: intp [K], each at most once.
            blocks: int32 [G, K].

        Returns:
            The block deltas, int32 [G * K, 4]: group, row, index, block.
        """
        index = self.held[rows]
        places = rows * self.blocks.shape[2] + index
        for table, own in zip(self._flat_blocks, blocks, strict=True):
            table[places] = own
        self.held[rows] = index + 1
        self.event_at[rows] = np.minimum((index + 1) * self.block_size, self.limit[rows])
        return _block_deltas(rows, index, blocks)

    def extend_blocks(self, row: int, blocks: np.ndarray) -> np.ndarray:
        """Append `blocks`, int32 [G, n], to `row`, out of its reservation; returns the block deltas."""
        held, count = int(self.held[row]), blocks.shape[1]
        self.blocks[:, row, held : held + count] = blocks
        self.held[row] = held + count
        self.reserved[row] -= count
        self.event_at[row] = min((held + count) * self.block_size, int(self.limit[row]))
        return _block_deltas(np.intp(row), np.arange(held, held + count), blocks)

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

    def pop_blocks(self, row: int) -> np.ndarray:
        """Take all blocks from `row` and return them, int32 [G, n]."""
        blocks = self.blocks[:, row, : self.held[row]].copy()
        self.held[row] = 0
        return blocks

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


def _block_deltas(rows: np.ndarray | np.intp, index: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    groups, count = blocks.shape
    deltas = np.empty((groups, count, 4), np.int32)
    deltas[:, :, 0] = np.arange(groups)[:, None]
    deltas[:, :, 1] = rows
    deltas[:, :, 2] = index
    deltas[:, :, 3] = blocks
    return deltas.reshape(-1, 4)
