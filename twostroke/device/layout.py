"""How a plan lies in a slot's input: a header, then eight sections packed one behind the other.

Only the words in use are copied, and a few more (`slot.py`): of a steady decode step the header. Block copies and
scores come first: where they are, the host must know, too.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch

from ..logprob_record import MAX_SCORES
from ..plan import ROW_RECORD, Plan, max_shared_blocks

HEADER_WORDS = 16
RECORD_WORDS = ROW_RECORD.itemsize // 4


class Header(IntEnum):
    """Places of the header's words. A section's `_AT` word is its offset in the input, in words."""

    NUM_LANES = 0
    NUM_CHUNKS = 1
    NUM_PROMPT_TOKENS = 2
    NUM_JOINS = 3
    NUM_BLOCK_DELTAS = 4
    NUM_LANE_DELTAS = 5
    JOINS_AT = 6
    BLOCK_DELTAS_AT = 7
    LANE_DELTAS_AT = 8
    CHUNKS_AT = 9
    PROMPT_TOKENS_AT = 10
    STEP = 11
    LEDGERS_AT = 12


def input_capacity(
    *,
    max_rows: int,
    max_step_tokens: int,
    max_model_len: int,
    block_size: int,
    num_groups: int,
    max_ledger_words: int = 0,
) -> int:
    """Return the words that the largest plan needs.

    A step can add a block to every lane, to every chunk one more than it fills, and to rows that join shared blocks and
    the copy of one.
    """
    blocks = 2 * max_rows + max_step_tokens // block_size + 1
    block_deltas = num_groups * (blocks + max_shared_blocks(max_step_tokens, max_model_len, block_size))
    lane_deltas = 2 * max_rows
    sections = (
        max_rows * (2 * num_groups + RECORD_WORDS) + 4 * block_deltas + 2 * lane_deltas + 4 * max_rows + max_step_tokens
    )
    return HEADER_WORDS + sections + max_ledger_words + 3 * MAX_SCORES


def pack(plan: Plan, words: np.ndarray) -> int:
    """Write `plan` into `words`, int32 [capacity], and return the number of words in use."""
    at = HEADER_WORDS
    for section in (plan.block_copies, plan.scores):
        if section.size:
            words[at : at + section.size] = section.reshape(-1)
            at += section.size
    offsets = []
    joins = plan.joins.view(np.int32) if len(plan.joins) else plan.joins
    for section in (joins, plan.block_deltas, plan.lane_deltas, plan.chunks, plan.prompt_tokens, plan.ledgers):
        offsets.append(at)
        if section.size:
            words[at : at + section.size] = section.reshape(-1)
            at += section.size
    words[:HEADER_WORDS] = (
        plan.num_lanes,
        len(plan.chunks),
        len(plan.prompt_tokens),
        len(plan.joins),
        len(plan.block_deltas),
        len(plan.lane_deltas),
        *offsets[:5],
        plan.step & 0x7FFFFFFF,
        offsets[5],
        0,
        0,
        0,
    )
    return at


def block_copies(words: torch.Tensor, count: int) -> torch.Tensor:
    """The block copies of a packed plan, int32 [count, 2], a view."""
    return words[HEADER_WORDS : HEADER_WORDS + 2 * count].view(count, 2)


def scores(words: torch.Tensor, copies: int, count: int) -> torch.Tensor:
    """The scores of a packed plan with so many block copies, int32 [count, 3], a view."""
    at = HEADER_WORDS + 2 * copies
    return words[at : at + 3 * count].view(count, 3)
