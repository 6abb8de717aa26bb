"""What it takes to bring blocks back from the host, and what to compute them again: both measured."""

from __future__ import annotations

from collections import Counter

FIRST_COPIES = 64
"""Blocks that are copied beside a step while nothing is known of how long either takes."""

RETRY_EVERY = 64
"""Of so many times that copies would not pay, some are made all the same once, to see again what they take."""

_HALF_LIFE = 512
"""Blocks, copied or computed, after which what was known counts for half beside what is new."""

_STEPS_HALF_LIFE = 8
"""The same of steps, of which the mean is known."""

_OUTLIER = 4
"""What takes longer than is known of copies, so many times and more, is cut: it may be a hiccup."""

_SHORTEST = 1e-9
"""Seconds per block that no copy takes less than."""

_STEP_SHARE = 0.5
"""Share of a step's time that the copies made beside it may take, so that they are done when it is."""


class _Rate:
    """Seconds per unit, over measurements that fade: a line through the origin, fitted by least squares.

    So one measurement of many units says more than many measurements of few, which are mostly what it takes to begin.

    Args:
        half_life: units after which old measurements count for half.
    """

    def __init__(self, half_life: int) -> None:
        self._half_life = half_life
        self._products = self._squares = 0.0

    def learn(self, seconds: float, units: int) -> None:
        kept = 0.5 ** (units / self._half_life)
        self._products = kept * self._products + units * seconds
        self._squares = kept * self._squares + units * units

    def forget(self) -> None:
        self._products = self._squares = 0.0

    @property
    def known(self) -> bool:
        return self._squares > 0

    @property
    def value(self) -> float:
        return self._products / self._squares


class CopyCosts:
    """Says whether copies between device and host pay, by the times that steps and copies took.

        copy       seconds per block, of copies either way
        compute    seconds per prompt token: what a step with prompts takes beyond what its lanes take alone

    As long as one of the two is not known, copies pay: that is how it gets known. An engine measures copies at start.

    What disturbs the measurement of a copy only makes it longer: what it takes to begin, most of which is the host's, a
    kernel that is compiled or memory that is allocated meanwhile, a step that keeps the device busy. So what is shorter
    than known is believed at once, and what is longer little by little. Copies that do not pay are not made, so nobody
    would find out that they do: some are made all the same, at the first, second and fourth time that they would not
    pay, and so on, and later on one of `RETRY_EVERY` times.

    Args:
        block_size: positions of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._copy, self._token = _Rate(_HALF_LIFE), _Rate(_HALF_LIFE * block_size)
        self._alone, self._step = _Rate(_STEPS_HALF_LIFE), _Rate(_STEPS_HALF_LIFE)
        self._refused: Counter[int] = Counter()

    def observe_copies(self, blocks: int, seconds: float) -> None:
        """Learn from copies of so many blocks, which took `seconds` on their stream."""
        seconds = max(seconds, _SHORTEST * blocks)
        if self._copy.known:
            expected = blocks * self._copy.value
            if seconds < expected:
                self._copy.forget()
            seconds = min(seconds, _OUTLIER * expected)
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

    @property
    def copy_seconds(self) -> float:
        """Of a block, one way; 0 if not known."""
        return self._copy.value if self._copy.known else 0.0

    @property
    def compute_seconds(self) -> float:
        """Of a block's tokens; 0 if not known."""
        return self._block_size * self._token.value if self._token.known else 0.0

    def pays(self, copies: int) -> bool:
        """Whether to copy a block so many times takes less than to compute it again."""
        if not self._copy.known or not self._token.known:
            return True
        return copies * self.copy_seconds < self.compute_seconds

    def worthwhile(self, blocks: int, copies: int) -> int:
        """How many of so many blocks, 1 or more, to copy `copies` times each instead of computing them again.

        All if that pays. Else none, or, now and then, a few that a step has time for.
        """
        if self.pays(copies):
            self._refused[copies] = 0
            return blocks
        self._refused[copies] += 1
        return min(blocks, self.copies_per_step) if _is_retried(self._refused[copies]) else 0

    @property
    def copies_per_step(self) -> int:
        """Blocks that can be copied while a step runs, at least 1."""
        if not self._copy.known or not self._step.known:
            return FIRST_COPIES
        return max(1, int(_STEP_SHARE * self._step.value / self._copy.value))


def _is_retried(refused: int) -> bool:
    """Whether to copy all the same, so many times after copies paid last."""
    return refused % RETRY_EVERY == 0 or (refused < RETRY_EVERY and refused.bit_count() == 1)
