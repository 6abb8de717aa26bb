"""Ledgers: what the device must know of a sample beyond its row, packed as words."""

from __future__ import annotations

import numpy as np

from ..plan import LEDGER_HEADER
from ..request import Sample


def ledger_words(sample: Sample) -> int:
    """Words of the record that opens the ledger of `sample`; 0 if it needs none."""
    terms = sample.request.terms
    if not terms.needs_ledger:
        return 0
    rules = terms.rules
    biases, sequences = len(rules.biases), rules.sequences
    return LEDGER_HEADER.itemsize // 4 + len(sample.tokens) + 2 * biases + len(sequences) + sum(map(len, sequences))


def ledger_record(ledger: int, sample: Sample) -> np.ndarray:
    """The record that opens `ledger` with all known tokens of `sample`, int32 [words], see `LEDGER_HEADER`."""
    rules = sample.request.terms.rules
    lengths = [len(sequence) for sequence in rules.sequences]
    header = np.zeros(1, LEDGER_HEADER)
    header["words"], header["ledger"] = ledger_words(sample), ledger
    header["tokens"], header["prompt_tokens"] = len(sample.tokens), sample.prompt_len
    header["restricted"], header["biases"] = rules.restricted, len(rules.biases)
    header["sequences"], header["sequence_tokens"] = len(lengths), sum(lengths)
    tokens = [token for sequence in rules.sequences for token in sequence]
    return np.concatenate(
        [
            header.view(np.int32),
            sample.tokens,
            rules.bias_ids,
            rules.biases.view(np.int32),
            np.cumsum(lengths, dtype=np.int32),
            np.array(tokens, np.int32),
        ]
    )
