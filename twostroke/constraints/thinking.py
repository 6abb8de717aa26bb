"""The thinking budget: how many tokens a sample may think before it has to answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .constraint import Constraint, allow


class ThinkingBudget:
    """Forces the end of thinking once the budget is used up; see `Constraint`.

        prompt ... <think> t t t t t </think> answer ... <think> t t </think> ...
                           `-- counted --'                       `-- also --'

    Tokens between a start and an end count, whether the start stands in the prompt or in the output. Nothing needs to
    be known of a token before the budget can be used up: until then the row is not held.

    Args:
        prompt: token ids.
        start, end: the token ids that begin and end the thinking.
        budget: tokens, >= 0.
        answer: what the text behind the thinking must be, if the prompt ends in thinking; else it must be that from
            the first token on, and there is no thinking.
    """

    def __init__(
        self, prompt: Sequence[int], start: Sequence[int], end: Sequence[int], budget: int, answer: Constraint | None
    ) -> None:
        self.held_from = 0
        self._start, self._end = list(start), list(end)
        self._left = budget
        self._answer = answer
        self._open = False
        self._tail: list[int] = []
        self._known = 0
        for token in prompt:
            self._follow(token)
        self._left = budget

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._answer is not None and not self._open:
                self._answer.advance([token])
            else:
                self._follow(token)
        self._known += len(tokens)
        self.held_from = self._known + self._free_tokens()

    def fill(self, mask: np.ndarray) -> None:
        if self._answer is not None and not self._open:
            self._answer.fill(mask)
        elif self._open and not self._left:
            mask[:] = 0
            allow(mask, self._end[_overlap(self._tail, self._end)])
        else:
            mask[:] = -1

    def forced(self) -> list[int]:
        return self._answer.forced() if self._answer is not None and not self._open else []

    def _free_tokens(self) -> int:
        """How many tokens, from the next one on, can be sampled whatever they are, but at least 1."""
        if self._answer is not None:
            return 1
        return max(1, self._left + (not self._open))

    def _follow(self, token: int) -> None:
        sought = self._end if self._open else self._start
        self._left -= self._open and self._left > 0
        self._tail = [*self._tail, token][-len(sought) :]
        if self._tail == sought:
            self._open, self._tail = not self._open, []


def _overlap(tail: Sequence[int], sought: Sequence[int]) -> int:
    """The length of the longest beginning of `sought`, short of all, with which `tail` ends."""
    return next(n for n in range(len(sought) - 1, -1, -1) if list(tail[len(tail) - n :]) == list(sought[:n]))
