"""What a step with held rows needs for its second part: masks, and the calls of logits processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np


class RowTokens(NamedTuple):
    """What is known of a row whose next token is about to be sampled. Every token is real.

    Attributes:
        token_ids: prompt and output so far, int32 [n], read-only.
        prompt_len: how many of them are the prompt's.
    """

    token_ids: np.ndarray
    prompt_len: int

    @property
    def output_ids(self) -> np.ndarray:
        """The output so far, int32 [n - prompt_len], read-only."""
        return self.token_ids[self.prompt_len :]


class ProcessorCall(NamedTuple):
    """Rows that have the same logits processors.

    Attributes:
        processors: called one after the other, see `sampling.processors.LogitsProcessor`.
        start, stop: where the rows lie in the second part.
        rows: their tokens, one entry per row.
        fail: called with the place of a row in `rows` and the exception that a processor raised for it.
    """

    processors: Sequence[Any]
    start: int
    stop: int
    rows: Sequence[RowTokens]
    fail: Callable[[int, BaseException], None]


class HeldInput(NamedTuple):
    """The second part of a step. Rows that are not in it stay without a token.

    Attributes:
        places: int32 [K], which of the step's held positions (`Plan.held`) are sampled.
        masks: K arrays, int32 [ceil(V / 32)]: bit v % 32 of word v // 32 is set if token v is allowed.
        calls: of the logits processors.
    """

    places: np.ndarray
    masks: Sequence[np.ndarray]
    calls: Sequence[ProcessorCall]
