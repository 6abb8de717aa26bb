"""What it takes to bring blocks back from the host, and what to compute them again: both measured."""

from __future__ import annotations

FIRST_COPIES = 64
"""Blocks that are copied beside a step while nothing is known of how long either takes."""

RETRY_EVERY = 64
"""Of so many copies that would not pay one is made all the same, to see again what they take."""

_MEMORY = 0.9
"""Weight of what was known when something new is learned: old measurements count for nothing after some dozens."""

_STEP_SHARE = 0.5
"""Share of a step's time that the copies made beside it may take, so that they are done when it is."""


class _Rate:
    """Seconds per unit, over measurements that fade."""

    def __init__(self) -> None:
        self._seconds = self._units = 0.0

    def learn(self, seconds: float, units: int) -> None:
        self._seconds = _MEMORY * self._seconds + seconds
        self._units = _MEMORY * self._units + units

    @property
    def known(self) -> bool:
        return self._units > 0

    @property
    def value(self) -> float:
        return self._seconds / self._units


class CopyCosts:
    """Says whether copies between device and host pay, by the times that steps and copies took.

        copy       seconds per block, of copies either way
        compute    seconds per prompt token: what a step with prompts takes beyond what its lanes take alone

    As long as one of the two is not known, copies pay: that is how it gets known.

    Args:
        block_size: positions of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._copy, self._token, self._alone, self._step = _Rate(), _Rate(), _Rate(), _Rate()
        self._refused = 0

    def observe_copies(self, blocks: int, seconds: float) -> None:
        """Learn from copies of so many blocks, which took `seconds` on their stream."""
        self._copy.learn(seconds, blocks)

    def observe_step(self, lanes: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step of so many rows that decoded and so many prompt tokens."""
        self._step.learn(seconds, 1)
        if not prompt_tokens:
            self._alone.learn(seconds, 1)
        elif not lanes:
            self._token.learn(seconds, prompt_tokens)
        elif self._alone.known:
            self._token.learn(max(0.0, seconds - self._alone.value), prompt_tokens)

    def pays(self, copies: int) -> bool:
        """Whether to copy a block so many times takes less than to compute it again."""
        if not self._copy.known or not self._token.known:
            return True
        if copies * self._copy.value < self._block_size * self._token.value:
            return True
        self._refused += 1
        return self._refused % RETRY_EVERY == 0

    @property
    def copies_per_step(self) -> int:
        """Blocks that can be copied while a step runs, at least 1."""
        if not self._copy.known or not self._step.known:
            return FIRST_COPIES
        return max(1, int(_STEP_SHARE * self._step.value / max(self._copy.value, 1e-9)))
