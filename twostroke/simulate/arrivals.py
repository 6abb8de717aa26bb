"""Arrivals: what a trace consists of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

OUTPUT_TOKEN = 0
"""What a simulated step samples: a prompt that continues an answer holds so many of these in its place."""

FILLER = 1
"""A token of no meaning."""


class Arrival(NamedTuple):
    """A request of a trace.

    Attributes:
        time: when it comes, seconds.
        prompt: token ids, int32 [P]. What is equal in two prompts from their beginning on, the prefix cache finds.
        output_tokens: after which it ends, >= 1.
        max_tokens: what it asks for: blocks and lanes are planned for so many. It ends by its length if they are
            `output_tokens`, else by a stop that the scheduler did not foresee.
        priority: as in `SamplingParams`.
    """

    time: float
    prompt: np.ndarray
    output_tokens: int
    max_tokens: int
    priority: int = 0


def own_tokens(number: int, count: int) -> np.ndarray:
    """`count` token ids that begin like those of no other `number`, int32 [count]."""
    tokens = np.full(count, FILLER, np.int32)
    tokens[:1] = FILLER + 1 + number
    return tokens
