"""The plan: an immutable description of one step, and the step's output as the CPU reads it.

Plans hold numpy arrays and ints only and can be pickled, so another process can be sent one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntFlag

import numpy as np

from .logprob_record import NO_RECORDS
from .sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_IDS

DUMMY_BLOCK = 0
"""The block that padding and dead rows read and write; no sample ever owns it."""

ROW_RECORD = np.dtype(
    [
        ("row", np.int32),
        ("done", np.int32),  # 1: dead, writes no KV and yields no token
        ("last_token", np.int32),  # what carry-over puts into the next step's input ids
        ("length", np.int32),  # launched positions: KV positions that the queued steps fill
        ("outputs", np.int32),  # tokens sampled so far; the output index of the next one
        ("min_outputs", np.int32),  # stop ids are masked while outputs < min_outputs
        ("max_outputs", np.int32),  # the row is done when outputs reaches it
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed_low", np.uint32),
        ("seed_high", np.uint32),
        ("typical_p", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("ngram_size", np.int32),  # 0 is off
        ("ledger", np.int32),  # -1 without one
        ("logprobs", np.int32),  # of output tokens: 0 for none, or 1 + how many of the most likely
        ("prompt_logprobs", np.int32),  # the same of prompt tokens
        ("stop_ids", np.int32, MAX_STOP_IDS),  # -1 where unused
    ]
)
"""A row that joins, as one record of 4-byte words: the row number, then one word per field of the row state."""


LEDGER_HEADER = np.dtype(
    [
        ("words", np.int32),  # of the whole record
        ("ledger", np.int32),
        ("tokens", np.int32),  # known so far, prompt and output
        ("prompt_tokens", np.int32),
        ("restricted", np.int32),  # 1: tokens without a bias cannot be sampled
        ("biases", np.int32),
        ("sequences", np.int32),  # bad words of several tokens
        ("sequence_tokens", np.int32),  # of all of them
    ]
)
"""A ledger that opens, as a record of 4-byte words: this header, and behind it the token ids, the ids of the biases,
the biases (float32), the end of each sequence among the tokens of all sequences, and these tokens."""


def max_ledger_words(max_step_tokens: int, max_model_len: int, vocab_size: int) -> int:
    """Most words of the ledgers that open in one plan: enough for any one, and for many; it bounds a slot's input."""
    any_one = LEDGER_HEADER.itemsize // 4 + max_model_len + 2 * vocab_size + MAX_BAD_WORDS + MAX_BAD_WORD_TOKENS
    return any_one + 4 * max_step_tokens


def max_shared_blocks(max_step_tokens: int, max_model_len: int, block_size: int) -> int:
    """Most blocks, times the groups, that the rows which join in one plan may take from the prefix cache.

    Enough for any one row, and for many; it bounds the size of a slot's input.
    """
    return -(-max_model_len // block_size) + 4 * max_step_tokens


class Feature(IntFlag):
    """What the rows of a batch ask for beyond the common case: each costs a step kernels of its own."""

    BIAS = 1  # logit_bias, allowed_token_ids, bad words of one token
    PENALTIES = 2  # presence, frequency and repetition penalty
    NGRAMS = 4  # no_repeat_ngram_size
    BAD_WORDS = 8  # bad words of several tokens
    TYPICAL = 16  # typical_p
    HELD = 32  # the step has two parts, see `Plan.held`
    LOGPROBS = 64  # logprobs, best_of


NO_FEATURES = Feature(0)
LEDGER_FEATURES = Feature.BIAS | Feature.PENALTIES | Feature.NGRAMS | Feature.BAD_WORDS
"""Those for which a row needs a ledger."""

NO_LEDGER = -1
"""The ledger of a row that has none."""


NO_LEDGERS = np.empty(0, np.int32)
NO_LEDGERS.flags.writeable = False

NO_COPIES = np.empty((0, 2), np.int32)
NO_COPIES.flags.writeable = False

NO_POSITIONS = np.empty(0, np.int32)
NO_POSITIONS.flags.writeable = False

NO_SCORES = np.empty((0, 3), np.int32)
NO_SCORES.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. The tokens of a step are those of its lanes, one each, then those of its prompt chunks.

    The sampled tokens come out in the order: lanes, then the chunks that end their row's prompt.

    Attributes:
        step: number of the step; steps are launched and committed in this order.
        lane_rows: the row behind each lane in use, int32 [L].
        chunks: prompt chunks, int32 [C, 4]: row, first position, tokens, 1 if the row samples after it (else 0).
        prompt_tokens: token ids of the chunks, one after the other, int32 [sum of chunk tokens].
        joins: rows that join the batch, `ROW_RECORD` [J].
        block_deltas: blocks added, int32 [B, 4]: group, row, index in the row's table, block.
        lane_deltas: lanes changed, int32 [M, 2]: lane, row (the dummy row for a lane that is no longer in use).
        ledgers: ledgers of joining rows, int32 [sum of their words], one record behind the other, see `LEDGER_HEADER`.
        features: what the rows with a part in steps ask for, all together; most often nothing.
        block_copies: blocks copied in all layers before anything is written, int32 [K, 2]: source, target. Targets
            differ from each other and from all sources. Only rows with a chunk in this step get copies.
        held: sampled positions that wait for the second part of the step, int32 [H], ascending; most often none.
        scores: prompt positions whose next token is scored, int32 [Q, 3]: row, place of the position among the tokens
            of the step, next token. At most `MAX_SCORES`.
        saves: blocks copied to the host before anything is written to them, in all groups, int32 [K, 2]: block, slot.
        loads: blocks copied from the host, int32 [K, 2]: slot, block. See `cache.host_tier.HostTier`.
        after: the step is held back until the transfer (saves and loads) of the plan of this number is done; -1 for
            none. It may be its own.
    """

    step: int
    lane_rows: np.ndarray
    chunks: np.ndarray
    prompt_tokens: np.ndarray
    joins: np.ndarray
    block_deltas: np.ndarray
    lane_deltas: np.ndarray
    ledgers: np.ndarray = field(default_factory=lambda: NO_LEDGERS)
    features: Feature = NO_FEATURES
    block_copies: np.ndarray = field(default_factory=lambda: NO_COPIES)
    held: np.ndarray = field(default_factory=lambda: NO_POSITIONS)
    scores: np.ndarray = field(default_factory=lambda: NO_SCORES)
    saves: np.ndarray = field(default_factory=lambda: NO_COPIES)
    loads: np.ndarray = field(default_factory=lambda: NO_COPIES)
    after: int = -1

    @property
    def num_lanes(self) -> int:
        return len(self.lane_rows)

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass runs over."""
        return len(self.lane_rows) + len(self.prompt_tokens)

    @property
    def num_ledgers(self) -> int:
        """Ledgers that open."""
        return int(np.count_nonzero(self.joins["ledger"] != NO_LEDGER)) if len(self.ledgers) else 0

    def sampled_rows(self) -> np.ndarray:
        """The rows of the sampled positions, int32 [S], in the order of their outputs."""
        return np.concatenate([self.lane_rows, self.sampling_chunks()[:, 0]]) if len(self.chunks) else self.lane_rows

    def sampling_chunks(self) -> np.ndarray:
        """The chunks that sample, int32 [S, 4], in the order of their outputs."""
        return self.chunks[self.chunks[:, 3] == 1] if len(self.chunks) else self.chunks


class Flag(IntFlag):
    """What the device says of one sampled position."""

    TOKEN = 1  # a token was sampled for a living row
    STOP = 2  # it is one of the row's stop ids
    LENGTH = 4  # it is the last one that the row may have
    ERROR = 8  # the logits had a NaN, an infinity, or nothing to sample; no token


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gave, in the order stated at `Plan`.

    Attributes:
        tokens: int32 [S].
        flags: int32 [S], see `Flag`; 0 for a dead row.
        records: of the sampled positions, `LOGPROB_RECORD` [S], anything where the row did not ask; none if no row did.
        scores: of the scored positions, `LOGPROB_RECORD` [Q].
    """

    tokens: np.ndarray
    flags: np.ndarray
    records: np.ndarray = field(default_factory=lambda: NO_RECORDS)
    scores: np.ndarray = field(default_factory=lambda: NO_RECORDS)
