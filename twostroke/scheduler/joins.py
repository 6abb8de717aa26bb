"""Joins: what the device is told of rows that join the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..plan import ROW_RECORD
from ..request import Sample
from ..terms import Terms


class Join(NamedTuple):
    """A row that joins: its terms, and the fields of its `ROW_RECORD` that are its own."""

    terms: Terms
    row: int
    length: int
    outputs: int
    max_outputs: int
    seed_low: int
    seed_high: int
    ledger: int

    @classmethod
    def of(cls, row: int, sample: Sample, known: int, length: int, ledger: int) -> Join:
        """That of a row with `known` tokens, whose first `length` positions are computed."""
        request, seed = sample.request, sample.seed
        outputs = known - sample.prompt_len
        return cls(request.terms, row, length, outputs, request.max_tokens, seed & 0xFFFFFFFF, seed >> 32, ledger)


def row_records(joins: Sequence[Join]) -> np.ndarray:
    """The device's state of the rows that join, `ROW_RECORD` [J].

    NOTE: what all rows of the same terms have in common is written once for them; of the rest a column at a time.
    """
    records = np.frombuffer(bytearray(b"".join(join.terms.row_record for join in joins)), ROW_RECORD)
    for name, column in zip(Join._fields[1:], np.array([join[1:] for join in joins], np.int64).T, strict=True):
        records[name] = column
    records.flags.writeable = False
    return records
