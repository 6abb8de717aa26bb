"""What steps do with ledgers: open them, edit logits by them, enter tokens.

`LedgerOps` is the interface; the plain PyTorch form, for the CPU, is here, the Triton one in `ledger_triton.py`.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from .batch import HEADER_WORDS, LEDGERS_AT

# Places of the words of a ledger record's header; behind it lie the sections that it counts.
WORDS, LEDGER, TOKENS, PROMPT_TOKENS, RESTRICTED, BIASES, SEQUENCES, SEQUENCE_TOKENS = range(8)
LEDGER_HEADER_WORDS = 8

SEEN, OUTPUT = 1, 2
"""What a count grows by: a token of the prompt sets the lowest bit, one of the output adds to the bits above it."""


class Ledgers(Protocol):
    """The ledgers; shapes and dtypes as at `device.ledgers.Ledgers`."""

    counts: torch.Tensor
    biases: torch.Tensor
    history: torch.Tensor
    num_sequences: torch.Tensor
    sequence_ends: torch.Tensor
    sequence_tokens: torch.Tensor


class Rows(Protocol):
    """What of the row state they read; shapes and dtypes as at `device.batch_state.BatchState`."""

    ledger: torch.Tensor
    length: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor
    ngram_size: torch.Tensor


class LedgerOps(Protocol):
    """The operations, all on the compute stream. `logits` are float32 [S, V], `row_ids` int32 [S].

    A row without a ledger is left alone. Barring adds -inf, so that a logit that was NaN or +inf stays an error.
    """

    def open(self, words: torch.Tensor, count: int) -> None:
        """Write the first `count` ledgers of a slot's input (`words`, int32) anew."""

    def add_biases(self, logits: torch.Tensor, row_ids: torch.Tensor) -> None:
        """Add biases; bar what is not allowed."""

    def penalize(self, logits: torch.Tensor, row_ids: torch.Tensor) -> None:
        """Divide positive logits of tokens in prompt or output by the repetition penalty, multiply negative ones.

        Then take frequency penalty * count and, where the count is not 0, the presence penalty away; counts are those
        of the output.
        """

    def bar_ngrams(self, logits: torch.Tensor, row_ids: torch.Tensor) -> None:
        """Bar each token that would complete an n-gram which prompt and output hold already."""

    def bar_sequences(self, logits: torch.Tensor, row_ids: torch.Tensor) -> None:
        """Bar the last token of each sequence whose other tokens end prompt and output."""

    def enter(self, tokens: torch.Tensor, row_ids: torch.Tensor) -> None:
        """Enter the tokens that were sampled, int32 [S], each behind the row's `length` tokens."""


class TorchLedgerOps:
    """The operations in plain PyTorch, for tensors on the CPU."""

    def __init__(self, ledgers: Ledgers, rows: Rows) -> None:
        self.ledgers = ledgers
        self.rows = rows

    def open(self, words: torch.Tensor, count: int) -> None:
        at = int(words[:HEADER_WORDS][LEDGERS_AT])
        for _ in range(count):
            header = words[at : at + LEDGER_HEADER_WORDS].tolist()
            self._open(header, words[at + LEDGER_HEADER_WORDS : at + header[WORDS]])
            at += header[WORDS]

    def _open(self, header: list[int], body: torch.Tensor) -> None:
        ledgers, ledger, biases, sequences = self.ledgers, header[LEDGER], header[BIASES], header[SEQUENCES]
        sizes = [header[TOKENS], biases, biases, sequences, header[SEQUENCE_TOKENS]]
        tokens, bias_ids, bias_bits, ends, sequence_tokens = body.split(sizes)
        prompt, output = tokens[: header[PROMPT_TOKENS]].long(), tokens[header[PROMPT_TOKENS] :].long()
        ledgers.counts[ledger] = OUTPUT * output.bincount(minlength=ledgers.counts.shape[1])
        ledgers.counts[ledger, prompt.unique()] += SEEN
        ledgers.biases[ledger] = -math.inf if header[RESTRICTED] else 0.0
        ledgers.biases[ledger, bias_ids.long()] = bias_bits.view(torch.float32)
        ledgers.history[ledger, : len(tokens)] = tokens
        ledgers.num_sequences[ledger] = sequences
        ledgers.sequence_ends[ledger, :sequences] = ends
        ledgers.sequence_tokens[ledger, : len(sequence_tokens)] = sequence_tokens

    def add_biases(self, logits: torch.Tensor, row_ids: torch.Tensor) -> None:
        place, ledger = self._holders(row_ids)
        logits[place] += self.ledgers.biases[ledger]

    def penalize(self, logits: torch.Tensor, row_ids: torch.Tensor) -> None:
        place, ledger = self._holders(row_ids)
        row, counts = row_ids[place], self.ledgers.counts[ledger]
        repetition, frequency, presence = (
            column[row][:, None] for column in (self.rows.repetition, self.rows.frequency, self.rows.presence)
        )
        x = logits[place]
        x = torch.where(counts > 0, torch.where(x < 0, x * repetition, x / repetition), x)
        x = x - frequency * (counts // OUTPUT)
        logits[place] = x - presence * (counts >= OUTPUT)

    def bar_ngrams(self, logits: torch.Tensor, row_ids: torch.Tensor) -> None:
        for place, ledger in zip(*self._listed(row_ids), strict=True):
            size = int(self.rows.ngram_size[row_ids[place]])
            tokens = self._tokens(ledger, row_ids[place])
            if 0 < size <= len(tokens):
                ngrams = tokens.unfold(0, size, 1)
                repeated = (ngrams[:, :-1] == tokens[len(tokens) - size + 1 :]).all(1)
                logits[place, ngrams[repeated, -1].long()] += -math.inf

    def bar_sequences(self, logits: torch.Tensor, row_ids: torch.Tensor) -> None:
        for place, ledger in zip(*self._listed(row_ids), strict=True):
            tokens, start = self._tokens(ledger, row_ids[place]), 0
            for end in self.ledgers.sequence_ends[ledger, : self.ledgers.num_sequences[ledger]].tolist():
                sequence, start = self.ledgers.sequence_tokens[ledger, start:end], end
                if len(sequence) - 1 <= len(tokens) and sequence[:-1].equal(tokens[len(tokens) - len(sequence) + 1 :]):
                    logits[place, int(sequence[-1])] += -math.inf

    def enter(self, tokens: torch.Tensor, row_ids: torch.Tensor) -> None:
        place, ledger = self._holders(row_ids)
        sampled = tokens[place].long()
        self.ledgers.history[ledger, self.rows.length[row_ids[place]].long()] = tokens[place]
        self.ledgers.counts[ledger, sampled] += OUTPUT

    def _holders(self, row_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The places of the rows that have a ledger, and their ledgers, int64."""
        ledger = self.rows.ledger[row_ids].long()
        place = (ledger >= 0).nonzero().squeeze(1)
        return place, ledger[place]

    def _listed(self, row_ids: torch.Tensor) -> tuple[list[int], list[int]]:
        place, ledger = self._holders(row_ids)
        return place.tolist(), ledger.tolist()

    def _tokens(self, ledger: int, row: torch.Tensor) -> torch.Tensor:
        return self.ledgers.history[ledger, : self.rows.length[row]]
