"""What it takes to bring blocks back from the host, and what to compute them again: both measured."""

from __future__ import annotations

from collections import Counter

FIRST_COPIES = 64
"""Blocks that are copied beside a step while nothing is known of how long either takes."""

RETRY_EVERY = 64
"""Once in so many times that copies would not pay, a few are made all the same, to see again what they take."""

_HALF_LIFE = 512
"""Blocks, copied or computed, after which what was known counts for half beside what is new."""

_STEPS_HALF_LIFE = 8
"""The same of steps, of which the mean is known."""

_OUTLIER = 4
"""Copies that take more than so many times what is known of them are cut there: it may be a hiccup."""

_SHORTEST = 1e-9
"""Seconds per block, which no copy takes less than."""

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

        save, load    seconds per block, of copies to the host and back
        compute       seconds per prompt token: what a step with prompts takes beyond what its lanes take alone

    As long as one of them is not known, copies pay: that is how it gets known. An engine measures copies at start.

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
        self._save, self._load = _Rate(_HALF_LIFE), _Rate(_HALF_LIFE)
        self._token = _Rate(_HALF_LIFE * block_size)
        self._alone, self._step = _Rate(_STEPS_HALF_LIFE), _Rate(_STEPS_HALF_LIFE)
        self._refused: Counter[int] = Counter()

    def observe_saves(self, blocks: int, seconds: float) -> None:
        """Learn from copies of so many blocks to the host, which took `seconds` on their stream."""
        _learn_copies(self._save, blocks, seconds)

    def observe_loads(self, blocks: int, seconds: float) -> None:
        """The same of copies back."""
        _learn_copies(self._load, blocks, seconds)

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
    def save_seconds(self) -> float:
        """To copy a block to the host; 0 if not known."""
        return self._save.value if self._save.known else 0.0

    @property
    def load_seconds(self) -> float:
        """To copy a block back; 0 if not known."""
        return self._load.value if self._load.known else 0.0

    @property
    def compute_seconds(self) -> float:
        """To compute a block; 0 if not known."""
        return self._block_size * self._token.value if self._token.known else 0.0

    def pays(self, copies: int) -> bool:
        """Whether it takes less than to compute a block again: to bring it back, 1 copy, or to save it first, 2."""
        rates = (self._load, self._save)[:copies]
        if not self._token.known or not all(rate.known for rate in rates):
            return True
        return sum(rate.value for rate in rates) < self.compute_seconds

    def worthwhile(self, blocks: int, copies: int) -> int:
        """How many of so many blocks, 1 or more, to copy instead of computing them again; `copies` as in `pays`.

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
        slower = max(self.save_seconds, self.load_seconds)
        if not slower or not self._step.known:
            return FIRST_COPIES
        return max(1, int(_STEP_SHARE * self._step.value / slower))


def _learn_copies(rate: _Rate, blocks: int, seconds: float) -> None:
    seconds = max(seconds, _SHORTEST * blocks)
    if rate.known:
        expected = blocks * rate.value
        if seconds < expected:
            rate.forget()
        seconds = min(seconds, _OUTLIER * expected)
    rate.learn(seconds, blocks)


def _is_retried(refused: int) -> bool:
    """Whether to copy all the same, so many times after copies paid last."""
    return refused % RETRY_EVERY == 0 or (refused < RETRY_EVERY and refused.bit_count() == 1)
