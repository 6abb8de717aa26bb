"""Log-probabilities on their way to a caller."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..request import Sample
from .output import TokenLogprob


class LogprobLog:
    """The log-probabilities of one sample, as they come.

    Attributes:
        output: of its tokens. prompt: of the prompt's, None for the first.
    """

    def __init__(self, sample: Sample) -> None:
        self.output: list[TokenLogprob] = []
        self.prompt: list[TokenLogprob | None] = [None]
        self._prompt_ids = sample.request.prompt
        params = sample.request.params
        self._top = params.logprobs or 0
        self._prompt_top = params.prompt_logprobs or 0
        self._handed = 0

    def add(self, token: int, record: Any) -> None:
        """Add what came with a token; `record` is one of `LOGPROB_RECORD`."""
        chance = float(record["sampling_logprob"])
        self.output.append(_logprob(token, record, self._top, chance))

    def add_prompt(self, record: Any) -> None:
        """Add what came for the next token of the prompt."""
        self.prompt.append(_logprob(int(self._prompt_ids[len(self.prompt)]), record, self._prompt_top, None))

    def hand_over(self, count: int) -> list[TokenLogprob]:
        """The next `count` that were not handed over yet."""
        first, self._handed = self._handed, self._handed + count
        return self.output[first : self._handed]

    def total(self, count: int) -> float:
        """The sum over the first `count` tokens."""
        return float(np.sum([entry.logprob for entry in self.output[:count]]))


def _logprob(token: int, record: Any, top: int, chance: float | None) -> TokenLogprob:
    ids: Iterable[int] = record["ids"][:top].tolist()
    likely = dict(zip(ids, record["logprobs"][:top].tolist(), strict=True))
    likely.pop(-1, None)
    return TokenLogprob(token, float(record["logprob"]), int(record["rank"]), likely, chance)
