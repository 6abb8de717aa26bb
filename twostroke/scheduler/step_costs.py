"""What prompt tokens cost: learned from the times of steps, asked for how many of them fit into a given time."""

from __future__ import annotations

from collections import deque

FIRST_TOKENS = 64
"""Prompt tokens of the first such step, of whose cost nothing is known."""

LEAST_TOKENS = 8
"""Prompt tokens that a step takes whatever they cost: else a prompt might never be computed."""

ALONE_EVERY = 64
"""Steps with prompts in a row, after which one runs without, to see again what that takes."""

_MEMORY = 0.9
"""Weight of what was known when a further step is learned: old steps count for nothing after some dozens."""

_OUTLIER = 4
"""What exceeds the bound so many times is cut: it may be a hiccup, such as the compilation of a kernel."""


class StepCosts:
    """Bounds the time that prompts add to a step in which others decode.

    A step with rows that decode and n prompt tokens takes longer than one with the rows alone, by

        fixed + slope * n

    The two are fitted to the steps that ran, by least squares whose weights fade, so they follow a context that grows
    and a batch that changes. What is beyond twice the largest number of prompt tokens seen of late is not believed.
    Whenever it is not known, or not any more, what the rows take alone, a step is asked to run without prompts.

    Args:
        limit: the bound, seconds.

    Attributes:
        prompt_tokens: tokens that the next step may have for prompts: 0, or at least `LEAST_TOKENS`.
    """

    def __init__(self, limit: float) -> None:
        self.prompt_tokens = 0
        self._limit = limit
        self._alone: deque[float] = deque(maxlen=3)  # of which the median counts
        self._since_alone = 0
        self._largest = 0.0
        # Faded sums over steps with prompts: of 1, n, n * n, of the added seconds, and of n times those.
        self._sums = [0.0] * 5

    def observe(self, lanes: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step of so many rows that decoded and so many prompt tokens, which took `seconds`."""
        if not lanes:
            return
        if not prompt_tokens:
            self._alone.append(seconds)
            self._since_alone = 0
        elif self._alone:
            self._learn_added(prompt_tokens, seconds)
        self.prompt_tokens = self._fitting() if self._alone and self._since_alone < ALONE_EVERY else 0

    def _learn_added(self, tokens: int, seconds: float) -> None:
        added = min(max(0.0, seconds - sorted(self._alone)[(len(self._alone) - 1) // 2]), _OUTLIER * self._limit)
        terms = (1.0, tokens, tokens**2, added, tokens * added)
        self._sums = [_MEMORY * total + term for total, term in zip(self._sums, terms, strict=True)]
        self._largest = max(_MEMORY * self._largest, float(tokens))
        self._since_alone += 1

    def _fitting(self) -> int:
        """Prompt tokens that fit into the bound, as far as that is known."""
        if not self._largest:
            return FIRST_TOKENS
        fixed, slope = self._fit()
        room, most = self._limit - fixed, 2 * self._largest
        if slope * most > room:
            most = room / slope if room > 0 else 0
        return max(LEAST_TOKENS, int(most))

    def _fit(self) -> tuple[float, float]:
        """Seconds that prompts add as such, and for each of their tokens; neither is negative."""
        count, tokens, squares, added, products = self._sums
        spread = count * squares - tokens * tokens
        if spread > 1e-6 * count * squares:
            slope = (count * products - tokens * added) / spread
            fixed = (added - slope * tokens) / count
            if slope >= 0 and fixed >= 0:
                return fixed, slope
        return 0.0, products / squares  # all of one size, or too noisy: the tokens get it all
