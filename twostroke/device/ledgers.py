"""Ledgers: what the device knows of the rows whose sampling depends on their history or on lists of tokens."""

from __future__ import annotations

import torch

from ..plan import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS


class Ledgers:
    """A pool of ledgers; a row that needs one has its number in `BatchState.ledger`, and keeps it as long as the row.

    A ledger is written anew, from all tokens that its sample has so far, in the step in which its row joins, and from
    then on the device keeps it: a token is entered in the step that samples it. Only the compute stream touches it.

    Attributes:
        counts: int32 [N, V]: 2 * how often the output holds a token, + 1 if the prompt does.
        biases: float32 [N, V], added to the logits; -inf bars a token.
        history: int32 [N, M], token ids of prompt and output, as many as the row's length says.
        num_sequences: int32 [N], bad words of several tokens.
        sequence_ends: int32 [N, MAX_BAD_WORDS], where each of them ends among `sequence_tokens`.
        sequence_tokens: int32 [N, MAX_BAD_WORD_TOKENS].
    """

    def __init__(self, count: int, vocab_size: int, max_model_len: int, device: torch.device) -> None:
        # NOTE: torch.empty, since opening a ledger writes all of it that is read, and unused ones then take no memory
        # on the CPU.
        self.counts = torch.empty((count, vocab_size), dtype=torch.int32, device=device)
        self.biases = torch.empty((count, vocab_size), dtype=torch.float32, device=device)
        self.history = torch.empty((count, max_model_len), dtype=torch.int32, device=device)
        self.num_sequences = torch.zeros(count, dtype=torch.int32, device=device)
        self.sequence_ends = torch.zeros((count, MAX_BAD_WORDS), dtype=torch.int32, device=device)
        self.sequence_tokens = torch.zeros((count, MAX_BAD_WORD_TOKENS), dtype=torch.int32, device=device)


def ledger_bytes(vocab_size: int, max_model_len: int) -> int:
    """Bytes of one ledger."""
    return 4 * (2 * vocab_size + max_model_len + 1 + MAX_BAD_WORDS + MAX_BAD_WORD_TOKENS)
