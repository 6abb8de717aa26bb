"""The draft: what a plan under construction carries so far."""

from __future__ import annotations

import numpy as np

from ..cache.host_tier import NO_TRANSFER
from ..plan import NO_COPIES, NO_LEDGER, NO_LEDGERS, NO_SCORES, ROW_RECORD, Feature, Plan
from ..request import Sample
from .joins import Join, row_records
from .ledgers import ledger_record
from .rows import NO_TOKENS


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


NO_CHUNKS = _frozen(np.empty((0, 4), np.int32))
NO_JOINS = _frozen(np.empty(0, ROW_RECORD))
NO_BLOCKS = _frozen(np.empty((0, 4), np.int32))


class Draft:
    """Collects joins, prompt chunks and block deltas, and turns them into an immutable plan."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.shared_blocks = 0
        self.ledger_words = 0
        self._ledgers: list[np.ndarray] = []
        self.num_scores = 0
        self._joins: list[Join] = []
        self._chunks: list[tuple[int, int, int, int]] = []
        self._pieces: list[np.ndarray] = []
        self._block_deltas: list[np.ndarray] = []
        self._copies: list[tuple[int, int]] = []
        self._scores: list[np.ndarray] = []
        self._after = NO_TRANSFER

    def hold_back(self, transfer: int) -> None:
        """Run the step after `transfer`, if that is one."""
        self._after = max(self._after, transfer)

    def add_join(self, row: int, sample: Sample, length: int, ledger: int) -> None:
        self.add_row(row, sample, len(sample.tokens), length, ledger)
        if ledger != NO_LEDGER:
            self._ledgers.append(ledger_record(ledger, sample))
            self.ledger_words += len(self._ledgers[-1])

    def add_row(self, row: int, sample: Sample, known: int, length: int, ledger: int = NO_LEDGER) -> None:
        """Let the device know that `row` has `known` tokens, and `length` positions: more than it has sampled."""
        self._joins.append(Join.of(row, sample, known, length, ledger))

    def add_shared_blocks(self, deltas: np.ndarray) -> None:
        """Add the deltas of blocks that a joining row shares, or gets from the host."""
        self.shared_blocks += len(deltas)
        self._block_deltas.append(deltas)

    def add_blocks(self, deltas: np.ndarray) -> None:
        self._block_deltas.append(deltas)

    def add_copy(self, source: int, target: int) -> None:
        """Copy block `source` to `target`, in all layers, before the step's tokens."""
        self._copies.append((source, target))

    def add_chunk(self, row: int, start: int, tokens: np.ndarray, *, samples: bool) -> None:
        """Add the chunk of `row` that begins at position `start`; the tokens are copied when the plan is made."""
        self._chunks.append((row, start, len(tokens), int(samples)))
        self._pieces.append(tokens)
        self.prompt_tokens += len(tokens)

    def sampling_rows(self) -> np.ndarray:
        """The rows of the chunks that sample, intp [S], in the order of their outputs."""
        return np.array([row for row, _, _, samples in self._chunks if samples], np.intp)

    def add_scores(self, row: int, offset: int, targets: np.ndarray) -> None:
        """Score `targets`, int32 [n], at the positions from the `offset`-th of the chunk that is added next."""
        scores = np.empty((len(targets), 3), np.int32)
        scores[:, 0], scores[:, 2] = row, targets
        scores[:, 1] = np.arange(len(targets)) + self.prompt_tokens + offset
        self._scores.append(scores)
        self.num_scores += len(targets)

    def plan(
        self,
        step: int,
        lane_rows: np.ndarray,
        lane_deltas: np.ndarray,
        features: Feature,
        held: np.ndarray,
        transfer: tuple[np.ndarray, np.ndarray] = (NO_COPIES, NO_COPIES),
    ) -> Plan:
        """The plan of `step`, which owns all its arrays. `transfer`: its saves and loads."""
        return Plan(
            step=step,
            lane_rows=lane_rows,
            chunks=_frozen(np.array(self._chunks, np.int32)) if self._chunks else NO_CHUNKS,
            prompt_tokens=_joined(self._pieces, NO_TOKENS),
            joins=row_records(self._joins) if self._joins else NO_JOINS,
            block_deltas=_joined(self._block_deltas, NO_BLOCKS),
            lane_deltas=lane_deltas,
            ledgers=_joined(self._ledgers, NO_LEDGERS),
            features=features,
            block_copies=_frozen(np.array(self._copies, np.int32)) if self._copies else NO_COPIES,
            held=held,
            scores=_joined([scores + np.array([0, len(lane_rows), 0], np.int32) for scores in self._scores], NO_SCORES),
            saves=transfer[0],
            loads=transfer[1],
            after=self._after,
        )


def _joined(pieces: list[np.ndarray], empty: np.ndarray) -> np.ndarray:
    return _frozen(np.concatenate(pieces)) if pieces else empty
